"""Reports long waits to the coordinator."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from raycollect.core import threads
from raycollect.core.timers import Watcher

WAIT_S = 0.5
"""How long a wait lasts before it is reported, in seconds: long for a collective, short for a person."""

TOLD_AFTER = (1, 10)
"""After how many times `WAIT_S` a wait is reported; by the second, the awaited rank may have begun a method."""


class WaitMonitor(Watcher):
    """The waits of a process. Any thread may call it.

    Only waits that block an actor's methods count: of the main thread, which runs methods one by one, and of plans
    that hold the method lock.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        super().__init__()
        self.wait_s = wait_s
        self._lock = threading.Lock()
        self._now: list[_Wait] = []
        self._seen: _Wait | None = None  # the newest wait at the last look

    def waiting(
        self, tell: Callable[[bool], None], clear: Callable[[], None], *, holds_up: bool = False
    ) -> AbstractContextManager[None]:
        """A context around a wait: if it lasts, `tell` is called in the timer's thread, and `clear` at the end.

        `tell` is called as often as `TOLD_AFTER` specifies; its argument is True the last time. `holds_up`: the wait
        blocks methods, though it is in another thread.
        """
        if not holds_up and threading.current_thread() is not threading.main_thread():
            return _NOT_WATCHED
        return _Wait(self, tell, clear)

    def look(self) -> float:
        """Reports the newest wait, if it was also the newest at the last look."""
        with self._lock:
            before, wait = self._seen, self._now[-1] if self._now else None
            self._seen = wait
            # Other waits may have begun and ended meanwhile: only a wait that was seen before has lasted.
            if wait is not None and wait is before:
                wait.looks += 1
                if wait.looks in TOLD_AFTER:  # never waits; under the lock, so that `clear` follows
                    threads.survives(wait.tell, wait.looks == TOLD_AFTER[-1])
        return math.inf if wait is None else self.wait_s


@dataclass(slots=True, eq=False)
class _Wait:
    _monitor: WaitMonitor
    tell: Callable[[bool], None]
    _clear: Callable[[], None]
    looks: int = 0

    def __enter__(self) -> None:
        monitor = self._monitor
        with monitor._lock:
            monitor._now.append(self)
            if monitor.timer is None:
                monitor._seen = self
                # If no thread can be started, the call continues, and the wait is not reported.
                threads.survives(monitor.look_after, monitor.wait_s, place="watching a wait")

    def __exit__(self, *exc: object) -> None:
        monitor = self._monitor
        with monitor._lock:
            monitor._now.remove(self)
        if self.looks:
            threads.survives(self._clear)


_NOT_WATCHED: AbstractContextManager[None] = nullcontext()
