"""Tells the hub of long waits: a thread that watches them, and sleeps while nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from raycollect.core import threads

WAIT_S = 0.5
"""How long a wait lasts before it is told: long for a collective, short for a person."""


class WaitMonitor:
    """The waits of a process. Any thread may call it.

    Only waits that hold up an actor's methods count: those of the main thread, which runs them one by one, and those of
    plans that hold the method lock.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._now: list[_Wait] = []
        self._idle = False
        self._thread: threading.Thread | None = None

    def waiting(
        self, tell: Callable[[], None], clear: Callable[[], None], *, holds_up: bool = False
    ) -> AbstractContextManager[None]:
        """Around what may wait: `tell` is called in the monitor's thread if it lasts, and then `clear` at its end.

        `holds_up`: it does hold up the methods, though it is in another thread.
        """
        if not holds_up and threading.current_thread() is not threading.main_thread():
            return _NOT_WATCHED
        return _Wait(self, tell, clear)

    def _begin(self) -> None:
        self._thread = threads.start("raycollect-watch", threads.repeat, self._look)

    def _look(self) -> bool:
        with self._changed:
            while not self._now:
                self._idle = True
                self._changed.wait()
            self._idle = False
            wait = self._now[-1]
            self._changed.wait(self._wait_s)
            # Other waits may have come and gone meanwhile: only one that is still here has lasted.
            if wait in self._now[-1:] and not wait.told:
                wait.told = True
                wait.tell()  # a send that never waits; under the lock, so that `clear` comes after it
        return True


@dataclass(slots=True, eq=False)
class _Wait:
    _monitor: WaitMonitor
    tell: Callable[[], None]
    _clear: Callable[[], None]
    told: bool = False

    def __enter__(self) -> None:
        monitor = self._monitor
        with monitor._changed:
            monitor._now.append(self)
            if monitor._thread is None:
                threads.survives(monitor._begin)  # without it the call goes on, and the hub does not hear of the wait
            elif monitor._idle:
                monitor._changed.notify()

    def __exit__(self, *exc: object) -> None:
        monitor = self._monitor
        with monitor._changed:
            monitor._now.remove(self)
        if self.told:
            threads.survives(self._clear)


_NOT_WATCHED: AbstractContextManager[None] = nullcontext()
