"""A run of a captured step under way, as its caller sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from raycollect.captured.run_tracker import RunTracker
from raycollect.core import html
from raycollect.driver.controller import Controller
from raycollect.driver.work import UnderWay, awake
from raycollect.errors import PlanAbortedError

__all__ = ["CapturedRun"]


class CapturedRun(UnderWay):
    """What ``run(async_op=True)`` returns: a run under way, and a way to wait for its results.

    Await it in a coroutine, or call `wait`. It may be dropped: the run goes on, and is logged if it fails.
    """

    def __init__(
        self, controller: Controller, capture: Any, tracker: RunTracker, collect: Callable[[RunTracker], Any]
    ) -> None:
        super().__init__(controller, tracker)
        self._run = tracker
        self._capture = capture  # keeps the capture open
        self._collect = collect
        self._values: tuple[Any, ...] = ()  # the results, once they are read

    def done(self) -> bool:
        """True when the outcome is known; never waits, never raises."""
        if not self._run.resolved:
            self._run.expire()
        return self._run.resolved

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> Any:
        """Waits for the outcome.

        Args:
            timeout_s: How long this call waits, in seconds; None: as long as the run's own limits allow.
            progress: Whether to show a progress bar on stderr if that lasts; None: inside `raycollect.progress` alone.

        Returns:
            What `Capture.run` returns: the values that the step returns; None where it returns none.

        Raises:
            ProgressError: A progress bar is wanted, and tqdm is not installed.
            CollectiveTimeoutError: The outcome was not known in time; the run goes on.
            RaycollectError: The run failed; the error says where and why.
        """
        self._hear(timeout_s, "run", progress)
        if not self._values:
            self._values = (self._collect(self._run),)
        return self._values[0]

    def cancel(self) -> bool:
        """Aborts the run on all participants, and with it those begun after it; the step does not run any more.

        Returns:
            False where the outcome was known already.
        """
        self._is_heard = True
        if self._run.resolved:
            return False
        self._run.abort(PlanAbortedError(detail="cancelled by its caller"))
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        if self.done() and self._run.error is None:
            return self.wait()
        # The doorbell rings for threads alone; `wait` warns there, too.
        with awake(asyncio.get_running_loop()):
            return (yield from asyncio.to_thread(self.wait, progress=False).__await__())

    @html.shown
    def _repr_html_(self) -> str:
        return self._html("run", f"run {self._run.place} of a captured step", ("plan", self._run.seq))

    def __repr__(self) -> str:
        return f"<CapturedRun {self._run.seq}: {self._state}>"
