"""The methods of an actor that Ray calls, as far as plans and runs of captured steps have to keep clear of them.

A method may run for any time, on behalf of any process. A plan or run that waits for its end can still be aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from raycollect.errors import PlanAbortedError, RaycollectError, Violation, anew, refusal
from raycollect.member.finished_calls import FinishedCalls
from raycollect.observe import Tracer, run_steps

_LOOK_S = 0.1
"""How often a plan or run that waits for a method looks whether it was aborted, in seconds."""

_OVERLAP: AbstractContextManager[None] = nullcontext()


class Methods:
    """The methods of this actor. Any thread may call it.

    Args:
        actor: What a person calls the actor.
        tracer: Whether waits are recorded.

    Attributes:
        is_ordered: Whether they come one by one; known when the actor is described to a controller.
        lock: If they come one by one, held by a method that Ray calls, or by what must not run beside one.
        finished_calls: Those that have ended.
        refusals: Why methods can't run now, by what says so.
    """

    def __init__(self, actor: str = "", tracer: Tracer | None = None) -> None:
        self.is_ordered: bool = False
        self.lock: threading.Lock = threading.Lock()
        self.finished_calls: FinishedCalls = FinishedCalls()
        self.refusals: dict[object, RaycollectError] = {}
        self._actor = actor
        self._tracer = tracer or Tracer()
        self._thread = 0  # in which Ray runs them, if they come one by one

    def described(self, *, is_ordered: bool) -> None:
        """Notes whether they come one by one, which is then in the calling thread."""
        self.is_ordered = is_ordered
        self._thread = threading.get_ident()

    def guard(self) -> AbstractContextManager[Any]:
        """What a method that Ray calls holds while it runs."""
        return self.lock if self.is_ordered else _OVERLAP

    def may_begin(self, called_by_ray: str = "") -> None:
        """Raises what keeps the methods of this actor, or that method which Ray calls, from running.

        Ray does not tell whether an actor with tensor transport has concurrency groups of its own. If no method of the
        class names one, a call with ``.options(concurrency_group=...)`` shows it, too late for what was ordered before.
        """
        if self.refusals:
            raise anew(next(iter(self.refusals.values())))
        if called_by_ray and self.is_ordered and threading.get_ident() != self._thread:
            expected = f"@ray.method(concurrency_group=...) at {called_by_ray!r}: then the actor is not ordered"
            found = f"{called_by_ray!r} in a concurrency group that only its caller names"
            wrong = Violation(kind="unsupported", field="method", found=found, expected=expected, actor=self._actor)
            raise refusal(called_by_ray, "", (wrong,))

    def note_end(self, task: bytes, *, is_over: bool) -> None:
        """`FinishedCalls.note`, where plans may wait for it."""
        if self.is_ordered:
            self.finished_calls.note(task, is_over=is_over)

    def without(self, seq: int, aborted: Callable[[], str | None]) -> AbstractContextManager[None]:
        """Around a plan, beside which no method may run; the arguments and errors are those of `keep_out`."""
        return _Without(self, seq, aborted)

    def keep_out(self, seq: int, aborted: Callable[[], str | None]) -> None:
        """Acquires the lock for a plan or run; the caller releases it.

        Args:
            seq: The number of the plan or run.
            aborted: Why it was aborted, or None.

        Raises:
            PlanAbortedError: It was aborted while a method ran.
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
