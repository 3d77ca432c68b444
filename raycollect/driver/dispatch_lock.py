"""The lock that is held while a plan, or a run, is numbered and sent to all its participants (P2).

One rule for what interrupts a call of the driver: whatever calls share is changed inside `Deferred`, in which no signal
handler runs, so that an exception of a handler is raised before or after the change. Nothing else is guarded. Waits in
such a block use `waiting` or `Allowed`. Finalizers run anywhere: where one can't wait, in `Inside` and under the lock,
its call is refused.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from threading import get_ident
from typing import Any

from raycollect.core import threads
from raycollect.core.signals import Deferred, waiting
from raycollect.errors import ReentrantCallError

INSIDE: set[int] = set()
"""The threads that hold, or wait for, a lock under which no call may wait for a plan."""


class Inside(Deferred):
    """A block in which no signal handler runs, and a finalizer makes no call that waits."""

    __slots__ = ("_me",)

    def __enter__(self) -> None:
        Deferred.__enter__(self)
        me = get_ident()
        self._me = 0 if me in INSIDE else me
        INSIDE.add(me)

    def __exit__(self, *exc: object) -> None:
        if self._me:
            INSIDE.discard(self._me)
        Deferred.__exit__(self)


def answered(futures: Iterable[Future[Any] | None], timeout_s: float) -> set[Future[Any]]:
    """Waits for answers of participants; returns those that have arrived in time.

    `concurrent.futures.wait` holds locks of the futures, for which the hub's thread waits: neither a signal nor a
    finalizer may keep it from releasing them.
    """
    pending = [future for future in futures if future is not None]
    with Inside():
        waiting(lambda seconds: not wait(pending, seconds).not_done, timeout_s)
    return {future for future in pending if future.done()}


class DispatchLock:
    """A lock that is entered inside of `Deferred`: a plan under it is sent to all participants, or to none.

    No thread waits under it. The garbage collector may run a finalizer in a thread that holds it.
    A finalizer's change that needs the lock, and may happen later, is for `soon`; all its other calls are refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        me = get_ident()
        if me in INSIDE:
            self.refuse_inside()
        INSIDE.add(me)  # first: a finalizer may run at any later step
        if not self._lock.acquire(False):
            try:
                waiting(partial(self._lock.acquire, True))
            except BaseException:  # of a signal handler
                INSIDE.discard(me)
                raise

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        INSIDE.discard(get_ident())
        if self._due:
            self._make_due_calls()

    def refuse_inside(self) -> None:
        """Raises ReentrantCallError in a thread that holds the lock, or waits for it: it can't wait for a plan."""
        if get_ident() in INSIDE:
            detail = "a finalizer, or a signal handler, makes a call in the middle of another call of its thread"
            raise ReentrantCallError(detail=detail)

    def soon(self, call: Callable[[], object]) -> None:
        """Makes a call under the lock: now, or when its holder releases it. Never waits, and raises nothing."""
        self._due.append(call)
        with Deferred():
            self._make_due_calls()

    def _make_due_calls(self) -> None:
        me = get_ident()
        is_nested = me in INSIDE
        while self._due:
            INSIDE.add(me)
            try:
                if not self._lock.acquire(blocking=False):  # its holder makes the due calls when it releases the lock
                    return
                try:
                    while self._due:
                        threads.survives(self._due.popleft())
                finally:
                    self._lock.release()
            finally:
                if not is_nested:
                    INSIDE.discard(me)
