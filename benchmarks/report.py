"""Rows, skipped contenders and targets of a run, as tables and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from raycollect.planner.wording import columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The times of one contender in one case; `suite` is the table that the row belongs to."""

    suite: str
    op: str
    ranks: int
    nbytes: int  # of one rank's tensor
    contender: str
    median_ms: float
    p90_ms: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A contender that was not measured."""

    suite: str
    contender: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a collective in which something goes wrong; `said` has a text for each rank."""

    suite: str
    case: str
    contender: str
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A target beside what was measured."""

    said: str
    reached: bool


Record = Row | Skip | Outcome


@dataclass(slots=True)
class Report:
    """All records of one table, and the machine on which they were measured."""

    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Adds a record; a skipped contender is named once."""
        if isinstance(record, Row):
            self.rows.append(record)
        elif isinstance(record, Outcome):
            self.outcomes.append(record)
        elif record not in self.skipped:
            self.skipped.append(record)

    def write(self, path: Path) -> None:
        """Writes ``{"machine": {...}, "rows": [...], ...}``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def text(self, title: str, reference: str) -> str:
        """The records as a table; the last column says how many times faster a row is than the reference."""
        base = {(row.op, row.ranks, row.nbytes): row.median_ms for row in self.rows if row.contender == reference}
        head = ("operation", "ranks", "size", "contender", "median ms", "p90 ms", "runs", "times faster")
        cells = [
            (
                row.op,
                str(row.ranks),
                size(row.nbytes),
                row.contender,
                f"{row.median_ms:.3f}",
                f"{row.p90_ms:.3f}",
                str(row.runs),
                f"{base[case] / row.median_ms:.2f}" if (case := (row.op, row.ranks, row.nbytes)) in base else "",
            )
            for row in self.rows
        ]
        lines = ["", title, *(columns([head, *cells], head[4:]) if cells else [])]
        lines += [f"{each.case}, {each.contender}: {'; '.join(each.said)}" for each in self.outcomes]
        return "\n".join([*lines, *(f"skipped: {skip.contender}: {skip.reason}" for skip in self.skipped)])


def rows_of(spent_s: Mapping[str, Sequence[float]], *, suite: str, op: str, ranks: int, nbytes: int) -> list[Row]:
    """Makes a row of the seconds of each contender."""
    rows = []
    for contender, seconds in spent_s.items():
        ordered = [1e3 * spent for spent in sorted(seconds)]
        median, p90 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        case = {"suite": suite, "op": op, "ranks": ranks, "nbytes": nbytes, "contender": contender}
        rows.append(Row(**case, median_ms=median, p90_ms=p90, runs=len(ordered)))  # type: ignore[arg-type]
    return rows


def size(nbytes: int) -> str:
    """A size as a person reads it: ``4 B``, ``1 MB`` (of 1,048,576 bytes)."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
