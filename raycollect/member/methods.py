"""The methods of an actor that Ray calls, as far as plans and runs of captured steps have to keep clear of them.

A method may run for any time, on behalf of any process. A plan or run that waits for its end can still be aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from raycollect.errors import PlanAbortedError, RaycollectError, Violation, copy_error, refusal
from raycollect.observe import Tracer, run_steps

KEPT = 4096
"""How many ended calls are remembered. Who waits for an earlier one has to ask (`Behind`)."""

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
        refusals: Why methods can't run now, by what says so.
    """

    def __init__(self, actor: str = "", tracer: Tracer | None = None) -> None:
        self.is_ordered: bool = False
        self.lock: threading.Lock = threading.Lock()
        self.refusals: dict[object, RaycollectError] = {}
        self._actor = actor
        self._tracer = tracer or Tracer()
        self._thread = 0  # in which Ray runs them, if they come one by one
        self._noting = threading.Lock()  # a plan's thread notes what a fence has told, beside that of the methods
        self._ended: dict[bytes, bool] = {}  # by task: whether Ray needs nothing more of the call
        self._changed = threading.Condition()
        self._waiting = 0

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
            raise copy_error(next(iter(self.refusals.values())))
        if called_by_ray and self.is_ordered and threading.get_ident() != self._thread:
            expected = f"@ray.method(concurrency_group=...) at {called_by_ray!r}: then the actor is not ordered"
            found = f"{called_by_ray!r} in a concurrency group that only its caller names"
            wrong = Violation(kind="unsupported", field="method", found=found, expected=expected, actor=self._actor)
            raise refusal(called_by_ray, "", (wrong,))

    # ------------------------------------------------------------------------------------------ their ends

    def note_end(self, task: bytes, *, is_over: bool) -> None:
        """`note`, where plans wait for methods (P2)."""
        if self.is_ordered:
            self.note(task, is_over=is_over)

    def note(self, task: bytes, *, is_over: bool) -> None:
        """A method has ended; `is_over`: Ray does not read a tensor any more to tell its result."""
        ended = self._ended
        with self._noting:
            ended[task] = is_over
            if len(ended) > KEPT:
                del ended[next(iter(ended))]
        if self._waiting:
            self.wake()

    def is_over(self, task: bytes) -> bool | None:
        """What `note` was told of a call; None: nothing yet."""
        return self._ended.get(task)

    def wake(self) -> None:
        """Whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, is_met: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits until a condition is met, which depends on what is noted here; False: it was not in time."""
        with self._changed:
            self._waiting += 1
            try:
                return self._changed.wait_for(is_met, timeout_s)
            finally:
                self._waiting -= 1

    # ------------------------------------------------------------------------------------------ kept apart

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
