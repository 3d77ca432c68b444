"""A hot loop: one allreduce, prepared once and run again and again.

Compiled Graphs occupies the actors that it compiles. Its graph takes the tensor that an actor
holds, reduces it over Ray's CPU communicator into a new one, and keeps that; the others work in place.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

import raycollect as col
from benchmarks import names
from benchmarks.crew import Contestant, expected, needs, needs_torch
from benchmarks.ours import Declared, RaycollectAllreduce, Replayed
from benchmarks.report import Record, Skipped
from benchmarks.suite import Choice, Maker, entry, sweep
from benchmarks.targets import KB, MB
from benchmarks.theirs import RayAllreduce

NAME = "captured"
TITLE = "allreduce of a hot loop, called from the driver"
REFERENCE = names.RAY
NEEDS_RAY = True

RANKS = (2, 4)
SIZES = (4, 64 * KB, MB)
BURST = 24
"""How many operations follow each other: a loop that is worth a capture is longer than what is called now and then."""


class Captured(Replayed, Declared):
    """``raycollect.capture()``: recorded once per size, replayed in each operation."""

    def __init__(self, name: str, ranks: int, *, arena: bool = False) -> None:
        needs("capture")
        super().__init__(name, ranks, arena=arena)

    def record(self) -> None:
        """One allreduce of the buffers."""
        col.allreduce_refs(self.refs, group_name=self.group)


class Reducer:
    """An actor in a Compiled Graph."""

    def __init__(self, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._value = rank + 1
        self._torch = torch
        self._given: Any = None
        self._kept: Any = None

    def allocate(self, nbytes: int) -> None:
        """Makes the tensor that it gives."""
        self._given = self._torch.full((max(1, nbytes // 4),), self._value, dtype=self._torch.float32)

    def give(self, _: int) -> Any:
        """Gives its tensor to the graph."""
        return self._given

    def keep(self, value: Any) -> int:
        """Keeps the sum."""
        self._kept = value
        return 0

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def forget(self) -> None:
        """Drops the sum."""
        self._kept = None

    def holds(self, value: float) -> bool:
        """Tells whether it has the sum."""
        return bool((self._kept == value).all())


class CompiledGraph(Contestant):
    """An allreduce in a Compiled Graph, over Ray's CPU communicator.

    Between two executions its actors wait by looking again and again, each with all of a core. So that they don't take
    the cores from whoever is measured next, their processes are stopped while it is not their turn.

    Raises:
        Skipped: This Ray has none, or there is no torch.
    """

    def __init__(self, name: str, ranks: int) -> None:
        needs_torch()
        try:
            from ray.experimental.channel.cpu_communicator import CPUCommunicator
        except ImportError as exc:
            raise Skipped(f"this Ray has no Compiled Graphs on CPUs: {exc}") from exc
        super().__init__(name, 0)
        self.ranks = ranks
        self._communicator = CPUCommunicator
        self._graph: Any = None
        self._pids: list[int] = []

    def prepare(self, nbytes: int) -> None:
        """Starts actors and compiles a graph over them."""
        from ray.dag import InputNode, MultiOutputNode
        from ray.experimental import collective

        self.close()
        remote = ray.remote(num_cpus=0)(Reducer)
        self.actors = [remote.remote(rank) for rank in range(self.ranks)]
        ray.get([actor.allocate.remote(nbytes) for actor in self.actors])
        pids = ray.get([actor.pid.remote() for actor in self.actors])
        with InputNode() as start:
            given = [actor.give.bind(start) for actor in self.actors]
            reduced = collective.allreduce.bind(given, transport=self._communicator(self.ranks, self.actors))
            ends = MultiOutputNode([actor.keep.bind(one) for actor, one in zip(self.actors, reduced, strict=True)])
        self._graph = ends.experimental_compile()
        self.operate()
        self._pids = pids
        self._signal(signal.SIGSTOP)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The time in which its actors run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def fill(self) -> None:
        """Drops the last sum."""
        with self._awake():
            ray.get([actor.forget.remote() for actor in self.actors])

    def run(self, count: int) -> Sequence[float]:
        """So many executions."""
        with self._awake():
            return super().run(count)

    def operate(self) -> None:
        """One execution."""
        ray.get(self._graph.execute(0))

    def check(self, runs: int) -> None:
        """Raises unless every rank has the sum."""
        value = expected(self.ranks, 1)
        with self._awake():
            right = ray.get([actor.holds.remote(value) for actor in self.actors])
        if not all(right):
            raise AssertionError(f"{self.name}: not {value}")

    def close(self) -> None:
        """Ends graph and actors."""
        self._signal(signal.SIGCONT)
        self._pids = []
        if self._graph is not None:
            self._graph.teardown()
            self._graph = None
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 and 4 actors."""
    for ranks in choice.ranks or ((2,) if choice.quick else RANKS):
        choice.progress(f"{NAME}: starts {ranks} actors")
        makers: list[Maker] = [
            entry(names.CAPTURED, Captured, ranks, arena=True),
            entry(names.ARENA, RaycollectAllreduce, ranks, arena=True),
            entry(names.ORDINARY, RaycollectAllreduce, ranks),
            entry(names.RAY, RayAllreduce, ranks),
            entry(names.GRAPH, CompiledGraph, ranks),
        ]
        runs = 5 * BURST, 10 * BURST
        sizes = choice.sizes or SIZES
        yield from sweep(
            NAME, choice, makers, op="allreduce", ranks=ranks, sizes=sizes, runs=lambda _, runs=runs: runs, burst=BURST
        )
