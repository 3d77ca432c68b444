"""One iteration of fresh refs, as the documents write it: a method of each actor makes an array, which is reduced.

No bursts, and nothing is prepared: each operation calls all methods and waits until the sums are there. ``op`` says how
long a method computes before it makes its array. The bare methods are those of actors without the mixin; they make an
array of the same size, keep it, and reduce nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks import names
from benchmarks.crew import Contestant, Joined, busy, crew
from benchmarks.ours import Replayed
from benchmarks.report import Record
from benchmarks.suite import Choice, Maker, entry, sweep
from benchmarks.targets import MB

NAME = "iteration"
TITLE = "methods that make fresh arrays, and their allreduce, called from the driver"
REFERENCE = names.METHODS
NEEDS_RAY = True

RANKS = (2, 4, 8, 16)
SIZES = (4, MB)
BUSY_MS = (0, 2)


class Bare:
    """An actor without the mixin."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._array: Any = None

    def make(self, nbytes: int, busy_ms: float) -> None:
        """Computes for so long, and makes an array."""
        busy(busy_ms)
        self._array = np.full(max(1, nbytes // 4), self._rank + 1, np.float32)

    def is_made(self) -> bool:
        """Whether the array is there."""
        return bool((self._array == self._rank + 1).all())


class Fresh(Contestant):
    """What the contenders have in common: `busy_ms` of computing, then an array that was not there before."""

    def __init__(self, name: str, actors: Sequence[Any], busy_ms: float) -> None:
        super().__init__(name, actors)
        self.busy_ms = busy_ms
        self.nbytes = 4

    def prepare(self, nbytes: int) -> None:
        """Notes the size."""
        self.nbytes = nbytes

    def fill(self) -> None:
        """Each operation makes its arrays."""

    def made(self) -> list[Any]:
        """Calls the methods that return the arrays."""
        return [actor.make.remote(self.name, self.nbytes, self.busy_ms) for actor in self.actors]

    def check(self, runs: int) -> None:
        """Raises unless every rank holds the sum of the last operation."""
        self.must_hold(self.ranks * (self.ranks + 1) / 2)


class Methods(Fresh):
    """The bare methods alone."""

    def __init__(self, name: str, busy_ms: float, ranks: int) -> None:
        remote = ray.remote(num_cpus=0)(Bare)
        super().__init__(name, [remote.remote(rank) for rank in range(ranks)], busy_ms)

    def operate(self) -> None:
        """Waits for all of them."""
        ray.get([actor.make.remote(self.nbytes, self.busy_ms) for actor in self.actors])

    def check(self, runs: int) -> None:
        """Raises unless the arrays are there."""
        if not all(ray.get([actor.is_made.remote() for actor in self.actors])):
            raise AssertionError(f"{self.name}: an array is missing")

    def close(self) -> None:
        """Ends the actors."""
        for actor in self.actors:
            ray.kill(actor)


class Eager(Fresh):
    """`allreduce_refs` of what the methods return."""

    def __init__(self, name: str, actors: Sequence[Any], busy_ms: float, ordering: str) -> None:
        super().__init__(name, actors, busy_ms)
        col.declare_collective_group(self.actors, group_name=self.group, ordering=ordering)

    def operate(self) -> None:
        """Calls the methods, then the collective."""
        col.allreduce_refs(self.made(), group_name=self.group)

    def close(self) -> None:
        """Destroys the group."""
        col.destroy_collective_group(self.group)
        super().close()


class Step(Replayed, Eager):
    """The same as a captured step: a new array each time, of a method that the step calls."""

    def __init__(self, name: str, actors: Sequence[Any], busy_ms: float) -> None:
        super().__init__(name, actors, busy_ms, "program")

    def record(self) -> None:
        """The methods and the collective."""
        arguments = self.name, self.nbytes, self.busy_ms
        made = [self.step.call(actor, "make", *arguments) for actor in self.actors]
        col.allreduce_refs(made, group_name=self.group)


class Within(Joined, Fresh):
    """An allreduce of a library's own in the method that makes the array, or in a second method behind it."""

    def __init__(self, name: str, actors: Sequence[Any], busy_ms: float, library: str, *, is_second: bool) -> None:
        super().__init__(name, actors, busy_ms, library=library)
        self._is_second = is_second

    def operate(self) -> None:
        """Waits for the methods that reduce."""
        group = "" if self._is_second else self.group
        arguments = self._library, self.name, self.nbytes, self.busy_ms, group
        ends = [actor.make_and_reduce.remote(*arguments) for actor in self.actors]
        if self._is_second:
            ends = [actor.each.remote("allreduce", self.name, self.group) for actor in self.actors]
        ray.get(ends)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 to 16 actors."""
    for ranks in choice.ranks or (RANKS[:2] if choice.quick else RANKS):
        choice.progress(f"{NAME}: starts {ranks} actors")
        with crew(ranks) as actors:
            for busy_ms in BUSY_MS:
                makers, op = _makers(actors, busy_ms), f"methods of {busy_ms} ms"
                sizes = choice.sizes or (SIZES[:1] if choice.quick else SIZES)
                yield from sweep(NAME, choice, makers, op=op, ranks=ranks, sizes=sizes, runs=lambda _: (40, 120))


def _makers(actors: Sequence[Any], busy_ms: float) -> list[Maker]:
    def within(name: str, library: str, *, is_second: bool) -> tuple[str, Callable[[], Within]]:
        return entry(name, Within, actors, busy_ms, library, is_second=is_second)

    return [
        entry(names.METHODS, Methods, busy_ms, len(actors)),
        entry(names.ORDINARY, Eager, actors, busy_ms, "program"),
        entry(names.DATA_ORDERED, Eager, actors, busy_ms, "data"),
        entry(names.CAPTURED, Step, actors, busy_ms),
        within(names.IMPERATIVE, "raycollect", is_second=False),
        within(names.RAY_INSIDE, "ray", is_second=False),
        within(names.RAY_BESIDE, "ray", is_second=True),
    ]
