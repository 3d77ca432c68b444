"""Keeps an actor's methods from its tensors while a version is copied from them or into them; inside the actor.

Methods that run one by one are excluded by `Methods.guard`. Methods that overlap, and threads of the actor's own, can
only be excluded by the actor itself: a publication or subscription names a lock of the actor, which is held while a
version is copied. A lock is any context manager: of `threading`, of `asyncio`, or one that pauses an engine.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from raycollect.core import threads
from raycollect.errors import CollectiveTimeoutError, RefusedError, VersionError, Violation, refusal, wrong_argument
from raycollect.errors.text import a_type

_Result = TypeVar("_Result")

_EXPECTED = (
    "a context manager, or a method that returns one: such as threading.Lock(), asyncio.Lock(), or a method under "
    "@contextmanager or @asynccontextmanager"
)

_MARGIN, _MOST_MARGIN_S = 0.1, 1.0
"""How much earlier than its driver an actor gives up, as a part of the time limit and in seconds: so it says why."""


@dataclass(frozen=True, slots=True)
class OwnProcess:
    """Stands for the actor where a process publishes or subscribes tensors of its own.

    It makes these calls itself, at moments of its choice, so only its lock excludes others. `loop` is the event loop in
    which it began, `op` the operation, for messages.
    """

    loop: asyncio.AbstractEventLoop | None
    op: str = ""


class Exclusion:
    """What excludes the methods of one actor.

    Args:
        op: The operation, for messages.
        rank: The rank of the actor in its side.
        owner: The actor, if the lock is given by its name.
        lock: The lock, its name in the actor, or None.
        guard: Returns the context that excludes methods which run one by one.
        loop: The event loop of the actor, if it has one.
        is_needed: Whether methods overlap, so that only the lock excludes them.

    Attributes:
        guard: As given.
        is_needed: As given.
        is_total: Whether the guard alone excludes all methods.

    Raises:
        InvalidArgumentError: The actor has no such attribute, or it can't be a lock.
    """

    def __init__(
        self,
        op: str,
        rank: int,
        owner: Any = None,
        lock: Any = None,
        *,
        guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
        loop: asyncio.AbstractEventLoop | None = None,
        is_needed: bool = False,
    ) -> None:
        self._words = f"the actor's lock {lock!r}" if isinstance(lock, str) else "the lock"
        if isinstance(lock, str):
            if not hasattr(owner, lock):
                raise refusal(op, "", (wrong_argument("lock", f"{lock!r}, which {a_type(owner)} lacks", _EXPECTED),))
            lock = getattr(owner, lock)
        if lock is not None and not (_is_manager(lock) or callable(lock)):
            raise refusal(op, "", (wrong_argument("lock", a_type(lock), _EXPECTED),))
        self._op = op
        self._rank = rank
        self._lock = lock
        self._loop = loop
        self.guard: Callable[[], AbstractContextManager[Any]] = guard
        self.is_needed: bool = is_needed
        self.is_total: bool = lock is None

    def run(self, action: Callable[[], _Result], limit_s: float) -> _Result:
        """Calls a function while the lock is held. The caller is in a block of `guard`.

        Raises:
            CollectiveTimeoutError: The lock was not acquired in time; the function was not called.
            VersionError: Acquiring or releasing the lock raised an exception, which is the cause.
            InvalidArgumentError: The method that the lock names returned no context manager.
            UnsupportedError: The lock is one of `asyncio`, and its event loop is missing, or waits for this call.
        """
        if self._lock is None:
            return action()
        limit_s -= min(_MARGIN * limit_s, _MOST_MARGIN_S)
        manager = self._lock if _is_manager(self._lock) else self._called(self._lock)
        outcome: Future[_Result] = Future()
        call = partial(_call, action, outcome)
        try:
            if hasattr(manager, "__aenter__"):
                loop = self._free_loop()
                held = asyncio.run_coroutine_threadsafe(_hold_in_loop(manager, call, outcome.cancel), loop)
            else:
                held = threads.call_in_helper(_hold, manager, call)
            if not threads.has_ended(held, limit_s) and outcome.cancel():  # it has not begun
                held.cancel()
            else:
                wait([held])
        except BaseException:  # such as that of a signal handler
            if not outcome.cancel():
                wait([outcome])  # a copy that has begun is completed
            raise
        failure = held.exception() if held.done() and not held.cancelled() else None
        if failure is not None and not outcome.cancelled():
            if outcome.done():
                outcome.result()  # what the function raised comes first
            detail = f"{self._words} raised {threads.cause_of(failure)}"
            raise VersionError(name="", rank=self._rank, detail=detail) from failure
        if outcome.cancel():
            detail = f"waited {limit_s:.3g} s for {self._words}"
            raise CollectiveTimeoutError(timeout_s=limit_s, detail=detail)
        return outcome.result()

    def run_until(self, action: Callable[[float], _Result], until_s: float) -> _Result:
        """Calls `run`; the function gets the time that is left while the lock is held, before `until_s`."""

        def left_s() -> float:
            return max(until_s - time.monotonic(), 0.0)

        return self.run(lambda: action(left_s()), left_s())

    def _called(self, method: Callable[[], Any]) -> Any:
        manager = method()
        if not _is_manager(manager):
            if inspect.iscoroutine(manager):
                manager.close()
            raise refusal(
                self._op, "", (wrong_argument("lock", f"a method that returned {a_type(manager)}", _EXPECTED),)
            )
        return manager

    def _free_loop(self) -> asyncio.AbstractEventLoop:
        """Returns the event loop in which a coroutine can hold a lock while this thread waits."""
        loop = None if self._loop is None or self._loop.is_closed() else self._loop
        if loop is not None and running_loop() is not loop:
            return loop
        actual = f"a lock of asyncio {'without an event loop' if loop is None else 'in a call of its event loop'}"
        expected = "a lock of threading" if loop is None else "await asyncio.to_thread(...) of this call"
        violation = Violation(kind="unsupported", rank=self._rank, field="lock", found=actual, expected=expected)
        raise refusal(self._op, "", (violation,))


def _call(action: Callable[[], _Result], outcome: Future[_Result]) -> None:
    """Calls a function, unless its outcome was cancelled."""
    if outcome.set_running_or_notify_cancel():
        try:
            outcome.set_result(action())
        except BaseException as exc:  # noqa: BLE001 - raised by `run`: the lock must not see it
            outcome.set_exception(exc)


def _hold(manager: Any, call: Callable[[], None]) -> None:
    """Calls a function while a lock is held. If the call was cancelled, the lock is released once it is acquired."""
    with manager:
        call()


async def _hold_in_loop(manager: Any, call: Callable[[], None], give_up: Callable[[], bool]) -> None:
    """Calls a function in a helper thread while a lock of an event loop is held."""
    async with manager:
        called = threads.awaitable(call)
        while not called.done():
            try:
                await asyncio.shield(called)
            except asyncio.CancelledError:  # as the loop ends: a copy that has begun is completed
                give_up()


def _is_manager(value: Any) -> bool:
    return hasattr(value, "__enter__") or hasattr(value, "__aenter__")


def blocking_in_loop(op: str) -> RefusedError:
    """Returns the error of a call in an event loop that would wait for a thread, which may need that loop."""
    actual = "in an event loop, while another thread makes a call for tensors of this process"
    expected = "await asyncio.to_thread(...) of this call"
    return refusal(op, "", (Violation(kind="unsupported", field="the call", found=actual, expected=expected),))


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the event loop that runs in the calling thread; None if none does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
