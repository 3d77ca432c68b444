"""What it costs to record a timeline: the same collective, in the same actors, with and without one.

Both contenders do the same with the same buffers, one of them between the beginning and the end of a timeline, the
other behind it; neither of these is timed. What is recorded is counted after each burst, so that nobody compares
nothing with nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import raycollect as col
from benchmarks import names
from benchmarks.ours import Declared, RaycollectAllreduce
from benchmarks.report import Record, size
from benchmarks.suite import Choice, close, compare, entry, gather
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
BURST = 60
"""How many operations in a timeline: beside them its beginning, of which the participants are told, is short. Some
hundred of them are needed to tell 2% from 4%."""


class Twin:
    """One of two that do the same, recorded or not.

    They share their buffers and their group: where each had its own, where those happen to lie made more of a
    difference than what is measured. So the first of them gets both ready, and each burst is filled and checked.

    Args:
        contender: Who does the operation.
        records: Whether this one records it, and is the second.
    """

    def __init__(self, contender: Declared, *, records: bool) -> None:
        self.name = names.RECORDED if records else names.UNRECORDED
        self._contender = contender
        self._records = records

    def prepare(self, nbytes: int) -> None:
        """Makes the buffers of both."""
        if not self._records:
            self._contender.prepare(nbytes)

    def fill(self) -> None:
        """Each burst does."""

    def run(self, count: int) -> Sequence[float]:
        """The operation, so many times; behind a timeline or in one, so that caches and cores are left alike.

        Raises:
            AssertionError: The timeline lacks a rank, or an operation; or the sums are wrong.
        """
        contender = self._contender
        contender.fill()
        with col.timeline() as line:
            times = contender.run(count) if self._records else []
        if not self._records:
            times = contender.run(count)
        rows = [row for row in line.summary().rows if row.op == "allreduce"]
        held = [(row.calls, row.ranks) for row in rows]
        if line.missing or held != ([(count, contender.ranks)] if self._records else []):
            raise AssertionError(f"{self.name}: {count} operations, and the timeline holds {rows}, {line.missing}")
        contender.check(count)
        return times

    def check(self, runs: int) -> None:
        """Each burst does."""

    def close(self) -> None:
        """Gives back what both have."""
        if not self._records:
            self._contender.close()


_MADE = {CAPTURED: Captured, DRIVER: RaycollectAllreduce}


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 actors."""
    for ranks in choice.ranks or RANKS:
        choice.progress(f"{NAME}: starts {ranks} actors")
        for op, nbytes in CASES:
            if choice.sizes and nbytes not in choice.sizes:
                continue
            choice.progress(f"{NAME}: {ranks} actors, {op}, {size(nbytes)}")
            made, skipped = gather(NAME, [entry(op, _MADE[op], ranks, arena=True)])
            yield from skipped
            contenders = [Twin(one, records=records) for one in made for records in (False, True)]
            runs = choice.runs_or(40 * BURST, 200 * BURST)
            yield from compare(contenders, suite=NAME, op=op, ranks=ranks, nbytes=nbytes, runs=runs, burst=BURST)
            close(contenders)
