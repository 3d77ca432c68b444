"""Actors that the tests share, tensors on them, and methods that wait."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import ray

import raycollect as col
from raycollect.member.participant import this_participant
from raycollect.member.runtime import this_runtime
from tests.support.actor_pool import reusable


class Buffers(col.CollectiveParticipant):
    """Holds one array, by default ten ones."""

    def __init__(self, buffer=None):
        self.buffer = np.ones(10, np.float32) if buffer is None else buffer

    def get_buffer(self):
        return self.buffer

    def set_buffer(self, value):
        self.buffer = np.array(value)

    @col.by_value
    def read(self):
        return self.buffer.copy()

    @col.by_value
    def call(self, function, *args):
        """Runs a function on this actor."""
        return function(self, *args)

    def make(self, function, *args):
        """Runs a function on this actor; tensors that it returns are kept."""
        return function(self, *args)


Worker = reusable(ray.remote(Buffers))


def buffers(workers):
    """Refs to the buffer of each actor."""
    return [worker.get_buffer.remote() for worker in workers]


def filled(actors, values):
    """Refs to a buffer on each actor, filled with a value."""
    ray.get([actor.set_buffer.remote(np.full(7, value)) for actor, value in zip(actors, values, strict=True)])
    return buffers(actors)


def block(worker, gate):
    """Keeps an actor in a method until a gate opens; the ref of its end."""
    return worker.call.remote(lambda self, gate: ray.get(gate.wait.remote()), gate)


@reusable
@ray.remote
class Plain:
    """An actor without the mixin."""

    def get_buffer(self):
        return np.ones(10, np.float32)

    def call(self, function, *args):
        return function(self, *args)


@reusable
@ray.remote
class Gate:
    """Lets a test decide when a method goes on."""

    def __init__(self):
        self.event = threading.Event()

    def wait(self):
        assert self.event.wait(60)

    def open(self):
        self.event.set()


def told(refs):
    """What each gave, or raised inside the actor."""
    found = []
    for ref in refs:
        try:
            found.append(ray.get(ref, timeout=60))
        except ray.exceptions.RayTaskError as exc:
            found.append(exc.cause)
    return found


def hold(actor, value):
    """Keeps an array on an actor; returns its ref."""
    return actor.make.remote(lambda self, array: array.copy(), np.array(value, np.float32))


def spread(workers, value=lambda rank: [rank]):
    """Keeps an array on each actor, by its place; returns their refs."""
    return [hold(worker, value(rank)) for rank, worker in enumerate(workers)]


def found(refs):
    return [np.asarray(one).tolist() for one in col.get(refs)]


def wait_in(actor_self, gate, begun=None):
    """Waits in its body; what it returns says whether the buffer was left alone meanwhile."""
    before = actor_self.buffer.copy()
    if begun is not None:
        ray.get(begun.open.remote())
    ray.get(gate.wait.remote())
    assert (actor_self.buffer == before).all()
    return actor_self.buffer


def opened(actor_self, gate):
    """Waits for its argument, not in its body, so that it stands in the actor's queue, and others behind it."""
    return actor_self.buffer


class Kinds(Buffers):
    """Every kind of method that Ray can call."""

    @ray.method(num_returns=2)
    def two(self):
        return np.zeros(3), np.ones(4)

    @ray.method(num_returns=2)
    def mixed(self):
        return np.zeros(3), "text"

    def pair(self):
        return np.zeros(3), np.ones(4)

    def listed(self):
        return [np.zeros(3), np.ones(4)]

    def plain_values(self):
        return {
            "int": 3,
            "mixed": [np.zeros(2), 1],
            "empty": [],
            "object": np.array([None, {}], dtype=object),
            "text": np.array(["a"]),
            "masked": np.ma.masked_array([1, 2], [True, False]),
        }

    def value(self, name):
        return self.plain_values()[name]

    def scalar(self, name="float32"):
        import torch

        made = {"array": np.array(3.0), "bool": np.array(False), "arena": col.full((), 3.0), "torch": torch.tensor(3.0)}
        return np.float32(3) if name == "float32" else made[name]

    def scalar_and_state(self):
        import torch

        return torch.tensor(3.0), {"weight": torch.zeros(2), "num_batches_tracked": torch.tensor(3)}

    def scalars(self):
        yield np.array(3.0)
        yield np.zeros(2)

    def inner(self):
        array = self.get_buffer()
        assert type(array) is np.ndarray
        return array * 2

    def in_thread(self):
        seen = []
        thread = threading.Thread(target=lambda: seen.append(type(self.get_buffer()).__name__))
        thread.start()
        thread.join()
        return ",".join(seen)

    def is_my_buffer(self, array, *, again=None):
        return array is self.buffer and (again is None or again is self.buffer)

    def add(self, array):
        assert type(array) is np.ndarray
        return np.asarray(array + 1)

    def boom(self):
        raise ValueError("boom")


class Async(col.CollectiveParticipant):
    """An async actor."""

    def __init__(self):
        self.buffer = np.ones(4)

    async def get_buffer(self):
        await asyncio.sleep(0)
        return self.buffer

    async def stream(self):
        for i in range(3):
            await asyncio.sleep(0)
            yield np.full(3, i)

    async def is_my_buffer(self, array):
        return array is self.buffer

    def plain(self):
        return self.buffer + 1

    @col.by_value
    async def read(self):
        return self.buffer.copy()


KindsActor = reusable(ray.remote(Kinds))
AsyncActor = reusable(ray.remote(Async))


def groups_here(self):
    return len(this_runtime().process_groups.all())


def held(actor):
    def count(self):

        return this_participant().store.statistics().held

    return ray.get(actor.call.remote(count))
