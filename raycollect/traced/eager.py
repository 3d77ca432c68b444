"""Eager steps: each call goes through Ray, for debugging."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

import ray

from raycollect.captured.step_values import Fixed, ReturnedValues
from raycollect.driver import values
from raycollect.driver.pending import Pending, plain
from raycollect.ray_bridge import recorded_calls
from raycollect.traced.kept import KeepWrapper


class _Submitted:
    """Collects the refs of the method calls of one thread or asynchronous task; a `CallRecorder`."""

    is_eager: ClassVar[bool] = True

    def __init__(self) -> None:
        self._where = _here()
        self.refs: list[Any] = []

    def is_here(self) -> bool:
        return _here() == self._where

    def method(self, submit: Callable[[], Any], handle: Any, name: str, options: dict[str, Any]) -> Any:
        result = submit()
        self.refs += [ref for ref in (result if type(result) is list else [result]) if isinstance(ref, ray.ObjectRef)]
        return result


def run_eagerly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function, waits for the methods that it calls, and returns the values of a step; raises Ray's errors."""
    submitted = _Submitted()
    token = recorded_calls.begin(submitted)
    try:
        returned = function(*args, **kwargs)
    finally:
        recorded_calls.end(token)
    ray.get(submitted.refs)  # raises the errors of methods whose results are unused

    def read(value: Any, where: str) -> Any:
        if type(value) is KeepWrapper:
            return Fixed(partial(plain, value.value))
        return Fixed(partial(values.get, value) if isinstance(value, (ray.ObjectRef, Pending)) else lambda: value)

    return ReturnedValues.of(returned, read).fill((), {})


class EndedRun:
    """The result of `Step.start` for a run that has ended: the step is eager, or the function calls nothing."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._outcome = Future[Any]()
        try:
            self._outcome.set_result(run())
        except Exception as exc:  # noqa: BLE001 - `wait` raises it
            self._outcome.set_exception(exc)

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> Any:
        """Returns the result of the step, or raises its error."""
        return self._outcome.result()

    def done(self) -> bool:
        """Returns True."""
        return True

    def cancel(self) -> bool:
        """Returns False: the run has ended."""
        return False

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.wait()


def _here() -> tuple[int, Any]:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), task
