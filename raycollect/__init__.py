"""raycollect: the driver states a collective once, over ObjectRefs; every participant runs its matching half.

::

    import raycollect as col

    col.declare_collective_group([A, B])
    col.allreduce_refs([A.get_buffer.remote(), B.get_buffer.remote()])   # both buffers now hold the sum

Names are loaded on first use, so that the planner and the backends import without Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycollect.api import Group as Group
    from raycollect.api import GroupStatus as GroupStatus
    from raycollect.api import MemberStatus as MemberStatus
    from raycollect.api import allreduce_refs as allreduce_refs
    from raycollect.api import barrier as barrier
    from raycollect.api import broadcast_refs as broadcast_refs
    from raycollect.api import create_collective_group as create_collective_group
    from raycollect.api import declare_collective_group as declare_collective_group
    from raycollect.api import destroy_collective_group as destroy_collective_group
    from raycollect.api import recv_ref as recv_ref
    from raycollect.api import send_ref as send_ref
    from raycollect.handle import Handle as Handle
    from raycollect.model import ReduceOp as ReduceOp
    from raycollect.participant import CollectiveParticipant as CollectiveParticipant
    from raycollect.participant import by_value as by_value
    from raycollect.runtime import mark_written as mark_written
    from raycollect.values import free as free
    from raycollect.values import get as get
    from raycollect.work import Work as Work

__version__ = "0.1.0"

_HOMES: dict[str, str] = {
    "CollectiveParticipant": "participant",
    "Group": "api",
    "GroupStatus": "api",
    "Handle": "handle",
    "MemberStatus": "api",
    "ReduceOp": "model",
    "Work": "work",
    "allreduce_refs": "api",
    "barrier": "api",
    "broadcast_refs": "api",
    "by_value": "participant",
    "create_collective_group": "api",
    "declare_collective_group": "api",
    "destroy_collective_group": "api",
    "errors": "errors",
    "free": "values",
    "get": "values",
    "mark_written": "runtime",
    "recv_ref": "api",
    "send_ref": "api",
}
"""Public name -> the module it lives in."""

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{home}")
    value = module if name == home else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
