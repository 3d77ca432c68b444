"""Calls of torch on a process group as calls of a member: in which thread they run, and what torch gets for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from time import monotonic
from typing import Any

from raycollect.core.model import OpKind
from raycollect.engine.execution import Outcome
from raycollect.errors import RaycollectError, Violation, anew, refusal
from raycollect.group.call_queue import Callers, CallQueue
from raycollect.group.coordinator import name_of_ranks
from raycollect.member.call import MemberCall
from raycollect.member.init import destroy_collective_group, get_group_handle
from raycollect.member.work import MemberWork

_log = logging.getLogger("raycollect")

torch: Any = import_module("torch")
distributed: Any = import_module("torch.distributed")

Call = Callable[[], None]
"""Makes one call of the member, and waits for its end."""


class _Failed:
    """The value of a torch future that has failed: who reads it gets the error.

    `torch.futures.Future.set_exception` makes the error itself the value, for Python to raise. DDP reads the value in
    C++: it takes the tensors out of it by pickling, looks at the first, and dies of SIGSEGV where there is none.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def look(self) -> Any:
        """Raises the error; what a future does with its value."""
        if isinstance(self._error, RaycollectError):
            raise anew(self._error)
        raise self._error.with_traceback(None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.look()


class TorchWork(distributed.Work):  # type: ignore[misc]
    """A call under way, as torch sees it; `tensors` are those that the call was given."""

    def __init__(self, work: MemberWork, future: Future[Any], tensors: Sequence[Any], source: int = -1) -> None:
        super().__init__()
        self._work = work
        self._future = future
        self._tensors = list(tensors)
        self._source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the end; a timeout of zero means as long as the call itself may last. Raises as `MemberWork`."""
        self._work.wait(timeout.total_seconds() or None)
        return True

    def get_future(self) -> Any:
        """Its end as a `torch.futures.Future` of the tensors."""
        made, tensors = torch.futures.Future(), self._tensors

        def settle(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                made._set_unwrap_func(_Failed.look)
            made.set_result(tensors if error is None else _Failed(error))

        self._future.add_done_callback(settle)
        return made

    def is_completed(self) -> bool:
        """Whether it has ended; never waits."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Why it failed; None if it did not, or has not ended."""
        return self._future.exception() if self._future.done() else None

    def result(self) -> list[Any]:
        """The tensors."""
        return self._tensors

    def _source_rank(self) -> int:
        return self._source


class TorchCalls:
    """The calls of one process group. Any thread may call it.

    Args:
        name: The name of raycollect's group, which this process has joined.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._process_group = get_group_handle(name)
        self._queues: dict[str, CallQueue] = {}  # by communicator

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks work on each other's tensors in shared memory."""
        return self._process_group.spec.backend == "shm"

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long later calls wait for the other ranks."""
        self._process_group.timeout_s = timeout.total_seconds()

    def close(self, *, drains: bool) -> None:
        """Leaves the group; may be called twice.

        Args:
            drains: Whether calls under way, such as a send that nobody waits for, may end before: as long as the
                group's time limit.
        """
        until_s = monotonic() + self._process_group.timeout_s
        for queue in self._queues.values():
            queue.close()
        for queue in self._queues.values() if drains else ():
            if not queue.drain(until_s - monotonic()):
                _log.warning("group %r: destroyed while %d calls were under way", self.name, queue.pending)
        with suppress(RaycollectError):  # it has left before
            destroy_collective_group(self.name)

    def call(self, kind: OpKind, values: Sequence[tuple[str, Any]], opts: Any = None, **arguments: Any) -> Call:
        """A call, yet to be made; `opts` are torch's options, `arguments` those of `MemberCall`."""
        given_s = opts.timeout.total_seconds() if opts is not None else 0.0
        timeout_s = given_s if given_s > 0 else None  # torch gives -1 ms where nobody said

        def run() -> None:
            MemberCall.of(kind, self.name, **arguments).run(values, async_op=False, timeout_s=timeout_s)

        return run

    def start(
        self,
        op: str,
        communicator: str,
        calls: Sequence[Call],
        tensors: Sequence[Any],
        opts: Any = None,
        *,
        source: int = -1,
    ) -> TorchWork:
        """Makes calls one after the other: in this thread if the caller is going to wait, and none is under way."""
        queue = self._queues.get(communicator)
        if not getattr(opts, "asyncOp", True) and (queue is None or not queue.pending):
            ended: Future[Any] = Future()
            ended.set_result(_made(calls))
            return self._work(op, ended, tensors, source)
        if queue is None:
            place = self._process_group
            name = f"{self.name}-{communicator}"
            queue = self._queues.setdefault(
                communicator, CallQueue(name, Callers(place.rank), lambda: place.why_not(()))
            )
        return self._work(op, queue.submit(partial(_made, calls), 0), tensors, source)

    def _work(self, op: str, future: Future[Any], tensors: Sequence[Any], source: int) -> TorchWork:
        return TorchWork(MemberWork(self._process_group, op, future, is_heard=True), future, tensors, source)

    def pair(self, op: str, source: int, target: int, tag: int) -> str:
        """The communicator of what one rank sends to another; refuses tags."""
        if tag:
            raise self.unsupported(op, "tag", str(tag), "0: calls between two ranks match by their order")
        return name_of_ranks(source, target)

    def unsupported(self, op: str, field: str, found: str, expected: str) -> RaycollectError:
        """The error for what torch has and this has not."""
        rank = self._process_group.rank
        wrong = Violation(kind="unsupported", rank=rank, field=field, found=found, expected=expected)
        return refusal(op, self.name, (wrong,))


def _made(calls: Sequence[Call]) -> Outcome:
    for call in calls:
        call()
    return Outcome()
