"""Actors that the tests share."""

from __future__ import annotations

import numpy as np
import ray

import raycollect as col
from tests.lives import lasting


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


Worker = lasting(ray.remote(Buffers))


def filled(actors, values):
    """Refs to a buffer on each actor, filled with a value."""
    ray.get([actor.set_buffer.remote(np.full(7, value)) for actor, value in zip(actors, values, strict=True)])
    return [actor.get_buffer.remote() for actor in actors]


def block(worker, gate):
    """Keeps an actor in a method until a gate opens; the ref of its end."""
    return worker.call.remote(lambda self, gate: ray.get(gate.wait.remote()), gate)


@ray.remote
class Plain:
    """An actor without the mixin."""

    def get_buffer(self):
        return np.ones(10, np.float32)

    def call(self, function, *args):
        return function(self, *args)
