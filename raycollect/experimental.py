"""The names of `ray.experimental.collective`: groups that the driver declares, looks up and destroys.

::

    from raycollect.experimental import create_collective_group  # was: from ray.experimental.collective import ...

    group = create_collective_group(actors, backend="gloo")
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from raycollect import backends
from raycollect.driver.controller import Controller
from raycollect.driver.group import Group, declare_collective_group, destroy_collective_group

__all__ = [
    "create_collective_group",
    "destroy_all_collective_groups",
    "destroy_collective_group",
    "get_collective_groups",
]

_OF_GRAPHS = ("allgather", "allreduce", "reducescatter")


def create_collective_group(actors: Sequence[Any], backend: str, name: str | None = None) -> Group:
    """Declares a group of actors, in their order; see `declare_collective_group`.

    Args:
        actors: The actor handles, by rank.
        backend: The name of the backend; ``"auto"`` chooses.
        name: The name of the group; by default a unique name.
    """
    return declare_collective_group(actors, backend=backend, group_name=name or f"group-{secrets.token_hex(8)}")


def get_collective_groups(actors: Sequence[Any] | None = None, backend: str | None = None) -> list[Group]:
    """Returns the groups that this process has declared and not destroyed.

    Args:
        actors: Only groups that have all of these actors.
        backend: Only groups of this backend.

    Raises:
        UnknownBackendError: No backend of that name exists.
    """
    controller = Controller.current()
    wanted = set(actors or ())
    name = None if backend is None else backends.get(backend).name
    groups = [Group(controller, *declared) for declared in controller.groups.declared()]
    return [group for group in groups if wanted <= set(group.actors) and name in (None, group.backend)]


def destroy_all_collective_groups() -> None:
    """Destroys all groups that this process has declared; the actors stay alive."""
    for group in get_collective_groups():
        group.destroy()


def __getattr__(name: str) -> Any:
    advice = f": Ray's {name} is for Compiled Graphs. Call {name}_refs in a captured step instead"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice if name in _OF_GRAPHS else ''}")
