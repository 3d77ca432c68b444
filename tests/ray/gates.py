"""Actors with buffers, kept in a method until a gate opens."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.member.runtime import Runtime
from tests.ray.workers import Gate, Worker, buffers
from tests.waiting import wait_until


@pytest.fixture
def gate(actors):
    """Opened by `gate.open.remote()`; what `gate.wait.remote()` gives is not there before."""
    (made,) = actors(Gate, 1, max_concurrency=8)
    yield made
    ray.get(made.open.remote())


@pytest.fixture
def crew(actors):
    """Declares groups of actors, with buffers that are there."""

    def make(count, threads=1, **declared):
        workers = actors(Worker, count, **({"max_concurrency": threads} if threads > 1 else {}))
        make.group = col.declare_collective_group(workers, **declared)
        refs = buffers(workers)
        ray.wait(refs, num_returns=count)
        return workers, refs

    return make


@pytest.fixture
def occupy(actors, gate):
    """Lets a method of a worker run until the gate opens: gives its ref, once it has begun."""

    def begin(worker, wait=wait_in):
        (begun,) = actors(Gate, 1, max_concurrency=8)
        ref = worker.make.remote(wait, gate, begun)
        ray.get(begun.wait.remote())
        return ref

    return begin


def wait_in(actor_self, gate, begun=None):
    """Waits in its body; what it returns says whether the buffer was left alone meanwhile."""
    before = actor_self.buffer.copy()
    if begun is not None:
        ray.get(begun.open.remote())
    ray.get(gate.wait.remote())
    assert (actor_self.buffer == before).all()
    return actor_self.buffer


def wait_and_leave(actor_self, gate, begun):
    """The same, until this process has heard that its group was destroyed."""
    found = wait_in(actor_self, gate, begun)
    lease = Runtime.current()._lease
    assert lease is None or wait_until(lambda: not lease._groups.by_id)
    return found


def opened(actor_self, gate):
    """Waits for its argument, not in its body, so that it stands in the actor's queue, and others behind it."""
    return actor_self.buffer


def assert_works(refs, workers, **given):
    col.allreduce_refs(refs, op="max", **given)
    found = col.get(refs)
    for one in found:
        np.testing.assert_array_equal(one, found[0])
    del workers
