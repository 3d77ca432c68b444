"""Has a recorder take what a thread calls of Ray, as long as a step is recorded there.

`core.submitted_calls` sees the methods of actors. Ray has no hook for tasks and for actors that are created, nor for
what `ray.get`, `ray.wait` and `ray.put` are given, so these functions are replaced, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from contextvars import Token
from typing import Any

import ray
from ray.actor import ActorClass
from ray.remote_function import RemoteFunction

from raycollect.core.placeholder import Placeholder
from raycollect.core.user_line import user_line
from raycollect.errors import UnrecordableCallError
from raycollect.ray_bridge import submitted_calls
from raycollect.ray_bridge.submitted_calls import Recorder, recorder, recording

_MARK = "__raycollect__"


def begin(one: Recorder) -> Token[Recorder | None]:
    """Gives a recorder the calls of this thread, or asynchronous task, until `end` gets what this returns."""
    submitted_calls.see_calls()
    _replace(RemoteFunction, "_remote", lambda made: f"the task {made._function_name}")
    _replace(ActorClass, "_remote", lambda made: f"the creation of an actor of {made.__ray_metadata__.class_name}")
    for name in ("get", "wait", "put"):
        _look_at(name)
    return recorder.set(one)


def end(token: Token[Recorder | None]) -> None:
    """Ends `begin`."""
    with suppress(ValueError):  # another context, as a generator may be in: nothing is recorded there
        recorder.reset(token)


def _replace(cls: type, name: str, words: Callable[[Any], str]) -> None:
    submit = getattr(cls, name)
    if hasattr(submit, _MARK):
        return

    @functools.wraps(submit)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = recording()
        if found is not None and not found.is_eager:
            raise UnrecordableCallError(
                detail="can't be recorded: a step records methods of participants and collectives",
                call=words(self),
                where=user_line(),
            )
        return submit(self, *args, **kwargs)

    setattr(call, _MARK, True)
    setattr(cls, name, call)


def _look_at(name: str) -> None:
    function = getattr(ray, name)
    if hasattr(function, _MARK):
        return

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value: Any = args[0] if args else next(iter(kwargs.values()), None)
        for one in value if type(value) in (list, tuple) else (value,):
            if isinstance(one, Placeholder):
                one._passed_to(f"ray.{name}()")
        return function(*args, **kwargs)

    setattr(call, _MARK, True)
    setattr(ray, name, call)
