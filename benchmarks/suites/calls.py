"""Calls from the driver on refs that stay: in bursts, after a pause, and many at once.

raycollect gets refs that persist over the calls; `ray.util.collective` gets an actor call per rank; the object store
goes through the driver. Table `cold` has a ping beside them, the lower bound of a round trip from a driver to its
ranks: processes that do nothing else, a byte to each over a pipe, one from each rank to the next, and one back.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks.report import Record
from benchmarks.suite import BURST, KB, MB, Choice, Maker, Table, entry, sweep
from raycollect.cli.contenders import BenchActor, BenchContender, Captured, ObjectStore, RayCollective, Refs
from raycollect.cli.harness import Contender, timed

DRIVER = Table("driver", "allreduce called from the driver, float32, in place")
COLD = Table("cold", "allreduce of 4 B from the driver, after a pause", "bare ping")
BATCH = Table("batch", "200 broadcasts of 4 KB on each of two actors, called from the driver")
TABLES = (DRIVER, COLD, BATCH)
NEEDS_RAY = True

RANKS = (2, 4)
PAUSE_S = 0.01
COUNT = 200


class Calling(BenchActor):
    """An actor whose method makes one call of its library."""

    def call(self) -> None:
        """Makes this rank's part of the call."""
        self.bound()()


class RayCalls(RayCollective):
    """`ray.util.collective`, by an actor call to each rank."""

    ACTOR = Calling

    run = BenchContender.run  # timed in the driver

    def operate(self) -> None:
        """Calls all actors once."""
        self.each("call")


# ---------------------------------------------------------------------------------------------- after a pause


class Paused:
    """A contender that sleeps before each operation."""

    def __init__(self, contender: Contender) -> None:
        self.name = contender.name
        self.prepare, self.fill, self.check, self.close = (
            contender.prepare,
            contender.fill,
            contender.check,
            contender.close,
        )
        self._contender = contender

    def run(self, count: int) -> Sequence[float]:
        """Runs so many operations, each after a pause."""
        spent_s: list[float] = []
        for _ in range(count):
            time.sleep(PAUSE_S)
            spent_s += self._contender.run(1)
        return spent_s


class Ping:
    """Bare processes on pipes."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        spawn = multiprocessing.get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(ranks)]
        ring = [spawn.Pipe(duplex=False) for _ in range(ranks)]  # a rank reads what the one before it writes
        self._drivers = [mine for mine, _ in pairs]
        self._processes = [
            spawn.Process(target=_answer, args=(pairs[rank][1], ring[rank][0], ring[(rank + 1) % ranks][1]))
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        self._ping()

    def prepare(self, nbytes: int) -> None: ...
    def fill(self) -> None: ...
    def check(self, runs: int) -> None: ...

    def run(self, count: int) -> Sequence[float]:
        """Pings so often."""
        return timed(self._ping, count)

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
            driver.recv_bytes()


def _answer(driver: Connection[Any, Any], before: Connection[Any, Any], after: Connection[Any, Any]) -> None:
    with suppress(EOFError, OSError):
        while True:
            driver.recv_bytes()
            after.send_bytes(b"p")
            before.recv_bytes()
            driver.send_bytes(b"p")


# ---------------------------------------------------------------------------------------------- many at once


class Many(Calling):
    """An actor with many tensors."""

    def prepare(self, operation: str, whole: int, in_arena: bool) -> None:
        """Makes the tensors; `whole` elements in all."""
        self._operation = operation
        self.arrays = [np.zeros(whole // COUNT, np.float32) for _ in range(COUNT)]

    def at(self, index: int) -> Any:
        """Returns one tensor."""
        return self.arrays[index]

    def fill(self) -> None:
        """Sets all tensors to the rank."""
        for array in self.arrays:
            array.fill(self._rank)

    def wrong(self, growth: float) -> int:
        """Counts the tensors that are not those of rank 0."""
        return sum(bool(array.any()) for array in self.arrays)

    def call(self) -> None:
        """Makes a call for each tensor."""
        for index in range(COUNT):
            self.call_one(index)

    def call_one(self, index: int) -> None:
        """Makes the call for one tensor."""
        self._library.broadcast(self.arrays[index], 0, self._group)


class ManyParticipant(Many, col.CollectiveParticipant):
    """The same with the mixin."""


class Each(Refs):
    """A broadcast for each tensor, one after the other."""

    ACTOR = ManyParticipant

    def prepare(self, nbytes: int) -> None:
        """Makes the tensors, and a ref to each."""
        BenchContender.prepare(self, nbytes)
        tensors = [[actor.at.remote(index) for actor in self.actors] for index in range(COUNT)]

        def call() -> None:
            for refs in tensors:
                col.broadcast_refs(refs, group_name=self.group)

        self.call = call


class Batched(Each):
    """The same calls in a `raycollect.batch()`."""

    def operate(self) -> None:
        """Makes all calls in one block."""
        with col.batch():
            self.call()


class RayAtOnce(RayCalls):
    """One actor call per rank, which makes all calls."""

    ACTOR = Many


class RayEach(RayAtOnce):
    """An actor call per tensor and rank."""

    def operate(self) -> None:
        """Waits for each tensor."""
        for index in range(COUNT):
            ray.get([actor.call_one.remote(index) for actor in self.actors])


# ---------------------------------------------------------------------------------------------- the suite


def _runs(nbytes: int) -> tuple[int, int]:
    return (120, 400) if nbytes < MB else (60, 200) if nbytes < 16 * MB else (12, 48)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 and 4 actors; batches over 2."""
    for ranks in choice.ranks or RANKS:
        ours: list[Maker] = [
            entry("raycollect", Refs, "allreduce", ranks),
            entry("raycollect, arena", Refs, "allreduce", ranks, in_arena=True),
        ]
        ray_calls = entry("ray.util.collective", RayCalls, "allreduce", ranks)
        makers = [*ours, ray_calls, entry("object store", ObjectStore, "allreduce", ranks)]
        sizes = (4, MB, 64 * MB)
        yield from sweep(DRIVER, choice, makers, op="allreduce", ranks=ranks, sizes=sizes, runs=_runs, burst=BURST)
    for ranks in choice.ranks or RANKS:
        makers = [
            entry("bare ping", Ping, ranks),
            entry("raycollect, captured", Captured, "allreduce", ranks, in_arena=True),
            entry("raycollect, arena", Refs, "allreduce", ranks, in_arena=True),
            entry("ray.util.collective", RayCalls, "allreduce", ranks),
        ]
        paused: list[Maker] = [(name, lambda make=make: Paused(make())) for name, make in makers]  # type: ignore[misc]
        yield from sweep(COLD, choice, paused, op="pauses of 10 ms", ranks=ranks, sizes=(4,), runs=lambda _: (40, 120))
    makers = [
        entry("raycollect, batch", Batched, "broadcast", 2),
        entry("raycollect, a call each", Each, "broadcast", 2),
        entry("ray.util.collective", RayAtOnce, "broadcast", 2),
        entry("ray.util.collective, a call each", RayEach, "broadcast", 2),
    ]
    sizes = (COUNT * 4 * KB,)
    yield from sweep(BATCH, choice, makers, op=f"{COUNT} broadcasts", ranks=2, sizes=sizes, runs=lambda _: (8, 80))
