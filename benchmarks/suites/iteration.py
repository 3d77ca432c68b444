"""One iteration of data-parallel training, as the users of each library write it.

A method of each actor computes a gradient for ``op`` milliseconds, and the gradients are reduced. An operation is one
iteration, which the driver waits for; a contender does `BURST` of them in its turn, as a training loop does.

==============================  ======================================================================================
the bare methods                plain actors whose method returns nothing: no gradient is reduced
raycollect, eager               ``allreduce_refs`` on what the methods of participants return
raycollect, eager, arena        the same, on arrays that ``col.zeros`` made
raycollect, col.step            the same function under ``@col.step``
raycollect, in actors           plain actors whose method calls ``raycollect.allreduce``
ray.util.collective inside      plain actors whose method calls ``ray.util.collective.allreduce``, over gloo
ray.util.collective in a        the same with a method for the gradient and a second one for the allreduce
second method
object store                    the driver gets the gradients, adds them up, and puts the sum for the actors
==============================  ======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks import names
from benchmarks.crew import Contestant, Joined, Plain, busy
from benchmarks.report import Record
from benchmarks.suite import Choice, Maker, entry, sweep
from benchmarks.targets import KB, MB

NAME = "iteration"
TITLE = "an iteration: a method of each actor, and the allreduce of what the methods return"
REFERENCE = names.RAY_INSIDE
NEEDS_RAY = True

RANKS = (2, 4, 8)
SIZES = (4, 64 * KB, MB, 16 * MB)
BUSY_MS = (0, 5)
BURST = 20


class Learner(Plain):
    """A plain actor with a gradient, of which each iteration writes the first element."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.array: Any = None

    def begin(self, nbytes: int, arena: bool) -> None:
        """Makes the gradient."""
        self.array = (col.zeros if arena else np.zeros)(max(1, nbytes // 4), np.float32)

    def compute(self, busy_ms: float) -> None:
        """Computes the gradient."""
        busy(busy_ms)
        self.array[:1] = self.rank + 1

    def gradient(self, busy_ms: float) -> Any:
        """Computes the gradient, and returns it."""
        self.compute(busy_ms)
        return self.array

    def reduce(self, library: str, group: str) -> None:
        """Reduces the gradient by a library."""
        self.library(library).allreduce(self.array, group)

    def compute_and_reduce(self, busy_ms: float, library: str, group: str) -> None:
        """Computes the gradient, and reduces it by a library."""
        self.compute(busy_ms)
        self.reduce(library, group)

    def replace(self, total: Any) -> None:
        """Copies the sum from the object store."""
        self.array[...] = total

    def has(self, first: float) -> bool:
        """Whether the first element is that, and all others are 0."""
        return bool(self.array[0] == first and not self.array[1:].any())


class Participant(Learner, col.CollectiveParticipant):
    """The same with the mixin."""


class Iteration(Contestant):
    """What the contenders have in common."""

    ACTOR = Learner

    def __init__(self, name: str, ranks: int, busy_ms: float, **how: Any) -> None:
        super().__init__(name, ranks, **how)
        self.busy_ms = busy_ms

    def prepare(self, nbytes: int) -> None:
        """Makes the gradients."""
        ray.get([actor.begin.remote(nbytes, self._arena) for actor in self.actors])

    def fill(self) -> None:
        """Each iteration does."""

    def check(self, runs: int) -> None:
        """Raises unless every rank holds the sum of the last iteration."""
        self.must_have([self.ranks * (self.ranks + 1) / 2] * self.ranks)

    def must_have(self, firsts: list[float]) -> None:
        """Raises unless the gradients begin with these, by rank."""
        right = ray.get([actor.has.remote(first) for actor, first in zip(self.actors, firsts, strict=True)])
        if not all(right):
            raise AssertionError(f"{self.name}: right on {right}")


class Methods(Iteration):
    """The bare methods."""

    def operate(self) -> None:
        """Waits for all of them."""
        ray.get([actor.compute.remote(self.busy_ms) for actor in self.actors])

    def check(self, runs: int) -> None:
        """Raises unless every rank holds its own gradient."""
        self.must_have([float(rank + 1) for rank in range(self.ranks)])


class Eager(Iteration):
    """`allreduce_refs` of what the methods return."""

    ACTOR = Participant

    def __init__(self, name: str, ranks: int, busy_ms: float, *, arena: bool = False) -> None:
        super().__init__(name, ranks, busy_ms, arena=arena)
        col.declare_collective_group(self.actors, group_name=self.group)

    def operate(self) -> None:
        """Calls the methods, then the collective."""
        col.allreduce_refs([actor.gradient.remote(self.busy_ms) for actor in self.actors], group_name=self.group)

    def close(self) -> None:
        """Destroys the group, and ends the actors."""
        col.destroy_collective_group(self.group)
        super().close()


class Step(Eager):
    """The same function under ``@col.step``."""

    def __init__(self, name: str, ranks: int, busy_ms: float) -> None:
        super().__init__(name, ranks, busy_ms)
        self._step = col.step(super().operate)

    def operate(self) -> None:
        """One call of the step."""
        self._step()

    def close(self) -> None:
        """Closes the step, then the rest."""
        self._step.close()
        super().close()


class Within(Joined, Iteration):
    """The method that computes the gradient reduces it by a library."""

    ACTOR = Learner

    def operate(self) -> None:
        """Waits for the methods."""
        arguments = self.busy_ms, self._library, self.group
        ray.get([actor.compute_and_reduce.remote(*arguments) for actor in self.actors])


class Behind(Within):
    """A second method reduces the gradient by a library."""

    def operate(self) -> None:
        """Waits for the second methods."""
        for actor in self.actors:
            actor.compute.remote(self.busy_ms)
        ray.get([actor.reduce.remote(self._library, self.group) for actor in self.actors])


class Store(Iteration):
    """The driver gets the gradients, adds them up, and puts the sum."""

    def operate(self) -> None:
        """Two calls per rank, one put."""
        first, *others = ray.get([actor.gradient.remote(self.busy_ms) for actor in self.actors])
        total = first.copy()
        for gradient in others:
            total += gradient
        put = ray.put(total)
        ray.get([actor.replace.remote(put) for actor in self.actors])


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 to 8 actors."""
    for ranks in choice.ranks or (RANKS[:2] if choice.quick else RANKS):
        for busy_ms in choice.busy_ms or (BUSY_MS[:1] if choice.quick else BUSY_MS):
            op = f"methods of {busy_ms:g} ms"
            choice.progress(f"{NAME}: starts {ranks} actors for each contender, {op}")
            sizes = choice.sizes or SIZES
            makers = _makers(ranks, busy_ms)
            yield from sweep(NAME, choice, makers, op=op, ranks=ranks, sizes=sizes, runs=_runs, burst=BURST)


def _runs(nbytes: int) -> tuple[int, int]:
    return (6 * BURST, 12 * BURST) if nbytes < 16 * MB else (3 * BURST, 6 * BURST)


def _makers(ranks: int, busy_ms: float) -> list[Maker]:
    return [
        entry(names.METHODS, Methods, ranks, busy_ms),
        entry(names.EAGER, Eager, ranks, busy_ms),
        entry(names.EAGER_ARENA, Eager, ranks, busy_ms, arena=True),
        entry(names.STEP, Step, ranks, busy_ms),
        entry(names.IMPERATIVE, Within, ranks, busy_ms, library="raycollect"),
        entry(names.RAY_INSIDE, Within, ranks, busy_ms, library="ray"),
        entry(names.RAY_BESIDE, Behind, ranks, busy_ms, library="ray"),
        entry(names.STORE, Store, ranks, busy_ms),
    ]
