"""The order of one controller's plans in this participant: each starts after its predecessor (P2)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

from raycollect.core import threads
from raycollect.observe import run_steps
from raycollect.observe.recorder import Event
from raycollect.observe.trace import Tracer

ARRIVALS = 64
"""How many agreements are reported: more than the plans of most captured steps."""

_EARLIER = "earlier plans"
"""The name of a wait, in timelines."""


def arrivals(story: Iterable[Event], now_s: float) -> dict[int, float]:
    """The last launches at whose agreement this rank arrived, and how many seconds ago."""
    seconds_ago: dict[int, float] = {}
    for event in story:
        if event.what == "check":
            seconds_ago.pop(event.seq, None)  # so that the dict is in order of time
            seconds_ago[event.seq] = max(now_s - event.at_s, 0.0)
    return dict(list(seconds_ago.items())[-ARRIVALS:])


class PlanSequencer:
    """The order of plans. Any thread may call it.

    Plans have increasing numbers, and each names its predecessor on this participant. A plan that is aborted before its
    arrival keeps its position in the order and does nothing.

    Args:
        tracer: Whether waits are recorded.

    Attributes:
        begun: The latest plan that has begun here.
        aborted: The reasons of aborted plans that have not ended. For a plan that has begun, the same as `reason`. An
            empty one does not abort it: the plan goes on, and its end is reported.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or Tracer()
        self.begun: int = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # the number of waits for a change
        self._later: dict[int, list[Callable[[], object]]] = {}  # predecessor -> callbacks after its end
        self._arrived_s: dict[int, float] = {}  # arrival times of early plans, if a timeline is recorded
        self._settled = 0  # all plans up to this number have ended
        self._ended: set[int] = set()
        self._running: set[int] = set()
        self.aborted: dict[int, str] = {}
        self._closed = ""

    def after(self, seq: int, predecessor: int, go: Callable[[], object]) -> None:
        """Calls `go` after the end of a plan's predecessor, so that no thread has to wait; never after `close`.

        `go` leads to the plan's `start`, and never waits.
        """
        with self._lock:
            ring = self._tracer.ring
            if ring is not None and not self.has_ended(predecessor):
                self._arrived_s[seq] = ring.clock()
        self.when_ended((predecessor,), go)

    def when_ended(self, seqs: Iterable[int], go: Callable[[], object]) -> None:
        """Calls `go` after the end of plans: now, or in the thread that ends the last plan; never after `close`."""
        with self._lock:
            if self._closed:
                return
            left = {seq for seq in seqs if not self.has_ended(seq)}
            for seq in left:
                self._later.setdefault(seq, []).append(partial(self._one_less, left, seq, go))
            is_now = not left  # read here: the thread that ends the last plan empties it, and calls `go`
        if is_now:
            go()

    def _one_less(self, left: set[int], seq: int, go: Callable[[], object]) -> None:
        with self._lock:
            left.discard(seq)
            if left:
                return
        go()

    def start(self, seq: int, predecessor: int) -> str | None:
        """Waits for the predecessor's end. Returns the reason not to run the plan, or None; `end` must follow."""
        with self._lock:
            if predecessor > self._settled and predecessor not in self._ended and not self._closed:
                self._wait(seq, predecessor)
            if self._arrived_s:
                ring, arrived_s = self._tracer.ring, self._arrived_s.pop(seq, None)
                if ring is not None and arrived_s is not None:
                    ring.waited(_EARLIER, arrived_s, seq)
            self.begun = max(self.begun, seq)
            if self._closed:
                return self._closed
            self._settled = max(self._settled, predecessor)
            if self._ended:
                self._ended = set(filter(self._settled.__lt__, self._ended))
            reason = self.aborted.get(seq)
            if reason is None:
                self._running.add(seq)
            return reason

    def _wait(self, seq: int, predecessor: int) -> None:
        ring = self._tracer.ring
        began_s = 0.0 if ring is None else ring.clock()
        run_steps.here().at = "waits for its predecessor"
        while not self.has_ended(predecessor) and not self._closed:
            self._waiting += 1
            self._changed.wait()
            self._waiting -= 1
        if ring is not None:
            ring.waited(_EARLIER, began_s, seq)

    def wait(self, seq: int) -> None:
        """Waits until a plan has ended, in any way, or `close` was called."""
        with self._lock:
            self._waiting += 1
            self._changed.wait_for(lambda: self.has_ended(seq) or self._closed)
            self._waiting -= 1

    def end(self, seq: int) -> bool:
        """Notes that a plan has ended, in any way; returns whether it was aborted before."""
        with self._lock:
            self._running.discard(seq)
            was_aborted = self.aborted.pop(seq, None) is not None
            if seq > self._settled:
                self._ended.add(seq)
            if self._waiting:
                self._changed.notify_all()
            later = self._later.pop(seq, ()) if self._later else ()
        for go in later:
            threads.survives(go)
        return was_aborted

    def abort(self, seq: int, reason: str) -> bool:
        """Notes that a plan is aborted. Returns True, without effect, if the plan has ended."""
        with self._lock:
            if self.has_ended(seq):
                return True
            self.aborted[seq] = reason
            return False

    def close(self, reason: str) -> tuple[int, ...]:
        """Aborts all plans, also later ones. Returns the running plans, which the caller has to wake."""
        with self._lock:
            self._closed = reason
            self._later.clear()
            self.aborted.update(dict.fromkeys(self._running, reason))
            self._changed.notify_all()
            return tuple(sorted(self._running))

    def reason(self, seq: int) -> str | None:
        """The reason of a plan's abort; None if it is not aborted."""
        return self.aborted.get(seq) or self._closed or None

    @property
    def last(self) -> int:
        """The latest ended plan; 0: none."""
        with self._lock:
            return max(self._ended, default=self._settled)

    def has_ended(self, seq: int) -> bool:
        """Whether a plan has ended here, in any way; plans before one that has begun have ended."""
        return seq in self._ended or seq <= self._settled  # in this order: numbers move from the set to `_settled`

    def running(self) -> tuple[int, ...]:
        """The running plans."""
        with self._lock:
            return tuple(sorted(self._running))

    def settle(self, timeout_s: float) -> bool:
        """Waits until the running plans have ended; False on a timeout."""
        with self._lock:
            under_way = set(self._running)
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: not under_way & self._running, timeout_s)
            finally:
                self._waiting -= 1
