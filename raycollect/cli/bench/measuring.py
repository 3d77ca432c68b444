"""The ways to call an operation, timed in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

import raycollect as col
from raycollect.captured.step import Capture
from raycollect.cli.bench.operations import ELEMENT_NBYTES, OPERATIONS, Rank, timed, whole_of
from raycollect.cli.bench.result import Result, Row
from raycollect.errors import KernelError, RaycollectError, anew
from raycollect.observe.summary import bus_factor

GROUP = "raycollect-bench"
WARMUP = 3  # untimed runs of each way, besides the one whose result is checked
BURST = 5  # how many runs a way does when it is its turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a benchmark."""

    operation: str  # one of `OPERATIONS`
    ranks: int  # actors, at least 2
    sizes: tuple[int, ...]  # bytes, rounded down to whole elements, the same number (at least 1) for each rank
    backend: str
    runs: int  # of each way at each size
    ways: tuple[str, ...]  # some of `WAYS`

    @property
    def wholes(self) -> tuple[int, ...]:
        """The sizes in elements, each once."""
        return tuple(dict.fromkeys(whole_of(self.operation, self.ranks, nbytes) for nbytes in self.sizes))


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
        spent_s = self._each("times", count, GROUP)
        return [max(one) for one in zip(*spent_s, strict=True)]

    def check(self, way: str, seed: int) -> int:
        """Runs the operation once on random data; raises KernelError where an element is wrong."""
        self._each("fill", seed)
        WAYS[way](self, 1)
        wrong = self._each("wrong", seed)
        if any(wrong):
            detail = f"{way}: {sum(wrong)} elements are not what numpy says, by rank: {wrong}; it was not timed"
            raise KernelError(op="bench", group_name=GROUP, detail=detail)
        self._each("clear")
        return sum(wrong)

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


def measure(settings: Settings, done: Callable[[], object]) -> Result:
    """Times a collective between actors that it makes, and ends them; `done` is called after each size.

    Raises:
        KernelError: A result is wrong.
        RaycollectError: The group could not be made, or a call failed.
    """
    remote: Any = ray.remote(num_cpus=0)(Rank)
    actors = [remote.remote(rank, settings.ranks) for rank in range(settings.ranks)]
    try:
        return between(actors, settings, done)
    finally:
        for actor in actors:
            ray.kill(actor)


def between(actors: Sequence[Any], settings: Settings, done: Callable[[], object]) -> Result:
    """Times a collective between actors of `Rank`, in a group that it declares and destroys."""
    rows: list[Row] = []
    group = col.declare_collective_group(actors, backend=settings.backend, group_name=GROUP)
    try:
        for whole in settings.wholes:
            rows += _at_size(_Trial(actors, settings, whole), settings, whole * ELEMENT_NBYTES)
            done()
    finally:
        group.destroy()
    rows.sort(key=lambda row: settings.ways.index(row.way))  # stable: sizes stay as they were given
    return Result(
        operation=settings.operation,
        ranks=settings.ranks,
        backend=group.backend,
        dtype=np.dtype(np.float32).name,
        runs=settings.runs,
        rows=tuple(rows),
    )


def _at_size(trial: _Trial, settings: Settings, nbytes: int) -> list[Row]:
    # In another order each time: what one way leaves behind (caches, sleeping threads) the next one pays for.
    times: dict[str, list[float]] = {way: [] for way in settings.ways}
    order = random.Random(nbytes)  # the same in each measurement
    try:
        wrong = {way: trial.check(way, seed) for seed, way in enumerate(settings.ways)}
        for way in settings.ways:
            WAYS[way](trial, WARMUP)
        for begun in range(0, settings.runs, BURST):
            for way in order.sample(settings.ways, len(settings.ways)):
                times[way] += WAYS[way](trial, min(BURST, settings.runs - begun))
    finally:
        trial.close()
    factor = bus_factor(settings.operation, settings.ranks)
    return [_row(way, nbytes, times[way], factor, wrong[way]) for way in settings.ways]


def _row(way: str, nbytes: int, times: Sequence[float], factor: float, wrong: int) -> Row:
    median_s, p90_s = (float(one) for one in np.percentile(times, (50, 90)))
    return Row(
        way=way,
        nbytes=nbytes,
        median_s=median_s,
        p90_s=p90_s,
        algorithm_bandwidth=nbytes / median_s,
        bus_bandwidth=nbytes / median_s * factor,
        wrong=wrong,
    )
