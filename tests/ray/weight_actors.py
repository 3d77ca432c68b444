"""Actors that hold weights, each element of which is the number of its version, so that a mixed one shows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import ray

import raycollect as col
from tests.support import actor_pool

SHAPES = {"up": (8, 6), "down": (6, 8), "bias": (5,)}


@actor_pool.reusable
@ray.remote(num_cpus=0)
class Weights(col.CollectiveParticipant):
    """One rank of a trainer or of a rollout."""

    def __init__(self):
        self.weights = {}

    def make(self, shapes, dtype="float32"):
        self.weights = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
        return self.weights

    def fill(self, value, names=None):
        for name in names or self.weights:
            self.weights[name][...] = value

    def fill_each(self, value, fails_at=None, until=None):
        """Yields each tensor's name when it has a value; waits for somebody to write a pipe before the last."""
        names = list(self.weights)
        for name in names:
            if name == fails_at:
                self.weights[name].reshape(-1)[:1] = value  # half of it
                raise ValueError("no such layer")
            if name == names[-1] and until is not None:
                Path(until).read_text()
            self.fill(value, [name])
            yield name

    def make_each(self, value):
        """Yields tensors that are none of those that were published."""
        for name, array in self.weights.items():
            yield {name: np.full_like(array, value)}

    @col.by_value
    def look(self, sub=None):
        """All values that are there, and the version that they are said to be."""
        version = sub.version() if sub is not None else None
        values = sorted({float(one) for array in self.weights.values() for one in np.unique(array)})
        return values, version.number if version else 0

    @col.by_value
    def held(self):
        return {name: np.array(array) for name, array in self.weights.items()}

    def pid(self):
        return os.getpid()


def replicas(actors, shapes=None):
    """A ref of whole tensors per actor."""
    return [actor.make.remote(shapes or SHAPES) for actor in actors]


def spoil(actor):
    """Flips bits in what a rank of a publisher keeps of its versions; inside the actor."""
    from raycollect.weights.agent import _locked

    with _locked() as agents:
        for source in (one for _, some in agents.sources.values() for one in some.values()):
            for slot in source._slots.values():
                for array in slot.arrays:
                    array += 1


def looks(actors, sub):
    return ray.get([actor.look.remote(sub) for actor in actors])


def held_by(actor):
    """How many values an actor's store holds."""

    def inside(_):
        from raycollect.member.participant import this_participant

        return this_participant().store.statistics().held

    return ray.get(actor.__ray_call__.remote(inside))
