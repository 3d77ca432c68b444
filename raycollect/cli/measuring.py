"""The timings of `raycollect bench`: a collective between actors, in several ways, over a range of sizes.

All ways use the same float32 tensors. Each way is checked before it is timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

import raycollect as col
from raycollect.cli.bench import OPERATIONS
from raycollect.errors import KernelError, RaycollectError, copy_error
from raycollect.observe.summary import bus_factor

GROUP = "raycollect-bench"
ELEMENT_NBYTES = np.dtype(np.float32).itemsize
WARMUP = 3  # untimed runs of each way, besides the run whose result is checked
BURST = 5  # how many runs a way does in its turn


def _arguments(operation: str, given: Any, taken: Any) -> tuple[Any, ...]:
    if OPERATIONS[operation][1]:
        return taken, given
    return (given, 0) if operation == "broadcast" else (given,)


def whole_of(operation: str, ranks: int, nbytes: int) -> int:
    """Converts bytes to elements: at least one for each rank, if there are pieces."""
    pieces = ranks if OPERATIONS[operation][1] else 1
    return max(1, nbytes // (pieces * ELEMENT_NBYTES)) * pieces


def timed(run: Callable[[], object], count: int) -> list[float]:
    """Runs a function `count` times, and returns the seconds of each run."""
    spent_s = []
    for _ in range(count):
        began_s = perf_counter()
        run()
        spent_s.append(perf_counter() - began_s)
    return spent_s


class Rank(col.CollectiveParticipant):
    """The actor of one rank: holds its input and output tensors, and makes calls of its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.given: Any = None
        self.taken: Any = None
        self._rank, self._ranks = rank, ranks

    def prepare(self, operation: str, whole: int) -> None:
        """Makes the tensors of an operation and a size, in the arena, and drops the last ones."""
        self.given = self.taken = None
        self._operation = operation
        lengths = {"whole": whole, "piece": whole // self._ranks}
        gives, takes = OPERATIONS[operation]
        self.given = col.zeros(lengths[gives], np.float32)
        self.taken = col.zeros(lengths[takes], np.float32) if takes else self.given

    def get(self, name: str) -> Any:
        """Returns the tensor that this rank gives, or the one that it takes."""
        return getattr(self, name)

    def fill(self) -> None:
        """Sets the input of this rank to its rank plus one, and clears its result."""
        self.taken.fill(np.nan)
        self.given.fill(self._rank + 1)

    def wrong(self) -> int:
        """Counts the wrong elements of this rank's result, and sets all to zero: sums in place would grow."""
        expected: Any = sum(range(1, self._ranks + 1))
        if self._operation == "broadcast":
            expected = 1
        elif self._operation in ("allgather", "alltoall"):
            expected = np.repeat(np.arange(1, self._ranks + 1), len(self.taken) // self._ranks)
        count = int(np.count_nonzero(self.taken != expected))
        self.taken.fill(0)
        self.given.fill(0)
        return count

    def times(self, count: int) -> list[float]:
        """Makes this rank's part of the call `count` times, after a barrier; returns the seconds of each."""
        col.barrier(GROUP)
        call, arguments = getattr(col, self._operation), _arguments(self._operation, self.given, self.taken)
        return timed(lambda: call(*arguments, GROUP), count)


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one way at one size."""

    way: str
    nbytes: int
    median_s: float  # of a run, until it is done on all ranks
    p90_s: float
    algorithm_bandwidth: float  # bytes over median time, in bytes per second
    bus_bandwidth: float  # see `raycollect.observe.summary`


def _each(actors: Sequence[Any], method: str, *args: Any) -> list[Any]:
    try:
        results: list[Any] = ray.get([getattr(actor, method).remote(*args) for actor in actors])
    except RayTaskError as exc:
        if isinstance(exc.cause, RaycollectError):
            raise copy_error(exc.cause) from None
        raise
    return results


def measure(
    operation: str, ranks: int, sizes: Sequence[int], backend: str, runs: int, ways: Sequence[str]
) -> tuple[str, list[Timing]]:
    """Times a collective between actors, which it creates and ends.

    Args:
        operation: One of `OPERATIONS`.
        ranks: The number of actors, at least 2.
        sizes: In bytes, rounded down to whole elements, the same number (at least 1) for each rank.
        backend: The backend of their group.
        runs: How many runs of each way are timed at each size.
        ways: Some of `WAYS`.

    Returns:
        The backend, and the rows by way and size.

    Raises:
        KernelError: A result is wrong.
        RaycollectError: The group could not be made, or a call failed.
    """
    remote: Any = ray.remote(num_cpus=0)(Rank)
    actors = [remote.remote(rank, ranks) for rank in range(ranks)]
    try:
        group = col.declare_collective_group(actors, backend=backend, group_name=GROUP)
        try:
            wholes = dict.fromkeys(whole_of(operation, ranks, nbytes) for nbytes in sizes)
            rows = [row for whole in wholes for row in _at_size(actors, operation, whole, runs, ways)]
        finally:
            group.destroy()
    finally:
        for actor in actors:
            ray.kill(actor)
    rows.sort(key=lambda row: ways.index(row.way))  # stable: sizes stay as they were given
    return group.backend, rows


def _at_size(actors: Sequence[Any], operation: str, whole: int, runs: int, ways: Sequence[str]) -> Iterator[Timing]:
    _each(actors, "prepare", operation, whole)
    given, taken = ([actor.get.remote(name) for actor in actors] for name in ("given", "taken"))
    refs = partial(getattr(col, f"{operation}_refs"), *_arguments(operation, given, taken), GROUP)
    with col.capture() as step:
        refs()
    times_of: dict[str, Callable[[int], list[float]]] = {
        "captured": partial(timed, step.run),
        "refs": partial(timed, refs),
        "members": lambda count: [max(row) for row in zip(*_each(actors, "times", count), strict=True)],  # the slowest
    }
    for way in ways:
        _check(actors, way, times_of[way])
    for way in ways:
        times_of[way](WARMUP)
    # In random order: caches and sleeping threads of one way affect the next one.
    times: dict[str, list[float]] = {way: [] for way in ways}
    order = random.Random(whole)  # the same in each measurement
    for begun in range(0, runs, BURST):
        for way in order.sample(ways, len(ways)):
            times[way] += times_of[way](min(BURST, runs - begun))
    step.close()
    nbytes, factor = whole * ELEMENT_NBYTES, bus_factor(operation, len(actors))
    for way, spent_s in times.items():
        median_s, p90_s = np.percentile(spent_s, (50, 90)).tolist()
        rate = nbytes / median_s
        yield Timing(way, nbytes, median_s, p90_s, algorithm_bandwidth=rate, bus_bandwidth=rate * factor)


def _check(actors: Sequence[Any], way: str, run: Callable[[int], object]) -> None:
    """Runs the operation once; raises KernelError if an element is wrong."""
    _each(actors, "fill")
    run(1)
    wrong = _each(actors, "wrong")
    if any(wrong):
        detail = f"{way}: {sum(wrong)} elements are wrong, by rank: {wrong}; it was not timed"
        raise KernelError(op="bench", group_name=GROUP, detail=detail)
