"""Writes timelines in the Trace Event Format, which Perfetto and chrome://tracing read, and reads them back.

Each process has a row per thread. Spans of one thread that overlap without nesting, such as the plans of a controller
or the methods of an async actor, go to rows of their own. A flow arrow leads from each plan to each participant's part
in it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycollect.core import files
from raycollect.errors.text import shown
from raycollect.observe.trace import KINDS, PART, PLAN, RUN
from raycollect.observe.whole import Missing, Process, Slice, Thread, Trace

FORMAT = 1
MOST_NBYTES = 2 << 30
"""The longest file that is read, unpacked."""
_MOST_TEXT = 300
"""How many characters of a reason are shown."""
_OWN = "raycollect"
_OTHER_TID = 10_000_000
"""Where the ids of rows begin that belong to no single thread."""

_ARGS = ("seq", "op", "group_id", "rank", "ranks", "nbytes", "calls", "meeting", "error", "group", "backend")
_DEFAULTS = Slice._field_defaults
_PLANS = (PLAN, RUN)

Event = dict[str, Any]


def document(trace: Trace) -> dict[str, Any]:
    """A timeline in the JSON object form of the format."""
    events: list[Event] = []
    pids, tids = set[int](), set[int]()
    drawn: list[_ProcessRows] = []
    processes = []
    for at, process in enumerate(trace.processes):
        one = _ProcessRows(process, _free(process.pid, pids), trace.began_s)
        events += one.heads(at, tids)
        drawn.append(one)
        processes.append(_metadata(process, one))
    for one in drawn:
        events += [_event(slice_, one.pid, tid, trace.began_s) for slice_, tid in one.placed]
    events += _flows(drawn, trace.began_s)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            _OWN: {
                "format": FORMAT,
                "began_s": trace.began_s,
                "ended_s": trace.ended_s,
                "clock": trace.clock,
                "processes": processes,
                "missing": [{name: getattr(one, name) for name in Missing.__slots__} for one in trace.missing],
                "dropped": trace.dropped,
            }
        },
        "traceEvents": events,
    }


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a file, atomically; one whose name ends with ``.gz`` is packed.

    Raises:
        OSError: It can't be written, or the path names a device, a FIFO, a directory or a link.
    """
    data = json.dumps(document(trace), separators=(",", ":")).encode()
    files.write(path, gzip.compress(data, 5) if Path(path).suffix == ".gz" else data)


def _free(wanted: int, taken: set[int]) -> int:
    """The id, or, where another host's process has it, one above those that systems give."""
    found = wanted
    if found in taken or found <= 0:
        found = max(_OTHER_TID, max(taken, default=0) + 1)
    taken.add(found)
    return found


@dataclass
class _ProcessRows:
    """A process on its way into a file."""

    process: Process
    pid: int  # its id in the file
    origin_s: float  # when the file's times begin
    placed: list[tuple[Slice, int]] = field(default_factory=list)  # its spans, each with the id of its row
    rows: dict[tuple[int, int], int] = field(default_factory=dict)  # (thread, which of its rows) -> the id of the row

    def heads(self, at: int, tids: set[int]) -> Iterator[Event]:
        yield self._named("process_name", 0, name=self.process.title)
        yield self._named("process_sort_index", 0, sort_index=at)
        by_row: dict[tuple[int, bool], list[Slice]] = defaultdict(list)
        for one in self.process.slices:
            by_row[one.thread, one.kind in _PLANS].append(one)
        # A plan ends on another thread than the one that has sent it: plans are rows for themselves.
        plans = [one for (_, is_plan), some in by_row.items() if is_plan for one in some]
        yield from self._place(plans, -1, Thread(0, "plans"), tids, nests=False)
        for (thread, is_plan), some in by_row.items():
            if not is_plan:
                known = self.process.threads.get(thread, Thread(0, "a thread"))
                yield from self._place(some, thread, known, tids, nests=True)

    def _place(
        self, slices: Sequence[Slice], thread: int, known: Thread, tids: set[int], *, nests: bool
    ) -> Iterator[Event]:
        for one, row in _rows(slices, self.origin_s, nests=nests):
            tid = self.rows.get((thread, row))
            if tid is None:
                tid = self.rows[thread, row] = _free(known.native if not row else 0, tids)
                yield self._named("thread_name", tid, name=known.name if not row else f"{known.name} ({row + 1})")
                yield self._named("thread_sort_index", tid, sort_index=len(self.rows))
            self.placed.append((one, tid))

    def _named(self, what: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": self.pid, "tid": tid, "args": args}


def _rows(slices: Sequence[Slice], origin_s: float, *, nests: bool) -> Iterator[tuple[Slice, int]]:
    """Each span with the first row in which it nests in what is open, or follows it."""
    open_: list[list[float]] = []  # by row, the ends of what is open, the innermost last
    for one in sorted(slices, key=lambda one: (one.begin_s, -one.end_s)):
        begin, end = _us(one.begin_s, origin_s), _us(one.end_s, origin_s)
        for ends in open_:
            while ends and ends[-1] <= begin:
                ends.pop()
        found = (at for at, ends in enumerate(open_) if not ends or (nests and end <= ends[-1]))
        row = next(found, len(open_))
        if row == len(open_):
            open_.append([])
        open_[row].append(end)
        yield one, row


def _us(at_s: float, origin_s: float) -> float:
    return round(1e6 * (at_s - origin_s), 3)


def _event(one: Slice, pid: int, tid: int, origin_s: float) -> Event:
    begin_us = _us(one.begin_s, origin_s)
    args = {name: value for name in _ARGS if (value := getattr(one, name)) != _DEFAULTS[name]}
    if one.kind in _PLANS:  # which share a row, whatever thread heard of their end
        args["thread"] = one.thread
    return {
        "ph": "X",
        "name": one.name if not one.error else f"{one.name} ({one.error})",
        "cat": one.kind,
        "ts": begin_us,
        "dur": round(_us(one.end_s, origin_s) - begin_us, 3),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _flows(drawn: Sequence[_ProcessRows], origin_s: float) -> Iterator[Event]:
    """An arrow from each plan to the outermost span of each participant's part in it."""
    parts: dict[tuple[str, int], list[tuple[Slice, int, int]]] = defaultdict(list)
    for one in drawn:
        placed = [(part, tid) for part, tid in one.placed if part.kind == PART and part.seq and not part.meeting]
        first: dict[int, tuple[Slice, int]] = {}
        for part, tid in sorted(placed, key=lambda found: (found[0].begin_s, -found[0].end_s)):
            first.setdefault(part.seq, (part, tid))
        for seq, (part, tid) in first.items():
            parts[one.process.leader, seq].append((part, one.pid, tid))
    plans = [(one, plan, tid) for one in drawn if one.process.leads for plan, tid in one.placed if plan.kind in _PLANS]
    pairs = [(one, plan, tid, *part) for one, plan, tid in plans for part in parts[one.process.leader, plan.seq]]
    for number, (one, plan, tid, part, part_pid, part_tid) in enumerate(pairs, 1):
        begin_us = _us(plan.begin_s, origin_s)
        bind_us = max(_us(part.begin_s, origin_s), begin_us)  # clocks of two hosts may differ a little
        if bind_us <= _us(part.end_s, origin_s):
            same = {"cat": PLAN, "name": "part", "id": number}
            yield {"ph": "s", **same, "ts": begin_us, "pid": one.pid, "tid": tid}
            yield {"ph": "f", "bp": "e", **same, "ts": bind_us, "pid": part_pid, "tid": part_tid}


def _metadata(process: Process, drawn: _ProcessRows) -> dict[str, Any]:
    names = ("name", "host", "pid", "clock", "leader", "leads", "uncertainty_s", "dropped")
    return {
        **{name: getattr(process, name) for name in names},
        "ranks": [list(one) for one in process.ranks],
        "id": drawn.pid,
        "rows": {str(tid): thread for (thread, _), tid in drawn.rows.items()},
        "threads": [[thread, *known] for thread, known in process.threads.items()],
    }


_MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    OSError,
    OverflowError,
    RecursionError,
    zlib.error,
)


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a file that `write` has written.

    Raises:
        OSError: It can't be read.
        ValueError: It is no such file.
    """
    with Path(path).open("rb") as file:
        try:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            data = (gzip.GzipFile(fileobj=file) if is_packed else file).read(MOST_NBYTES + 1)
            if len(data) > MOST_NBYTES:
                raise ValueError(f"it is longer than {MOST_NBYTES} bytes")
            return trace_of(json.loads(data))
        except _MALFORMED as exc:
            why = f"it has no {shown(exc.args[0])}" if isinstance(exc, KeyError) else str(exc)[:_MOST_TEXT]
            raise ValueError(f"{os.fspath(path)!r} is not a timeline of raycollect: {why}") from exc


def trace_of(found: Any) -> Trace:
    """The inverse of `document`, rounded to nanoseconds; what it raises for other documents varies."""
    own = found["otherData"][_OWN]
    if own["format"] != FORMAT:
        raise ValueError(f"format {shown(own['format'])}, this raycollect reads {FORMAT}")
    began_s = _finite(own["began_s"])
    rows: dict[int, dict[int, int]] = {
        int(one["id"]): {int(tid): int(thread) for tid, thread in one["rows"].items()} for one in own["processes"]
    }
    slices: dict[int, list[Slice]] = defaultdict(list)
    for event in found["traceEvents"]:
        if event.get("ph") == "X" and event["cat"] in KINDS:
            slices[event["pid"]].append(_slice(event, rows[event["pid"]], began_s))
    return Trace(
        began_s=began_s,
        ended_s=_finite(own["ended_s"]),
        clock=str(own["clock"]),
        processes=tuple(_process(one, slices[int(one["id"])]) for one in own["processes"]),
        missing=tuple(Missing(**one) for one in own["missing"]),
    )


def _slice(event: Mapping[str, Any], rows: Mapping[int, int], began_s: float) -> Slice:
    args = {name: type(_DEFAULTS[name])(value) for name, value in event["args"].items() if name in _ARGS}
    begin_s = began_s + _finite(event["ts"]) / 1e6
    name = event["name"].removesuffix(f" ({args['error']})") if args.get("error") else event["name"]
    return Slice(
        kind=event["cat"],
        name=str(name),
        begin_s=begin_s,
        end_s=begin_s + _finite(event["dur"]) / 1e6,
        thread=int(event["args"].get("thread", rows[event["tid"]])),
        **args,
    )


def _finite(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{found} is not a time")
    return found


def _process(one: Mapping[str, Any], slices: Iterable[Slice]) -> Process:
    return Process(
        name=str(one["name"]),
        host=str(one["host"]),
        pid=int(one["pid"]),
        clock=str(one["clock"]),
        leader=str(one["leader"]),
        leads=bool(one["leads"]),
        ranks=tuple((str(group), int(rank)) for group, rank in one["ranks"]),
        uncertainty_s=_finite(one["uncertainty_s"]),
        dropped=int(one["dropped"]),
        threads={int(thread): Thread(int(native), str(name)) for thread, native, name in one["threads"]},
        slices=tuple(sorted(slices, key=lambda one: one.end_s)),
    )
