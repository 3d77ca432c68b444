"""Threads of the library, and the handling of exceptions in them.

A thread of the library outlives what it calls. An exception is logged with its traceback, and the thread goes on; one
that repeats is logged once a minute, and the thread rests in between. Whoever waits for a result gets the error that
`failed` makes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from raycollect.core import limits
from raycollect.errors import InternalError, RaycollectError, ResourceLimitError, copy_error

_log = logging.getLogger("raycollect")

EVERY_S = 60.0  # how often the log tells of the same failure in one place of one thread, in seconds

# How long a thread rests after a step that failed; each further one in a row makes it four times as long.
_REST_S, _MOST_REST_S = 0.001, 1.0

_Result = TypeVar("_Result")

_APART = "raycollect-apart"

# Threads in which no method of a user runs, by the beginning of their names
_OWN = tuple(f"raycollect-{name}" for name in ("apart", "call", "order"))

_MOST_PLACES = 1024
_LONGEST = 2000


@dataclass(slots=True)
class _Told:
    """The log's memory of a place that failed."""

    again_s: float = 0.0
    count: int = 0  # of failures of which it was not told


_told: dict[tuple[str, str, type], _Told] = {}


def start(name: str, run: Callable[..., object], *args: object) -> threading.Thread:
    """Starts a daemon thread; what ends it is logged. Raises ResourceLimitError, a RuntimeError, where it can't."""
    thread = threading.Thread(target=survives, args=(run, *args), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as exc:
        error = limits.exhausted(exc, f"starting thread {name!r}")
        if error is None:
            raise
        raise copy_error(error) from exc
    return thread


def apart(call: Callable[..., _Result], *args: object, name: str = _APART) -> Future[_Result]:
    """Makes one call that may wait, and can't be interrupted, in a new thread, which may be left behind.

    New, as libraries keep things for each thread, such as its current device. Where nobody waits for the result, pass
    `survives`, or what logs its failures itself. RuntimeError: no more threads can be started.
    """
    future: Future[_Result] = Future()
    start(name, _fulfil, [(future, call, args)])
    return future


def bounded(call: Callable[[], object], timeout_s: float = 0.0) -> bool:
    """Makes a call as `apart` does and waits at most `timeout_s` for its end, which is all that its caller wants.

    It is made here where no more threads can be started. Its failure is logged.

    Returns:
        Whether it has ended.
    """
    try:
        making = apart(survives, call)
    except RuntimeError:
        survives(call)
        return True
    return has_ended(making, timeout_s)


def _fulfil(job: list[tuple[Future[_Result], Callable[..., _Result], tuple[object, ...]]]) -> None:
    # The frames of an exception, which the future keeps, may keep neither that nor what the call was given.
    try:
        future, call, args = job.pop()
    except IndexError:  # it was taken back
        return
    is_wanted = future.set_running_or_notify_cancel()  # an await may be cancelled; the call is made all the same
    try:
        result = call(*args)
    except BaseException as exc:  # noqa: BLE001 - whoever waits gets it
        if is_wanted:
            future.set_exception(exc)
    else:
        if is_wanted:
            future.set_result(result)
    finally:
        del future, call, args


def has_ended(future: Future[_Result], timeout_s: float) -> bool:
    """Waits for a call of `apart`; False where it has not ended in time."""
    return future in futures.wait([future], timeout_s).done


def is_own() -> bool:
    """Tells whether the calling thread runs no code of users, so that what is current in it is nobody else's matter."""
    return threading.current_thread().name.startswith(_OWN)


def pool(name: str, count: int) -> ThreadPoolExecutor:
    """Threads that start on demand. Where nobody waits for a result, submit `survives`."""
    return ThreadPoolExecutor(count, thread_name_prefix=name)


def submit(workers: ThreadPoolExecutor, call: Callable[..., _Result], *args: object) -> Future[_Result]:
    """Makes a call in a thread of a pool. RuntimeError: no thread can be started; then it is not made later, either."""
    future: Future[_Result] = Future()
    job = [(future, call, args)]
    try:
        workers.submit(_fulfil, job)
    except RuntimeError:  # it is queued nevertheless
        with suppress(IndexError):  # a thread of the pool has taken it
            job.pop()
            raise
    return future


def awaitable(
    call: Callable[..., _Result], *args: object, workers: ThreadPoolExecutor | None = None
) -> asyncio.Future[_Result]:
    """Makes a call that may wait, for a coroutine to await: in a thread of `workers`, or in a new one.

    Never in the default pool of the event loop: users may fill that with calls that wait for this coroutine.

    Raises:
        InternalError: No more threads can be started.
    """
    try:
        future = apart(call, *args) if workers is None else submit(workers, call, *args)
    except RuntimeError as exc:
        raise failed(_name_of(call), exc) from exc
    return asyncio.wrap_future(future)


@contextmanager
def beside(name: str, call: Callable[..., object], *args: object) -> Iterator[Future[object]]:
    """Makes a call apart, while the block does its half of the same collectives.

    Where the block fails because the other side has refused, what the call raised is the error.
    """
    called = apart(call, *args, name=name)
    try:
        yield called
    except RaycollectError:  # after which the other side may never answer
        if called.done():
            called.result()
        raise
    called.result()


def survives(call: Callable[..., object], *args: object, place: str = "") -> bool:
    """Makes a call whose result nobody waits for; False where it failed, which is logged under `place`, or its name."""
    try:
        call(*args)
    except Exception as exc:  # noqa: BLE001 - any: that is what this is for
        failed(place or _name_of(call), exc)
        return False
    return True


def repeat(step: Callable[[], bool]) -> None:
    """Repeats a step until it returns False. After a failure the thread rests."""
    goes_on, failures = True, 0
    while goes_on:
        try:
            goes_on = step()
            failures = 0
        except Exception as exc:  # noqa: BLE001 - any: that is what this is for
            failed(_name_of(step), exc)
            time.sleep(min(_REST_S * 4**failures, _MOST_REST_S))
            failures = min(failures + 1, 10)


Failure = InternalError | ResourceLimitError
"""What somebody gets who waits for what has failed."""


def failed(place: str, exc: BaseException) -> Failure:
    """Logs an unexpected exception, once a minute for each thread and place; returns the error for whoever waits."""
    thread = threading.current_thread().name
    if len(_told) >= _MOST_PLACES:  # threads of connections have names of their own
        _told.clear()
    told, now_s = _told.setdefault((thread, place, type(exc)), _Told()), time.monotonic()
    if now_s >= told.again_s:
        more = f" ({told.count} times more since that was told last)" if told.count else ""
        told.again_s, told.count = now_s + EVERY_S, 0
        _log.error("%s: %s failed%s; the thread goes on", thread, place, more, exc_info=exc)
    else:
        told.count += 1
    return limits.exhausted(exc, place) or InternalError(detail=f"{place} failed: {cause_of(exc)}")


def cause_of(exc: BaseException) -> str:
    """An exception in a line: its type and message."""
    text = message_of(exc)
    return f"{type(exc).__name__}: {text[:_LONGEST]}" if text else type(exc).__name__


def message_of(exc: BaseException) -> str:
    """The message of an exception of anyone's code, which may fail to make it."""
    try:
        return str(exc)
    except Exception as broken:  # noqa: BLE001 - anyone's code
        return f"(its message can't be made: {type(broken).__name__})"


def _name_of(call: Callable[..., object]) -> str:
    while isinstance(call, functools.partial):
        call = call.func
    return str(getattr(call, "__qualname__", type(call).__name__))
