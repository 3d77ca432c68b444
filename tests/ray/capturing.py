"""What the tests of captured steps share: actors that compute, and what they would do without being captured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import ray

import raycollect as col
from raycollect.member.runtime import Runtime
from tests.lives import lasting
from tests.ray.workers import Buffers


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
        import os

        os._exit(1)


Learner = lasting(ray.remote(Learning))


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
    return len(Runtime.current()._lease._captures._living)
