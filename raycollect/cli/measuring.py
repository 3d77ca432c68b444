"""What `raycollect bench` times: a collective between actors, in several ways, over a range of sizes.

All ways use the same float32 tensors. Each way is checked before it is timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

import raycollect as col
from raycollect.captured.step import Capture
from raycollect.errors import KernelError, RaycollectError, anew
from raycollect.observe.summary import bus_factor

GROUP = "raycollect-bench"
ELEMENT_NBYTES = np.dtype(np.float32).itemsize
WARMUP = 3  # untimed runs of each way, besides the one whose result is checked
BURST = 5  # how many runs a way does when it is its turn

Refs = Sequence[Any]


# ---------------------------------------------------------------------------------------------- operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """How to call an operation, and its expected result.

    Attributes:
        refs: The driver's operation, of what the ranks give, what they take, and the group.
        member: A rank's half of it, of its tensors, its rank, and the group.
        result: What is in it: the ``"sum"``, rank 0's operand (``"root"``), or a piece of each rank (``"pieces"``).
        gives: Whether a rank gives the ``"whole"``, or a ``"piece"``.
        takes: The same for its result; ``""``: it works in place.
    """

    refs: Callable[[Refs, Refs, str], object]
    member: Callable[[Rank, int, str], object]
    result: str
    gives: str = "whole"
    takes: str = ""


def _send_or_receive(tensors: Rank, rank: int, group: str) -> None:
    if rank == 0:
        col.send(tensors.given, 1, group)
    elif rank == 1:
        col.recv(tensors.taken, 0, group)


# Operation -> how it is called. What is in pieces is one contiguous tensor.
OPERATIONS: Mapping[str, Operation] = {
    "allreduce": Operation(
        refs=lambda given, _, group: col.allreduce_refs(given, group),
        member=lambda tensors, _, group: col.allreduce(tensors.given, group),
        result="sum",
    ),
    "broadcast": Operation(
        refs=lambda given, _, group: col.broadcast_refs(given, 0, group),
        member=lambda tensors, _, group: col.broadcast(tensors.given, 0, group),
        result="root",
    ),
    "allgather": Operation(
        refs=lambda given, taken, group: col.allgather_refs(taken, given, group),
        member=lambda tensors, _, group: col.allgather(tensors.taken, tensors.given, group),
        result="pieces",
        gives="piece",
        takes="whole",
    ),
    "reducescatter": Operation(
        refs=lambda given, taken, group: col.reducescatter_refs(taken, given, group),
        member=lambda tensors, _, group: col.reducescatter(tensors.taken, tensors.given, group),
        result="sum",
        takes="piece",
    ),
    "alltoall": Operation(
        refs=lambda given, taken, group: col.alltoall_refs(taken, given, group),
        member=lambda tensors, _, group: col.alltoall(tensors.taken, tensors.given, group),
        result="pieces",
        takes="whole",
    ),
    "send": Operation(
        refs=lambda given, taken, group: col.send_ref(given[0], taken[1], group),
        member=_send_or_receive,
        result="root",
        takes="whole",
    ),
}


def whole_of(operation: str, ranks: int, nbytes: int) -> int:
    """Converts bytes to elements: at least one for each rank, where there are pieces."""
    kind = OPERATIONS[operation]
    pieces = ranks if "piece" in (kind.gives, kind.takes) or operation == "alltoall" else 1
    return max(1, nbytes // (pieces * ELEMENT_NBYTES)) * pieces


# ---------------------------------------------------------------------------------------------- in the actors


class Rank(col.CollectiveParticipant):
    """Holds what one rank gives and takes, and makes calls of its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.given: Any = None
        self.taken: Any = None
        self._rank, self._ranks = rank, ranks

    def prepare(self, operation: str, whole: int) -> None:
        """Makes the tensors of an operation and a size, in the arena, in place of the last."""
        self.given = self.taken = None
        self._operation = OPERATIONS[operation]
        lengths = {"whole": whole, "piece": whole // self._ranks}
        self.given = col.zeros(lengths[self._operation.gives], np.float32)
        takes = self._operation.takes
        self.taken = col.zeros(lengths[takes], np.float32) if takes else self.given

    def get_given(self) -> Any:
        """Returns what this rank gives."""
        return self.given

    def get_taken(self) -> Any:
        """Returns where its result goes."""
        return self.taken

    def fill(self) -> None:
        """Sets what this rank gives to its rank plus one, and forgets its result."""
        self.taken.fill(np.nan)
        self.given.fill(self._rank + 1)

    def wrong(self) -> int:
        """Counts the wrong elements of this rank's result, and sets all to zero: sums in place would grow."""
        expected: Any = {
            "sum": sum(range(1, self._ranks + 1)),
            "root": 1,
            "pieces": np.repeat(np.arange(1, self._ranks + 1), len(self.taken) // self._ranks),
        }[self._operation.result]
        has_result = self._operation.member is not _send_or_receive or self._rank == 1
        count = int(np.count_nonzero(self.taken != expected)) if has_result else 0
        self.taken.fill(0)
        self.given.fill(0)
        return count

    def times(self, count: int, group: str) -> list[float]:
        """Makes this rank's half of the call so many times, after all ranks have come; returns the seconds of each."""
        col.barrier(group)
        return timed(lambda: self._operation.member(self, self._rank, group), count)


def timed(run: Callable[[], object], count: int) -> list[float]:
    """Runs something so many times, and returns the seconds of each run."""
    spent_s = []
    for _ in range(count):
        began_s = perf_counter()
        run()
        spent_s.append(perf_counter() - began_s)
    return spent_s


# ---------------------------------------------------------------------------------------------- in the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a benchmark."""

    operation: str  # one of `OPERATIONS`
    ranks: int  # actors, at least 2
    sizes: tuple[int, ...]  # bytes, rounded down to whole elements, the same number (at least 1) for each rank
    backend: str
    runs: int  # of each way at each size
    ways: tuple[str, ...]  # some of `WAYS`


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way at one size."""

    way: str
    nbytes: int
    median_s: float  # of a run, until it is done on all ranks
    p90_s: float
    algorithm_bandwidth: float  # bytes over median time, in bytes per second
    bus_bandwidth: float  # bytes per second that are moved at least; see `raycollect.observe.summary`
    wrong: int  # wrong elements: always 0, since `measure` raises otherwise


class _Trial:
    """The tensors of one size, and the ways to do the operation on them."""

    def __init__(self, actors: Sequence[Any], settings: Settings, whole: int) -> None:
        self._actors = actors
        self._step: Capture | None = None
        self._operation = OPERATIONS[settings.operation]
        self._each("prepare", settings.operation, whole)
        self._given = [actor.get_given.remote() for actor in actors]
        self._taken = [actor.get_taken.remote() for actor in actors]

    def call(self) -> None:
        self._operation.refs(self._given, self._taken, GROUP)

    def captured(self, count: int) -> list[float]:
        if self._step is None:
            with col.capture() as step:
                self.call()
            self._step = step
        return timed(self._step.run, count)

    def refs(self, count: int) -> list[float]:
        return timed(self.call, count)

    def members(self, count: int) -> list[float]:
        """The times of members' own calls; each is that of the slowest rank."""
        return [max(one) for one in zip(*self._each("times", count, GROUP), strict=True)]

    def check(self, way: str) -> None:
        """Runs the operation once; raises KernelError where an element is wrong."""
        self._each("fill")
        WAYS[way](self, 1)
        wrong = self._each("wrong")
        if any(wrong):
            detail = f"{way}: {sum(wrong)} elements are wrong, by rank: {wrong}; it was not timed"
            raise KernelError(op="bench", group_name=GROUP, detail=detail)

    def close(self) -> None:
        if self._step is not None:
            self._step.close()

    def _each(self, method: str, *args: Any) -> list[Any]:
        try:
            found: list[Any] = ray.get([getattr(actor, method).remote(*args) for actor in self._actors])
        except RayTaskError as exc:
            if isinstance(exc.cause, RaycollectError):
                raise anew(exc.cause) from None
            raise
        return found


# Way -> so many runs of it, and the seconds that each took.
WAYS: Mapping[str, Callable[[_Trial, int], list[float]]] = {
    "captured": _Trial.captured,
    "refs": _Trial.refs,
    "members": _Trial.members,
}


def measure(settings: Settings, actors: Sequence[Any] = ()) -> tuple[str, list[Row]]:
    """Times a collective between actors of `Rank`, which it makes and ends where none are given.

    Returns:
        The backend, and the rows by way and size.

    Raises:
        KernelError: A result is wrong.
        RaycollectError: The group could not be made, or a call failed.
    """
    remote: Any = ray.remote(num_cpus=0)(Rank)
    made = [] if actors else [remote.remote(rank, settings.ranks) for rank in range(settings.ranks)]
    try:
        group = col.declare_collective_group(made or actors, backend=settings.backend, group_name=GROUP)
        try:
            wholes = dict.fromkeys(whole_of(settings.operation, settings.ranks, nbytes) for nbytes in settings.sizes)
            rows = [row for whole in wholes for row in _at_size(made or actors, settings, whole)]
        finally:
            group.destroy()
    finally:
        for actor in made:
            ray.kill(actor)
    rows.sort(key=lambda row: settings.ways.index(row.way))  # stable: sizes stay as they were given
    return group.backend, rows


def _at_size(actors: Sequence[Any], settings: Settings, whole: int) -> list[Row]:
    trial = _Trial(actors, settings, whole)
    # In another order each time: what one way leaves behind (caches, sleeping threads) the next one pays for.
    times: dict[str, list[float]] = {way: [] for way in settings.ways}
    order = random.Random(whole)  # the same in each measurement
    try:
        for way in settings.ways:
            trial.check(way)
        for way in settings.ways:
            WAYS[way](trial, WARMUP)
        for begun in range(0, settings.runs, BURST):
            for way in order.sample(settings.ways, len(settings.ways)):
                times[way] += WAYS[way](trial, min(BURST, settings.runs - begun))
    finally:
        trial.close()
    nbytes, factor = whole * ELEMENT_NBYTES, bus_factor(settings.operation, settings.ranks)
    rows = []
    for way in settings.ways:
        median_s, p90_s = (float(one) for one in np.percentile(times[way], (50, 90)))
        rate = nbytes / median_s
        rows.append(
            Row(
                way=way,
                nbytes=nbytes,
                median_s=median_s,
                p90_s=p90_s,
                algorithm_bandwidth=rate,
                bus_bandwidth=rate * factor,
                wrong=0,
            )
        )
    return rows
