"""Passes a thread's calls of Ray to a recorder, as long as a step is recorded there.

`submitted_calls` sees the methods of actors. Here are tasks, actors that are created, and the arguments of `ray.get`,
`ray.wait` and `ray.put`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import Token
from functools import partial
from typing import Any

import ray
from ray.actor import ActorClass
from ray.remote_function import RemoteFunction

from raycollect.core.placeholder import Placeholder
from raycollect.core.user_line import user_line
from raycollect.errors import UnrecordableCallError
from raycollect.ray_bridge import submitted_calls
from raycollect.ray_bridge.hooks import hook
from raycollect.ray_bridge.submitted_calls import CallRecorder, recorder, recording


def begin(to: CallRecorder) -> Token[CallRecorder | None]:
    """Passes the calls of this thread, or asynchronous task, to a recorder, until `end` of the returned token."""
    submitted_calls.see_calls()
    hook(RemoteFunction, "_remote", partial(_refusing, _task_name))
    hook(ActorClass, "_remote", partial(_refusing, _creation_name))
    for name in ("get", "wait", "put"):
        hook(ray, name, partial(_looking, name))
    return recorder.set(to)


def end(token: Token[CallRecorder | None]) -> None:
    """Ends `begin`."""
    with suppress(ValueError):  # another context, as a generator may be in: nothing is recorded there
        recorder.reset(token)


def _task_name(function: Any) -> str:
    return f"the task {function._function_name}"


def _creation_name(actor_class: Any) -> str:
    return f"the creation of an actor of {actor_class.__ray_metadata__.class_name}"


def _refusing(words: Callable[[Any], str], submit: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder_here = recording()
        if recorder_here is not None and not recorder_here.is_eager:
            raise UnrecordableCallError(
                detail="can't be recorded: a step records methods of participants and collectives",
                call=words(self),
                where=user_line(),
            )
        return submit(self, *args, **kwargs)

    return call


def _looking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        value: Any = args[0] if args else next(iter(kwargs.values()), None)
        for item in value if type(value) in (list, tuple) else (value,):
            if isinstance(item, Placeholder):
                item._passed_to(f"ray.{name}()")
        return function(*args, **kwargs)

    return call
