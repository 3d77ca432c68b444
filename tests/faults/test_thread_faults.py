"""A fault in the threads that there are with Ray only; the files of this name in `tests/pure` have all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.errors import InternalError
from tests.faults import thread_failures
from tests.support.actors import Buffers

TESTED = frozenset({"raycollect-fetch"})


@ray.remote
class Async(Buffers):
    """Its methods may overlap, so that plans run in a thread of their own."""

    async def rest(self) -> None:
        """Makes it so."""

    @col.by_value
    async def total(self, array: Any) -> float:
        """Gets a tensor of another actor."""
        return float(array.sum())


@pytest.mark.parametrize("inplace", [True, False])
def test_unexpected_program_failure_is_raised_and_the_next_one_runs(actors: Any, inplace: bool) -> None:
    workers, thread = actors(Async, 2), "raycollect-order"
    group = col.declare_collective_group(workers)
    refs = [worker.get_buffer.remote() for worker in workers]
    ray.get(refs)
    ray.get(
        workers[1].__ray_call__.remote(thread_failures.put_failing, "raycollect.member.lease:Lease", "_run", thread)
    )
    with pytest.raises(InternalError, match="injected on raycollect-"):
        col.allreduce_refs(refs, inplace=inplace, timeout_s=20)
    assert ray.get(workers[1].__ray_call__.remote(thread_failures.end_failing)).startswith(thread)
    assert [member.answers for member in group.status().members] == [True, True]
    for one in col.get(col.allreduce_refs(refs, inplace=inplace)):
        np.testing.assert_array_equal(one, np.full(10, 2, np.float32))


def test_unexpected_failure_to_fetch_for_a_coroutine_is_raised_and_the_next_call_works(actors: Any) -> None:
    worker, other = actors(Async, 2)
    ref, thread = other.get_buffer.remote(), "raycollect-fetch"
    ray.get(
        worker.__ray_call__.remote(thread_failures.put_failing, "raycollect.pos.handle:Handle", "fetch_for_use", thread)
    )
    with pytest.raises(InternalError, match="injected on raycollect-"):
        ray.get(worker.total.remote(ref))
    assert ray.get(worker.__ray_call__.remote(thread_failures.end_failing)).startswith(thread)
    assert ray.get(worker.total.remote(ref)) == 10
