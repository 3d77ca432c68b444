"""`timeline` and `summary`: where the time of collectives goes, over all participants."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raycollect.core import files, html
from raycollect.core.bound_to_process import BoundToProcess
from raycollect.driver.controller import Controller
from raycollect.errors import TimelineError, refuse, wrong_argument, wrong_time_limit
from raycollect.errors.text import is_path, shown
from raycollect.member.runtime import this_runtime
from raycollect.observe import chrome
from raycollect.observe.picture import picture
from raycollect.observe.summary import Summary, summarize
from raycollect.observe.timeline_session import STOP_S, TimelineSession
from raycollect.observe.trace import LIMIT, MOST
from raycollect.observe.whole import TimelineTrace
from raycollect.ray_bridge import ray_session


class Timeline(BoundToProcess):
    """A recording of `timeline`, under way or ended. A context manager; leaving the block stops it.

    Attributes:
        path: The file that is written; None: none.
        trace: What was recorded; None while it records.
    """

    _INSTEAD = "stop it here, and pass what its `summary` returns, or the path of its file"

    def __init__(self, path: Path | None, tracing: TimelineSession, timeout_s: float) -> None:
        self.path = path
        self.trace: TimelineTrace | None = None
        self._tracing = tracing
        self._timeout_s = timeout_s
        self._undo = ray_session.before_shutdown(tracing.drain)

    def __enter__(self) -> Timeline:  # noqa: PYI034 - Python 3.10 has no `Self`
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        self.stop()

    @property
    def missing(self) -> tuple[str, ...]:
        """The participants whose recording is missing, and why: a line each."""
        return () if self.trace is None else tuple(map(str, self.trace.missing))

    @property
    def dropped(self) -> int:
        """How many entries were overwritten, as a ring was full."""
        return 0 if self.trace is None else self.trace.dropped

    def stop(self) -> Timeline:
        """Ends the recording, collects the participants' records, and writes the file. May be called twice.

        Waits for answers for the `timeout_s` of `timeline`; participants without one are in `missing`.

        Raises:
            OSError: The file can't be written; `trace` is set all the same.
        """
        if self.trace is None:
            self._undo()
            _observe(None)
            self.trace = self._tracing.end(self._timeout_s)
            if self.path is not None:
                chrome.write(self.trace, self.path)
        return self

    def summary(self) -> Summary:
        """A summary of the records so far (`SummaryRow`)."""
        return summarize(self.trace if self.trace is not None else self._tracing.peek(self._timeout_s))

    @html.shown
    def _repr_html_(self) -> str:
        if self.trace is None:
            return html.block("timeline", "timeline: it records")
        facts: list[tuple[str, object]] = [
            ("file", "" if self.path is None else self.path),
            ("processes", len(self.trace.processes)),
            ("missing", "; ".join(self.missing)),
            ("overwritten", self.dropped or ""),
        ]
        summary = html.Markup(self.summary()._repr_html_())
        return html.block("timeline", "timeline", html.pairs(facts), picture(self.trace), summary)

    def __repr__(self) -> str:
        where = "" if self.path is None else f" in {self.path}"
        return f"<Timeline{where}: {'it records' if self.trace is None else repr(self.trace)}>"


def timeline(
    path: str | os.PathLike[str] | None = None,
    *,
    limit: int = LIMIT,
    timeout_s: float = STOP_S,
) -> Timeline:
    """Records where the time of collectives goes: in this process, and on all participants that it drives.

    Participants that are leased later record from then on. The contents and the cost of records are described in
    docs/timeline.md.

    Args:
        path: Where to write it at the end, as Perfetto (https://ui.perfetto.dev) reads it; packed, where the name ends
            with ``.gz``. None: nowhere; `Timeline.summary` and `Timeline.trace` have it.
        limit: How many entries each process keeps, the newest ones; at most 500,000.
        timeout_s: How long participants may take at the end to say what they have recorded, in seconds.

    Raises:
        TimelineError: One is recorded in this process already.
        RayClientError: This process is connected by ray://.
        InvalidArgumentError: An argument makes no sense.
        OSError: There is no folder in which the file could be, or the path names something other than a regular file.
    """
    ray_session.refuse_client()
    _check(path, limit, timeout_s)
    target = None if path is None else Path(path).absolute()
    if target is not None and not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} for the timeline")
    if target is not None:
        files.check(target)
    tracing = this_runtime().timelines.begin("timeline()", limit=limit)
    try:
        _observe(tracing)
        tracing.begun()  # runs by the doorbell would overtake the message
        return Timeline(target, tracing, timeout_s)
    except BaseException:  # or of a signal handler: the caller has no `Timeline` to stop
        _observe(None)
        tracing.end(0.0)
        raise


def summary() -> Summary:
    """Summarizes the current or last timeline: a row per group, operation and backend.

    Raises:
        TimelineError: There was none in this process.
    """
    timelines = this_runtime().timelines
    running = timelines.running
    trace = running.peek() if running is not None else timelines.last
    if trace is None:
        detail = (
            "nothing was recorded in this process: run the collectives in a block `with timeline():`, or set "
            "RAYCOLLECT_TIMELINE=FILE before it starts"
        )
        raise TimelineError(detail=detail)
    return summarize(trace)


def _observe(tracing: TimelineSession | None) -> None:
    controller = Controller._current
    if controller is not None:
        controller.observed(tracing)


def _check(path: Any, limit: Any, timeout_s: Any) -> None:
    wrong = [*wrong_time_limit(timeout_s, also=(0,))]
    if path is not None and not is_path(path):
        wrong.append(wrong_argument("path", shown(path), "that of a file"))
    if type(limit) is not int or not 1 <= limit <= MOST:
        wrong.append(wrong_argument("limit", shown(limit), f"a number from 1 to {MOST}"))
    refuse("timeline", wrong)
