"""Which plans this participant has ended, so that each starts after its predecessor (P2). Pure but for one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from raycollect.observe.recorder import Event
from raycollect.observe.trace import Tracer

__all__ = ["ARRIVALS", "Ledger", "arrivals"]

ARRIVALS = 64
"""At how many doors one is said to have been: more than the plans of most captured steps."""

_EARLIER = "earlier plans"
"""What a timeline says that a plan waits for."""

_DOORS = ("door", "again")
"""How the story calls it when one comes to a door."""


def arrivals(story: Iterable[Event], now_s: float) -> dict[int, float]:
    """The last doors that one came to, by the launch, and how many seconds ago.

    Args:
        story: What happened, oldest first.
        now_s: The time, by the recorder's clock.
    """
    found: dict[int, float] = {}
    for event in story:
        if event.what in _DOORS:
            found.pop(event.seq, None)  # so that the last ones stand last
            found[event.seq] = max(now_s - event.at_s, 0.0)
    return dict(list(found.items())[-ARRIVALS:])


class Ledger:
    """The plans of one controller on one participant. Any thread may call it.

    Plans carry increasing numbers, and each names the one before it on this participant. One that was aborted before it
    came is a tombstone: it takes its turn like any other, and does nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # how many wait for a change
        self._later: dict[int, list[Callable[[], object]]] = {}  # predecessor -> what goes on after it
        self._came: dict[int, float] = {}  # when those came, where a timeline is recorded
        self._settled = 0  # every plan up to here has ended
        self._ended: set[int] = set()
        self._running: set[int] = set()
        self._aborted: dict[int, str] = {}
        self._closed = ""

    def after(self, seq: int, predecessor: int, go: Callable[[], object]) -> None:
        """Lets a plan go on once its predecessor has ended, which keeps no thread waiting for that.

        Args:
            seq: The plan.
            predecessor: The plan before it here.
            go: Leads to its `start`; never waits. It is not called where all is closed: nobody asks any more.
        """
        with self._lock:
            if self._closed:
                return
            if not self._has_ended(predecessor):
                self._later.setdefault(predecessor, []).append(go)
                ring = Tracer.current().ring
                if ring is not None:
                    self._came[seq] = ring.clock()
                return
        go()

    def start(self, seq: int, predecessor: int) -> str | None:
        """Waits for the predecessor's end, then notes that the plan runs; `end` must follow.

        Returns:
            None; or, for an aborted plan, the reason why it must not run.
        """
        with self._lock:
            if not self._has_ended(predecessor) and not self._closed:
                self._wait(seq, predecessor)
            if self._came:
                ring, came_s = Tracer.current().ring, self._came.pop(seq, None)
                if ring is not None and came_s is not None:
                    ring.waited(_EARLIER, came_s, seq)
            if self._closed:
                return self._closed
            self._settled = max(self._settled, predecessor)
            if self._ended:
                self._ended = {other for other in self._ended if other > self._settled}
            reason = self._aborted.get(seq)
            if reason is None:
                self._running.add(seq)
            return reason

    def _wait(self, seq: int, predecessor: int) -> None:
        """Waits for the predecessor's end, and notes that in the timeline, where one is recorded."""
        ring = Tracer.current().ring
        began_s = 0.0 if ring is None else ring.clock()
        while not self._has_ended(predecessor) and not self._closed:
            self._waiting += 1
            self._changed.wait()
            self._waiting -= 1
        if ring is not None:
            ring.waited(_EARLIER, began_s, seq)

    def end(self, seq: int) -> None:
        """Notes that a plan has ended, however."""
        with self._lock:
            self._running.discard(seq)
            self._aborted.pop(seq, None)
            if seq > self._settled:
                self._ended.add(seq)
            if self._waiting:
                self._changed.notify_all()
            later = self._later.pop(seq, ()) if self._later else ()
        for go in later:
            go()

    def abort(self, seq: int, reason: str) -> bool:
        """Notes that a plan is aborted; one that has ended stays as it is.

        Returns:
            True where it has ended already.
        """
        with self._lock:
            if self._has_ended(seq):
                return True
            self._aborted[seq] = reason
            return False

    def close(self, reason: str) -> tuple[int, ...]:
        """Aborts all plans, those that will come included.

        Returns:
            The plans that run now and have to be woken.
        """
        with self._lock:
            self._closed = reason
            self._later.clear()
            self._aborted.update(dict.fromkeys(self._running, reason))
            self._changed.notify_all()
            return tuple(sorted(self._running))

    def reason(self, seq: int) -> str | None:
        """Why a plan was aborted; None where it was not."""
        return self._aborted.get(seq)

    @property
    def last(self) -> int:
        """The latest plan that has ended; 0: none."""
        with self._lock:
            return max(self._ended, default=self._settled)

    def has_ended(self, seq: int) -> bool:
        """Whether a plan has ended here, however; all before one that has begun have."""
        with self._lock:
            return self._has_ended(seq)

    def running(self) -> tuple[int, ...]:
        """The plans that run now."""
        with self._lock:
            return tuple(sorted(self._running))

    def settle(self, timeout_s: float) -> bool:
        """Waits until the plans that run now have ended; False where they have not in time."""
        with self._lock:
            under_way = set(self._running)
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: not under_way & self._running, timeout_s)
            finally:
                self._waiting -= 1

    def _has_ended(self, seq: int) -> bool:
        return seq <= self._settled or seq in self._ended
