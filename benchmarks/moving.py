"""What the suites have in common that bring a trainer's weights to rollouts, and those whose actors are their own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import ray

from benchmarks.crew import group_names, needs_torch
from benchmarks.interleave import timed


class RayRank:
    """An actor that can be a rank of `ray.util.collective` over gloo."""

    def join(self, ranks: int, rank: int, group: str) -> None:
        """Joins a group."""
        import_module("torch").set_num_threads(1)
        import_module("ray.util.collective").init_collective_group(ranks, rank, "gloo", group)

    def leave(self, group: str) -> None:
        """Leaves it."""
        import_module("ray.util.collective").destroy_collective_group(group)


class InRayGroup:
    """A contender whose actors, each a `RayRank`, are in one group; stands before the other base.

    Raises:
        Skipped: Its gloo needs torch, which is not installed.
    """

    actors: Sequence[Any]
    group: str

    def __init__(self, *args: Any) -> None:
        needs_torch()
        super().__init__(*args)
        count = len(self.actors)
        ray.get([actor.join.remote(count, rank, self.group) for rank, actor in enumerate(self.actors)])

    def close(self) -> None:
        """Leaves the group, and gives back the rest."""
        ray.get([actor.leave.remote(self.group) for actor in self.actors])
        super().close()  # type: ignore[misc]


class Moving:
    """A contender with actors of its own: a trainer's, and its rollouts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.actors: list[Any] = self.start()
        self.group = next(group_names)
        self.wrong = 0

    def start(self) -> list[Any]:
        """Starts the actors."""
        raise NotImplementedError

    def prepare(self, nbytes: int) -> None:
        """Makes the weights."""
        ray.get([actor.prepare.remote(nbytes) for actor in self.actors])

    def fill(self) -> None:
        """The next turn begins: the trainer has other weights, the rollouts none."""
        raise NotImplementedError

    def run(self, count: int) -> list[float]:
        """Moves the weights so many times, others each time."""
        spent = []
        for _ in range(count):
            self.fill()
            spent += timed(self.operate, 1)
            self.wrong += not all(self.is_right())
        return spent

    def is_right(self) -> list[bool]:
        """Whether each rollout has what it should in this turn."""
        raise NotImplementedError

    def check(self, runs: int) -> None:
        """Raises if the rollouts did not have all weights after a run; others have been at them since."""
        if self.wrong:
            raise AssertionError(f"{self.name}: the rollouts did not have the weights after {self.wrong} runs")

    def operate(self) -> None:
        """Moves the weights once."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the actors."""
        for actor in self.actors:
            ray.kill(actor)
