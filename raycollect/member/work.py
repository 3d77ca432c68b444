"""The handle of a member's asynchronous call."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from time import monotonic
from typing import Any

from raycollect.core import html
from raycollect.core.bound_to_process import BoundToProcess
from raycollect.errors import (
    CollectiveTimeoutError,
    PlanAbortedError,
    RaycollectError,
    copy_error,
    refuse,
    wrong_wait,
)
from raycollect.group.process_group import ProcessGroup
from raycollect.planner.wording import seconds_words

_log = logging.getLogger("raycollect")


class MemberWork(BoundToProcess):
    """A member's call with ``async_op=True``, which runs on a communication thread.

    Await it in a coroutine, or call `wait`. Do not touch the tensors before that.
    """

    _INSTEAD = "wait for it where the call was made, and pass the tensor"

    def __init__(self, process_group: ProcessGroup, op: str, future: Future[Any], *, is_heard: bool = False) -> None:
        self._is_heard = is_heard  # whether the caller gets an error of the call
        self._process_group = process_group
        self._op = op
        self._future = future
        self._began_s = monotonic()

    def done(self) -> bool:
        """Whether the call has ended; never waits, never raises."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the end of the call.

        Args:
            timeout_s: How long this call waits, in seconds; None: as long as the collective's own limits allow.

        Raises:
            CollectiveTimeoutError: The call did not end within `timeout_s`; the collective continues.
            RaycollectError: The collective failed.
        """
        refuse("wait", wrong_wait(timeout_s))
        try:
            self._future.exception(None if timeout_s == math.inf else timeout_s)
        except FutureTimeoutError:
            raise CollectiveTimeoutError(
                op=self._op,
                group_name=self._process_group.name,
                detail="this wait is over, and the collective goes on: wait again",
                timeout_s=timeout_s or 0.0,
            ) from None
        self._raise()

    def __await__(self) -> Generator[Any, None, None]:
        ended = Future[None]()  # not the call's: asyncio would raise its error object, and cancel it with the await
        ended.set_running_or_notify_cancel()
        self._future.add_done_callback(lambda _: ended.set_result(None))
        yield from asyncio.wrap_future(ended).__await__()
        self._raise()

    def _raise(self) -> None:
        self._is_heard = True
        error = self._future.exception()
        if isinstance(error, RaycollectError):
            raise copy_error(error)
        if error is not None:
            try:
                raise error.with_traceback(None)
            finally:
                del error

    def _outcome(self) -> tuple[str, BaseException | None]:
        if not self._future.done():
            return f"under way for {seconds_words(monotonic() - self._began_s)}", None
        error = self._future.exception()
        return ("done" if error is None else type(error).__name__), error

    def __del__(self) -> None:
        if not self._is_heard:
            self._future.add_done_callback(partial(_log_unheard, self._op, self._process_group.name))

    @html.shown
    def _repr_html_(self) -> str:
        is_known = self._future.done()
        state, error = self._outcome()
        process_group = self._process_group
        rows = [
            ("rank", f"{process_group.rank} of {process_group.world_size}, backend {process_group.backend}"),
            ("error", "" if error is None else html.failure(error)),
        ]
        far = html.line(html.bar(int(state == "done") if is_known else None, 1))
        return html.block("work", f"{self._op} on group {process_group.name!r}: {state}", far, html.pairs(rows))

    def __repr__(self) -> str:
        return f"<MemberWork {self._op} on group {self._process_group.name!r}: {self._outcome()[0]}>"


def _log_unheard(op: str, group_name: str, future: Future[Any]) -> None:
    error = future.exception()
    if error is not None and not isinstance(error, PlanAbortedError):
        _log.error("%s on group %r failed, and nobody waited for it: %s", op, group_name, error)
