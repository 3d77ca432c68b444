"""One trace of a step's function: a captured step, with the arguments and results of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from raycollect.captured.install import Installed
from raycollect.driver.step_runs import RunTracker
from raycollect.traced.eager import EndedRun
from raycollect.traced.recording import TracedCapture
from raycollect.traced.signature import CallReader


class Begun(NamedTuple):
    """A run that has begun."""

    given: dict[str, Any]
    installed: Installed | None  # None: there is nothing to run
    tracker: RunTracker | None


class Trace:
    """One trace of a function. Any thread may run it.

    Attributes:
        capture: The captured step; empty if the function has called nothing.
        used: The number of the call that used it last.
    """

    __slots__ = ("_is_empty", "_names", "capture", "used")

    def __init__(self, capture: TracedCapture, names: Sequence[str]) -> None:
        self.capture: TracedCapture = capture
        self.used: int = 0
        self._names = tuple(names)
        self._is_empty = capture.is_empty

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        reader: CallReader,
        values: Sequence[Any],
        *,
        staging_nbytes: int,
        timeout_s: float | None,
    ) -> Trace:
        """Traces a function by running its Python code only. If the function raises, the trace is released."""
        names: list[str] = []
        capture = TracedCapture(staging_nbytes=staging_nbytes, timeout_s=timeout_s)

        def leaf(parameter: str, name: str, value: Any) -> Any:
            names.append(name)
            return capture.parameters.leaf(name, parameter, value)

        bound = reader.traced(values, leaf)
        with capture:
            returned = function(*bound.args, **bound.kwargs)
            if returned is not None:
                capture.returns(returned)
        return cls(capture, names)

    def begin(self, leaves: Sequence[Any]) -> Begun:
        """Begins a run; CaptureBrokenError or GroupError: nothing was sent, and the function can be traced again."""
        given = dict(zip(self._names, leaves, strict=True))
        if self._is_empty:
            return Begun(given, None, None)
        return Begun(given, *self.capture.begin(given))

    def end(self, begun: Begun, *, async_op: bool) -> Any:
        """Waits for a run, and returns the function's result; with `async_op`, returns a `CapturedRun` at once."""
        given, installed, tracker = begun
        if installed is not None and tracker is not None:
            return self.capture._begun_run(installed, tracker, given, async_op=async_op)
        return EndedRun(partial(self.capture.fixed, given)) if async_op else self.capture.fixed(given)

    def close(self) -> None:
        """Releases the captured step."""
        self.capture.close()
