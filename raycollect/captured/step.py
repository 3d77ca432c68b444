"""Captured steps: collectives and method calls that are recorded once and run many times without Ray.

The block of a `capture` is recorded like a batch. At its end each participant gets its step program, by one actor task;
from then on a run is a number and its arguments.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Generator, Mapping
from contextvars import Token
from typing import Any, ClassVar, Literal, overload

from raycollect.captured.explanation import explain_capture
from raycollect.captured.install import Installed, install
from raycollect.captured.recording import Recording
from raycollect.captured.step_values import MISSING
from raycollect.core import html, threads
from raycollect.core.bound_to_process import BoundToProcess
from raycollect.core.deadline import NEVER, Deadline
from raycollect.core.model import TensorInfo
from raycollect.core.signals import Deferred, guarded
from raycollect.driver import batch, stall_report
from raycollect.driver.controller import Controller
from raycollect.driver.pending import Argument, Pending
from raycollect.driver.step_runs import RunTracker, StepRuns
from raycollect.driver.work import UnderWay, awake
from raycollect.engine.step_program import CAPTURE_NBYTES
from raycollect.engine.value_codec import unpack_values
from raycollect.errors import (
    CaptureError,
    CollectiveTimeoutError,
    ProtocolError,
    copy_error,
    refuse,
    wrong_flags,
    wrong_time_limit,
)
from raycollect.planner import STAGING_NBYTES, Source
from raycollect.planner.report import StepExplanation
from raycollect.planner.wording import counted
from raycollect.ray_bridge import direct_transport, recorded_calls
from raycollect.ray_bridge.submitted_calls import CallRecorder

_UNEXPLAINED = {"its block has not ended": "a captured step can't be explained before its block has ended"}

SHOWN_S = 0.5  # how long a notebook waits for the infos of operands, in seconds
_IN_BLOCK = "a captured step can't run inside a batch or the block of a captured step: its runs are plans of their own"


class CapturedRun(UnderWay):
    """The return value of ``run(async_op=True)``: a run under way, and a way to wait for its results (`UnderWay`)."""

    _KIND = "run"
    _INSTEAD = "wait for it here, and pass what `wait` returns"

    _tracker: RunTracker

    def __init__(
        self, controller: Controller, capture: Any, tracker: RunTracker, collect: Callable[[RunTracker], Any]
    ) -> None:
        super().__init__(controller, tracker)
        self._capture = capture  # keeps the capture open
        self._collect = collect
        self._values: tuple[Any, ...] = ()  # the results, once they are read

    def _outcome(self) -> Any:
        if not self._values:
            self._values = (self._collect(self._tracker),)
        return self._values[0]

    def __await__(self) -> Generator[Any, None, Any]:
        if self.done() and self._tracker.error is None:
            return self.wait()
        # The doorbell rings for threads alone; `wait` warns there, too.
        with awake(asyncio.get_running_loop()):
            return (yield from threads.awaitable(functools.partial(self.wait, progress=False)).__await__())

    @html.shown
    def _repr_html_(self) -> str:
        return self._html("run", f"run {self._tracker.place} of a captured step", ("plan", self._tracker.seq))

    def __repr__(self) -> str:
        return f"<CapturedRun {self._tracker.seq}: {self._state}>"


class Capture(BoundToProcess):
    """The calls of a ``with capture() as step:`` block, and their runs.

    `call`, `argument` and `returns` work in the block, besides the driver's operations; `run` and `close` after it. Any
    thread may run it. It is closed when its last reference is dropped.
    """

    _INSTEAD = "run it here, and pass what `run` returns; or capture a step there"
    _RECORDING: ClassVar[type[Recording]] = Recording

    def __init__(self, *, staging_nbytes: int = STAGING_NBYTES, timeout_s: float | None = None) -> None:
        self._id = secrets.token_bytes(CAPTURE_NBYTES)
        self._block = self._RECORDING(self._id, staging_nbytes=staging_nbytes, timeout_s=timeout_s)
        self._parameters = self._block.parameters
        self._recorder: Token[CallRecorder | None] | None = None
        self._controller: Controller | None = None
        self._installed: Installed | None = None
        self._runs: StepRuns | None = None
        self._state = "its block was not entered"  # why it can't run; empty while it can
        self._counts = (0, 0)  # collectives, method calls
        self._begun = 0  # how many runs were begun

    # ------------------------------------------------------------------------------------------ the block

    def __enter__(self) -> Capture:  # noqa: PYI034 - `typing.Self` needs Python 3.11
        if self._state != "its block was not entered":
            raise CaptureError(detail="a captured step is recorded once: enter a new capture()")
        if batch.current() is not None:
            raise CaptureError(detail="a captured step can't be recorded inside a batch or another captured step")
        self._block.__enter__()
        self._recorder = recorded_calls.begin(self._block)
        self._state = "its block has not ended"
        return self

    @guarded
    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        with Deferred():
            self._state = "its block failed"
            try:
                if self._recorder is not None:
                    recorded_calls.end(self._recorder)
                self._block.__exit__(kind, exc, trace)
                if exc is None:
                    self._record()
                    self._state = ""
            finally:
                if self._state:
                    self._block.clear()
                    self._block._let_go()

    def _record(self) -> None:
        request_list = self._block.request_list
        if not request_list.requests and not request_list.calls:
            raise CaptureError(detail="nothing was recorded in the block: call operations of the driver, or methods")
        self._counts = len(request_list.requests), len(request_list.calls)
        request_list.end_plan()
        self._controller = Controller.current()
        installed = install(self._controller, self._id, self._block)
        self._installed, self._runs = installed, installed.runs
        self._parameters.place(installed.names)
        self._block.seal()

    # ------------------------------------------------------------------------------------------ recording

    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Pending:
        """Records a method call on a participant, as ``actor.method.remote()`` in the block does.

        The method runs in a separate thread, at its place in the step: never while Ray runs a method of an actor
        whose methods run in order. Its return value stays in the actor.

        Args:
            method: The method, as ``actor.method``.
            args: Its arguments: plain values and arrays, which are the same in each run; `argument`; what other calls
                of the step made on the same actor; ObjectRefs: that of a tensor of the actor stands for the tensor, any
                other for its value.
            kwargs: The same, by name.

        Returns:
            A placeholder of the value: for operands of operations, arguments of later calls on this actor, and
            `returns`.

        Raises:
            CaptureError: Not in the block itself.
            RefusedError: The actor or an argument can't be used; with every reason.
        """
        self._inside("step.call()")
        return self._block.call(method, args, kwargs)

    def argument(self, name: str, default: Any = MISSING) -> Argument:
        """Declares an argument that each run is given by name, for methods that the step calls.

        Args:
            name: Its name; not one of `run`'s own parameters.
            default: Its value where a run does not give it; left out: each run has to.

        Raises:
            CaptureError: Not in the block itself.
            InvalidArgumentError: The name or the default can't be used.
        """
        self._inside("step.argument()")
        return self._parameters.declare(name, default)

    def returns(self, values: Any) -> None:
        """Sets the return value of each run: copies of these values, in this structure.

        Args:
            values: What calls of the step made, or refs that take part in it: one, or a list, tuple or dict of them.
                The step's arguments, and plain values and arrays, are returned as they are. None: there are no results.

        Raises:
            CaptureError: Not in the block itself, or called before.
            InvalidArgumentError: Something else is among them.
        """
        self._inside("step.returns()")
        self._block.returns(values)

    def _inside(self, what: str) -> None:
        """Raises CaptureError where the caller is not in the block itself."""
        block = batch.current()
        if block is self._block:
            return
        if block is not None and block._outermost is self._block:
            raise CaptureError(detail=f"{what} can't be inside a batch of the step: a batch is one plan")
        raise CaptureError(detail=f"{what} belongs into the block of its own captured step: {self!r}")

    # ------------------------------------------------------------------------------------------ running

    @overload
    def run(self, /, *, async_op: Literal[True], timeout_s: float | None = ..., **arguments: Any) -> CapturedRun: ...

    @overload
    def run(self, /, *, async_op: bool = ..., timeout_s: float | None = ..., **arguments: Any) -> Any: ...

    def run(self, /, *, async_op: bool = False, timeout_s: float | None = None, **arguments: Any) -> Any:
        """Runs the step: all its calls, in order, on all participants.

        A run follows the earlier collectives, runs and methods of this process on its actors, and precedes
        later ones. Methods of actors that run several at a time have no order.

        Args:
            async_op: True: returns a `CapturedRun` at once. Several runs may be under way.
            timeout_s: After how many seconds the run is given up and fails, whether anybody waits for it or not; runs
                before it and methods that it waits for included. None: the limits of its collectives alone.
            arguments: The arguments that the step declares, by name.

        Returns:
            The values that the step returns, in the structure that was given to `returns`; None without one.

        Raises:
            CaptureError: It is closed, or not ready, or called in a block that records.
            CaptureBrokenError: An earlier run failed, or a group has other members than it was recorded with; nothing
                was sent. Capture it again, or use `step`, which records itself again.
            UnknownGroupError: A group was destroyed.
            InvalidArgumentError: An argument is missing, unknown, too long or of a type that does not travel, or makes
                no sense.
            GroupBrokenError: A member has ended, or members are changing; nothing was sent.
            MethodError: A method raised.
            RefusedError, FaultError: As collectives do.
        """
        installed = ready(self._installed, self._state)
        if timeout_s is not None or (async_op is not True and async_op is not False):
            refuse("run", [*wrong_time_limit(timeout_s), *wrong_flags(async_op=async_op)])
        deadline = NEVER if timeout_s is None else Deadline.after(timeout_s)
        with Deferred():
            tracker = installed.runs.begin(self._parameters.pack(arguments), deadline)
            return self._begun_run(installed, tracker, arguments, async_op=async_op)

    def _begun_run(
        self, installed: Installed, tracker: RunTracker, arguments: Mapping[str, Any], *, async_op: bool
    ) -> Any:
        """The return value of `run`, of a run that has begun."""
        self._begun += 1
        returned = self._block.returned
        given = {} if returned is None or not returned.echoed else returned.given(arguments)
        controller: Controller = self._controller  # type: ignore[assignment]  # or it would not be ready
        if async_op:
            return CapturedRun(controller, self, tracker, functools.partial(self._collect, installed, given=given))
        stall_report.wait(controller, tracker, None)
        if isinstance(tracker.error, CollectiveTimeoutError):
            stall_report.explain_delay(controller, tracker, tracker.error)
        return self._collect(installed, tracker, given)

    def close(self) -> None:
        """Releases the step and all that it holds; aborts runs under way. May be called twice."""
        if self._runs is not None:
            self._state, self._installed = "it was closed", None
            self._runs.close()
            self._block._let_go()

    def _collect(self, installed: Installed, tracker: RunTracker, given: Mapping[str, Any]) -> Any:
        if tracker.error is not None:
            raise copy_error(tracker.error)
        refs = installed.kept_refs(self._id, tracker.seq) if installed.retained else []
        returned = self._block.returned
        if returned is None:
            return None
        values = [unpack_values(payload or b"") for payload in tracker.results]
        try:
            returns = [values[at][place] for at, place in installed.places]
        except LookupError:
            raise ProtocolError(detail=f"run {tracker.seq} came back without its results") from None
        return returned.fill([*returns, *refs], given)

    # ------------------------------------------------------------------------------------------ looking at it

    def _tensor_infos(self, timeout_s: float = 60.0) -> dict[Source, tuple[TensorInfo, ...] | None]:
        """The infos of its plans' operands, by source; None: not known before the first run. Raises as `explain`."""
        installed, controller = self._installed, self._controller
        if installed is None or controller is None:
            raise CaptureError(detail=f"this captured step has no tensors yet, or no more: {self._state}")
        runs = installed.runs
        peers = controller.groups.links(runs.memberships, runs.step_plan.participants)
        try:
            looks = direct_transport.get([peer.actor._raycollect_look.remote(self._id) for peer in peers], timeout_s)
        except Exception:  # another thread may have destroyed a group meanwhile
            controller.groups.check(runs.memberships)
            raise
        infos = {source: looks[at][slot] for source, (at, slot) in installed.operands.items()}
        return {source: None if info is None else tuple(info) for source, info in infos.items()}

    def explain(self) -> str:
        """The explanation of `plan` as text; raises the same errors."""
        return self.plan().explain()

    def plan(self) -> StepExplanation:
        """Explains each run: its method calls and plans in order, each plan as `raycollect.plan` does.

        Raises:
            CaptureError: It is not ready, or closed; or the tensors of a plan are unknown before the first run.
            UnknownGroupError, GroupBrokenError: A group was destroyed, or a member has ended.
        """
        if self._installed is None:
            raise CaptureError(detail=_UNEXPLAINED.get(self._state) or f"this step can't be explained: {self._state}")
        return explain_capture(self._id, self._installed, self._tensor_infos())

    def __del__(self) -> None:
        runs, controller = getattr(self, "_runs", None), getattr(self, "_controller", None)
        if runs is not None and controller is not None and not runs.is_closed:
            runs.refs = {}  # here: a thread of the library must not let go of refs while Ray is being shut down
            controller.abandon(runs.let_go_idle, tuple(self._block.held))

    @property
    def _told_state(self) -> str:
        if not self._state and self._runs is not None and self._runs.failure is not None:
            return f"broken by {type(self._runs.failure).__name__}"
        return self._state or "ready"

    @html.shown
    def _repr_html_(self) -> str:
        collectives, calls = self._counts
        runs, explanation = self._runs, self._explanation()
        failure = None if runs is None else runs.failure
        under_way = "" if runs is None or runs.is_closed or runs.is_idle else "some under way"
        facts = [
            ("state", self._told_state if failure is None else html.failure(failure)),
            ("runs", ", ".join(filter(None, [f"{self._begun} begun", under_way]))),
            ("participants", "" if runs is None else len(runs.step_plan.participants)),
        ]
        return html.block(
            "capture",
            f"captured step of {counted(collectives, 'collective')} and "
            f"{counted(calls, 'method call')}: {self._told_state}",
            html.pairs(facts),
            "" if explanation is None else html.folded("what each run does", explanation._repr_html_()),
        )

    def _explanation(self) -> StepExplanation | None:
        if self._installed is None:
            return None
        try:
            return explain_capture(self._id, self._installed, self._tensor_infos(SHOWN_S))
        except Exception:  # noqa: BLE001 - a busy or dead actor, or no run so far: it is shown without
            return None

    def __repr__(self) -> str:
        collectives, calls = self._counts
        return (
            f"<Capture of {counted(collectives, 'collective')} and {counted(calls, 'method call')}: {self._told_state}>"
        )


def ready(installed: Installed | None, state: str) -> Installed:
    """The installed step, if it can run here and now; otherwise `state` is the reason."""
    if installed is None or state or batch.current() is not None:
        raise CaptureError(detail=(state and f"this captured step can't run: {state}") or _IN_BLOCK)
    return installed


def capture(*, staging_nbytes: int = STAGING_NBYTES, timeout_s: float | None = None) -> Capture:
    """Records the calls of a block once, to run them again and again without Ray.

    ``with capture() as step:`` records the driver's operations, and method calls by ``actor.method.remote(...)`` or
    ``step.call(actor.method, ...)``. At the end of the block every participant gets its part. ``step.run()`` then does
    all of it, at the cost of one small message per participant. Collectives with no method call between them are one
    plan, like a batch.

    Args:
        staging_nbytes: As for `batch`.
        timeout_s: How long ranks wait for each other, in seconds, where a call does not say, and how long participants
            may take to be ready; by default as long as each group says, and 60.

    Raises:
        InvalidArgumentError: An argument makes no sense.
        CaptureError: A captured step, or a placeholder of a value in it, is used where it can't be.
        RefusedError, GroupError, FaultError: At the end of the block: it can't be planned, or not all are ready.
    """
    batch.check_arguments("capture", staging_nbytes, timeout_s)
    return Capture(staging_nbytes=staging_nbytes, timeout_s=timeout_s)
