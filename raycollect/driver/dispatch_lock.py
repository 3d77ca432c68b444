"""The lock that is held while a plan, or a run, is numbered and sent to all its participants (P2)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident

from raycollect.core import threads
from raycollect.core.signals import Deferred, waiting
from raycollect.errors import ReentrantCallError


class DispatchLock:
    """A lock under which no signal handler runs: what is sent under it is sent to all, or to nobody.

    Nobody waits under it. A thread that has it may be asked for more: the garbage collector may run a finalizer in it.
    So what must happen under the lock, and need not happen at once, is for `soon`; all else is refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._deferred = Deferred()
        self._due: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        me = get_ident()
        if self._owner == me:
            raise ReentrantCallError(detail="a finalizer makes a call, in the middle of another call of its thread")
        deferred = Deferred()
        deferred.__enter__()
        try:
            if not self._lock.acquire(blocking=False):
                waiting(partial(self._lock.acquire, True))
        except BaseException:  # of a signal's handler
            deferred.__exit__()
            raise
        self._owner, self._deferred = me, deferred

    def __exit__(self, *exc: object) -> None:
        deferred, self._owner = self._deferred, 0
        self._lock.release()
        if self._due:
            self._make_due_calls()
        deferred.__exit__()

    def soon(self, call: Callable[[], object]) -> None:
        """Makes a call under the lock: now, or right after whoever has it. Never waits, and raises nothing."""
        self._due.append(call)
        with Deferred():
            self._make_due_calls()

    def _make_due_calls(self) -> None:
        while self._due and self._lock.acquire(blocking=False):  # else whoever has it looks at them afterwards
            self._owner = get_ident()
            try:
                while self._due:
                    threads.survives(self._due.popleft())
            finally:
                self._owner = 0
                self._lock.release()
