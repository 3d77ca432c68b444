"""Many small tensors at once: 64 of 4 KB on each of two actors, as the gradients of a small model.

What is timed is the reduction of all of them. `ray.util.collective` is called once per tensor: by an actor call each,
or by one actor call per rank that reduces all. raycollect gets one ref per rank that stands for a list, or a ref and a
call per tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray

import raycollect as col
from benchmarks import names
from benchmarks.crew import crew, needs
from benchmarks.ours import Declared, RaycollectAllreduce
from benchmarks.report import Record
from benchmarks.suite import Choice, Maker, close, compare, entry, gather
from benchmarks.targets import KB
from benchmarks.theirs import RayAllreduce, RayGroup

NAME = "batch"
TITLE = "allreduce of 64 small tensors, called from the driver"
REFERENCE = names.RAY_CALLS
NEEDS_RAY = True

COUNT = 64
SIZES = (COUNT * 4 * KB,)


class Each(Declared):
    """64 refs per rank, one to each tensor."""

    def __init__(self, name: str, actors: Sequence[Any]) -> None:
        super().__init__(name, actors)
        self._tensors: list[list[Any]] = []

    def prepare(self, nbytes: int) -> None:
        """Makes 64 buffers on each rank."""
        self._tensors = []
        made = [(actor, f"{self.name} {at}") for at in range(COUNT) for actor in self.actors]
        ray.get([actor.allocate.remote(name, nbytes // COUNT, False) for actor, name in made])
        refs = [actor.get_array.remote(name) for actor, name in made]
        self._tensors = [refs[at : at + self.ranks] for at in range(0, len(refs), self.ranks)]

    def fill(self) -> None:
        """Sets all of them to the rank + 1."""
        ray.get([actor.fill.remote(f"{self.name} {at}") for at in range(COUNT) for actor in self.actors])

    def must_hold(self, value: float, name: str = "") -> None:
        """Looks at all of them."""
        for at in range(COUNT):
            super().must_hold(value, f"{self.name} {at}")

    def operate(self) -> None:
        """A call each, all under way at once."""
        works = [col.allreduce_refs(refs, group_name=self.group, async_op=True) for refs in self._tensors]
        for work in works:
            work.wait()

    def close(self) -> None:
        """Lets go of all of them."""
        self._tensors = []
        ray.get([actor.drop.remote(f"{self.name} {at}") for at in range(COUNT) for actor in self.actors])
        super().close()


class Batch(Each):
    """The same calls in a ``raycollect.batch()``."""

    def __init__(self, name: str, actors: Sequence[Any]) -> None:
        needs("batch")
        super().__init__(name, actors)

    def operate(self) -> None:
        """A call each, in one block."""
        with col.batch():
            for refs in self._tensors:
                col.allreduce_refs(refs, group_name=self.group)


class RayCalls(RayGroup):
    """One actor call per tensor and rank, all under way at once."""

    def operate(self) -> None:
        """Submits all, waits for all."""
        calls: list[Any] = []
        for at in range(COUNT):
            calls += [actor.allreduce_at.remote(self.name, at, self.group) for actor in self.actors]
        ray.get(calls)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over two actors."""
    for ranks in choice.ranks or (2,):
        choice.progress(f"{NAME}: starts {ranks} actors")
        with crew(ranks) as actors:
            makers: list[Maker] = [
                entry(names.ORDINARY, RaycollectAllreduce, actors, count=COUNT),
                entry(names.ARENA, RaycollectAllreduce, actors, arena=True, count=COUNT),
                entry(names.CALLS, Each, actors),
                entry(names.BATCH, Batch, actors),
                entry(names.RAY_CALLS, RayCalls, actors, count=COUNT),
                entry(names.RAY, RayAllreduce, actors, count=COUNT),
            ]
            contenders, skipped = gather(NAME, makers)
            yield from skipped
            for nbytes in choice.sizes or SIZES:
                choice.progress(f"{NAME}: {ranks} actors, {COUNT} tensors")
                runs = choice.runs_or(8, 80)
                op = f"allreduce of {COUNT} tensors"
                yield from compare(contenders, suite=NAME, op=op, ranks=ranks, nbytes=nbytes, runs=runs)
            close(contenders)
