"""An allreduce as it is done today: `ray.util.collective` over gloo, and the object store."""

from __future__ import annotations

import ray

from benchmarks.crew import Contestant, Joined, Plain


class RayGroup(Joined, Contestant):
    """A contender with a group of `ray.util.collective` over gloo.

    Raises:
        Skipped: Its gloo needs torch, which is not installed.
    """

    def __init__(self, name: str, ranks: int, *, count: int = 1) -> None:
        super().__init__(name, ranks, count=count, library="ray")


class RayAllreduce(RayGroup):
    """One actor call per rank; each reduces what its buffer is made of, in place."""

    def operate(self) -> None:
        """One call per rank."""
        ray.get([actor.each.remote("allreduce", self.name, self.group) for actor in self.actors])


class StoreAllreduce(Contestant):
    """Through the object store: the driver gets all arrays, adds them up, puts the sum; the actors copy it."""

    ACTOR = Plain

    def operate(self) -> None:
        """Two calls per rank, one put."""
        arrays = ray.get([actor.read.remote(self.name) for actor in self.actors])
        total = arrays[0] + arrays[1]
        for array in arrays[2:]:
            total += array
        put = ray.put(total)
        ray.get([actor.write.remote(self.name, put) for actor in self.actors])
