"""Calls with pauses between them: what a person feels, and a loop whose iterations compute.

``op`` says how long the driver sleeps before each call; that is not timed. The ping is the least that any way from a
driver to its ranks and back can take: processes that do nothing else, a byte to each over a pipe, one byte from each
rank to the next, and a byte back.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import names
from benchmarks.interleave import Contender, timed
from benchmarks.ours import RaycollectAllreduce
from benchmarks.report import Record
from benchmarks.suite import Choice, Maker, close, compare, entry, gather
from benchmarks.suites.captured import Captured
from benchmarks.theirs import RayAllreduce

NAME = "cold"
TITLE = "allreduce of 4 B from the driver, with pauses between the calls"
REFERENCE = names.PING
NEEDS_RAY = True

RANKS = (2, 4)
PAUSES_MS = (0, 2, 10, 50)
_NBYTES = 4


class Paused:
    """A contender that sleeps before each operation."""

    def __init__(self, contender: Contender, pause_ms: float) -> None:
        self.name = contender.name
        self._contender = contender
        self._pause_s = pause_ms / 1e3

    def prepare(self, nbytes: int) -> None:
        """As the contender does."""
        self._contender.prepare(nbytes)

    def fill(self) -> None:
        """As the contender does."""
        self._contender.fill()

    def run(self, count: int) -> Sequence[float]:
        """So many operations, each after a pause."""
        spent: list[float] = []
        for _ in range(count):
            time.sleep(self._pause_s)
            spent += self._contender.run(1)
        return spent

    def check(self, runs: int) -> None:
        """As the contender does."""
        self._contender.check(runs)

    def close(self) -> None:
        """The contender goes on."""


class Ping:
    """Bare processes on pipes."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(ranks)]
        ring = [context.Pipe(duplex=False) for _ in range(ranks)]  # rank r reads what the one before it writes
        self._drivers = [mine for mine, _ in pairs]
        self._count = 0
        self._processes = [
            context.Process(target=_answer, args=(pairs[rank][1], ring[rank][0], ring[(rank + 1) % ranks][1]))
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        self._ping()

    def prepare(self, nbytes: int) -> None:
        """Nothing is reduced."""

    def fill(self) -> None:
        """Begins to count."""
        self._count = 0

    def run(self, count: int) -> Sequence[float]:
        """So many pings."""
        return timed(self._ping, count)

    def check(self, runs: int) -> None:
        """Raises unless all have answered as often."""
        if self._count != runs * len(self._drivers):
            raise AssertionError(f"{self.name}: {self._count} answers in {runs} runs")

    def close(self) -> None:
        """Ends the processes."""
        for driver in self._drivers:
            driver.close()
        for process in self._processes:
            process.join()

    def _ping(self) -> None:
        for driver in self._drivers:
            driver.send_bytes(b"p")
        for driver in self._drivers:
            self._count += len(driver.recv_bytes())


def _answer(driver: Connection[Any, Any], before: Connection[Any, Any], after: Connection[Any, Any]) -> None:
    with suppress(EOFError, OSError):
        while True:
            driver.recv_bytes()
            after.send_bytes(b"p")
            before.recv_bytes()
            driver.send_bytes(b"p")


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 and 4 actors."""
    for ranks in choice.ranks or RANKS:
        choice.progress(f"{NAME}: starts {ranks} actors")
        makers: list[Maker] = [
            entry(names.PING, Ping, ranks),
            entry(names.CAPTURED, Captured, ranks, arena=True),
            entry(names.ARENA, RaycollectAllreduce, ranks, arena=True),
            entry(names.RAY, RayAllreduce, ranks),
        ]
        contenders, skipped = gather(NAME, makers)
        yield from skipped
        for pause_ms in PAUSES_MS:
            op = f"pauses of {pause_ms} ms"
            choice.progress(f"{NAME}: {ranks} actors, {op}")
            paused = [Paused(one, pause_ms) for one in contenders]
            runs = choice.runs_or(40, 120)
            yield from compare(paused, suite=NAME, op=op, ranks=ranks, nbytes=_NBYTES, runs=runs)
        close(contenders)
