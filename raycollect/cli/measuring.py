"""What `raycollect bench` times: a collective between actors, in several ways, over a range of sizes.

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
from raycollect.errors import KernelError, RaycollectError, anew
from raycollect.observe.summary import bus_factor

GROUP = "raycollect-bench"
ELEMENT_NBYTES = np.dtype(np.float32).itemsize
WARMUP = 3  # untimed runs of each way, besides the one whose result is checked
BURST = 5  # how many runs a way does when it is its turn


def _arguments(operation: str, given: Any, taken: Any) -> tuple[Any, ...]:
    if OPERATIONS[operation][1]:
        return taken, given
    return (given, 0) if operation == "broadcast" else (given,)


def whole_of(operation: str, ranks: int, nbytes: int) -> int:
    """Converts bytes to elements: at least one for each rank, where there are pieces."""
    pieces = ranks if OPERATIONS[operation][1] else 1
    return max(1, nbytes // (pieces * ELEMENT_NBYTES)) * pieces


def timed(run: Callable[[], object], count: int) -> list[float]:
    """Runs something so many times, and returns the seconds of each run."""
    spent_s = []
    for _ in range(count):
        began_s = perf_counter()
        run()
        spent_s.append(perf_counter() - began_s)
    return spent_s


class Rank(col.CollectiveParticipant):
    """The actor of one rank: it holds what the rank gives and takes, and makes calls of its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.given: Any = None
        self.taken: Any = None
        self._rank, self._ranks = rank, ranks

    def prepare(self, operation: str, whole: int) -> None:
        """Makes the tensors of an operation and a size, in the arena, in place of the last."""
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
        """Sets what this rank gives to its rank plus one, and forgets its result."""
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
        """Makes this rank's half of the call so many times, after all ranks have come; returns the seconds of each."""
        col.barrier(GROUP)
        call, arguments = getattr(col, self._operation), _arguments(self._operation, self.given, self.taken)
        return timed(lambda: call(*arguments, GROUP), count)


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one size."""

    way: str
    nbytes: int
    median_s: float  # of a run, until it is done on all ranks
    p90_s: float
    algorithm_bandwidth: float  # bytes over median time, in bytes per second
    bus_bandwidth: float  # bytes per second that are moved at least; see `raycollect.observe.summary`


def _each(actors: Sequence[Any], method: str, *args: Any) -> list[Any]:
    try:
        found: list[Any] = ray.get([getattr(actor, method).remote(*args) for actor in actors])
    except RayTaskError as exc:
        if isinstance(exc.cause, RaycollectError):
            raise anew(exc.cause) from None
        raise
    return found


def measure(
    operation: str, ranks: int, sizes: Sequence[int], backend: str, runs: int, ways: Sequence[str]
) -> tuple[str, list[Row]]:
    """Times a collective between actors, which it makes and ends.

    Args:
        operation: One of `OPERATIONS`.
        ranks: How many actors, at least 2.
        sizes: In bytes, rounded down to whole elements, the same number (at least 1) for each rank.
        backend: That of their group.
        runs: How many are timed of each way at each size.
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


def _at_size(actors: Sequence[Any], operation: str, whole: int, runs: int, ways: Sequence[str]) -> Iterator[Row]:
    _each(actors, "prepare", operation, whole)
    given, taken = ([actor.get.remote(name) for actor in actors] for name in ("given", "taken"))
    refs = partial(getattr(col, f"{operation}_refs"), *_arguments(operation, given, taken), GROUP)
    with col.capture() as step:
        refs()
    times_of: dict[str, Callable[[int], list[float]]] = {
        "captured": partial(timed, step.run),
        "refs": partial(timed, refs),
        "members": lambda count: [max(one) for one in zip(*_each(actors, "times", count), strict=True)],  # the slowest
    }
    for way in ways:
        _check(actors, way, times_of[way])
    for way in ways:
        times_of[way](WARMUP)
    # In another order each time: what one way leaves behind (caches, sleeping threads) the next one pays for.
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
        yield Row(way, nbytes, median_s, p90_s, algorithm_bandwidth=rate, bus_bandwidth=rate * factor)


def _check(actors: Sequence[Any], way: str, run: Callable[[int], object]) -> None:
    """Runs the operation once; raises KernelError where an element is wrong."""
    _each(actors, "fill")
    run(1)
    wrong = _each(actors, "wrong")
    if any(wrong):
        detail = f"{way}: {sum(wrong)} elements are wrong, by rank: {wrong}; it was not timed"
        raise KernelError(op="bench", group_name=GROUP, detail=detail)
