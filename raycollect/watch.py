"""Tells the hub of waits that last: a thread that only looks at what others wait in, and sleeps while nobody does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["WAIT_S", "Watch"]

WAIT_S = 0.5
"""From when on a wait is told of: long for a collective, short for a person."""


class Watch:
    """The waits of a process. Any thread may call it.

    Only waits of the main thread count: there an actor runs its methods one by one, so that nothing else can come about
    while one waits.

    Args:
        wait_s: See `WAIT_S`.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._now: _Wait | None = None
        self._idle = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, tell: Callable[[], None], clear: Callable[[], None]) -> Iterator[None]:
        """Around what may wait.

        Args:
            tell: Called, on the watch's thread, when it has lasted.
            clear: Called at its end, if it was told of.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wait = _Wait(tell)
        with self._changed:
            outer, self._now = self._now, wait
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="raycollect-watch", daemon=True)
                self._thread.start()
            elif self._idle:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._now = outer
                told = wait.told
            if told:
                clear()

    def _look(self) -> None:
        while True:
            with self._changed:
                while self._now is None:
                    self._idle = True
                    self._changed.wait()
                self._idle = False
                wait = self._now
                self._changed.wait(self._wait_s)
                # Another wait may have come, and gone, meanwhile: only one that is here still has lasted.
                if wait is self._now and not wait.told:
                    wait.told = True
                    wait.tell()  # a send that never waits; under the lock, so that `clear` comes after it


class _Wait:
    """One wait."""

    __slots__ = ("tell", "told")

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell = tell
        self.told = False
