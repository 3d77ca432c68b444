"""Timelines as files of the Trace Event Format, which Perfetto and chrome://tracing read; and back.

A process has a row of rows, one per thread. Spans of one row that overlap without one lying inside the other, as the
plans of a controller and the methods of an async actor do, go to rows of their own. A flow arrow leads from each plan
to each participant's part in it.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycollect.observe.trace import KINDS, PART, PLAN, RUN
from raycollect.observe.whole import Missing, Process, Slice, Thread, Trace

__all__ = ["document", "read", "trace_of", "write"]

FORMAT = 1
_OWN = "raycollect"
_OTHER_TID = 10_000_000
"""Where the ids of rows begin that are no thread's own."""

_ARGS = ("seq", "op", "group_id", "rank", "ranks", "nbytes", "calls", "meeting", "error", "group", "backend")
_DEFAULTS = Slice._field_defaults
_PLANS = (PLAN, RUN)

Event = dict[str, Any]


# ---------------------------------------------------------------------------------------------- writing


def document(trace: Trace) -> dict[str, Any]:
    """A timeline in the JSON object form of the format."""
    events: list[Event] = []
    book = _Ids()
    drawn: list[_Drawn] = []
    processes = []
    for at, process in enumerate(trace.processes):
        one = _Drawn(process, book.pid(process.pid), trace.began_s)
        events += one.heads(at, book)
        drawn.append(one)
        processes.append(_told(process, one))
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
    """Writes a file; one whose name ends with ``.gz`` is packed. Another one of that name is replaced at once, or not.

    Raises:
        OSError: It can't be written.
    """
    target = Path(path)
    data = json.dumps(document(trace), separators=(",", ":")).encode()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(gzip.compress(data, 5) if target.suffix == ".gz" else data)
        unfinished.replace(target)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


class _Ids:
    """Ids of processes and rows that no other one in the file has."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._tids: set[int] = set()

    def pid(self, pid: int) -> int:
        return _free(pid, self._pids)

    def tid(self, native: int) -> int:
        return _free(native, self._tids)


def _free(wanted: int, taken: set[int]) -> int:
    """The id, or where another one has it, on another host, the next above those that systems give."""
    found = wanted
    if found in taken or found <= 0:
        found = max(_OTHER_TID, max(taken, default=0) + 1)
    taken.add(found)
    return found


@dataclass
class _Drawn:
    """A process on its way into a file.

    Attributes:
        process: The process.
        pid: Its id in the file.
        origin_s: When the file's times begin.
        placed: Its spans, each with the id of its row.
        rows: (thread, which of its rows) -> the id of the row.
    """

    process: Process
    pid: int
    origin_s: float
    placed: list[tuple[Slice, int]] = field(default_factory=list)
    rows: dict[tuple[int, int], int] = field(default_factory=dict)

    def heads(self, at: int, book: _Ids) -> Iterator[Event]:
        """Places its spans, and gives the events that name the process and its rows."""
        yield self._named("process_name", 0, name=self.process.title)
        yield self._named("process_sort_index", 0, sort_index=at)
        by_row: dict[tuple[int, bool], list[Slice]] = defaultdict(list)
        for one in self.process.slices:
            by_row[one.thread, one.kind in _PLANS].append(one)
        # A plan ends on another thread than the one that has sent it: plans are rows for themselves.
        plans = [one for (_, is_plan), some in by_row.items() if is_plan for one in some]
        yield from self._place(plans, -1, Thread(0, "plans"), book, nests=False)
        for (thread, is_plan), some in by_row.items():
            if not is_plan:
                known = self.process.threads.get(thread, Thread(0, "a thread"))
                yield from self._place(some, thread, known, book, nests=True)

    def _place(
        self, slices: Sequence[Slice], thread: int, known: Thread, book: _Ids, *, nests: bool
    ) -> Iterator[Event]:
        for one, row in _rows(slices, self.origin_s, nests=nests):
            tid = self.rows.get((thread, row))
            if tid is None:
                tid = self.rows[thread, row] = book.tid(known.native if not row else 0)
                yield self._named("thread_name", tid, name=known.name if not row else f"{known.name} ({row + 1})")
                yield self._named("thread_sort_index", tid, sort_index=len(self.rows))
            self.placed.append((one, tid))

    def _named(self, what: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": self.pid, "tid": tid, "args": args}


def _rows(slices: Sequence[Slice], origin_s: float, *, nests: bool) -> Iterator[tuple[Slice, int]]:
    """Each span with the first row in which it lies inside what is open there, or behind it."""
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
    """Microseconds, of which thousandths are kept."""
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


def _flows(drawn: Sequence[_Drawn], origin_s: float) -> Iterator[Event]:
    """An arrow from each plan to each participant's part in it: its outermost span."""
    parts: dict[tuple[str, int], list[tuple[Slice, int, int]]] = defaultdict(list)
    for one in drawn:
        first: dict[int, tuple[Slice, int]] = {}
        for part, tid in one.placed:
            if part.kind == PART and part.seq and not part.meeting:
                known = first.get(part.seq)
                if known is None or (part.begin_s, -part.end_s) < (known[0].begin_s, -known[0].end_s):
                    first[part.seq] = part, tid
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


def _told(process: Process, drawn: _Drawn) -> dict[str, Any]:
    """What a file says of a process, besides its spans."""
    names = ("name", "host", "pid", "clock", "leader", "leads", "uncertainty_s", "dropped")
    return {
        **{name: getattr(process, name) for name in names},
        "ranks": [list(one) for one in process.ranks],
        "id": drawn.pid,
        "rows": {str(tid): thread for (thread, _), tid in drawn.rows.items()},
        "threads": [[thread, *known] for thread, known in process.threads.items()],
    }


# ---------------------------------------------------------------------------------------------- reading


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a file that `write` has written.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It can't be read.
        ValueError: It is no such file; the text says so.
    """
    data = Path(path).read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return trace_of(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, OSError, RecursionError) as exc:
        why = f"it has no {exc}" if isinstance(exc, KeyError) else exc
        raise ValueError(f"{os.fspath(path)!r} is no timeline of raycollect: {why}") from exc


def trace_of(found: Any) -> Trace:
    """The timeline of a document; the inverse of `document`, but for what microseconds leave out.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It is no such document.
    """
    own = found["otherData"][_OWN]
    if own["format"] != FORMAT:
        raise ValueError(f"format {own['format']!r}, this raycollect reads {FORMAT}")
    began_s = float(own["began_s"])
    rows: dict[int, dict[int, int]] = {
        int(one["id"]): {int(tid): int(thread) for tid, thread in one["rows"].items()} for one in own["processes"]
    }
    slices: dict[int, list[Slice]] = defaultdict(list)
    for event in found["traceEvents"]:
        if event.get("ph") == "X" and event["cat"] in KINDS:
            slices[event["pid"]].append(_slice(event, rows[event["pid"]], began_s))
    return Trace(
        began_s=began_s,
        ended_s=float(own["ended_s"]),
        clock=str(own["clock"]),
        processes=tuple(_process(one, slices[int(one["id"])]) for one in own["processes"]),
        missing=tuple(Missing(**one) for one in own["missing"]),
    )


def _slice(event: Mapping[str, Any], rows: Mapping[int, int], began_s: float) -> Slice:
    args = {name: type(_DEFAULTS[name])(value) for name, value in event["args"].items() if name in _ARGS}
    begin_s = began_s + float(event["ts"]) / 1e6
    name = event["name"].removesuffix(f" ({args['error']})") if args.get("error") else event["name"]
    return Slice(
        kind=event["cat"],
        name=str(name),
        begin_s=begin_s,
        end_s=begin_s + float(event["dur"]) / 1e6,
        thread=int(event["args"].get("thread", rows[event["tid"]])),
        **args,
    )


def _process(one: Mapping[str, Any], slices: Iterable[Slice]) -> Process:
    return Process(
        name=str(one["name"]),
        host=str(one["host"]),
        pid=int(one["pid"]),
        clock=str(one["clock"]),
        leader=str(one["leader"]),
        leads=bool(one["leads"]),
        ranks=tuple((str(group), int(rank)) for group, rank in one["ranks"]),
        uncertainty_s=float(one["uncertainty_s"]),
        dropped=int(one["dropped"]),
        threads={int(thread): Thread(int(native), str(name)) for thread, native, name in one["threads"]},
        slices=tuple(sorted(slices, key=lambda one: one.end_s)),
    )
