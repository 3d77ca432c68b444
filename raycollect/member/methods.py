"""The methods of an actor that Ray calls, and their mutual exclusion with plans and runs of captured steps.

A method of any caller may run for any time. A plan or run that waits for the method's end can still be aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from raycollect.errors import PlanAbortedError, RaycollectError, Violation, copy_error, refusal
from raycollect.observe import Tracer, run_steps

KEPT = 4096
"""How many ended calls are remembered. A plan that waits for an older call asks the controller (`Behind`)."""

_LOOK_S = 0.1
"""How often a plan or run that waits for a method checks for an abort, in seconds."""

_OVERLAP: AbstractContextManager[None] = nullcontext()


class Methods:
    """The methods of this actor. Any thread may call it.

    Args:
        actor: The name of the actor for a person.
        tracer: Whether waits are recorded.

    Attributes:
        is_ordered: Whether methods run one by one; set when the actor is described to a controller.
        lock: If methods run one by one, held by a method that Ray calls, or by a plan or run that excludes methods.
        refusals: The errors that keep methods from running, by the object that set them.
    """

    def __init__(self, actor: str = "", tracer: Tracer | None = None) -> None:
        self.is_ordered: bool = False
        self.lock: threading.Lock = threading.Lock()
        self.refusals: dict[object, RaycollectError] = {}
        self._actor = actor
        self._tracer = tracer or Tracer()
        self._thread = 0  # the thread of the methods, if they run one by one
        self._noting = threading.Lock()  # also a plan's thread notes ends of calls
        self._ended: dict[bytes, bool] = {}  # task -> whether Ray needs nothing more of the call
        self._changed = threading.Condition()
        self._waiting = 0

    def described(self, *, is_ordered: bool) -> None:
        """Sets whether methods run one by one, and then always in the calling thread."""
        self.is_ordered = is_ordered
        self._thread = threading.get_ident()

    def guard(self) -> AbstractContextManager[Any]:
        """The context of a method that Ray calls."""
        return self.lock if self.is_ordered else _OVERLAP

    def may_begin(self, called_by_ray: str = "") -> None:
        """Raises the error that keeps methods from running, or the given method that Ray calls.

        Ray does not expose the concurrency groups of an actor with tensor transport. If no method of the class names a
        group, only a call with ``.options(concurrency_group=...)`` reveals it, too late for earlier plans.
        """
        if self.refusals:
            raise copy_error(next(iter(self.refusals.values())))
        if called_by_ray and self.is_ordered and threading.get_ident() != self._thread:
            expected = f"@ray.method(concurrency_group=...) at {called_by_ray!r}: then the actor is not ordered"
            actual = f"{called_by_ray!r} in a concurrency group that only its caller names"
            wrong = Violation(kind="unsupported", field="method", found=actual, expected=expected, actor=self._actor)
            raise refusal(called_by_ray, "", (wrong,))

    # ------------------------------------------------------------------------------------------ their ends

    def note_end(self, task: bytes, *, is_over: bool) -> None:
        """Calls `note` if plans wait for methods (P2)."""
        if self.is_ordered:
            self.note(task, is_over=is_over)

    def note(self, task: bytes, *, is_over: bool) -> None:
        """Notes the end of a method; `is_over`: Ray needs no tensor any more to return the result."""
        ended = self._ended
        with self._noting:
            ended[task] = is_over
            if len(ended) > KEPT:
                del ended[next(iter(ended))]
        if self._waiting:
            self.wake()

    def is_over(self, task: bytes) -> bool | None:
        """`is_over` of a call, as noted; None: the call has not ended."""
        return self._ended.get(task)

    def wake(self) -> None:
        """Makes all waits check their condition again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, is_met: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits for a condition on the state of this object; False on a timeout."""
        with self._changed:
            self._waiting += 1
            try:
                return self._changed.wait_for(is_met, timeout_s)
            finally:
                self._waiting -= 1

    # ------------------------------------------------------------------------------------------ mutual exclusion

    def without(self, seq: int, aborted: Callable[[], str | None]) -> AbstractContextManager[None]:
        """A context that excludes methods; the arguments and errors are those of `keep_out`."""
        return _Without(self, seq, aborted)

    def keep_out(self, seq: int, aborted: Callable[[], str | None]) -> None:
        """Acquires the lock for a plan or run; the caller releases it.

        Args:
            seq: The number of the plan or run.
            aborted: Returns the reason of an abort, or None.

        Raises:
            PlanAbortedError: The plan or run was aborted while a method ran.
        """
        lock = self.lock
        if lock.acquire(blocking=False):
            return
        ring = self._tracer.ring
        began_s = 0.0 if ring is None else ring.clock()
        run_steps.here().at = "waits for a method to end"
        while not lock.acquire(timeout=_LOOK_S):
            reason = aborted()
            if reason:
                raise PlanAbortedError(detail=reason)
        if ring is not None:
            ring.waited("a method", began_s, seq)


class _Without:
    __slots__ = ("_aborted", "_methods", "_seq")

    def __init__(self, methods: Methods, seq: int, aborted: Callable[[], str | None]) -> None:
        self._methods, self._seq, self._aborted = methods, seq, aborted

    def __enter__(self) -> None:
        self._methods.keep_out(self._seq, self._aborted)

    def __exit__(self, *exc: object) -> None:
        self._methods.lock.release()
