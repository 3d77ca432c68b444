"""The share of time that each process spends in methods, waits, consistency checks and kernels, by time slot."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from raycollect.observe.trace import CHECK, KERNEL, METHOD, STAGING, WAIT, Span

SLOT_S = 0.25
"""The length of a time slot, in seconds."""
SLOTS = 120
"""How many slots a stream has."""

ACTIVITIES = ("method", "wait", "check", "kernel")
"""What a process does, in the order of the shares."""

_ACTIVITY: Mapping[str, str] = {METHOD: "method", WAIT: "wait", CHECK: "check", KERNEL: "kernel", STAGING: "kernel"}
"""Kind of span -> activity. Other kinds consist of these."""

_MOST_RECENT = 4096
"""How many spans of a thread are searched for those inside a method."""

Shares = tuple[float, ...]
"""By activity, from 0 to 1; what is left to 1 is idle time."""


class _Stream:
    """The time slots of one process: their numbers -> the seconds of each activity."""

    def __init__(self) -> None:
        self.slots: dict[int, list[float]] = {}
        self._recent = defaultdict[int, deque[Span]](lambda: deque(maxlen=_MOST_RECENT))  # by thread, no methods

    def add(self, span: Span) -> None:
        activity = _ACTIVITY.get(span.kind)
        if activity is None:
            return
        self._count(span.begin_s, span.end_s, activity, 1)
        if span.kind != METHOD:
            self._recent[span.thread].append(span)
            return
        for inner in reversed(self._recent[span.thread]):  # in the order of their ends; the method ends last
            if inner.end_s <= span.begin_s:
                break
            if inner.begin_s >= span.begin_s:
                self._count(inner.begin_s, inner.end_s, "method", -1)

    def _count(self, begin_s: float, end_s: float, activity: str, sign: int) -> None:
        last = int(end_s / SLOT_S)
        for slot in range(max(int(begin_s / SLOT_S), last - SLOTS), last + 1):
            seconds = min(end_s, (slot + 1) * SLOT_S) - max(begin_s, slot * SLOT_S)
            if seconds > 0:
                of_slot = self.slots.setdefault(slot, [0.0] * len(ACTIVITIES))
                of_slot[ACTIVITIES.index(activity)] += sign * seconds


class Streams:
    """The newest time slots of several processes. Spans are added as they end; times are those of one clock."""

    def __init__(self) -> None:
        self._streams = defaultdict[object, _Stream](_Stream)

    def add(self, process: object, spans: Iterable[Span]) -> None:
        """Adds spans of a process."""
        stream = self._streams[process]
        for span in spans:
            stream.add(span)

    def forget(self, now_s: float) -> None:
        """Forgets slots that are older than a stream, and processes without others."""
        first = _first(now_s)
        for process, stream in list(self._streams.items()):
            stream.slots = {slot: seconds for slot, seconds in stream.slots.items() if slot >= first}
            if not stream.slots:
                del self._streams[process]

    def of(self, process: object, now_s: float) -> list[Shares]:
        """Returns the shares of each slot of a process, the oldest first."""
        stream = self._streams.get(process)
        slots = {} if stream is None else stream.slots
        first = _first(now_s)
        return [_shares(slots[slot]) if slot in slots else _IDLE for slot in range(first, first + SLOTS)]


_IDLE: Shares = (0.0,) * len(ACTIVITIES)


def _first(now_s: float) -> int:
    return int(now_s / SLOT_S) - SLOTS


def _shares(seconds: Iterable[float]) -> Shares:
    positive = [max(value, 0.0) for value in seconds]
    whole = max(SLOT_S, sum(positive))  # of methods that overlap
    return tuple(round(value / whole, 3) for value in positive)
