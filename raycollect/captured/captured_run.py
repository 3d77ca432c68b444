"""A run of a captured step under way, as its caller sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from raycollect.core import html, threads
from raycollect.driver.controller import Controller
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.driver.work import UnderWay, awake


class CapturedRun(UnderWay):
    """What ``run(async_op=True)`` returns: a run under way, and a way to wait for its results (`UnderWay`)."""

    _KIND = "run"
    _INSTEAD = "wait for it here, and pass what `wait` returns"

    def __init__(
        self, controller: Controller, capture: Any, tracker: PlanTracker, collect: Callable[[PlanTracker], Any]
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
            return (yield from threads.awaitable(partial(self.wait, progress=False)).__await__())

    @html.shown
    def _repr_html_(self) -> str:
        return self._html("run", f"run {self._tracker.place} of a captured step", ("plan", self._tracker.seq))

    def __repr__(self) -> str:
        return f"<CapturedRun {self._tracker.seq}: {self._state}>"
