"""Writes timelines in the Trace Event Format, which Perfetto and chrome://tracing read.

Each process has a row per thread. Spans of one thread that overlap without nesting, such as the plans of a controller
or the methods of an async actor, go to rows of their own. A flow arrow leads from each plan to each participant's part
in it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycollect.core import files
from raycollect.observe.summary import summarize
from raycollect.observe.trace import PART, PLAN, RUN, Label, Span
from raycollect.observe.whole import Missing, Process, TimelineTrace

FORMAT = 2
_DEFAULTS = {**Span._field_defaults, **Label._field_defaults}
_PLANS = (PLAN, RUN)

Event = dict[str, Any]


def document(trace: TimelineTrace) -> dict[str, Any]:
    """Returns a timeline in the JSON object form of the format."""
    events: list[Event] = []
    tids = itertools.count(1)
    drawn = [_ProcessRows(process, number, trace.began_s) for number, process in enumerate(trace.processes, 1)]
    processes = []
    for rows in drawn:
        events += rows.heads(tids)
        facts = {name: getattr(rows.process, name) for name in ("name", "host", "pid", "uncertainty_s", "dropped")}
        processes.append({**facts, "ranks": list(map(list, rows.process.ranks)), "id": rows.pid})
    for rows in drawn:
        events += [_event(span, rows.pid, tid, trace.began_s) for span, tid in rows.placed]
    events += _flows(drawn, trace.began_s)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "raycollect": {
                "format": FORMAT,
                "began_s": trace.began_s,
                "ended_s": trace.ended_s,
                "processes": processes,
                "missing": [{name: getattr(missing, name) for name in Missing.__slots__} for missing in trace.missing],
                "dropped": trace.dropped,
                "summary": summarize(trace).to_dict(),
            }
        },
        "traceEvents": events,
    }


def write(trace: TimelineTrace, path: str | os.PathLike[str]) -> None:
    """Writes a file, atomically; one whose name ends with ``.gz`` is packed.

    Raises:
        OSError: The file can't be written, or the path names a device, a FIFO, a directory or a link.
    """
    data = json.dumps(document(trace), separators=(",", ":")).encode()
    files.write(path, gzip.compress(data, 5) if Path(path).suffix == ".gz" else data)


@dataclass
class _ProcessRows:
    """The rows of a process in a file."""

    process: Process
    pid: int  # its id in the file: processes of two hosts may have the same pid
    origin_s: float  # when the file's times begin
    placed: list[tuple[Span, int]] = field(default_factory=list)  # its spans, each with the id of its row
    rows: dict[tuple[int, int], int] = field(default_factory=dict)  # (thread, number of the row) -> the id of the row

    def heads(self, tids: Iterator[int]) -> Iterator[Event]:
        yield self._named("process_name", 0, name=self.process.title)
        yield self._named("process_sort_index", 0, sort_index=self.pid)
        by_row: dict[tuple[int, bool], list[Span]] = defaultdict(list)
        for span in self.process.spans:
            by_row[span.thread, span.kind in _PLANS].append(span)
        # A plan ends on another thread than the one that sent it, so plans have rows of their own.
        plans = [span for (_, is_plan), some in by_row.items() if is_plan for span in some]
        yield from self._place(plans, -1, "plans", tids, nests=False)
        for (thread, is_plan), some in by_row.items():
            if not is_plan:
                name = self.process.threads.get(thread, "a thread")
                yield from self._place(some, thread, name, tids, nests=True)

    def _place(
        self, spans: Sequence[Span], thread: int, name: str, tids: Iterator[int], *, nests: bool
    ) -> Iterator[Event]:
        for span, row in _rows(spans, self.origin_s, nests=nests):
            tid = self.rows.get((thread, row))
            if tid is None:
                tid = self.rows[thread, row] = next(tids)
                yield self._named("thread_name", tid, name=name if not row else f"{name} ({row + 1})")
                yield self._named("thread_sort_index", tid, sort_index=len(self.rows))
            self.placed.append((span, tid))

    def _named(self, what: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": self.pid, "tid": tid, "args": args}


def _rows(spans: Sequence[Span], origin_s: float, *, nests: bool) -> Iterator[tuple[Span, int]]:
    """Yields each span with the first row in which it nests in the open spans, or follows them."""
    open_: list[list[float]] = []  # by row, the ends of what is open, the innermost last
    for span in sorted(spans, key=lambda span: (span.begin_s, -span.end_s)):
        begin, end = _us(span.begin_s, origin_s), _us(span.end_s, origin_s)
        for ends in open_:
            while ends and ends[-1] <= begin:
                ends.pop()
        fitting = (at for at, ends in enumerate(open_) if not ends or (nests and end <= ends[-1]))
        row = next(fitting, len(open_))
        if row == len(open_):
            open_.append([])
        open_[row].append(end)
        yield span, row


def _us(at_s: float, origin_s: float) -> float:
    return round(1e6 * (at_s - origin_s), 3)


def _event(span: Span, pid: int, tid: int, origin_s: float) -> Event:
    begin_us = _us(span.begin_s, origin_s)
    args = {"seq": span.seq, **span.label._asdict(), "error": span.error, "group": span.group, "backend": span.backend}
    return {
        "ph": "X",
        "name": span.name if not span.error else f"{span.name} ({span.error})",
        "cat": span.kind,
        "ts": begin_us,
        "dur": round(_us(span.end_s, origin_s) - begin_us, 3),
        "pid": pid,
        "tid": tid,
        "args": {name: value for name, value in args.items() if value != _DEFAULTS[name]},
    }


def _flows(drawn: Sequence[_ProcessRows], origin_s: float) -> Iterator[Event]:
    """Yields an arrow from each plan to the outermost span of each participant's part in it."""
    parts: dict[tuple[str, int], list[tuple[Span, int, int]]] = defaultdict(list)
    for rows in drawn:
        placed = [(part, tid) for part, tid in rows.placed if part.kind == PART and part.seq and not part.label.meeting]
        first: dict[int, tuple[Span, int]] = {}
        for part, tid in sorted(placed, key=lambda entry: (entry[0].begin_s, -entry[0].end_s)):
            first.setdefault(part.seq, (part, tid))
        for seq, (part, tid) in first.items():
            parts[rows.process.leader, seq].append((part, rows.pid, tid))
    plans = [
        (rows, plan, tid) for rows in drawn if rows.process.leads for plan, tid in rows.placed if plan.kind in _PLANS
    ]
    pairs = [(rows, plan, tid, *part) for rows, plan, tid in plans for part in parts[rows.process.leader, plan.seq]]
    for number, (rows, plan, tid, part, part_pid, part_tid) in enumerate(pairs, 1):
        begin_us = _us(plan.begin_s, origin_s)
        bind_us = max(_us(part.begin_s, origin_s), begin_us)  # clocks of two hosts may differ a little
        if bind_us <= _us(part.end_s, origin_s):
            same = {"cat": PLAN, "name": "part", "id": number}
            yield {"ph": "s", **same, "ts": begin_us, "pid": rows.pid, "tid": tid}
            yield {"ph": "f", "bp": "e", **same, "ts": bind_us, "pid": part_pid, "tid": part_tid}
