"""The timings of `raycollect bench`: a collective between actors by several contenders, over a range of sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np

from raycollect.cli.contenders import CONTENDERS, ELEMENT_NBYTES, BenchContender, Refs, whole_of
from raycollect.cli.harness import Skipped, interleave
from raycollect.observe.summary import bus_factor

BURST = 5


class Timing(msgspec.Struct, frozen=True):
    """The times of one way at one size."""

    way: str
    timed_in: str  # "driver", or "actors": the slowest rank
    nbytes: int
    median_s: float  # of a run, until it is done on all ranks
    p90_s: float
    algorithm_bandwidth: float  # bytes over median time, in bytes per second
    bus_bandwidth: float  # see `raycollect.observe.summary`


def measure(
    operation: str, ranks: int, sizes: Sequence[int], backend: str, runs: int, ways: Sequence[str]
) -> tuple[str, list[Timing], dict[str, str]]:
    """Times a collective between actors, which it creates and ends.

    Args:
        operation: One of `OPERATIONS`.
        ranks: The number of actors of each way, at least 2.
        sizes: In bytes, rounded down to whole elements, the same number (at least 1) for each rank.
        backend: The backend of their group.
        runs: The number of timed runs of each way at each size.
        ways: Some of `WAYS`.

    Returns:
        The backend, the rows by size, and way -> why it was skipped.

    Raises:
        KernelError: A result is wrong.
        RaycollectError: A group could not be made, or a call failed.
    """
    contenders = list[BenchContender]()
    skipped = dict[str, str]()
    with ExitStack() as closing:
        for way in ways:
            try:
                contenders.append(CONTENDERS[way](way, operation, ranks, backend=backend))
            except Skipped as exc:
                skipped[way] = str(exc)
            else:
                closing.callback(contenders[-1].close)
        wholes = dict.fromkeys(whole_of(operation, ranks, nbytes) for nbytes in sizes)
        rows = [row for whole in wholes for row in _at_size(contenders, whole * ELEMENT_NBYTES, runs)]
    rows.sort(key=lambda row: ways.index(row.way))  # stable: sizes stay as they were given
    return next((item.backend for item in contenders if isinstance(item, Refs)), backend), rows, skipped


def _at_size(contenders: Sequence[BenchContender], nbytes: int, runs: int) -> Iterator[Timing]:
    spent_s = interleave(contenders, nbytes=nbytes, runs=runs, warmup=1, burst=min(BURST, runs))
    for contender in contenders:
        median_s, p90_s = np.percentile(spent_s[contender.name], (50, 90)).tolist()
        rate, factor = nbytes / median_s, bus_factor(contender.operation, contender.ranks)
        yield Timing(contender.name, contender.TIMED_IN, nbytes, median_s, p90_s, rate, rate * factor)
