"""What it costs to record a timeline: the same collective, in the same actors, with and without one.

Both contenders do the same, one of them between the beginning and the end of a timeline, the other behind it; neither
of these is timed. What is recorded is counted after each burst, so that nobody compares nothing with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import raycollect as col
from benchmarks import names
from benchmarks.crew import crew
from benchmarks.ours import Declared, RaycollectAllreduce
from benchmarks.report import Record, size
from benchmarks.suite import Choice, Maker, close, compare, entry, gather
from benchmarks.suites.captured import Captured
from benchmarks.targets import MB

NAME = "timeline"
TITLE = "allreduce while a timeline is recorded, called from the driver"
REFERENCE = names.UNRECORDED
NEEDS_RAY = True

RANKS = (2,)
CAPTURED, DRIVER = "captured allreduce", "allreduce_refs"
CASES = ((CAPTURED, 4), (CAPTURED, MB), (DRIVER, MB))
"""(operation, bytes per rank)."""
BURSTS = {CAPTURED: 60, DRIVER: 60}
"""Operation -> how many in a timeline: beside them its beginning, of which the participants are told, is short."""


def recorded(contender: Declared, run: Callable[[int], Sequence[float]], count: int) -> Sequence[float]:
    """So many operations of a contender, in a timeline.

    Raises:
        AssertionError: The timeline lacks a rank, or an operation.
    """
    times: Sequence[float] = []
    with col.timeline() as line:
        times = run(count)
    rows = [row for row in line.summary().rows if row.op == "allreduce"]
    if line.missing or [(row.calls, row.ranks) for row in rows] != [(count, contender.ranks)]:
        raise AssertionError(f"{contender.name}: {count} operations, and the timeline holds {rows}, {line.missing}")
    return times


def unrecorded(run: Callable[[int], Sequence[float]], count: int) -> Sequence[float]:
    """The same behind a timeline that has ended: beginning and ending one leaves caches and cores as it does there."""
    with col.timeline():
        pass
    return run(count)


class UnrecordedCapture(Captured):
    """Captured runs."""

    def run(self, count: int) -> Sequence[float]:
        """The operation, so many times."""
        return unrecorded(super().run, count)


class UnrecordedCalls(RaycollectAllreduce):
    """`allreduce_refs`."""

    def run(self, count: int) -> Sequence[float]:
        """The operation, so many times."""
        return unrecorded(super().run, count)


class RecordedCapture(Captured):
    """Captured runs, recorded."""

    def run(self, count: int) -> Sequence[float]:
        """The operation, so many times."""
        return recorded(self, super().run, count)


class RecordedCalls(RaycollectAllreduce):
    """`allreduce_refs`, recorded."""

    def run(self, count: int) -> Sequence[float]:
        """The operation, so many times."""
        return recorded(self, super().run, count)


_MADE = {CAPTURED: (UnrecordedCapture, RecordedCapture), DRIVER: (UnrecordedCalls, RecordedCalls)}


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 actors."""
    for ranks in choice.ranks or RANKS:
        choice.progress(f"{NAME}: starts {ranks} actors")
        with crew(ranks) as actors:
            for op, nbytes in CASES:
                if choice.sizes and nbytes not in choice.sizes:
                    continue
                choice.progress(f"{NAME}: {ranks} actors, {op}, {size(nbytes)}")
                without, with_ = _MADE[op]
                makers: list[Maker] = [
                    entry(names.UNRECORDED, without, actors, arena=True),
                    entry(names.RECORDED, with_, actors, arena=True),
                ]
                contenders, skipped = gather(NAME, makers)
                yield from skipped
                burst = BURSTS[op]
                runs = choice.runs_or(10 * burst, 40 * burst)
                yield from compare(contenders, suite=NAME, op=op, ranks=ranks, nbytes=nbytes, runs=runs, burst=burst)
                close(contenders)
