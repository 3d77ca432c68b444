"""The lock that keeps plans and runs of captured steps apart from the methods that Ray calls.

A method may run for any time, on behalf of any process. A plan or run that waits for its end can still be aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from raycollect.errors import PlanAbortedError
from raycollect.observe import Tracer, run_steps

_LOOK_S = 0.1
"""How often a plan or run that waits for a method looks whether it was aborted, in seconds."""


class Held:
    """Around a plan, which has the lock; the arguments and errors are those of `acquire`."""

    __slots__ = ("_aborted", "_lock", "_seq")

    def __init__(self, lock: threading.Lock, seq: int, aborted: Callable[[], str | None]) -> None:
        self._lock, self._seq, self._aborted = lock, seq, aborted

    def __enter__(self) -> None:
        acquire(self._lock, self._seq, self._aborted)

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def acquire(lock: threading.Lock, seq: int, aborted: Callable[[], str | None]) -> None:
    """Acquires the lock for a plan or run.

    Args:
        lock: The lock; the caller releases it.
        seq: The number of the plan or run.
        aborted: Why it was aborted, or None.

    Raises:
        PlanAbortedError: It was aborted while a method ran.
    """
    if lock.acquire(blocking=False):
        return
    ring = Tracer.current().ring
    began_s = 0.0 if ring is None else ring.clock()
    run_steps.here().at = "waits for a method to end"
    while not lock.acquire(timeout=_LOOK_S):
        reason = aborted()
        if reason:
            raise PlanAbortedError(detail=reason)
    if ring is not None:
        ring.waited("a method", began_s, seq)
