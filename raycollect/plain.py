"""What the controller runs, through `__ray_call__`, on actors that lack the mixin.

They take part in imperative calls and in barriers; their tensors stay their own business.
"""

from __future__ import annotations

import inspect
from typing import Any

from raycollect import ray_internals
from raycollect.backends import Gpu, gpus
from raycollect.runtime import Runtime


def describe(actor: Any) -> dict[str, Any]:
    """Who this actor is; the controller asks when a group is formed. Runs inside the actor, with the mixin or without.

    Args:
        actor: The instance of the user's class.
    """
    methods = (inspect.getattr_static(type(actor), name) for name in dir(type(actor)))
    return Runtime.current().describe(ordered=not any(hasattr(m, "__ray_concurrency_group__") for m in methods))


def gpu(actor: Any) -> Gpu | None:
    """What this actor, to which Ray gave a GPU, has for a group on GPUs; asked as `describe` is. Runs inside the actor.

    Args:
        actor: The instance of the user's class.
    """
    return gpus.here()


def run_program(actor: Any, payload: bytes) -> None:
    """Runs this rank's half of a plan, which has no outputs here. Runs inside the actor.

    An async actor's plain functions run on its event loop, which must not wait: there a kernel thread runs it, as
    wherever methods overlap, and the controller hears of its end all the same, over the channel.
    """
    Runtime.current().run_task(payload, ray_internals.current_task())
