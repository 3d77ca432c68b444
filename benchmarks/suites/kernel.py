"""The data plane alone: one process per rank and contender, no Ray. See `benchmarks.kernels` for what makes it fair."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks import names
from benchmarks.kernels.operands import OPS
from benchmarks.kernels.roster import ROSTER
from benchmarks.kernels.team import Team
from benchmarks.report import Record, size
from benchmarks.suite import Choice, close, compare, entry, gather
from benchmarks.targets import KB, MB

NAME = "kernel"
TITLE = "no Ray, float32, in place where the operation can be"
REFERENCE = names.TORCH
NEEDS_RAY = False

SIZES = (4, 64 * KB, MB, 16 * MB, 64 * MB)
QUICK_MOVES = (64 * KB, 16 * MB)
"""The sizes of all operations but the allreduce, where it has to be quick."""

BURSTS = ((1 * MB, 40), (16 * MB, 10), (64 * MB, 3), (math.inf, 2))
"""(below how many bytes, how many operations run back to back); with the one before them at most `MOST_RUNS`."""

QUICK_RUNS = ((1 * MB, 400), (16 * MB, 100), (64 * MB, 21), (math.inf, 10))
FULL_RUNS = ((1 * MB, 1200), (16 * MB, 300), (64 * MB, 60), (math.inf, 24))
"""(below how many bytes, how many operations are timed)."""


def measure(choice: Choice) -> Iterator[Record]:
    """Measures all operations, over each number of ranks in turn."""
    for ranks in choice.ranks or ((2,) if choice.quick else (2, 4)):
        choice.progress(f"{NAME}: starts {ranks} processes for each contender")
        teams, skipped = gather(NAME, [entry(name, Team, ranks) for name in ROSTER])
        yield from skipped
        try:
            yield from _measure(choice, ranks, teams)
        finally:
            close(teams)


def _measure(choice: Choice, ranks: int, teams: list[Team]) -> Iterator[Record]:
    for op in OPS:
        if op == "send" and ranks > 2:
            continue
        playing = [team for team in teams if op in ROSTER[team.name].ops]
        for team in playing:
            team.op = op
        for nbytes in choice.sizes or (QUICK_MOVES if choice.quick and op != "allreduce" else SIZES):
            choice.progress(f"{NAME}: {op}, {ranks} ranks, {size(nbytes)}")
            runs = choice.runs or _below(QUICK_RUNS if choice.quick else FULL_RUNS, nbytes)
            burst = min(runs, _below(BURSTS, nbytes))
            yield from compare(playing, suite=NAME, op=op, ranks=ranks, nbytes=nbytes, runs=runs, burst=burst)


def _below(table: tuple[tuple[float, int], ...], nbytes: int) -> int:
    return next(value for limit, value in table if nbytes < limit)
