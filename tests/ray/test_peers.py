"""What `ray.util.collective`, Compiled Graphs and Ray Direct Transport get wrong, done right here.

Each of their numbered defects and where it has its test; `tests/` is left out, and a test below has no file.

 1  a call's reduce op becomes the default
        pure/backends/test_adopted.py::test_one_calls_reduce_op_is_not_the_next_calls_default
 2  gloo_timeout reaches nothing
        pure/member/test_joining.py::test_defect_2_the_timeout_reaches_every_operation
 3  a second group has the first one's ranks
        pure/member/test_joining.py::test_defect_3_a_second_group_of_a_process_has_its_own_ranks
 4  send ignores the group
        pure/member/test_joining.py::test_defect_4_a_send_stays_in_its_group
    reducescatter overwrites what it reads
        test_defect_4_a_reducescatter_leaves_its_inputs
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
        contract/test_values.py::test_every_rank_holds_what_numpy_makes
        test_defect_8_a_transfer_into_a_tensor_with_gaps
    32 streams per call; cupy's send raises
        none: needs a GPU
 9  looking up a group blocks
        pure/member/test_joining.py::test_defect_9_group_lookup_does_not_block
10  four reduce ops
        contract/test_values.py::test_every_rank_holds_what_numpy_makes
    no gather, scatter, all-to-all
        contract/test_values.py::test_every_rank_holds_what_numpy_makes
    nothing of uneven sizes
        contract/test_values.py::test_every_rank_holds_what_numpy_makes
11  one tensor twice in a list
        ray/test_tensors.py::test_defect_11_a_list_of_one_tensor_twice
        contract/test_mismatches.py::test_a_mismatch_is_one_error_for_all_who_called
12  MAX and MIN on the CPU raise
        test_defect_12_max_and_min_on_the_cpu
    groups of equal ranks share one barrier
        test_defect_12_groups_of_equal_ranks_do_not_meet
13  a failed transfer kills both actors
        test_defect_13_a_transfer_that_fails_leaves_both_actors_alive
    one ref to N actors is N sends
        test_defect_13_one_tensor_to_many_actors_is_one_plan
    views slip through
        test_defect_13_a_view_is_the_same_storage_whatever_its_id
    no async or threaded actors
        test_defect_13_async_and_threaded_actors_take_part
    one group per actor
        test_defect_13_an_actor_is_in_several_groups
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.driver.controller import Controller
from tests.ray.workers import AsyncActor, Worker


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


# ------------------------------------------------------------------------------- ray.util.collective


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_defect_4_a_reducescatter_leaves_its_inputs(actors, backend):
    pair = actors(Worker, 2)
    col.declare_collective_group(pair, backend=backend)

    def call(self):
        rank = col.get_rank()
        given = [np.full(3, 10.0 * rank + taker) for taker in range(2)]
        taken = np.zeros(3)
        col.reducescatter(taken, given)
        return [one.tolist() for one in given], taken.tolist()

    found = ray.get([worker.call.remote(call) for worker in pair])

    assert found == [([[10.0 * rank + taker] * 3 for taker in range(2)], [10.0 + 2 * rank] * 3) for rank in range(2)]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_defect_8_a_transfer_into_a_tensor_with_gaps(actors, backend):
    pair = actors(Worker, 2)
    col.declare_collective_group(pair, backend=backend)

    def call(self):
        whole = np.zeros((3, 4)) if col.get_rank() else np.arange(12.0).reshape(3, 4)
        col.recv(whole.T[::2], 0) if col.get_rank() else col.send(whole.T[::2], 1)
        return whole

    sent, received = ray.get([worker.call.remote(call) for worker in pair])

    np.testing.assert_array_equal(sent, np.arange(12.0).reshape(3, 4))
    np.testing.assert_array_equal(received, np.where([True, False] * 2, sent, 0))


# ------------------------------------------------------------------------------- Compiled Graphs' CPU communicator


@pytest.mark.parametrize(("op", "expected"), [("MAX", [3, 5]), ("MIN", [1, 2])])
def test_defect_12_max_and_min_on_the_cpu(actors, op, expected):
    workers = actors(Worker, 2)
    refs = [made(workers[0], 1, 5), made(workers[1], 3, 2)]

    col.allreduce_refs(refs, op=op)

    for found in col.get(refs):
        np.testing.assert_array_equal(found, expected)


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


# ------------------------------------------------------------------------------- Ray Direct Transport


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_defect_13_a_transfer_that_fails_leaves_both_actors_alive(actors, backend):
    a, b = actors(Worker, 2)
    group = col.declare_collective_group([a, b], backend=backend)
    pids = [member.pid for member in group.status().members]
    source, short, right = made(a, 1, 2, 3, 4), made(b, 0, 0), made(b, 0, 0, 0, 0)

    with pytest.raises(col.errors.MismatchError, match="shape"):
        col.send_ref(source, short)

    np.testing.assert_array_equal(col.get(short), [0, 0])
    np.testing.assert_array_equal(col.get(col.send_ref(source, right)), [1, 2, 3, 4])
    assert ray.get([w.call.remote(lambda self: __import__("os").getpid()) for w in (a, b)]) == pids


def test_defect_13_one_tensor_to_many_actors_is_one_plan(actors):
    workers = actors(Worker, 4)
    refs = [made(worker, rank) for rank, worker in enumerate(workers)]
    col.broadcast_refs(refs, src_rank=2)  # forms the group
    before = next(Controller.current().numbers)

    col.broadcast_refs(refs, src_rank=3)

    assert next(Controller.current().numbers) == before + 2, "more than one plan"
    assert all(found == [2] for found in col.get(refs))


@pytest.mark.parametrize("view", [slice(1, 3), slice(None, None, -1), slice(0, 4)])
def test_defect_13_a_view_is_the_same_storage_whatever_its_id(actors, view):
    """There, aliasing is tracked by `id()`, and views slip through."""
    a, b = actors(Worker, 2)
    a.call.remote(lambda self: setattr(self, "buffer", np.arange(4, dtype=np.float32)))
    lists = [
        a.make.remote(lambda self, view: [self.buffer[view], np.zeros_like(self.buffer[view])], view),
        b.make.remote(lambda self, view: [np.zeros(4, np.float32)[view].copy() for _ in range(2)], view),
    ]
    tensors = [
        a.make.remote(lambda self, view: self.buffer[::-1][view], view),
        b.make.remote(lambda self, view: np.ones(4, np.float32)[view], view),
    ]

    with pytest.raises(col.errors.AliasError) as caught:
        col.allgather_refs(lists, tensors)

    assert [violation.rank for violation in caught.value.violations] == [0]
    np.testing.assert_array_equal(ray.get(a.call.remote(lambda self: self.buffer.copy())), [0, 1, 2, 3])


def test_defect_13_async_and_threaded_actors_take_part(actors):
    threaded = actors(Worker, 1, max_concurrency=4)
    waiting = actors(AsyncActor, 1)
    ref = waiting[0].get_buffer.remote()
    zeros = np.zeros_like(col.get(ref))
    refs = [threaded[0].make.remote(lambda self, zeros: zeros + 3, zeros), ref]
    expected = col.get(ref) + 3

    col.allreduce_refs(refs)

    for found in col.get(refs):
        np.testing.assert_array_equal(found, expected)


def test_defect_13_an_actor_is_in_several_groups(actors):
    a, b, c = actors(Worker, 3)
    col.declare_collective_group([a, b], group_name="left")
    col.declare_collective_group([c, b], group_name="right")
    refs = [made(a, 1), made(b, 2), made(c, 4)]

    col.allreduce_refs(refs[:2], "left")
    col.allreduce_refs([refs[2], refs[1]], "right")

    assert [found.tolist() for found in col.get(refs)] == [[3], [7], [7]]
