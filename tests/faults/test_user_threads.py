"""Mistakes of users with threads, coroutines and generators."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.faults.groups import PATIENT_S, assert_works
from tests.support.actor_pool import reusable
from tests.support.actors import Buffers, Worker
from tests.support.waiting import wait_until


class Coroutines(col.CollectiveParticipant):
    """An async actor that makes collectives in its coroutines."""

    async def join(self, world, rank):
        col.init_collective_group(world, rank)

    async def by_thread(self, count):
        for _ in range(count):
            tensor = np.ones(4)
            await asyncio.to_thread(col.allreduce, tensor)
        return tensor.tolist()

    async def in_the_loop(self, count):
        for _ in range(count):
            tensor = np.ones(4)
            col.allreduce(tensor, timeout_s=PATIENT_S)
        return tensor.tolist()

    async def awaited(self, count):
        for _ in range(count):
            tensor = np.ones(4)
            await col.allreduce(tensor, async_op=True)
        return tensor.tolist()

    async def items(self):
        for n in range(2):
            yield np.full(3, n + 1.0)
        raise ValueError("half-way")


def test_coroutines_that_call_at_once(actors):
    pair = actors(ray.remote(Coroutines), 2)
    ray.get([one.join.remote(2, rank) for rank, one in enumerate(pair)])
    for name in ("in_the_loop", "awaited"):  # one thread
        found = ray.get([getattr(one, name).remote(3) for one in pair for _ in range(3)], timeout=60)
        assert found == [[2.0] * 4] * 6
    for _ in range(3):  # one after the other, in any threads
        assert ray.get([one.by_thread.remote(3) for one in pair], timeout=60) == [[2.0] * 4] * 2
    streams = [list(one.items.remote()) for one in pair]
    assert_half(streams)


class Streams(Buffers):
    """Generators of every kind, of which the last items fail."""

    def two(self):
        yield np.full(3, 1.0)
        yield np.full(3, 2.0)

    @ray.method(num_returns=2)
    def declared(self):
        yield np.full(3, 1.0)
        yield np.full(3, 2.0)

    def half(self):
        yield from self.two()
        raise ValueError("half-way")

    @ray.method(num_returns=3)
    def declared_half(self):
        yield from self.two()
        raise ValueError("half-way")


Stream = reusable(ray.remote(Streams))


def assert_half(streams):
    """Two items can be used, and the third is the exception."""
    for at in range(2):
        refs = [stream[at] for stream in streams]
        col.allreduce_refs(refs, timeout_s=PATIENT_S)
        np.testing.assert_array_equal(col.get(refs), np.full((len(refs), 3), 2.0 * (at + 1)))
    with pytest.raises(errors.ProducerFailedError, match="ValueError: half-way"):
        col.allreduce_refs([stream[2] for stream in streams], timeout_s=PATIENT_S)
    with pytest.raises(ray.exceptions.RayTaskError, match="half-way"):
        col.get(streams[0][2])


CALLS = {
    "streamed": lambda one: one.two.remote(),
    "streamed, though declared": lambda one: one.declared.options(num_returns="streaming").remote(),
    "declared": lambda one: one.declared.remote(),
    "said by the caller": lambda one: one.two.options(num_returns=2).remote(),
}


def test_the_items_of_a_generator_are_never_taken_for_each_other(actors):
    """How its caller numbers them is for Ray alone to know: where the actor can't, they go by value."""
    pair = actors(Stream, 2)
    for name, call in CALLS.items():
        items = [list(call(one)) for one in pair]
        for at in range(2):
            refs = [of_one[at] for of_one in items]
            np.testing.assert_array_equal(col.get(refs), np.full((2, 3), at + 1.0))
            if name == "said by the caller":
                with pytest.raises(errors.NotATensorError, match=r"@ray\.method\(num_returns=n\)"):
                    col.allreduce_refs(refs, timeout_s=PATIENT_S)
            else:
                col.allreduce_refs(refs, timeout_s=PATIENT_S)
                np.testing.assert_array_equal(col.get(refs), np.full((2, 3), 2.0 * (at + 1)))
    assert_works(pair)


def test_a_generator_that_raises_half_way(actors):
    pair = actors(Stream, 2)
    for name in ("half", "declared_half"):
        assert_half([list(getattr(one, name).remote()) for one in pair])
    assert_works(pair)


def begin_thread(self, calls):
    """Starts a thread of the user's, which waits; or which waits in a collective, where others do not come."""
    self.go, began = threading.Event(), threading.Event()

    def own_work():
        began.set()
        if calls:
            with pytest.raises(errors.CollectiveTimeoutError):
                col.allreduce(np.ones(2), timeout_s=PATIENT_S)
        else:
            self.go.wait(60)

    threading.Thread(target=own_work, daemon=True).start()
    assert began.wait(PATIENT_S)


@pytest.mark.parametrize("calls", [False, True])
def test_an_idle_actor_is_idle_whatever_its_own_threads_do(actors, calls):
    """Unless one of them is in a collective, for which others may wait."""
    pair = actors(Worker, 2)
    group = col.declare_collective_group(pair)
    ray.get(pair[0].call.remote(begin_thread, calls))
    assert wait_until(lambda: ("own_work" in group.status().members[0].doing) == calls)
    assert group.status().members[1].doing == ""
    if not calls:
        assert group.status().members[0].doing == ""
        ray.get(pair[0].call.remote(lambda self: self.go.set()))
