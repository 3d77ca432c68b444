"""The actors of the suites that need Ray.

Each contender has actors of its own, of the class that its users would write: those of raycollect inherit the mixin,
all others are plain. So no contender pays for what its users don't have, and none finds caches warm that another has
filled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks.interleave import timed
from benchmarks.report import Skipped

group_names = (f"benchmark {number}" for number in itertools.count(1))
"""A name for each group, so that none is taken for another."""


class Plain:
    """An actor without the mixin. It holds buffers by name, and operates on them by any library."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.arrays: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------ buffers

    def allocate(self, name: str, nbytes: int, arena: bool, count: int = 1) -> None:
        """Makes `count` float32 arrays of `nbytes` each, in place of those of that name."""
        self.arrays.pop(name, None)
        make = col.empty if arena else np.empty
        made = [make(max(1, nbytes // 4), dtype=np.float32) for _ in range(count)]
        self.arrays[name] = made if count > 1 else made[0]

    def fill(self, name: str, value: float | None = None) -> None:
        """Sets them to a value; by default to the rank + 1."""
        for array in self._all(name):
            array.fill(self.rank + 1 if value is None else value)

    def holds(self, name: str, value: float) -> bool:
        """Tells whether all elements of all of them are about that."""
        slack = 1e-5 * abs(value)
        return all(
            value - slack <= float(array.min()) and float(array.max()) <= value + slack for array in self._all(name)
        )

    def drop(self, name: str) -> None:
        """Lets go of them."""
        self.arrays.pop(name, None)

    def get_array(self, name: str) -> Any:
        """Gives a ref to them."""
        return self.arrays[name]

    def get_named(self, name: str) -> Any:
        """Gives a ref to them by names, as a model's parameters have them."""
        return {f"layer.{at}.weight": array for at, array in enumerate(self.arrays[name])}

    @col.by_value
    def read(self, name: str) -> Any:
        """Gives them through the object store."""
        return self.arrays[name]

    def write(self, name: str, value: Any) -> None:
        """Sets them to what came through the object store."""
        self.arrays[name][...] = value

    def keep(self, name: str, value: Any) -> None:
        """Keeps what came through the object store where it lies; nothing is copied."""
        self.arrays[name] = value

    @col.by_value
    def echo(self, name: str, value: Any, take: str) -> Any:
        """Keeps or writes what came through the object store, and gives it back."""
        getattr(self, take)(name, value)
        return self.arrays[name]

    def _all(self, name: str) -> list[Any]:
        held = self.arrays[name]
        return held if isinstance(held, list) else [held]

    # ------------------------------------------------------------------------------------------ imperative calls

    @staticmethod
    def library(name: str) -> Any:
        """The module of a library by its name."""
        if name != "ray":
            return col
        import ray.util.collective as collective

        return collective

    def join(self, library: str, ranks: int, group: str, backend: str = "auto") -> None:
        """Joins a group of `ray.util.collective` over gloo, or of `raycollect`."""
        if library == "ray":
            import torch

            torch.set_num_threads(1)
            backend = "gloo"
        self.library(library).init_collective_group(ranks, self.rank, backend, group)

    def leave(self, library: str, group: str) -> None:
        """Leaves it."""
        self.library(library).destroy_collective_group(group)

    def each(self, op: str, name: str, group: str) -> None:
        """One call of `ray.util.collective` for each array."""
        call = getattr(self.library("ray"), op)
        for array in self._all(name):
            call(array, group_name=group)

    def one(self, op: str, name: str, at: int, group: str) -> None:
        """The same for one array."""
        getattr(self.library("ray"), op)(self.arrays[name][at], group_name=group)

    def loop(self, library: str, op: str, name: str, group: str, count: int) -> list[float]:
        """So many calls in a loop, after a barrier; gives the seconds that each took on this rank.

        All libraries work in one array: where one lies in memory makes up to a fifth of the time of a call.
        """
        collective, own = self.library(library), self.arrays[name]
        call = getattr(collective, op)
        array = self.arrays.get("work", own[:0])
        if array.size != own.size:
            array = self.arrays["work"] = np.empty_like(own)
        array[...] = own
        collective.barrier(group)
        spent = timed(lambda: call(array, group_name=group), count)
        own[...] = array
        return spent

    def send(self, library: str, name: str, to: int, group: str) -> None:
        """Sends."""
        self.library(library).send(self.arrays[name], to, group)

    def recv(self, library: str, name: str, source: int, group: str) -> None:
        """Receives."""
        self.library(library).recv(self.arrays[name], source, group)

    def bounce(self, library: str, name: str, back: str, group: str) -> None:
        """Rank 0 sends, and receives into another buffer; rank 1 receives, and sends that back."""
        collective, array = self.library(library), self.arrays[name]
        if self.rank == 0:
            collective.send(array, 1, group)
            collective.recv(self.arrays[back], 1, group)
        else:
            collective.recv(array, 0, group)
            collective.send(array, 0, group)

    # ------------------------------------------------------------------------------------------ memory

    def reset_peak(self) -> int:
        """Has the kernel count the peak of resident memory from now on; gives the resident bytes.

        Raises:
            OSError: The system does not let it.
        """
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:  # noqa: PTH123 - written, never made
            file.write("5")
        return _status("VmRSS")

    def peak(self) -> int:
        """The peak since then, in bytes."""
        return _status("VmHWM")


def busy(milliseconds: float) -> None:
    """Computes for so long."""
    until_s = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < until_s:
        pass


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123 - read line by line
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{field}:"))


class Participant(Plain, col.CollectiveParticipant):
    """The same with the mixin."""


class Contestant:
    """A contender with actors of its own, a buffer in each, and one operation.

    Args:
        name: The contender's name.
        ranks: The number of actors.
        arena: Whether the buffers lie in the shared arena.
        count: The number of arrays of the same size that form a buffer.

    Raises:
        Skipped: This raycollect has no arena.
    """

    ACTOR: type = Participant
    """The class of the actors."""

    def __init__(self, name: str, ranks: int, *, arena: bool = False, count: int = 1) -> None:
        if arena:
            needs("empty")
        self.name = name
        self.ranks = ranks
        self.actors: list[Any] = self.start()
        self.group = next(group_names)
        self._arena = arena
        self._count = count

    def start(self) -> list[Any]:
        """Starts the actors, by rank."""
        remote = ray.remote(num_cpus=0)(self.ACTOR)
        return [remote.remote(rank) for rank in range(self.ranks)]

    def operate(self) -> None:
        """Does the operation once; returns when it is done everywhere."""
        raise NotImplementedError

    def prepare(self, nbytes: int) -> None:
        """Makes the buffers: so many bytes per rank in all."""
        nbytes //= self._count
        ray.get([actor.allocate.remote(self.name, nbytes, self._arena, self._count) for actor in self.actors])

    def fill(self) -> None:
        """Sets them to the rank + 1."""
        ray.get([actor.fill.remote(self.name) for actor in self.actors])

    def run(self, count: int) -> Sequence[float]:
        """The operation, so many times."""
        return timed(self.operate, count)

    def check(self, runs: int) -> None:
        """Raises unless every rank holds the sum of `runs` sums in place."""
        self.must_hold(expected(self.ranks, runs))

    def must_hold(self, value: float, name: str = "") -> None:
        """Raises unless every rank's buffer is about that value everywhere."""
        right = ray.get([actor.holds.remote(name or self.name, value) for actor in self.actors])
        if not all(right):
            wrong = [rank for rank, good in enumerate(right) if not good]
            raise AssertionError(f"{self.name}: not {value} on ranks {wrong} of {self.ranks}")

    def close(self) -> None:
        """Ends the actors."""
        for actor in self.actors:
            ray.kill(actor)


class Joined:
    """A contender whose actors, which need no mixin, join a group of a library; stands before the other base.

    Args:
        library: ``"raycollect"``, or ``"ray"`` for `ray.util.collective` over gloo.
        backend: What the group is made with.

    Raises:
        Skipped: Ray's gloo needs torch, which is not installed.
    """

    ACTOR = Plain

    actors: Sequence[Any]
    ranks: int
    group: str

    def __init__(self, *args: Any, library: str, backend: str = "auto", **how: Any) -> None:
        if library == "ray":
            needs_torch()
        super().__init__(*args, **how)
        self._library = library
        ray.get([actor.join.remote(library, self.ranks, self.group, backend) for actor in self.actors])

    def close(self) -> None:
        """Leaves the group, and ends the actors."""
        ray.get([actor.leave.remote(self._library, self.group) for actor in self.actors])
        super().close()  # type: ignore[misc]


def expected(ranks: int, runs: int) -> float:
    """What every element holds after `runs` sums in place, where rank r began with r + 1."""
    return ranks * (ranks + 1) / 2 * float(ranks) ** (runs - 1)


def needs_torch() -> None:
    """Raises Skipped unless torch is there."""
    if find_spec("torch") is None:
        raise Skipped("it needs torch (pip install torch)")


def needs(feature: str) -> None:
    """Raises Skipped unless this raycollect has a feature."""
    if not hasattr(col, feature):
        raise Skipped(f"this raycollect has no raycollect.{feature}")
