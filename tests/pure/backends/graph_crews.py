"""Ranks that run the same kernels again and again, on the fake of cupy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raycollect.backends.nccl.graphs import GraphCounts
from raycollect.core.model import Kernel, Launch
from raycollect.core.protocols import Communicator
from tests.fake_cupy import Fake
from tests.gpu.again import ARRIVAL, again
from tests.pure.backends.streams import WAIT_S, sums
from tests.pure.on_gpu import Caller, GpuTeam, cupy_of, pending, read_elsewhere, team_on_gpus

RUNS = 6
"""Plain, plain and recorded, then graphs."""


class Crew:
    """Ranks on GPUs that sum arrays of their own, with a kernel each that is kept from launch to launch."""

    def __init__(self, fake: Fake, team: GpuTeam, how: Callable[[int], str] = lambda rank: "plain") -> None:
        self.fake, self.team, self.how = fake, team, how
        self.callers: list[Any] = [None] * team.world_size
        self.arrays: list[Any] = [None] * team.world_size
        self.kernels: list[Any] = [None] * team.world_size
        self.sums = 0
        self.team.must(self._make)

    def _make(self, communicator: Communicator) -> None:
        rank = communicator.rank
        self.callers[rank] = Caller()
        with self.callers[rank]["non-blocking"]:
            self.arrays[rank] = pending(np.zeros(40, np.int32), self.how(rank))
        self.kernels[rank] = sums(self.arrays[rank])

    def renew(self, rank: int) -> None:
        """A rank comes with another array."""
        self.team.must(self._make, ranks=(rank,))

    def body(self, communicator: Communicator, launch: Launch, come: Callable[..., Any] = again) -> list[int]:
        """Writes on a stream of its own, sums at once, and reads on another stream."""
        rank, caller = communicator.rank, self.callers[communicator.rank]
        with caller["non-blocking"]:
            cupy_of(self.arrays[rank]).fill(100**rank * self.sums)
            come(communicator, launch, self.kernels[rank])
        return [int(value) for value in set(read_elsewhere(self.arrays[rank], caller.other))]

    def sum(self, *, long_way: tuple[int, ...] = ()) -> None:
        """Sums values that no rank has had before; the ranks of `long_way` agree and launch as at first."""
        self.sums += 1
        launch = self.team.launch(timeout_s=WAIT_S)

        def come(communicator: Communicator, launch: Launch, kernel: Kernel) -> None:
            if communicator.rank not in long_way:
                assert again(communicator, launch, kernel) is None
                return
            assert communicator.agree(launch, ARRIVAL) == [ARRIVAL] * self.team.world_size
            communicator.launch(launch, (kernel,))
            communicator.end(launch, True)

        total = sum(100**rank * self.sums for rank in self.team.everyone)
        assert self.team.must(self.body, launch, come) == [[total]] * self.team.world_size

    @property
    def graphs(self) -> list[GraphCounts]:
        return [communicator.graphs for communicator in self.team.communicators]  # type: ignore[attr-defined]

    @property
    def launched(self) -> list[int]:
        return [counts.launched for counts in self.graphs]


MakeCrew = Callable[..., Crew]


@pytest.fixture
def crew() -> Iterator[MakeCrew]:
    """Makes a crew, on a GPU each; in the end nothing is left of their graphs."""
    crews: list[Any] = []

    def make(world: int = 2, *, seed: int = 0, version: int = 22803, how: Any = lambda rank: "plain") -> Crew:
        context = team_on_gpus(world, seed=seed, nccl_version=version)
        fake, team = context.__enter__()
        crews.append((context, fake, team))
        return Crew(fake, team, how)

    yield make
    for context, fake, team in crews:
        for communicator in team.communicators:
            communicator.close()
        assert not fake.graphs
        context.__exit__(None, None, None)
