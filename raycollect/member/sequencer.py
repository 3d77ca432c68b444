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
"""How many agreements are told: more than the plans of most captured steps."""

_EARLIER = "earlier plans"
"""What a plan waits for, in timelines."""


def arrivals(story: Iterable[Event], now_s: float) -> dict[int, float]:
    """The last launches whose agreement this rank came to, and how many seconds ago that was."""
    found: dict[int, float] = {}
    for event in story:
        if event.what == "check":
            found.pop(event.seq, None)  # so that the last ones stand last
            found[event.seq] = max(now_s - event.at_s, 0.0)
    return dict(list(found.items())[-ARRIVALS:])


class PlanSequencer:
    """Any thread may call it.

    Plans have increasing numbers, and each names the one before it on this participant. A plan that was aborted before
    it came keeps its place in the order and does nothing.

    Args:
        tracer: Whether waits are recorded.

    Attributes:
        begun: The latest plan that has begun here.
        aborted: Why plans are aborted that have not ended. Of one that has begun it tells all that `reason` does.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or Tracer()
        self.begun: int = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # how many wait for a change
        self._later: dict[int, list[Callable[[], object]]] = {}  # predecessor -> what goes on after it
        self._came: dict[int, float] = {}  # when those came, where a timeline is recorded
        self._settled = 0  # every plan up to here has ended
        self._ended: set[int] = set()
        self._running: set[int] = set()
        self.aborted: dict[int, str] = {}
        self._closed = ""

    def after(self, seq: int, predecessor: int, go: Callable[[], object]) -> None:
        """Calls `go` once a plan's predecessor has ended, so that no thread has to wait; never after `close`.

        It leads to the plan's `start`, and never waits.
        """
        with self._lock:
            ring = self._tracer.ring
            if ring is not None and not self.has_ended(predecessor):
                self._came[seq] = ring.clock()
        self.when_ended((predecessor,), go)

    def when_ended(self, seqs: Iterable[int], go: Callable[[], object]) -> None:
        """Calls back once plans have ended: now, or in the thread of the last one; never after `close`."""
        with self._lock:
            if self._closed:
                return
            left = {seq for seq in seqs if not self.has_ended(seq)}
            for seq in left:
                self._later.setdefault(seq, []).append(partial(self._one_less, left, seq, go))
        if not left:
            go()

    def _one_less(self, left: set[int], seq: int, go: Callable[[], object]) -> None:
        with self._lock:
            left.discard(seq)
            if left:
                return
        go()

    def start(self, seq: int, predecessor: int) -> str | None:
        """Waits for the predecessor's end. Returns why the plan must not run, or None; `end` must follow."""
        with self._lock:
            if predecessor > self._settled and predecessor not in self._ended and not self._closed:
                self._wait(seq, predecessor)
            if self._came:
                ring, came_s = self._tracer.ring, self._came.pop(seq, None)
                if ring is not None and came_s is not None:
                    ring.waited(_EARLIER, came_s, seq)
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
        run_steps.here().at = "waits for the one before it"
        while not self.has_ended(predecessor) and not self._closed:
            self._waiting += 1
            self._changed.wait()
            self._waiting -= 1
        if ring is not None:
            ring.waited(_EARLIER, began_s, seq)

    def wait(self, seq: int) -> None:
        """Waits until a plan has ended, however, or `close` was called."""
        with self._lock:
            self._waiting += 1
            self._changed.wait_for(lambda: self.has_ended(seq) or self._closed)
            self._waiting -= 1

    def end(self, seq: int) -> bool:
        """Notes that a plan has ended, however; returns whether it was aborted before."""
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
        """Notes that a plan is aborted. Returns True if it has ended already, which changes nothing."""
        with self._lock:
            if self.has_ended(seq):
                return True
            self.aborted[seq] = reason
            return False

    def close(self, reason: str) -> tuple[int, ...]:
        """Aborts all plans, also those that will come. Returns the plans that run now and have to be woken."""
        with self._lock:
            self._closed = reason
            self._later.clear()
            self.aborted.update(dict.fromkeys(self._running, reason))
            self._changed.notify_all()
            return tuple(sorted(self._running))

    def reason(self, seq: int) -> str | None:
        """Why a plan was aborted; None if it was not."""
        return self.aborted.get(seq) or self._closed or None

    @property
    def last(self) -> int:
        """The latest plan that has ended; 0: none."""
        with self._lock:
            return max(self._ended, default=self._settled)

    def has_ended(self, seq: int) -> bool:
        """Whether a plan has ended here, however; all before a plan that has begun have."""
        return seq in self._ended or seq <= self._settled  # in this order: it may go from the one to the other

    def running(self) -> tuple[int, ...]:
        """The plans that run now."""
        with self._lock:
            return tuple(sorted(self._running))

    def settle(self, timeout_s: float) -> bool:
        """Waits until the plans that run now have ended; False if they have not in time."""
        with self._lock:
            under_way = set(self._running)
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: not under_way & self._running, timeout_s)
            finally:
                self._waiting -= 1
