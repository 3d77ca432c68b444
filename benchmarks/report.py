"""What a measurement is, and how it is kept."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender in one case.

    Attributes:
        suite: The suite that measured it, such as ``"driver"``.
        op: The operation.
        ranks: How many processes took part.
        nbytes: Bytes per rank: the larger side of what a rank gives and takes.
        contender: Who was measured.
        median_ms: The median time of one operation.
        p90_ms: Nine in ten were faster.
        runs: How many operations were timed.
    """

    suite: str
    op: str
    ranks: int
    nbytes: int
    contender: str
    median_ms: float
    p90_ms: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """How much memory an operation takes beside its operands, at its peak.

    Attributes:
        op: The operation.
        ranks: How many processes took part.
        nbytes: Bytes per rank.
        contender: Who was measured.
        extra_nbytes: By rank: the peak of the resident memory while it ran, less what was resident before.
    """

    op: str
    ranks: int
    nbytes: int
    contender: str
    extra_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one operation sends over the busiest link between hosts.

    Attributes:
        op: The operation.
        ranks: How many processes took part.
        nbytes: Bytes per rank.
        contender: Who was measured.
        sent_nbytes: What the host that sends most has sent, as its interface counts.
        least_nbytes: The fewest bytes with which it can be done, without headers.
    """

    op: str
    ranks: int
    nbytes: int
    contender: str
    sent_nbytes: int
    least_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Who was not measured, and why."""

    suite: str
    contender: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A target beside what was measured, in words, and whether it was reached."""

    said: str
    reached: bool


Record = Row | Peak | Traffic | Skip
"""What a suite gives."""


class Skipped(Exception):
    """A contender can't be measured here; says why."""


@dataclass(slots=True)
class Report:
    """All records of a run.

    Attributes:
        machine: What they were measured on.
        rows: In the order of measuring.
        memory: In the order of measuring.
        traffic: In the order of measuring.
        skipped: Each once.
        judged: The targets of what was measured.
    """

    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    memory: list[Peak] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Puts a record where it belongs."""
        if isinstance(record, Row):
            self.rows.append(record)
        elif isinstance(record, Peak):
            self.memory.append(record)
        elif isinstance(record, Traffic):
            self.traffic.append(record)
        elif record not in self.skipped:
            self.skipped.append(record)

    def write(self, path: Path) -> None:
        """Writes ``{"machine": {...}, "rows": [...], ...}``, a list for each of the other attributes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def summarise(times_ms: Sequence[float], *, suite: str, op: str, ranks: int, nbytes: int, contender: str) -> Row:
    """Makes one row of the times of one contender."""
    ordered = sorted(times_ms)
    return Row(
        suite=suite,
        op=op,
        ranks=ranks,
        nbytes=nbytes,
        contender=contender,
        median_ms=statistics.median(ordered),
        p90_ms=ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        runs=len(ordered),
    )


def rows_of(times: dict[str, list[float]], *, suite: str, op: str, ranks: int, nbytes: int) -> list[Row]:
    """Makes a row of each contender's times."""
    return [
        summarise(spent, suite=suite, op=op, ranks=ranks, nbytes=nbytes, contender=name)
        for name, spent in times.items()
    ]


def size(nbytes: int) -> str:
    """A size as a person reads it: ``4 B``, ``1 MB`` (of 1,048,576 bytes)."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
