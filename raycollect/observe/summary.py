"""Summarizes a timeline: a row per group, operation and backend.

Bytes and bandwidths are those of nccl-tests (doc/PERFORMANCE.md there). The *bytes* of a collective are what each rank
holds in full: an allreduce's tensor, an allgather's result, a reduce-scatter's input. *Algorithm bandwidth* is bytes
over time. *Bus bandwidth* is that times the least that the operation has to move over each link of the slowest rank, so
that it compares with the hardware whatever the number of ranks.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raycollect.core import html
from raycollect.observe.trace import CHECK, COLLECTIVE, KERNEL
from raycollect.observe.whole import Process, Trace
from raycollect.planner.wording import columns, counted, nbytes_words, seconds_words

_BUS: Mapping[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("allgather", "reducescatter", "gather", "scatter", "alltoall"), lambda n: (n - 1) / n),
    **dict.fromkeys(("reduce", "broadcast", "send", "recv"), lambda n: 1.0),
}
"""Operation -> bus bandwidth over algorithm bandwidth, by the number of ranks."""


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth; 0 for a barrier or a batch, which have none."""
    return _BUS[op](ranks) if op in _BUS and ranks > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """All calls of one operation in one group.

    Attributes:
        group: The group.
        op: The operation; ``"batch"``: whole batches, and plans of captured steps that have several calls. The calls in
            them have rows of their own, without times in the consistency check.
        backend: The backend.
        ranks: The most ranks that took part.
        calls: How many calls there were.
        nbytes: The bytes of all of them, as nccl-tests count them.
        median_s: The median time of one, in seconds: from leaving the consistency check to the end of the kernels, on
            the slowest rank.
        p99_s: The 99th percentile of these.
        algorithm_bandwidth: In bytes per second; 0: nothing was moved.
        bus_bandwidth: In bytes per second.
        waiting: The share of the ranks' time that they waited in the consistency check, from 0 to 1.
        skew_s: How much later than the first the last rank came to the consistency check, in seconds: the median.
        worst_skew_s: The largest such delay.
        last_rank: The rank that came last most often; -1: no consistency check had several ranks.
        last_share: At what share of the consistency checks it came last.
    """

    group: str
    op: str
    backend: str
    ranks: int
    calls: int
    nbytes: int
    median_s: float
    p99_s: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    waiting: float
    skew_s: float
    worst_skew_s: float
    last_rank: int
    last_share: float


def _bandwidth(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate else ""


def _has_check(row: SummaryRow) -> bool:
    return row.last_rank >= 0


_COLUMNS: Mapping[str, Callable[[SummaryRow], str]] = {
    "group": lambda row: row.group,
    "op": lambda row: row.op,
    "backend": lambda row: row.backend,
    "calls": lambda row: str(row.calls),
    "bytes": lambda row: nbytes_words(row.nbytes) if row.nbytes else "",
    "median": lambda row: seconds_words(row.median_s),
    "p99": lambda row: seconds_words(row.p99_s),
    "algbw": lambda row: _bandwidth(row.algorithm_bandwidth),
    "busbw": lambda row: _bandwidth(row.bus_bandwidth),
    "waiting": lambda row: f"{row.waiting:.0%}" if row.waiting or _has_check(row) else "",
    "skew": lambda row: seconds_words(row.skew_s) if _has_check(row) else "",
    "worst skew": lambda row: seconds_words(row.worst_skew_s) if _has_check(row) else "",
    "last rank": lambda row: f"{row.last_rank} ({row.last_share:.0%})" if _has_check(row) else "",
}
_HEAD = tuple(_COLUMNS)
_RIGHT = frozenset(_HEAD[3:])


def _cells(row: SummaryRow) -> tuple[str, ...]:
    return tuple(cell(row) for cell in _COLUMNS.values())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Summary:
    """A timeline in numbers.

    Attributes:
        rows: By group, operation and backend; what took longest in all comes first.
        duration_s: How long was recorded, in seconds.
        processes: How many processes have recorded.
        missing: What could not be collected, in words.
        dropped: How many entries were overwritten because rings were full.
    """

    rows: tuple[SummaryRow, ...]
    duration_s: float
    processes: int
    missing: tuple[str, ...] = ()
    dropped: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    @property
    def _title(self) -> str:
        return f"timeline of {seconds_words(self.duration_s)}, {counted(self.processes, 'process')}"

    @property
    def _notes(self) -> list[str]:
        notes = [f"missing: {one}" for one in self.missing]
        if self.dropped:
            notes.append(f"{self.dropped} entries were overwritten: record for less time, or with a higher limit")
        return notes

    def __str__(self) -> str:
        rows = [_HEAD, *map(_cells, self.rows)]
        lines = [self._title, *(line.rstrip() for line in columns(rows, _RIGHT) if self.rows)]
        if not self.rows:
            lines.append("no collective has ended in it")
        return "\n".join([*lines, *self._notes])

    def __repr__(self) -> str:
        return str(self)

    @html.shown
    def _repr_html_(self) -> str:
        told = html.table(_HEAD, map(_cells, self.rows), right=_RIGHT, count=len(self.rows))
        return html.block("summary", self._title, told, html.lines(self._notes) if self._notes else "")


_Row = tuple[str, str, str]
_Meeting = tuple[str, str, str, int, int]
"""(controller, call id of members' own calls, group id, launch, which of its pieces)."""


@dataclass(slots=True)
class _Call:
    """One collective, as its ranks saw it."""

    row: _Row
    ranks: int
    calls: int
    nbytes: int
    took_s: list[float]
    has_failed: bool = False


@dataclass(slots=True)
class _Check:
    """One agreement: rank -> (when it came, when it left)."""

    row: _Row
    stays: dict[int, tuple[float, float]]


def summarize(trace: Trace) -> Summary:
    """Summarizes a timeline."""
    calls: dict[_Meeting, _Call] = {}
    checks: dict[_Meeting, _Check] = {}
    for process in trace.processes:
        _gather(process, calls, checks)
    by_row: dict[_Row, tuple[list[_Call], list[_Check]]] = defaultdict(lambda: ([], []))
    for call in calls.values():
        if not call.has_failed:  # on any rank
            by_row[call.row][0].append(call)
    for check in checks.values():
        by_row[check.row][1].append(check)
    rows = [(sum(max(one.took_s) for one in some), _row(row, some, met)) for row, (some, met) in by_row.items() if some]
    return Summary(
        rows=tuple(row for _, row in sorted(rows, key=lambda one: -one[0])),
        duration_s=trace.ended_s - trace.began_s,
        processes=len(trace.processes),
        missing=tuple(map(str, trace.missing)),
        dropped=trace.dropped,
    )


def _gather(process: Process, calls: dict[_Meeting, _Call], checks: dict[_Meeting, _Check]) -> None:
    pieces = Counter[tuple[str, str, int, str]]()
    for one in process.slices:
        leader = "" if one.meeting else process.leader
        row = one.group, one.op, one.backend
        if one.kind == CHECK and one.op:
            check = checks.setdefault((leader, one.meeting, one.group_id, one.seq, 0), _Check(row, {}))
            came_s, went_s = check.stays.get(one.rank, (one.begin_s, one.end_s))
            check.stays[one.rank] = min(came_s, one.begin_s), max(went_s, one.end_s)
        elif one.kind in (COLLECTIVE, KERNEL) and one.calls:
            key = one.meeting, one.group_id, one.seq, one.op
            place = (leader, one.meeting, f"{one.group_id} {one.op}", one.seq, pieces[key])
            pieces[key] += 1
            call = calls.setdefault(place, _Call(row, one.ranks, one.calls, one.nbytes, []))
            call.nbytes = max(call.nbytes, one.nbytes)
            call.took_s.append(one.end_s - one.begin_s)
            call.has_failed = call.has_failed or bool(one.error)


def _row(row: _Row, calls: Sequence[_Call], checks: Sequence[_Check]) -> SummaryRow:
    times = sorted(max(one.took_s) for one in calls)
    nbytes, total_s = sum(one.nbytes for one in calls), sum(times)
    rate = nbytes / total_s if total_s else 0.0
    ranks = max(one.ranks for one in calls)
    waited_s = sum(went - came for check in checks for came, went in check.stays.values())
    worked_s = sum(sum(one.took_s) for one in calls)
    skews = sorted(_skews(checks))
    last = Counter(_last(check) for check in checks if len(check.stays) > 1).most_common(1)
    group, op, backend = row
    return SummaryRow(
        group=group,
        op=op,
        backend=backend,
        ranks=ranks,
        calls=sum(one.calls for one in calls),
        nbytes=nbytes,
        median_s=statistics.median(times),
        p99_s=times[math.ceil(0.99 * len(times)) - 1],
        algorithm_bandwidth=rate,
        bus_bandwidth=rate * bus_factor(op, ranks),
        waiting=waited_s / (waited_s + worked_s) if waited_s else 0.0,
        skew_s=statistics.median(skews) if skews else 0.0,
        worst_skew_s=skews[-1] if skews else 0.0,
        last_rank=last[0][0] if last else -1,
        last_share=last[0][1] / len(skews) if last else 0.0,
    )


def _skews(checks: Iterable[_Check]) -> Iterator[float]:
    for check in checks:
        if len(check.stays) > 1:
            came = [came_s for came_s, _ in check.stays.values()]
            yield max(came) - min(came)


def _last(check: _Check) -> int:
    return max(check.stays, key=lambda rank: check.stays[rank][0])
