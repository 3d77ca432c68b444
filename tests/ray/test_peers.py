"""What `ray.util.collective`, Compiled Graphs and Ray Direct Transport get wrong, done right here.

Each of their numbered defects and where it has its test; `tests/` is left out, and a test below has no file.

 1  a call's reduce op becomes the default
        pure/member/test_joining.py::test_defect_1_an_op_does_not_become_the_default
 2  gloo_timeout reaches nothing
        pure/member/test_joining.py::test_defect_2_the_timeout_reaches_every_operation
 3  a second group has the first one's ranks
        pure/member/test_joining.py::test_defect_3_a_second_group_of_a_process_has_its_own_ranks
 4  send ignores the group
        pure/member/test_joining.py::test_defect_4_a_send_stays_in_its_group
    reducescatter overwrites what it reads
        contract/test_values.py::test_every_rank_holds_what_numpy_makes
 5  ranks and sizes are not checked
        pure/member/test_joining.py::test_defect_5_wrong_ranks_and_sizes_are_refused
        ray/test_declare.py::test_defect_5_a_wrong_world_size_is_refused
 6  named actors stay behind
        ray/test_imperative.py::test_defect_6_nothing_of_a_group_stays_in_the_cluster
    names collide across jobs
        ray/test_imperative.py::test_defect_6_names_do_not_collide_across_jobs
 7  nothing waits for what NCCL has enqueued
        none: needs a GPU
 8  a tensor with gaps reduces other memory
        pure/member/test_joining.py::test_defect_8_a_tensor_with_gaps_is_reduced_where_it_is
        contract/test_values.py::test_every_rank_holds_what_numpy_makes
    32 streams per call; cupy's send raises
        none: needs a GPU
 9  looking up a group blocks
        pure/member/test_joining.py::test_defect_9_group_lookup_does_not_block
10  four reduce ops
        pure/member/test_joining.py::test_defect_10_more_reduce_ops
    no gather, scatter, all-to-all
        contract/test_values.py::test_every_rank_holds_what_numpy_makes
    nothing of uneven sizes
        contract/test_values.py::test_every_rank_holds_what_numpy_makes
11  one tensor twice in a list
        pure/member/test_joining.py::test_defect_11_one_tensor_twice_in_a_list_is_refused
        contract/test_mismatches.py::test_a_mismatch_is_one_error_for_all_who_called
12  MAX and MIN on the CPU raise
        contract/test_values.py::test_every_rank_holds_what_numpy_makes
    groups of equal ranks share one barrier
        test_defect_12_groups_of_equal_ranks_do_not_meet
13  a failed transfer kills both actors
        contract/test_mismatches.py::test_a_mismatch_is_one_error_for_all_who_called
    one ref to N actors is N sends
        ray/test_main_job.py::test_plan_of_any_size_sends_one_message_per_participant
    views slip through
        contract/test_mismatches.py::test_a_mismatch_is_one_error_for_all_who_called
    no async or threaded actors
        ray/test_concurrent_actors.py::test_mixed_actors
    one group per actor
        ray/test_batch.py::test_random_batches_over_overlapping_groups_are_program_order
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import raycollect as col
from tests.ray.workers import Worker


def made(worker, *args):
    """A ref to an array of these numbers, kept in the worker."""
    return worker.make.remote(lambda self: np.array(args, np.float32))


def test_the_index_names_tests_that_exist():
    here = Path(__file__)
    named = re.findall(r"(?:(\S+)::)?(test_\w+)$", __doc__, re.MULTILINE)
    assert len(named) > 13
    for file, test in named:
        path = here.parent.parent / file if file else here
        assert f"\ndef {test}(" in path.read_text(), f"{file}::{test}"


# ------------------------------------------------------------------------------- Compiled Graphs' CPU communicator


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_defect_12_groups_of_equal_ranks_do_not_meet(actors, backend):
    """There, all groups of one size share one barrier actor."""
    pairs = [actors(Worker, 2) for _ in range(3)]
    for i, pair in enumerate(pairs):
        col.declare_collective_group(pair, backend=backend, group_name=f"pair {i}")
    refs = [[made(worker, 10 * i + 1) for worker in pair] for i, pair in enumerate(pairs)]

    works = [col.allreduce_refs(pair, f"pair {i}", async_op=True) for i, pair in reversed(list(enumerate(refs)))]
    for work in works:
        work.wait()

    for i, pair in enumerate(refs):
        for found in col.get(pair):
            np.testing.assert_array_equal(found, [20 * i + 2])
