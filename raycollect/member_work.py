"""A call of a member under way, as the method that made it sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from time import monotonic
from typing import Any

from raycollect import html
from raycollect.errors import CollectiveTimeoutError
from raycollect.planner.wording import seconds_words
from raycollect.seat import Seat

__all__ = ["MemberWork"]


class MemberWork:
    """What ``async_op=True`` gives inside a member: the call runs on a communication thread.

    Await it in a coroutine, or call `wait`. The tensors must stay as they are until then.
    """

    def __init__(self, seat: Seat, op: str, future: Future[Any]) -> None:
        self._seat = seat
        self._op = op
        self._future = future
        self._began_s = monotonic()

    def done(self) -> bool:
        """True when the outcome is known; never waits, never raises."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the outcome.

        Args:
            timeout_s: How long this call waits, in seconds; None: as long as the collective's own limits allow.

        Raises:
            CollectiveTimeoutError: The outcome was not known in time; the collective goes on.
            RaycollectError: The collective failed.
        """
        try:
            self._future.result(timeout_s)
        except FutureTimeoutError:
            if self._future.done():
                raise
            raise CollectiveTimeoutError(
                op=self._op,
                group_name=self._seat.name,
                detail="this wait is over; the collective goes on",
                timeout_s=timeout_s or 0.0,
            ) from None

    def __await__(self) -> Generator[Any, None, None]:
        yield from asyncio.wrap_future(self._future).__await__()

    def _outcome(self) -> tuple[str, BaseException | None]:
        """How it stands, and what it has failed with."""
        if not self._future.done():
            return f"under way for {seconds_words(monotonic() - self._began_s)}", None
        if self._future.cancelled():
            return "cancelled", None
        error = self._future.exception()
        return ("done" if error is None else type(error).__name__), error

    @html.shown
    def _repr_html_(self) -> str:
        is_known = self._future.done()
        state, error = self._outcome()
        seat = self._seat
        told = [
            ("rank", f"{seat.rank} of {seat.world_size}, backend {seat.backend}"),
            ("error", "" if error is None else html.failure(error)),
        ]
        far = html.line(html.bar(int(state == "done") if is_known else None, 1))
        return html.block("work", f"{self._op} on group {seat.name!r}: {state}", far, html.pairs(told))

    def __repr__(self) -> str:
        return f"<MemberWork {self._op} on group {self._seat.name!r}: {self._outcome()[0]}>"
