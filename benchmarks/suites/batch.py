"""Many tensors at once: 200 of 4 KB on each of two actors, as the parameters of a small model.

First 200 broadcasts: raycollect by a call each, one after the other, and in one ``raycollect.batch()``;
`ray.util.collective` by an actor call each per rank, one after the other and all submitted ahead, and by one actor call
per rank that makes all 200. Then an allreduce of 200 tensors that are one operand, a dict, beside one tensor of the
same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray

import raycollect as col
from benchmarks import names
from benchmarks.crew import needs
from benchmarks.ours import Declared, RaycollectAllreduce
from benchmarks.report import Record
from benchmarks.suite import Choice, Maker, entry, sweep
from benchmarks.targets import KB
from benchmarks.theirs import RayGroup

NAME = "batch"
TITLE = "many tensors at once, called from the driver"
REFERENCE = names.RAY
NEEDS_RAY = True

COUNT = 200
SIZES = (COUNT * 4 * KB, COUNT * 64 * KB)
_ROOTS = 1.0  # what rank 0 has, and all after the broadcast


class Each(Declared):
    """200 refs per rank, one to each tensor; a broadcast of each, one after the other."""

    def __init__(self, name: str, ranks: int) -> None:
        super().__init__(name, ranks, count=COUNT)
        self._tensors: list[list[Any]] = []

    def prepare(self, nbytes: int) -> None:
        """Makes 200 buffers on each rank, and a ref to each."""
        self._tensors = []
        made = [(actor, f"{self.name} {at}") for at in range(COUNT) for actor in self.actors]
        ray.get([actor.allocate.remote(name, nbytes // COUNT, False) for actor, name in made])
        refs = [actor.get_array.remote(name) for actor, name in made]
        self._tensors = [refs[at : at + self.ranks] for at in range(0, len(refs), self.ranks)]

    def fill(self) -> None:
        """Sets all of them to the rank + 1."""
        ray.get([actor.fill.remote(f"{self.name} {at}") for at in range(COUNT) for actor in self.actors])

    def check(self, runs: int) -> None:
        """Raises unless all hold what rank 0 had."""
        for at in range(COUNT):
            self.must_hold(_ROOTS, f"{self.name} {at}")

    def operate(self) -> None:
        """A call each."""
        for refs in self._tensors:
            col.broadcast_refs(refs, group_name=self.group)

    def close(self) -> None:
        """Lets go of the refs, then of the rest."""
        self._tensors = []
        super().close()


class Batch(Each):
    """The same calls in a ``raycollect.batch()``."""

    def __init__(self, name: str, ranks: int) -> None:
        needs("batch")
        super().__init__(name, ranks)

    def operate(self) -> None:
        """A call each, in one block."""
        with col.batch():
            super().operate()


class RayEach(RayGroup):
    """200 broadcasts by one actor call per rank."""

    def __init__(self, name: str, ranks: int) -> None:
        super().__init__(name, ranks, count=COUNT)

    def check(self, runs: int) -> None:
        """Raises unless all hold what rank 0 had."""
        self.must_hold(_ROOTS)

    def operate(self) -> None:
        """One call per rank."""
        ray.get([actor.each.remote("broadcast", self.name, self.group) for actor in self.actors])


class RayCalls(RayEach):
    """One actor call per tensor and rank, one tensor after the other."""

    def operate(self) -> None:
        """Submits, waits, and goes on."""
        for at in range(COUNT):
            ray.get([actor.one.remote("broadcast", self.name, at, self.group) for actor in self.actors])


class RayAhead(RayEach):
    """One actor call per tensor and rank, all submitted before any is waited for."""

    def operate(self) -> None:
        """Submits all, waits for all."""
        calls = [(at, actor) for at in range(COUNT) for actor in self.actors]
        ray.get([actor.one.remote("broadcast", self.name, at, self.group) for at, actor in calls])


class Named(RaycollectAllreduce):
    """An allreduce of 200 tensors that are one operand: a dict."""

    def __init__(self, name: str, ranks: int, *, arena: bool = False) -> None:
        super().__init__(name, ranks, arena=arena, count=COUNT)

    def prepare(self, nbytes: int) -> None:
        """Makes the buffers, and one ref to the dict of each rank."""
        super().prepare(nbytes)
        self.refs = [actor.get_named.remote(self.name) for actor in self.actors]


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over two actors."""
    for ranks in choice.ranks or (2,):
        broadcasts: list[Maker] = [
            entry(names.BATCH, Batch, ranks),
            entry(names.CALLS, Each, ranks),
            entry(names.RAY, RayEach, ranks),
            entry(names.RAY_CALLS, RayCalls, ranks),
            entry(names.RAY_AHEAD, RayAhead, ranks),
        ]
        op, sizes = f"{COUNT} broadcasts", choice.sizes or SIZES[:1]
        yield from sweep(NAME, choice, broadcasts, op=op, ranks=ranks, sizes=sizes, runs=lambda _: (8, 80))
        reductions: list[Maker] = [
            entry(names.NAMED, Named, ranks),
            entry(names.NAMED_ARENA, Named, ranks, arena=True),
            entry(names.ONE, RaycollectAllreduce, ranks),
            entry(names.ONE_ARENA, RaycollectAllreduce, ranks, arena=True),
        ]
        op, sizes = f"allreduce of {COUNT}", choice.sizes or SIZES
        yield from sweep(NAME, choice, reductions, op=op, ranks=ranks, sizes=sizes, runs=lambda _: (40, 200), burst=4)
