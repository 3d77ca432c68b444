"""Times contenders in turn: first each once, then each once more, so that whatever else happens hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

RUNS_PER_ROUND = 8
"""Between two fills; a sum over n ranks grows n times per run, and float32 must hold it: 8 ** 9 is far below."""


class Contender(Protocol):
    """Somebody who can do the operation that a suite measures."""

    name: str

    def prepare(self, nbytes: int) -> None:
        """Gets operands of this size ready."""
        ...

    def fill(self) -> None:
        """Sets the operands to their first values."""
        ...

    def run(self) -> None:
        """Does the operation once, and returns when it is done everywhere."""
        ...

    def check(self, runs: int) -> None:
        """Raises unless the operands hold what so many runs since `fill` must have left."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


def interleave(
    contenders: Sequence[Contender],
    *,
    nbytes: int,
    runs: int,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times each contender `runs` times at one size, and checks what it computed after every round.

    Args:
        contenders: Who is timed; in each turn another one goes first.
        nbytes: Bytes per rank.
        runs: How many operations of each are timed.
        warmup: How many go before that.
        clock: Gives seconds.

    Returns:
        Milliseconds per operation, by the contender's name.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.prepare(nbytes)
    turn, total = 0, warmup + runs
    while turn < total:
        count = min(RUNS_PER_ROUND, total - turn)
        for contender in contenders:
            contender.fill()
        for _ in range(count):
            shift = turn % len(contenders)
            for contender in (*contenders[shift:], *contenders[:shift]):
                start = clock()
                contender.run()
                spent = clock() - start
                if turn >= warmup:
                    times[contender.name].append(spent * 1e3)
            turn += 1
        for contender in contenders:
            contender.check(count)
    return times
