"""A fault in each thread that there is with Ray only; `tests/pure/test_thread_faults.py` has all others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.errors import InternalError
from tests.pure import thread_faults
from tests.support.actors import Buffers


@ray.remote
class Async(Buffers):
    """Its methods may overlap, so that plans run in a thread of their own."""

    def excluded(self) -> Any:
        """A lock that excludes nothing."""
        return nullcontext()

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


def test_unexpected_failure_of_an_update_is_raised_and_the_next_update_works(actors: Any) -> None:
    (engine,), tensors = actors(Async, 1), np.ones(10, np.float32)
    ref, thread = engine.get_buffer.remote(), "raycollect-weights"
    with col.publish(tensors, "faulty") as pub, col.subscribe("faulty", [ref], lock="excluded") as sub:
        pub.put()
        ray.get(
            engine.__ray_call__.remote(
                thread_faults.put_failing, "raycollect.weights.receiver:Receiver", "stage", thread
            )
        )
        with pytest.raises(InternalError):
            sub.update()
        assert ray.get(engine.__ray_call__.remote(thread_faults.end_failing)).startswith(thread)
        assert sub.update().version.number == 1
