"""Times contenders in turn: first each once, then each once more, so that whatever else happens hits all alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

RUNS_PER_ROUND = 8
"""Between two fills; a sum over n ranks grows n times per run, and float32 must hold it: 16 ** 9 is far below."""


class Contender(Protocol):
    """Somebody who can do the operation that a suite measures."""

    name: str

    def prepare(self, nbytes: int) -> None:
        """Gets operands of this size ready."""
        ...

    def fill(self) -> None:
        """Sets the operands to their first values."""
        ...

    def run(self, count: int) -> Sequence[float]:
        """Does the operation so many times, one after the other.

        Returns:
            The seconds that each took until it was done everywhere.
        """
        ...

    def check(self, runs: int) -> None:
        """Raises unless the operands hold what so many runs since `fill` must have left."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


def timed(operation: Callable[[], Any], count: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Does something so many times, and gives the seconds that each took."""
    spent = []
    for _ in range(count):
        start = clock()
        operation()
        spent.append(clock() - start)
    return spent


def interleave(
    contenders: Sequence[Contender], *, nbytes: int, runs: int, warmup: int = 3, burst: int = 1
) -> dict[str, list[float]]:
    """Times each contender at least `runs` times at one size, and checks what it computed after every round.

    Args:
        contenders: Who is timed; in each turn in another order, drawn at random, because what one leaves behind (Ray
            tidies up after the call has returned) is paid for by the next.
        nbytes: Bytes per rank.
        runs: How many operations of each are timed.
        warmup: How many turns go before that.
        burst: How many operations a contender does when it is its turn.

    Returns:
        Milliseconds per operation, by the contender's name.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.prepare(nbytes)
    draw = random.Random(nbytes)  # the same orders in every run
    turns_per_round = max(1, RUNS_PER_ROUND // burst)
    turn, total = 0, warmup + -(-runs // burst)
    while turn < total:
        count = min(turns_per_round, total - turn)
        for contender in contenders:
            contender.fill()
        for _ in range(count):
            for contender in draw.sample(contenders, len(contenders)):
                spent = contender.run(burst)
                if turn >= warmup:
                    times[contender.name] += [each * 1e3 for each in spent]
            turn += 1
        for contender in contenders:
            contender.check(count * burst)
    return times
