"""A collective, or a run of a captured step, under way, as its caller sees it."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import monotonic
from typing import Any, ClassVar

from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raycollect.backends import arrays
from raycollect.core import html, threads
from raycollect.core.bound_to_process import BoundToProcess
from raycollect.core.deadline import NEVER, Deadline
from raycollect.core.model import Key
from raycollect.core.signals import Deferred
from raycollect.driver import stall_report
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import Submission, send
from raycollect.driver.driver_rank import with_results
from raycollect.driver.plan_tracker import ABSENT, PlanTracker, retrieve_errors
from raycollect.driver.progress import Progress, ProgressProbe
from raycollect.errors import (
    CollectiveTimeoutError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    RetryError,
    Violation,
    copy_error,
    refusal,
    refuse,
    wrong_flags,
    wrong_wait,
)
from raycollect.errors.text import listed
from raycollect.planner.wording import counted, seconds_words
from raycollect.pos import unkept
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import direct_transport

MOST_NAMED = 8  # how many pending participants are named where a collective is shown


SHOWN_S = 0.5  # how long participants may take to report progress where a collective is shown, in seconds

LOOK_INTO_S = 5.0  # how long the values of all absent operands of a plan are waited for, in seconds

AWAKE_S = 0.1  # how often the loop of an await wakes, in seconds


class UnderWay(BoundToProcess, ABC):
    """A collective or run under way, and a way to wait for it: await it in a coroutine, or call `wait`.

    It may be dropped: the collective continues, and a failure is logged.
    """

    _KIND: ClassVar[str]  # its name in messages

    def __init__(self, controller: Controller, tracker: PlanTracker) -> None:
        self._controller = controller
        self._tracker = tracker
        self._is_heard = False  # whether the caller has got the outcome, or has cancelled
        self._began_s = monotonic()
        self._probe: ProgressProbe | None = None  # created on first use
        self._probing = threading.RLock()  # a finalizer may ask, too
        if tracker.deadline is not NEVER:
            controller.timeouts.watch(tracker)

    def progress(self, timeout_s: float = SHOWN_S) -> Progress:
        """Asks the participants for their progress; does not wait for the outcome.

        Args:
            timeout_s: How long they may take to answer, in seconds. A late participant counts as where it was last.

        Returns:
            The progress, in bytes; after the end, that of the last question.

        Raises:
            InvalidArgumentError: The time makes no sense.
        """
        refuse("progress", wrong_wait(timeout_s))
        with self._probing:
            if self._probe is None:
                self._probe = ProgressProbe(self._controller.participants, self._tracker, self._began_s)
            if not self._tracker.resolved:
                self._probe.ask()
            self._probe.hear(timeout_s)
            return self._probe.read()

    def done(self) -> bool:
        """True when the outcome is known; never waits, never raises."""
        tracker = self._tracker
        return tracker.resolved or (tracker.deadline.is_over and self._controller.timeouts.expire(tracker))

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> Any:
        """Waits for the outcome.

        Args:
            timeout_s: How long this call waits, in seconds; None: as long as its own limits allow.
            progress: Whether to show a progress bar on stderr if that lasts; None: inside `raycollect.progress` alone.

        Returns:
            The return value without ``async_op``: of a collective `refs`; of a run the values that the step
            returns, None where it returns none.

        Raises:
            InvalidArgumentError: An argument makes no sense.
            ProgressError: A progress bar is wanted, and tqdm is not installed.
            CollectiveTimeoutError: The outcome was not known in time; it goes on.
            RaycollectError: It failed; the error says where and why.
        """
        if timeout_s is not None or progress is not None:
            refuse("wait", [*wrong_wait(timeout_s), *wrong_flags(progress=progress)])
        tracker = self._tracker
        if not tracker.is_known:
            self._controller.plans.dispatching.refuse_inside()  # this thread may be sending the plan
        if not stall_report.wait(self._controller, tracker, timeout_s, progress=progress):
            over = CollectiveTimeoutError(
                op=tracker.plan.name,
                group_name=tracker.group_name,
                detail=f"this wait is over; the {self._KIND} goes on",
                timeout_s=timeout_s or 0.0,
            )
            if timeout_s is not None and timeout_s > 0:  # a poll does not wait for reports
                stall_report.explain_delay(self._controller, tracker, over, timeout_s)
            raise copy_error(over)
        self._is_heard = True
        if isinstance(tracker.error, CollectiveTimeoutError):
            stall_report.explain_delay(self._controller, tracker, tracker.error)
        return self._outcome()

    def cancel(self) -> bool:
        """Aborts it on all participants. With a run, later runs are aborted, too, and the step can't run any more.

        Does not wait. If all ranks of a collective arrived before the abort, tensors may hold the result.

        Returns:
            False where the outcome was known already, or all ranks are about to take their results (``snapshot=True``).
        """
        self._is_heard = True
        return abort(self._controller, self._tracker, "cancelled by its caller")

    @abstractmethod
    def _outcome(self) -> Any:
        """The return value of `wait`; raises the error of a failure."""

    @abstractmethod
    def __await__(self) -> Generator[Any, None, Any]: ...

    def __del__(self) -> None:
        if not getattr(self, "_is_heard", True):
            self._tracker.abandon()

    @property
    def _state(self) -> str:
        tracker = self._tracker
        if tracker.resolved:
            return "done" if tracker.error is None else type(tracker.error).__name__
        ended, count = self._ended(), len(tracker.plan.participants)
        far = f", {ended} of {count} have ended" if ended else ""  # the last one may report all
        return f"under way for {seconds_words(monotonic() - self._began_s)}{far}"

    def _ended(self) -> int:
        tracker = self._tracker
        return sum(not tracker.is_pending(at) for at in range(len(tracker.plan.participants)))

    def _far(self) -> Progress | None:
        try:
            far = self.progress()
        except Exception:  # noqa: BLE001 - its group was destroyed meanwhile: it is shown without progress
            return None
        return far if far.total_nbytes else None

    def _html(self, kind: str, title: str, *own: tuple[str, object]) -> html.Markup:
        tracker, count = self._tracker, len(self._tracker.plan.participants)
        state, is_known, error = self._state, tracker.resolved, tracker.error
        ended = count if is_known and error is None else self._ended()
        far = self._far()
        late = [tracker.member(at) for at in range(count) if ended and tracker.is_pending(at)]
        facts = [
            ("bytes", far or ""),
            ("ended", f"{ended} of {counted(count, 'participant')}" if ended or is_known else ""),
            ("not ended", listed((f"rank {member.rank} ({member.actor})" for member in late), most=MOST_NAMED)),
            *own,
            ("error", "" if error is None else html.failure(error)),
        ]
        if far is not None and not is_known:
            shown = html.bar(far.done_nbytes, far.total_nbytes)
        else:
            shown = html.bar(ended if ended or is_known else None, count)
        return html.block(kind, f"{title}: {state}", html.line(shown), html.pairs(facts))


class Work(UnderWay):
    """The return value of ``async_op=True``: the result refs at once, and a way to wait (`UnderWay`).

    Attributes:
        refs: The result: a list of refs in rank order, or the one ref of a send, reduce or gather; None for a barrier.
            For a batch: the list of all these. Usable at once: their users wait.
    """

    _KIND = "collective"
    _INSTEAD = "pass its `refs`: what uses them waits for it"

    def __init__(
        self, controller: Controller, tracker: PlanTracker, refs: Any, submission: Submission | None = None
    ) -> None:
        super().__init__(controller, tracker)
        self.refs: Any = refs
        # It holds the operands until the plan has succeeded (P5)
        sent = self._sent = [] if submission is None else [submission]

        def let_go() -> None:
            if tracker.error is None:
                sent.clear()

        if sent:
            tracker.when_resolved(let_go)

    def _outcome(self) -> Any:
        error = _explain(self._tracker)
        if error is not None:
            retrieve_errors(self._tracker.outputs.values())
            raise copy_error(error)
        self.refs = with_results(self.refs)
        return self.refs

    def retry(self) -> Work:
        """Runs the same collective, or batch, again after it has failed: with the same refs, on the same actors.

        A group that was broken is rebuilt first (`Group.rebuild`). The agreement before the launch refuses operands
        that the failed collective has half overwritten, with TensorDirtyError. Operands are whole after a refusal,
        after a rank that never arrived, and wherever results go elsewhere (``inplace=False``) or are written all at
        once (``snapshot=True``).

        Returns:
            The new attempt, with refs of its own where it makes something.

        Raises:
            RetryError: It is under way, or succeeded; its batch may have been done in part; its group has other members
                now.
            UnknownGroupError: Its group was destroyed.
            GroupBrokenError: Its group is broken.
        """
        self._is_heard = self._tracker.resolved
        if not self._tracker.resolved:
            raise RetryError(op=self._tracker.plan.name, detail="it is under way: wait for it, or cancel it first")
        if self._tracker.error is None:
            raise RetryError(op=self._tracker.plan.name, detail="it ended without an error: nothing to retry")
        submission = self._sent[0].again(self._controller, self._tracker)
        with Deferred():
            tracker, refs = send(self._controller, *submission)
            return Work(self._controller, tracker, refs, submission)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        resolved = loop.create_future()

        def settle() -> None:
            if not resolved.done():
                resolved.set_result(None)

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed: an await that was cancelled left this behind
                loop.call_soon_threadsafe(settle)

        self._tracker.when_resolved(tell)
        with stall_report.Attention(self._controller, self._tracker), awake(loop):
            yield from resolved.__await__()
        if self._tracker.error is None:
            return self.wait()
        return (yield from threads.awaitable(self.wait).__await__())  # it may ask participants for the cause

    @html.shown
    def _repr_html_(self) -> str:
        tracker = self._tracker
        calls = len(tracker.plan.requests)
        return self._html(
            "work",
            f"{tracker.plan.name} on group {tracker.group_name!r}",
            ("plan", tracker.seq),
            ("calls", calls if calls > 1 else ""),
        )

    def __repr__(self) -> str:
        tracker = self._tracker
        return f"<Work {tracker.plan.name} on group {tracker.group_name!r}, plan {tracker.seq}: {self._state}>"


def wait_or_abort(controller: Controller, tracker: PlanTracker) -> None:
    """Waits for a plan's outcome, inside of the `Deferred` in which it was sent.

    An exception of a signal handler, as of Ctrl-C, aborts the plan: no other thread can wait for it.
    """
    try:
        stall_report.wait(controller, tracker, None)
    except BaseException:
        abort(controller, tracker, "its caller was interrupted")
        raise
    controller.plans.send(tracker, [])  # removes it: the hub does not see ends in shared memory


def abort(controller: Controller, tracker: PlanTracker, why: str) -> bool:
    """Aborts a plan or a run on all participants; False where its outcome is known, or all take their results."""
    if tracker.resolved or tracker.is_committed:
        return False
    controller.plans.fail(tracker, PlanAbortedError(detail=why))
    retrieve_errors(tracker.outputs.values())
    return True


@contextmanager
def awake(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Wakes an event loop now and then during an await: the handler of Ctrl-C in a notebook does not."""
    beats: list[asyncio.TimerHandle] = []
    _beat(loop, beats)
    try:
        yield
    finally:
        beats.pop().cancel()


def _beat(loop: asyncio.AbstractEventLoop, beats: list[asyncio.TimerHandle]) -> None:
    beats[:] = [loop.call_later(AWAKE_S, _beat, loop, beats)]


def _explain(tracker: PlanTracker) -> RaycollectError | None:
    """A plan's error with its cause. It asks Ray for absent operands, so it is not for the channel's thread."""
    refs, error = tracker.refs, tracker.error  # in this order: another thread may explain it meanwhile
    if not isinstance(error, RefusedError) or error.__cause__ is not None:
        return error
    violations, cause, deadline = [], None, Deadline.after(LOOK_INTO_S)
    for violation in error.violations:
        ref = refs.get(Key(bytes.fromhex(violation.ref)))
        if violation.kind in ABSENT and ref is not None:
            violation, why = look_into(violation, ref, deadline)
            cause = cause or why
        violations.append(violation)
    explained = refusal(error.op, error.group_name, tuple(violations))
    explained.__cause__ = cause
    tracker.explain(explained)
    return explained


def look_into(violation: Violation, ref: Any, deadline: Deadline) -> tuple[Violation, BaseException | None]:
    """The violation of an absent ref with the fate of its method, and the method's exception."""
    try:
        value: Any = direct_transport.get(ref, deadline.left_s())
    except (RayError, GetTimeoutError) as exc:
        value = exc.with_traceback(None)
    if isinstance(value, Handle):
        return violation, None
    kind, actual, expected = absence(value)
    if kind == "lost":
        kind, expected = violation.kind, violation.expected
    cause = value if isinstance(value, RayError) else None
    return replace(violation, kind=kind, found=actual, expected=expected), cause


def absence(value: Any) -> tuple[str, str, str]:
    """The kind, found and expected of a ref's violation, from its value, or from Ray's error."""
    if isinstance(value, RayTaskError):
        raised = value.cause or value
        return "producer_failed", f"missing: its method raised {type(raised).__name__}: {raised}", "a value"
    if isinstance(value, RayError):
        return "lost", f"lost ({type(value).__name__})", ""
    by = "that a public method, not a static or class method, of a CollectiveParticipant returned"
    expected = f"a tensor, or a list, tuple or dict of tensors, {by}"
    return "not_tensor", f"{unkept(value, arrays.is_tensor, arrays.describe_value)}, returned by value", expected
