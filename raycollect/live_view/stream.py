"""The share of time that each process spends in methods, waits, consistency checks and kernels, by time slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from raycollect.observe.trace import CALL, CHECK, KERNEL, METHOD, STAGING, WAIT, Span

SLOT_S = 0.25
"""The length of a time slot, in seconds."""
SLOTS = 120
"""How many slots a stream has."""

ACTIVITIES = ("method", "wait", "check", "kernel")
"""What a process does, in the order of the shares."""

_ACTIVITY: Mapping[str, str] = {
    METHOD: "method",
    CALL: "method",
    WAIT: "wait",
    CHECK: "check",
    KERNEL: "kernel",
    STAGING: "kernel",
}
"""Kind of span -> activity. Other kinds consist of these."""

Shares = tuple[float, ...]
"""By activity, from 0 to 1; what is left to 1 is idle time."""


class Streams:
    """The newest time slots of several processes. Spans are added as they end; times are those of one clock."""

    def __init__(self) -> None:
        self._slots: defaultdict[object, dict[int, dict[str, float]]] = defaultdict(dict)

    def add(self, process: object, spans: Iterable[Span]) -> None:
        """Adds spans of a process."""
        slots = self._slots[process]
        for span in spans:
            activity = _ACTIVITY.get(span.kind)
            if activity is None:
                continue
            last = int(span.end_s / SLOT_S)
            for slot in range(max(int(span.begin_s / SLOT_S), last - SLOTS), last + 1):
                seconds = min(span.end_s, (slot + 1) * SLOT_S) - max(span.begin_s, slot * SLOT_S)
                if seconds > 0:
                    of_slot = slots.setdefault(slot, dict.fromkeys(ACTIVITIES, 0.0))
                    of_slot[activity] += seconds

    def of(self, process: object, now_s: float) -> list[Shares]:
        """Returns the shares of each slot of a process, the oldest first; forgets older slots."""
        first = int(now_s / SLOT_S) - SLOTS
        slots = self._slots[process] = {slot: of for slot, of in self._slots[process].items() if slot >= first}
        return [_shares(slots[slot]) if slot in slots else _IDLE for slot in range(first, first + SLOTS)]


_IDLE: Shares = (0.0,) * len(ACTIVITIES)


def _shares(seconds: Mapping[str, float]) -> Shares:
    # A method that makes calls itself includes their checks and kernels, which are subtracted.
    inside = seconds["wait"] + seconds["check"] + seconds["kernel"]
    method = max(min(seconds["method"], SLOT_S - inside), 0.0)
    whole = max(SLOT_S, method + inside)
    return tuple(round((method if name == "method" else seconds[name]) / whole, 3) for name in ACTIVITIES)
