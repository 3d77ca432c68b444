"""A loop: one iteration of data-parallel training as the users of each library write it, and a captured step.

In table `iteration` a method of each actor computes a gradient, of which it writes the first element, and the gradients
are reduced. The driver waits for each iteration; a contender does 20 of them in its turn, as a training loop does.

In table `captured` an allreduce is prepared once and run again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks.report import Record
from benchmarks.suite import KB, MB, Choice, Maker, Table, entry, sweep
from benchmarks.suites.calls import RayCalls
from raycollect.cli.contenders import BenchActor, BenchContender, Captured, Members, RayCollective, Refs

ITERATION = Table(
    "iteration",
    "a method of each actor, and the allreduce of what the methods return",
    "ray.util.collective inside the method",
)
CAPTURED = Table("captured", "allreduce of a hot loop, called from the driver")
TABLES = (ITERATION, CAPTURED)
NEEDS_RAY = True

RANKS = (2, 4)
ITERATIONS = 20
BURST = 24


class Learner(BenchActor):
    """An actor with a gradient, of which each iteration writes the first element."""

    def prepare(self, operation: str, whole: int, in_arena: bool) -> None:
        """Makes the gradient."""
        self.array = (col.zeros if in_arena else np.zeros)(whole, np.float32)

    def fill(self) -> None:
        """Does nothing: each iteration fills."""

    def wrong(self, first: list[float]) -> int:
        """Counts the wrong elements; `first` has the first one of each rank."""
        return int(self.array[0] != first[self._rank]) + int(np.count_nonzero(self.array[1:]))

    def compute(self) -> None:
        """Computes the gradient."""
        self.array[0] = self._rank + 1

    def gradient(self) -> Any:
        """Computes the gradient, and returns it."""
        self.compute()
        return self.array

    def reduce(self) -> None:
        """Reduces the gradient by the library of the group."""
        self._library.allreduce(self.array, self._group)

    def compute_and_reduce(self) -> None:
        """Does both in one method."""
        self.compute()
        self.reduce()

    def replace(self, total: Any) -> None:
        """Copies the sum from the object store."""
        self.array[...] = total


class LearningParticipant(Learner, col.CollectiveParticipant):
    """The same with the mixin."""


class Iteration(BenchContender):
    """The methods alone: no gradient is reduced."""

    ACTOR = Learner
    run = BenchContender.run  # timed in the driver, also where a subclass mixes in `Members`

    def operate(self) -> None:
        """Waits for the methods."""
        self.each("compute")

    def expected(self) -> list[float]:
        """The first element of each rank after an iteration."""
        return [rank + 1.0 for rank in range(self.ranks)]

    def check(self, runs: int) -> None:
        """Raises AssertionError unless each rank holds the result of the last iteration."""
        wrong = self.each("wrong", self.expected())
        if any(wrong):
            raise AssertionError(f"{self.name}: {wrong} wrong elements")


class Reduced(Iteration):
    """An iteration that ends with the sum on all ranks; here through the object store."""

    def expected(self) -> list[float]:
        """The sum."""
        return [self.ranks * (self.ranks + 1) / 2] * self.ranks

    def operate(self) -> None:
        """Gets the gradients, adds them up, and puts the sum."""
        first, *others = ray.get([actor.gradient.remote() for actor in self.actors])
        total = first.copy()
        for gradient in others:
            total += gradient
        self.each("replace", ray.put(total))


class Eager(Reduced):
    """`allreduce_refs` of what the methods return."""

    ACTOR = LearningParticipant
    start = Refs.start

    def operate(self) -> None:
        """Calls the methods, then the collective."""
        col.allreduce_refs([actor.gradient.remote() for actor in self.actors], group_name=self.group)


class Step(Eager):
    """The same function under `col.step`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step = col.step(super().operate)
        self.closing.callback(self._step.close)

    def operate(self) -> None:
        """Calls the step."""
        self._step()


class Within(Reduced, Members):
    """The method that computes the gradient reduces it by raycollect."""

    def operate(self) -> None:
        """Waits for the methods."""
        self.each("compute_and_reduce")


class RayWithin(Within, RayCollective):
    """The same by `ray.util.collective`."""


class RayBehind(RayWithin):
    """A second method reduces the gradient by `ray.util.collective`."""

    def operate(self) -> None:
        """Waits for the second methods."""
        for actor in self.actors:
            actor.compute.remote()
        self.each("reduce")


# ---------------------------------------------------------------------------------------------- the suite


def _runs(nbytes: int) -> tuple[int, int]:
    return (6 * ITERATIONS, 12 * ITERATIONS) if nbytes < 16 * MB else (3 * ITERATIONS, 6 * ITERATIONS)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 and 4 actors."""
    for ranks in choice.ranks or RANKS:
        case = "allreduce", ranks
        makers: list[Maker] = [
            entry("the bare methods", Iteration, *case),
            entry("raycollect, eager", Eager, *case),
            entry("raycollect, eager, arena", Eager, *case, in_arena=True),
            entry("raycollect, col.step", Step, *case),
            entry("raycollect, in actors", Within, *case),
            entry("ray.util.collective inside the method", RayWithin, *case),
            entry("ray.util.collective in a second method", RayBehind, *case),
            entry("object store", Reduced, *case),
        ]
        sizes = (4, 64 * KB, MB, 16 * MB)
        op = "methods of 0 ms"
        yield from sweep(ITERATION, choice, makers, op=op, ranks=ranks, sizes=sizes, runs=_runs, burst=ITERATIONS)
    for ranks in choice.ranks or (RANKS[:1] if choice.quick else RANKS):
        case = "allreduce", ranks
        makers = [
            entry("raycollect, captured", Captured, *case, in_arena=True),
            entry("raycollect, arena", Refs, *case, in_arena=True),
            entry("raycollect", Refs, *case),
            entry("ray.util.collective", RayCalls, *case),
        ]
        runs, sizes = (5 * BURST, 10 * BURST), (4, 64 * KB, MB)
        yield from sweep(
            CAPTURED, choice, makers, op="allreduce", ranks=ranks, sizes=sizes, runs=lambda _, n=runs: n, burst=BURST
        )
