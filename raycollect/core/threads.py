"""Threads of the library, and the handling of exceptions in them.

A thread of the library survives exceptions in its calls. An exception is logged with its traceback, and the thread goes
on; a repeated exception is logged once a minute, and the thread rests in between. Waiters for a result get the error of
`failed`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from raycollect.core import limits
from raycollect.errors import InternalError, RaycollectError, ResourceLimitError, copy_error

_log = logging.getLogger("raycollect")

EVERY_S = 60.0  # the log interval of equal failures in one place of one thread, in seconds

# How long a thread rests after a failed step; four times as long after each further failure in a row.
_REST_S, _MOST_REST_S = 0.001, 1.0

_Result = TypeVar("_Result")

_HELPER = "raycollect-helper"

# The name prefixes of threads that run no user code
_OWN = tuple(f"raycollect-{name}" for name in ("helper", "call", "order"))

_MOST_PLACES = 1024
_LONGEST = 2000


@dataclass(slots=True)
class _LogEntry:
    """The last log entry of a failing place."""

    again_s: float = 0.0
    count: int = 0  # of failures that were not logged


_log_entries: dict[tuple[str, str, type], _LogEntry] = {}


def start(name: str, run: Callable[..., object], *args: object) -> threading.Thread:
    """Starts a daemon thread, and logs an exception that ends it; raises ResourceLimitError, a RuntimeError."""
    thread = threading.Thread(target=survives, args=(run, *args), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as exc:
        error = limits.exhausted(exc, f"starting thread {name!r}")
        if error is None:
            raise
        raise copy_error(error) from exc
    return thread


def call_in_helper(call: Callable[..., _Result], *args: object, name: str = _HELPER) -> Future[_Result]:
    """Makes one call that may block, and can't be interrupted, in a new helper thread, which may be abandoned.

    The thread is new, as libraries have state per thread, such as the current device. If no caller waits for the
    result, pass `survives`, or a function that logs its failures. Raises RuntimeError if no thread can be started.
    """
    future: Future[_Result] = Future()
    start(name, _fulfil, [(future, call, args)])
    return future


def bounded(call: Callable[[], object], timeout_s: float = 0.0) -> bool:
    """Makes a call without a result in a helper thread, and waits at most `timeout_s` for its end.

    If no thread can be started, the calling thread makes it. Its failure is logged.

    Returns:
        Whether the call has ended.
    """
    try:
        making = call_in_helper(survives, call)
    except RuntimeError:
        survives(call)
        return True
    return has_ended(making, timeout_s)


def _fulfil(job: list[tuple[Future[_Result], Callable[..., _Result], tuple[object, ...]]]) -> None:
    # The frames of an exception, which the future holds, must refer neither to the future nor to the arguments.
    try:
        future, call, args = job.pop()
    except IndexError:  # `submit` has withdrawn it
        return
    is_wanted = future.set_running_or_notify_cancel()  # an await may be cancelled; the call is made anyway
    try:
        result = call(*args)
    except BaseException as exc:  # noqa: BLE001 - raised in the waiter
        if is_wanted:
            future.set_exception(exc)
    else:
        if is_wanted:
            future.set_result(result)
    finally:
        del future, call, args


def has_ended(future: Future[_Result], timeout_s: float) -> bool:
    """Waits for a call of `call_in_helper`; False after a timeout."""
    return future in futures.wait([future], timeout_s).done


def is_own() -> bool:
    """Tells whether the calling thread runs no user code, so that its current device and stream need no restoring."""
    return threading.current_thread().name.startswith(_OWN)


def pool(name: str, count: int) -> ThreadPoolExecutor:
    """Threads that start on demand. If no caller waits for a result, submit `survives`."""
    return ThreadPoolExecutor(count, thread_name_prefix=name)


def submit(workers: ThreadPoolExecutor, call: Callable[..., _Result], *args: object) -> Future[_Result]:
    """Makes a call in a thread of a pool. Raises RuntimeError, and withdraws the call, if no thread can be started."""
    future: Future[_Result] = Future()
    job = [(future, call, args)]
    try:
        workers.submit(_fulfil, job)
    except RuntimeError:  # the call is queued nevertheless
        with suppress(IndexError):  # a thread of the pool has taken it
            job.pop()
            raise
    return future


def once(memo: dict[Any, Any], key: Hashable, make: Callable[[], _Result]) -> _Result:
    """Returns a result that `memo` has or gets under a key; threads that ask for it at once wait for one to make it."""
    mine: Future[_Result] = Future()
    future: Future[_Result] = memo.setdefault(key, mine)
    if future is mine:
        try:
            mine.set_result(make())
        except BaseException as exc:
            memo.pop(key, None)
            mine.set_exception(exc)
            raise
    return future.result()


def awaitable(
    call: Callable[..., _Result], *args: object, workers: ThreadPoolExecutor | None = None
) -> asyncio.Future[_Result]:
    """Makes a call that may block, for a coroutine to await: in a thread of `workers`, or in a new one.

    The default pool of the event loop is not used: users may fill it with calls that wait for this coroutine.

    Raises:
        InternalError: No thread can be started.
    """
    try:
        future = call_in_helper(call, *args) if workers is None else submit(workers, call, *args)
    except RuntimeError as exc:
        raise failed(_name_of(call), exc) from exc
    return asyncio.wrap_future(future)


@contextmanager
def beside(name: str, call: Callable[..., object], *args: object) -> Iterator[Future[object]]:
    """Makes a call in a helper thread, while the block does its half of the same collectives.

    If the block fails because the call has refused, the exception of the call is raised.
    """
    called = call_in_helper(call, *args, name=name)
    try:
        yield called
    except RaycollectError:  # the call may block forever after this
        if called.done():
            called.result()
        raise
    called.result()


def survives(call: Callable[..., object], *args: object, place: str = "") -> bool:
    """Makes a call without a result; False if it failed, which is logged under `place`, or its name."""
    try:
        call(*args)
    except Exception as exc:  # noqa: BLE001 - any exception is logged
        failed(place or _name_of(call), exc)
        return False
    return True


def repeat(step: Callable[[], bool]) -> None:
    """Repeats a step until it returns False. The thread rests after a failure."""
    goes_on, failures = True, 0
    while goes_on:
        try:
            goes_on = step()
            failures = 0
        except Exception as exc:  # noqa: BLE001 - any exception is logged
            failed(_name_of(step), exc)
            time.sleep(min(_REST_S * 4**failures, _MOST_REST_S))
            failures = min(failures + 1, 10)


Failure = InternalError | ResourceLimitError
"""The error that waiters for a failed call get."""


def failed(place: str, exc: BaseException) -> Failure:
    """Logs an unexpected exception, once a minute for each thread and place; returns the error for waiters."""
    thread = threading.current_thread().name
    if len(_log_entries) >= _MOST_PLACES:  # each connection's thread has its own name
        _log_entries.clear()
    entry, now_s = _log_entries.setdefault((thread, place, type(exc)), _LogEntry()), time.monotonic()
    if now_s >= entry.again_s:
        more = f" ({entry.count} times more since the last entry)" if entry.count else ""
        entry.again_s, entry.count = now_s + EVERY_S, 0
        _log.error("%s: %s failed%s; the thread goes on", thread, place, more, exc_info=exc)
    else:
        entry.count += 1
    return limits.exhausted(exc, place) or InternalError(detail=f"{place} failed: {cause_of(exc)}")


def cause_of(exc: BaseException) -> str:
    """The type and message of an exception."""
    text = message_of(exc)
    return f"{type(exc).__name__}: {text[:_LONGEST]}" if text else type(exc).__name__


def message_of(exc: BaseException) -> str:
    """The message of a foreign exception, whose `__str__` may fail."""
    try:
        return str(exc)
    except Exception as broken:  # noqa: BLE001 - foreign code
        return f"(its message can't be made: {type(broken).__name__})"


def _name_of(call: Callable[..., object]) -> str:
    while isinstance(call, functools.partial):
        call = call.func
    return str(getattr(call, "__qualname__", type(call).__name__))
