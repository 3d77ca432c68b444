"""Batches: the calls of a ``with batch():`` block are recorded; its end sends all of them as one plan."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, ClassVar

from raycollect.core.bound_to_process import BoundToProcess
from raycollect.core.signals import Deferred, close_block, guarded, open_block
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.driver_rank import with_results
from raycollect.driver.requests import RequestList
from raycollect.driver.work import Work, wait_or_abort
from raycollect.errors import BatchError, refuse, wrong_argument, wrong_flags, wrong_time_limit
from raycollect.errors.text import shown
from raycollect.planner import STAGING_NBYTES, Membership

_LEAST_STAGING_NBYTES = 16  # the size of the largest element

_MOST_STAGING_NBYTES = 1 << 62

_FAILED = "its batch failed, and nothing of it was sent"
_REHEARSED = "its call was only planned, not made"


class Batch(BoundToProcess):
    """The calls of a ``with batch() as b:`` block. For the thread, or the asynchronous task, that enters the block.

    Results (`refs`, `work`, `done`, `wait`, `cancel`) raise BatchError until the block has ended, and if it failed.
    """

    _INSTEAD = "pass what is in its `refs`, after its block has ended"

    _takes_driver: ClassVar[bool] = True  # whether the driver may be a rank of its calls' groups
    _ASYNC_ADVICE = "False in a batch: batch(async_op=True) is for all of its calls"

    def __init__(
        self,
        *,
        staging_nbytes: int = STAGING_NBYTES,
        async_op: bool = False,
        timeout_s: float | None = None,
        is_rehearsal: bool = False,
    ) -> None:
        self.request_list: RequestList = RequestList()
        self.staging_nbytes = staging_nbytes
        self.timeout_s = timeout_s  # of calls that name none; None: the operations' own
        self.is_rehearsal = is_rehearsal  # whether it is never sent
        self._async_op = async_op
        self._outer: Batch | None = None
        self._token: Token[Batch | None] | None = None
        self._thread = 0
        self._task: Any = None
        self._is_open = False
        self._first = self._refs_before = self._end = 0  # this block's part of the request list
        # The groups of its calls, until the plan is sent: a derived group among them is not dissolved before
        self.held: dict[Membership, Controller] = {}
        self._work: Work | None = None
        self._why = "it was not entered"  # why there are no results; empty once the block has ended well

    # ------------------------------------------------------------------------------------------ the block

    def __enter__(self) -> Batch:  # noqa: PYI034 - `typing.Self` needs Python 3.11
        if self._token is not None:
            raise BatchError(detail="a batch is entered once: enter a new batch()")
        try:
            with Deferred():
                self._open()
        except BaseException as exc:  # of a signal handler: Python does not call `__exit__` then
            self.__exit__(type(exc), exc, None)
            raise
        return self

    def _open(self) -> None:
        open_block()
        self._outer = None if self.is_rehearsal else current()
        if self._outer is not None:
            self.request_list = self._outer.request_list
            self.timeout_s = self._outer.timeout_s if self.timeout_s is None else self.timeout_s
        self._first, self._refs_before = len(self.request_list.requests), len(self.request_list.refs)
        self._thread, self._task = threading.get_ident(), _running_task()
        self._why, self._is_open = "its block has not ended", True
        self._token = _current.set(self)

    @guarded
    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        with Deferred():
            self._close(exc)
            work = None if self._async_op else self._work
            if work is not None:
                wait_or_abort(work._controller, work._tracker)
        if work is not None:
            work.wait()

    def _close(self, exc: BaseException | None) -> None:
        if not self._is_open:
            return
        self._end, self._is_open = len(self.request_list.requests), False
        close_block()
        try:
            is_elsewhere = not self._leave()
            if exc is not None or is_elsewhere:
                self._fail()
            if exc is not None:
                return
            if is_elsewhere:
                raise BatchError(detail=f"a block was left in another context than it began in: {_FAILED}")
            if self._outer is None:
                self._send()
            elif self._outermost.is_rehearsal:
                self._outermost.staging_nbytes = self.staging_nbytes
            self._why = ""
        finally:
            self._release()

    def _leave(self) -> bool:
        """Ends the recording; False in another context than that in which it began, as a generator may be in."""
        try:
            if self._token is not None:
                _current.reset(self._token)
        except ValueError:
            return False
        return True

    @property
    def _outermost(self) -> Batch:
        """The batch that sends the calls of this one."""
        return self if self._outer is None else self._outer._outermost

    def _hold(self, controller: Controller, membership: Membership) -> None:
        """Keeps a group for calls that are recorded, and not sent yet."""
        if membership not in self.held:
            self.held[membership] = controller
            controller.groups.held.append(membership.spec.group_id)

    def _let_go(self) -> None:
        """Lets go of all groups."""
        held, self.held = self.held, {}
        for membership, controller in held.items():
            controller.groups.held.remove(membership.spec.group_id)

    def _release(self) -> None:
        self._let_go()

    def _stand_in(self, value: Any) -> Any:
        """The value that replaces an operand of an operation; here, the operand itself."""
        return value

    @property
    def _async_advice(self) -> str:
        """Why a call in the block can't be asynchronous; empty where it can."""
        around = self._outermost
        return "" if around.is_rehearsal else around._ASYNC_ADVICE

    def _is_here(self) -> bool:
        """Whether the caller is the thread, and the asynchronous task if any, that entered the block."""
        return threading.get_ident() == self._thread and _running_task() is self._task

    def _send(self) -> None:
        if self.is_rehearsal or not self.request_list.requests:
            return
        controller = Controller.current()
        try:
            is_awaited = not self._async_op
            tracker, submission = self.request_list.send(controller, self.staging_nbytes, is_awaited=is_awaited)
        except BaseException:
            self._fail()
            raise
        self._work = Work(controller, tracker, self.request_list.results, submission)

    def _fail(self) -> None:
        if self._outermost._work is None:  # else the outer batch has ended before it, and sent it
            self.request_list.rewind(self._first, self._refs_before, _FAILED)
        self._why = "its block failed, and nothing of it was sent"

    # ------------------------------------------------------------------------------------------ results

    @property
    def refs(self) -> list[Any]:
        """The result of each call of the block, as the call returns it outside; raises the error of a failed plan."""
        work = self._sent()._work
        if work is not None and work.done():
            work.wait()  # raises the error of a failed plan
        return [with_results(result) for result in self.request_list.results[self._first : self._end]]

    @property
    def work(self) -> Work | None:
        """The plan under way; None where nothing was recorded."""
        return self._sent()._work

    def done(self) -> bool:
        """True when the outcome is known; never waits."""
        work = self.work
        return work is None or work.done()

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> list[Any]:
        """Waits for the outcome, and returns `refs`; arguments and errors are those of `Work.wait`."""
        work = self.work
        if work is not None:
            work.wait(timeout_s, progress=progress)
        return self.refs

    def cancel(self) -> bool:
        """Aborts the plan; False where the outcome was known already, or nothing was recorded."""
        work = self.work
        return work is not None and work.cancel()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        work = self.work
        if work is not None:
            yield from work.__await__()
        return self.refs

    def _sent(self) -> Batch:
        around = self if self._outer is None else self._outer._sent()
        if self._why and not (self.is_rehearsal and self._token is not None):
            raise BatchError(detail=f"a batch has no results: {self._why}")
        return around

    def __repr__(self) -> str:
        state = self._why or ("empty" if self._work is None else repr(self._work))
        return f"<Batch of {len(self.request_list.results)} calls: {state}>"


_current: ContextVar[Batch | None] = ContextVar("raycollect_batch", default=None)


def current() -> Batch | None:
    """The batch in whose block the caller is; None outside, and in threads and tasks that a block has started."""
    around = _current.get()
    while around is not None and not around._is_open:  # its block was left in another context
        around = around._outer
    return around if around is None or around._is_here() else None


def limit_s(timeout_s: float | None) -> float | None:
    """The time limit of a call: its own, or that of the block around it; None: neither has one."""
    around = current() if timeout_s is None else None
    return timeout_s if around is None else around.timeout_s


def _running_task() -> Any:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def batch(*, staging_nbytes: int = STAGING_NBYTES, async_op: bool = False, timeout_s: float | None = None) -> Batch:
    """Makes one plan of all calls in a block.

    ``with batch() as b:`` records the calls of its block and sends them when it ends, with one message per participant.
    Small tensors of similar calls are packed together. Results are as if the calls ran one after the other. In the
    block a call returns what it returns outside, with a `Pending` for each ref that is still to be made; afterwards
    ``b.refs`` has the result of each call. If the block raises, nothing is sent. A batch inside another one joins it
    and uses the outer one's arguments, except for the time limit of its calls. Calls of threads and asynchronous tasks
    that the block starts are not recorded.

    Args:
        staging_nbytes: How many bytes of memory a participant may use for packing small tensors, at least 16; 0: no
            packing.
        async_op: True: the end of the block does not wait; ``b.wait()`` does.
        timeout_s: The limit of calls that name none, in seconds. The batch is one plan, which may take as long as the
            longest limit of its calls, from the end of the block on, waits for methods included. Where a call has no
            limit, ranks wait for each other alone, as its group says.

    Raises:
        InvalidArgumentError: An argument makes no sense.
        BatchError: A batch, or a result of one of its calls, is used where it can't be.
        RefusedError, GroupError, FaultError: At the end of the block, as the calls themselves; violations say which
            call.
    """
    check_arguments("batch", staging_nbytes, timeout_s, async_op=async_op)
    return Batch(staging_nbytes=staging_nbytes, async_op=async_op, timeout_s=timeout_s)


def check_arguments(op: str, staging_nbytes: Any, timeout_s: Any, **flags: Any) -> None:
    """Checks the arguments of `batch`, on behalf of `op`; raises InvalidArgumentError."""
    violations = [*wrong_time_limit(timeout_s), *wrong_flags(**flags)]
    if type(staging_nbytes) is not int or not (
        staging_nbytes == 0 or _LEAST_STAGING_NBYTES <= staging_nbytes <= _MOST_STAGING_NBYTES
    ):
        expected = f"0, or a whole number of bytes from {_LEAST_STAGING_NBYTES} to {_MOST_STAGING_NBYTES}"
        violations.append(wrong_argument("staging_nbytes", shown(staging_nbytes), expected))
    refuse(op, violations)


def record(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[RequestKey, ...], dict[Any, Any], int]:
    """Runs a function and records its calls as one batch that is never sent.

    Batches in the function are joined, and their calls need no waiting; their outputs stay `Pending`. Calls of threads
    and asynchronous tasks that the function starts are made, not recorded. Raises what the calls raise before planning.

    Returns:
        The calls, their refs by key, and the bytes of staging memory.
    """
    with Batch(is_rehearsal=True) as rehearsal:
        function(*args, **(kwargs or {}))
    request_list = rehearsal.request_list
    recorded = tuple(request_list.requests), dict(request_list.refs), rehearsal.staging_nbytes
    request_list.rewind(0, 0, _REHEARSED)
    return recorded
