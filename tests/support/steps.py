"""What the tests of captured steps share: actors that compute, and checks of what is left of a step."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.member.participant import this_participant
from tests.support.actor_pool import reusable
from tests.support.actors import Buffers, found, spread


class Learning(Buffers):
    """A participant with weights, and methods for steps."""

    def __init__(self, seed=0, size=5):
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.weights = np.ones(size, np.float32)
        self.seen = []

    def gradient(self, scale=1.0):
        return (self.rng.standard_normal(len(self.weights)) * scale).astype(np.float32)

    def apply(self, gradient, rate=0.5):
        self.weights = self.weights - np.float32(rate) * gradient

    @col.by_value
    def read_weights(self):
        return self.weights.copy()

    def loss(self):
        return float(self.weights.sum())

    def note(self, *args, **kwargs):
        self.seen.append((args, kwargs))
        return len(self.seen)

    @col.by_value
    def noted(self):
        return self.seen

    def echo(self, value):
        return value

    def fail_at(self, count):
        self.seen.append(count)
        if len(self.seen) >= count:
            raise ValueError(f"call {len(self.seen)} of them")
        return np.zeros(2, np.float32)

    def grow(self):
        """A longer tensor with each call."""
        self.seen.append(None)
        return np.ones(len(self.seen), np.float32)

    def grow_to(self, size):
        return np.zeros(size, np.uint8)

    def steady(self):
        return np.ones(1, np.float32)

    def stall(self, fifo):
        """Waits until somebody writes to a named pipe: no method could end it that waits for its turn."""
        with Path(fifo).open("rb", buffering=0) as pipe:
            pipe.read(1)

    def die(self):

        os._exit(1)


Learner = reusable(ray.remote(Learning))


@reusable
@ray.remote
class Coroutines(col.CollectiveParticipant):
    """An async actor."""

    def __init__(self):
        self.total = 0

    async def gradient(self, scale):
        import asyncio

        await asyncio.sleep(0)
        return np.full(3, scale, np.float32)

    def add(self, gradient):
        self.total += float(gradient.sum())
        return self.total


def captured_here(self):
    """How many captured steps a participant has."""
    return len(this_participant()._lease._captures._living)


def is_broken(step, match="one of its runs failed", **arguments):
    """Later runs are refused, with the reason."""
    with pytest.raises(errors.CaptureBrokenError, match=match) as broken:
        step.run(**arguments)
    assert "Traceback" not in str(broken.value)
    assert "broken by" in repr(step)
    return True


def works_on(workers):
    """A captured step of these actors' groups runs."""
    refs = spread(workers, lambda rank: [rank + 1])
    with col.capture() as step:
        col.allreduce_refs(refs)
        step.returns([step.call(worker.steady) for worker in workers])
    total = sum(range(1, len(workers) + 1))
    assert [one.tolist() for one in step.run()] == [[1]] * len(workers)
    assert found(refs) == [[total]] * len(workers)
    step.close()
    return True


def held_by(trio):
    return ray.get([worker.call.remote(captured_here) for worker in trio])
