"""Tells the hub of long waits: a thread that watches them, and sleeps while nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raycollect.core import threads

__all__ = ["WAIT_S", "WaitMonitor"]

WAIT_S = 0.5
"""How long a wait lasts before it is told: long for a collective, short for a person."""


class WaitMonitor:
    """The waits of a process. Any thread may call it.

    Only waits of the main thread count: an actor runs its methods there one by one, so that a wait holds up all others.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._now: _Wait | None = None
        self._idle = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, tell: Callable[[], None], clear: Callable[[], None]) -> Iterator[None]:
        """Around what may wait: `tell` is called in the monitor's thread if it lasts, and then `clear` at its end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wait = _Wait(tell)
        with self._changed:
            outer, self._now = self._now, wait
            if self._thread is None:
                threads.survives(self._begin)  # without it the call goes on, and the hub does not hear of the wait
            elif self._idle:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._now = outer
                told = wait.told
            if told:
                threads.survives(clear)

    def _begin(self) -> None:
        self._thread = threads.start("raycollect-watch", threads.repeat, self._look)

    def _look(self) -> bool:
        with self._changed:
            while self._now is None:
                self._idle = True
                self._changed.wait()
            self._idle = False
            wait = self._now
            self._changed.wait(self._wait_s)
            # Other waits may have come and gone meanwhile: only one that is still here has lasted.
            if wait is self._now and not wait.told:
                wait.told = True
                wait.tell()  # a send that never waits; under the lock, so that `clear` comes after it
        return True


class _Wait:
    __slots__ = ("tell", "told")

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell = tell
        self.told = False
