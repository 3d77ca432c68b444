"""Tells the coordinator of long waits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from raycollect.core import threads
from raycollect.core.timers import Watcher

WAIT_S = 0.5
"""How long a wait lasts before it is told: long for a collective, short for a person."""

TOLD_AFTER = (1, 10)
"""After how many times `WAIT_S` it is told: the second time, whoever is awaited had the time to begin a method."""


class WaitMonitor(Watcher):
    """The waits of a process. Any thread may call it.

    Only waits that hold up an actor's methods count: those of the main thread, which runs them one by one, and those of
    plans that hold the method lock.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        super().__init__()
        self.wait_s = wait_s
        self._lock = threading.Lock()
        self._now: list[_Wait] = []
        self._seen: _Wait | None = None  # the last of them, when they were last looked at

    def waiting(
        self, tell: Callable[[bool], None], clear: Callable[[], None], *, holds_up: bool = False
    ) -> AbstractContextManager[None]:
        """Around what may wait: `tell` is called in the timer's thread if it lasts, and then `clear` at its end.

        `tell` is called as often as `TOLD_AFTER` says, and learns whether it is the last time. `holds_up`: the wait
        holds up the methods, though it is in another thread.
        """
        if not holds_up and threading.current_thread() is not threading.main_thread():
            return _NOT_WATCHED
        return _Wait(self, tell, clear)

    def look(self) -> float:
        """Tells of the last wait, if it was here at the last look."""
        with self._lock:
            before, wait = self._seen, self._now[-1] if self._now else None
            self._seen = wait
            # Other waits may have come and gone meanwhile: only one that was here before has lasted.
            if wait is not None and wait is before:
                wait.looks += 1
                if wait.looks in TOLD_AFTER:  # a send that never waits; under the lock, so that `clear` comes after it
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
                # Without a thread the call goes on, and the coordinator does not hear of the wait.
                threads.survives(monitor.look_after, monitor.wait_s, place="watching a wait")

    def __exit__(self, *exc: object) -> None:
        monitor = self._monitor
        with monitor._lock:
            monitor._now.remove(self)
        if self.looks:
            threads.survives(self._clear)


_NOT_WATCHED: AbstractContextManager[None] = nullcontext()
