"""The errors of methods that raise in a captured step."""

from __future__ import annotations

import traceback
from types import TracebackType

from raycollect.core.threads import message_of
from raycollect.errors import MethodError
from raycollect.observe.stacks import is_on_the_way

# How much of what a method raised is told: letters of its message, last lines of its traceback, letters of each.
DETAIL_LENGTH, TRACE_LINES, LINE_LENGTH = 2000, 30, 300


def method_error(method: str, step: int, exc: BaseException) -> MethodError:
    """Makes the error of a method's exception, without the exception or its frames, which would keep tensors alive."""
    detail, trace = message_of(exc)[:DETAIL_LENGTH], _trace(exc)
    return MethodError(op=method, call=step, raised=type(exc).__name__, detail=detail, trace=trace)


def _trace(exc: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(type(exc), exc, _from_method(exc.__traceback__)))
    except Exception:  # noqa: BLE001 - it shows the exception too
        text = "".join(traceback.format_tb(_from_method(exc.__traceback__)))
    return "\n".join(line[:LINE_LENGTH] for line in text.splitlines()[-TRACE_LINES:])


def _from_method(trace: TracebackType | None) -> TracebackType | None:
    # Without the frames on the way to the method.
    while trace is not None and is_on_the_way(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
