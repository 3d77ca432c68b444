"""Tells the hub of long waits; a timer looks at them while somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from raycollect.core import threads, timers

WAIT_S = 0.5
"""How long a wait lasts before it is told: long for a collective, short for a person."""


class WaitMonitor:
    """The waits of a process. Any thread may call it.

    Only waits that hold up an actor's methods count: those of the main thread, which runs them one by one, and those of
    plans that hold the method lock.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._now: list[_Wait] = []
        self._seen: _Wait | None = None  # the last of them, when they were last looked at
        self._is_watched = False  # whether somebody will look

    def waiting(
        self, tell: Callable[[], None], clear: Callable[[], None], *, holds_up: bool = False
    ) -> AbstractContextManager[None]:
        """Around what may wait: `tell` is called in the timer's thread if it lasts, and then `clear` at its end.

        `holds_up`: it does hold up the methods, though it is in another thread.
        """
        if not holds_up and threading.current_thread() is not threading.main_thread():
            return _NOT_WATCHED
        return _Wait(self, tell, clear)

    def _watch(self) -> None:
        timers.later(self._wait_s, self._look)

    def _look(self) -> None:
        with self._lock:
            before, wait = self._seen, self._now[-1] if self._now else None
            self._seen = wait
            self._is_watched = wait is not None and threads.survives(self._watch)
            # Other waits may have come and gone meanwhile: only one that was here before has lasted.
            if wait is not None and wait is before and not wait.told:
                wait.told = True
                wait.tell()  # a send that never waits; under the lock, so that `clear` comes after it


@dataclass(slots=True, eq=False)
class _Wait:
    _monitor: WaitMonitor
    tell: Callable[[], None]
    _clear: Callable[[], None]
    told: bool = False

    def __enter__(self) -> None:
        monitor = self._monitor
        with monitor._lock:
            monitor._now.append(self)
            if not monitor._is_watched:
                monitor._seen = self
                # Without it the call goes on, and the hub does not hear of the wait.
                monitor._is_watched = threads.survives(monitor._watch)

    def __exit__(self, *exc: object) -> None:
        monitor = self._monitor
        with monitor._lock:
            monitor._now.remove(self)
        if self.told:
            threads.survives(self._clear)


_NOT_WATCHED: AbstractContextManager[None] = nullcontext()
