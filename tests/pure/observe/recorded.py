"""Recorded spans for the tests of timelines."""

from __future__ import annotations

from typing import Any

from raycollect.observe import Label
from raycollect.observe.trace import (
    CHECK,
    KERNEL,
    METHOD,
    PART,
    PLAN,
    RUN,
    Span,
)
from raycollect.observe.whole import Missing, Process, TimelineTrace

LABEL = Label(op="allreduce", group_id="g1", rank=1, ranks=2, nbytes=4096, calls=1)


def a_span(kind: str, begin_ms: float, end_ms: float, thread: int = 1, **more: Any) -> Span:
    label = Label(**{name: more.pop(name) for name in Label._fields if name in more})
    name = more.pop("name", kind)
    return Span(kind, name, 50 + begin_ms / 1e3, 50 + end_ms / 1e3, thread, label=label, **more)


def a_process(name: str, pid: int, spans: list[Span], **more: Any) -> Process:
    threads = {span.thread: f"thread {span.thread}" for span in spans}
    return Process(name=name, host="h", pid=pid, leader="L", threads=threads, spans=tuple(spans), **more)


def a_trace(*processes: Process, missing: tuple[Missing, ...] = ()) -> TimelineTrace:
    return TimelineTrace(began_s=50.0, ended_s=51.0, processes=processes, missing=missing)


OF_G = {"op": "allreduce", "group_id": "g", "ranks": 2, "group": "default", "backend": "shm"}


def two_ranks() -> TimelineTrace:
    """A driver with two plans that overlap, and two ranks."""
    plans = [a_span(PLAN, 0, 30, seq=1), a_span(RUN, 10, 40, seq=2)]
    ranks = []
    for rank, late_ms in ((0, 0.0), (1, 4.0)):
        same = {**OF_G, "rank": rank}
        spans = [
            a_span(METHOD, 0.5, 1, name="get"),
            a_span(PART, 2 + late_ms, 20, seq=1, **same),
            a_span(CHECK, 2 + late_ms, 10, seq=1, **same),
            a_span(KERNEL, 10, 20, seq=1, nbytes=4_000_000, calls=1, **same),
            a_span(PART, 21, 39, 2, seq=2, **same),
            a_span(CHECK, 22, 24 + late_ms, 2, seq=2, **same),
            a_span(KERNEL, 24 + late_ms, 34, 2, seq=2, nbytes=4_000_000, calls=1, **same),
        ]
        ranks.append(a_process(f"W{rank}", 20 + 10 * rank, spans, ranks=(("default", rank),)))
    return a_trace(a_process("driver", 10, plans, leads=True), *ranks)
