"""The handle of a driver in a list of actors: it is a rank of a group that it drives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle


class _Method(NamedTuple):
    """Looks like a method of an actor; the answer is there at once."""

    call: Callable[..., Any]

    def remote(self, *args: Any) -> Any:
        """Makes the call, and returns a ref of the result."""
        return ray.put(self.call(*args))


class DriverHandle:
    """Stands for the process that made it, among the actors of a group; `raycollect.this_process()` returns it.

    The formation of a group uses it like the handle of an actor with the mixin.

    Args:
        actor_id: The driver's id among actors; no actor of Ray has it.
        name: Its name in messages.
        describe: Says who it is, as the mixin does.
        link_type: Makes the controller's end of the connection to it.
    """

    _raycollect_run = None  # it has the mixin's methods, as far as they are needed (`is_participant`)

    def __init__(
        self, actor_id: Any, name: str, describe: Callable[[], dict[str, Any]], link_type: Callable[..., Any]
    ) -> None:
        self._actor_id = actor_id
        self.name: str = name
        self.link_type: Callable[..., Any] = link_type
        self._raycollect_describe = _Method(describe)
        self.__ray_call__: _Method = _Method(lambda function: function(self))

    def __reduce__(self) -> Any:
        raise TypeError("col.this_process() means the process that called it, and can't be sent to another one")

    def __repr__(self) -> str:
        return f"<{self.name}, as a rank>"


def is_handle(value: Any) -> bool:
    """Whether a value can stand for a member of a group."""
    return isinstance(value, (ActorHandle, DriverHandle))
