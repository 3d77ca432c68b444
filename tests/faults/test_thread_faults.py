"""A fault in the thread that there is with Ray only; `tests/pure/test_thread_faults.py` has all others."""

from __future__ import annotations

from typing import Any

import pytest
import ray

import raycollect as col
from raycollect.errors import InternalError
from tests.pure import thread_faults
from tests.support.actors import Buffers


@ray.remote
class Async(Buffers):
    """Its methods may overlap, so that plans run in a thread of their own."""

    async def rest(self) -> None:
        """Makes it so."""

    @col.by_value
    async def total(self, array: Any) -> float:
        """Gets a tensor of another actor."""
        return float(array.sum())


def test_unexpected_failure_to_fetch_for_a_coroutine_is_raised_and_the_next_call_works(actors: Any) -> None:
    worker, other = actors(Async, 2)
    ref, thread = other.get_buffer.remote(), "raycollect-fetch"
    ray.get(
        worker.__ray_call__.remote(thread_faults.put_failing, "raycollect.pos.handle:Handle", "fetch_for_use", thread)
    )
    with pytest.raises(InternalError, match="injected on raycollect-"):
        ray.get(worker.total.remote(ref))
    assert ray.get(worker.__ray_call__.remote(thread_faults.end_failing)).startswith(thread)
    assert ray.get(worker.total.remote(ref)) == 10
