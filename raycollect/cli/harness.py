"""Times contenders in turns of a drawn order, so that other load on the machine affects all of them alike.

`raycollect bench` and the benchmarks of the repository measure with it. It needs neither Ray nor an array library.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

RUNS_PER_ROUND = 8  # between two fills: a sum in place over 16 ranks grows 16 times per run, and stays a float32


class Skipped(Exception):
    """A contender can't be measured here; the text says why."""


class Contender(Protocol):
    """An implementation of the operation that is measured."""

    name: str

    def prepare(self, nbytes: int) -> None:
        """Allocates operands of this size."""
        ...

    def fill(self) -> None:
        """Sets the operands to their first values."""
        ...

    def run(self, count: int) -> Sequence[float]:
        """Runs the operation `count` times; returns the seconds that each run took on all ranks."""
        ...

    def check(self, runs: int) -> None:
        """Raises unless the operands hold the result of so many runs since `fill`."""
        ...

    def close(self) -> None:
        """Releases everything."""
        ...


def timed(operation: Callable[[], object], count: int) -> list[float]:
    """Runs a function `count` times; returns the seconds of each run."""
    spent_s = []
    for _ in range(count):
        start_s = perf_counter()
        operation()
        spent_s.append(perf_counter() - start_s)
    return spent_s


def interleave(
    contenders: Sequence[Contender], *, nbytes: int, runs: int, warmup: int = 3, burst: int = 1
) -> dict[str, list[float]]:
    """Times each contender at least `runs` times at one size, and checks its results after every round.

    Args:
        contenders: Each turn has a new order, as a contender pays for the caches and threads that the last one left.
        nbytes: The bytes of each rank.
        runs: The number of timed runs of each contender.
        warmup: The number of turns before that.
        burst: The number of runs in a turn.

    Returns:
        The seconds of each run, by the contender's name.
    """
    for contender in contenders:
        contender.prepare(nbytes)
    spent_s: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    draw = random.Random(nbytes)  # the same orders in each measurement
    turn, turns = 0, warmup + -(-runs // burst)
    while turn < turns:
        count = min(max(1, RUNS_PER_ROUND // burst), turns - turn)
        for contender in contenders:
            contender.fill()
        for _ in range(count):
            for contender in draw.sample(contenders, len(contenders)):
                spent = contender.run(burst)
                if turn >= warmup:
                    spent_s[contender.name] += spent
            turn += 1
        for contender in contenders:
            contender.check(count * burst)
    return spent_s
