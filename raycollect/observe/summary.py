"""Summarizes a timeline: a row per group, operation and backend.

Bytes and bandwidths are those of nccl-tests (doc/PERFORMANCE.md there). The *bytes* of a collective are those of the
full tensor: an allreduce's tensor, an allgather's result, a reduce-scatter's input. *Algorithm bandwidth* is bytes over
time. *Bus bandwidth* is algorithm bandwidth times the least share of the bytes that the slowest rank's link has to
move, so that it compares with the hardware for any number of ranks.
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
from raycollect.observe.whole import Process, TimelineTrace
from raycollect.planner.wording import columns, counted, nbytes_words, seconds_words

_BUS: Mapping[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("allgather", "reducescatter", "gather", "scatter", "alltoall"), lambda n: (n - 1) / n),
    **dict.fromkeys(("reduce", "broadcast", "send", "recv"), lambda n: 1.0),
}
"""Operation -> bus bandwidth over algorithm bandwidth, by the number of ranks."""


def bus_factor(op: str, ranks: int) -> float:
    """Returns bus bandwidth over algorithm bandwidth; 0 for a barrier or a batch, which have none."""
    return _BUS[op](ranks) if op in _BUS and ranks > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """All calls of one operation in one group.

    Attributes:
        group: The group.
        op: The operation; ``"batch"``: whole batches, and plans of captured steps that have several calls. The calls in
            them have rows of their own, without times in the consistency check.
        backend: The backend.
        ranks: The largest number of ranks that took part.
        calls: The number of calls.
        nbytes: The bytes of all calls, as nccl-tests count them.
        median_s: The median time of a call, in seconds: from the end of the consistency check to the end of the
            kernels, on the slowest rank.
        p99_s: The 99th percentile of these times.
        algorithm_bandwidth: In bytes per second; 0: nothing was moved.
        bus_bandwidth: In bytes per second.
        waiting: The share of the ranks' time in the consistency check, from 0 to 1.
        skew_s: The median delay between the first and the last rank's arrival at the consistency check, in seconds.
        worst_skew_s: The largest such delay.
        last_rank: The rank that was last most often; -1: no consistency check had several ranks.
        last_share: The share of the consistency checks at which it was last.
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
        rows: By group, operation and backend; the largest total time comes first.
        duration_s: How long was recorded, in seconds.
        processes: How many processes have recorded.
        missing: Descriptions of spans that could not be collected.
        dropped: How many entries were overwritten because rings were full.
    """

    rows: tuple[SummaryRow, ...]
    duration_s: float
    processes: int
    missing: tuple[str, ...] = ()
    dropped: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return asdict(self)

    @property
    def _title(self) -> str:
        return f"timeline of {seconds_words(self.duration_s)}, {counted(self.processes, 'process')}"

    @property
    def _notes(self) -> list[str]:
        notes = [f"missing: {missing}" for missing in self.missing]
        if self.dropped:
            notes.append(f"{self.dropped} entries were overwritten: record for less time, or with a higher limit")
        return notes

    def __str__(self) -> str:
        rows = [_HEAD, *map(_cells, self.rows)]
        lines = [self._title, *(line.rstrip() for line in columns(rows, _RIGHT) if self.rows)]
        if not self.rows:
            lines.append("no collective has ended")
        return "\n".join([*lines, *self._notes])

    def __repr__(self) -> str:
        return str(self)

    @html.shown
    def _repr_html_(self) -> str:
        table = html.table(_HEAD, map(_cells, self.rows), right=_RIGHT, count=len(self.rows))
        return html.block("summary", self._title, table, html.lines(self._notes) if self._notes else "")


_Row = tuple[str, str, str]
_Meeting = tuple[str, str, str, int, int]
"""(controller, call id of members' own calls, group id, launch, index of its piece)."""


@dataclass(slots=True)
class _CollectiveCall:
    """One collective, with the times of its ranks."""

    row: _Row
    ranks: int
    calls: int
    nbytes: int
    took_s: list[float]
    has_failed: bool = False


@dataclass(slots=True)
class _Check:
    """One agreement: rank -> (when it arrived, when it left)."""

    row: _Row
    stays: dict[int, tuple[float, float]]


def summarize(trace: TimelineTrace) -> Summary:
    """Summarizes a timeline."""
    calls: dict[_Meeting, _CollectiveCall] = {}
    checks: dict[_Meeting, _Check] = {}
    for process in trace.processes:
        _gather(process, calls, checks)
    by_row: dict[_Row, tuple[list[_CollectiveCall], list[_Check]]] = defaultdict(lambda: ([], []))
    for call in calls.values():
        if not call.has_failed:  # on any rank
            by_row[call.row][0].append(call)
    for check in checks.values():
        by_row[check.row][1].append(check)
    rows = [
        (sum(max(call.took_s) for call in some), _row(row, some, met)) for row, (some, met) in by_row.items() if some
    ]
    return Summary(
        rows=tuple(row for _, row in sorted(rows, key=lambda entry: -entry[0])),
        duration_s=trace.ended_s - trace.began_s,
        processes=len(trace.processes),
        missing=tuple(map(str, trace.missing)),
        dropped=trace.dropped,
    )


def _gather(process: Process, calls: dict[_Meeting, _CollectiveCall], checks: dict[_Meeting, _Check]) -> None:
    pieces = Counter[tuple[str, str, int, str]]()
    for span in process.spans:
        op, group_id, rank, ranks, nbytes, count, meeting = span.label
        leader = "" if meeting else process.leader
        row = span.group, op, span.backend
        if span.kind == CHECK and op:
            check = checks.setdefault((leader, meeting, group_id, span.seq, 0), _Check(row, {}))
            arrived_s, left_s = check.stays.get(rank, (span.begin_s, span.end_s))
            check.stays[rank] = min(arrived_s, span.begin_s), max(left_s, span.end_s)
        elif span.kind in (COLLECTIVE, KERNEL) and count:
            key = meeting, group_id, span.seq, op
            place = (leader, meeting, f"{group_id} {op}", span.seq, pieces[key])
            pieces[key] += 1
            call = calls.setdefault(place, _CollectiveCall(row, ranks, count, nbytes, []))
            call.nbytes = max(call.nbytes, nbytes)
            call.took_s.append(span.end_s - span.begin_s)
            call.has_failed = call.has_failed or bool(span.error)


def _row(row: _Row, calls: Sequence[_CollectiveCall], checks: Sequence[_Check]) -> SummaryRow:
    times = sorted(max(call.took_s) for call in calls)
    nbytes, total_s = sum(call.nbytes for call in calls), sum(times)
    rate = nbytes / total_s if total_s else 0.0
    ranks = max(call.ranks for call in calls)
    waited_s = sum(left - arrived for check in checks for arrived, left in check.stays.values())
    worked_s = sum(sum(call.took_s) for call in calls)
    skews = sorted(_skews(checks))
    last = Counter(_last(check) for check in checks if len(check.stays) > 1).most_common(1)
    group, op, backend = row
    return SummaryRow(
        group=group,
        op=op,
        backend=backend,
        ranks=ranks,
        calls=sum(call.calls for call in calls),
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
            arrivals = [arrived_s for arrived_s, _ in check.stays.values()]
            yield max(arrivals) - min(arrivals)


def _last(check: _Check) -> int:
    return max(check.stays, key=lambda rank: check.stays[rank][0])
