"""Groups as a controller forms them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from raycollect import backends
from raycollect.core.model import GroupSpec, Member, ReduceOp
from raycollect.errors import UnknownGroupError
from raycollect.errors.text import a_type, as_name
from raycollect.group.link_costs import Costs
from raycollect.planner import Membership, Topology

ALIVE, BROKEN, DESTROYED = "alive", "broken", "destroyed"

DEFAULT_TIMEOUT_S = 60.0
"""How long ranks wait for each other in the driver's calls by default, in seconds."""

MEMBERS_TIMEOUT_S = 30.0
"""The same for calls that members make themselves; as in `ray.util.collective`."""


def membership_of(spec: GroupSpec, members: Sequence[Member], costs: Costs | None = None, **more: Any) -> Membership:
    """Makes a group of members, by rank; `more` are other fields of `Membership`."""
    costs, capabilities = costs or Costs(), backends.get(spec.backend, spec.name)
    topology = Topology.of([member.machine for member in members], inside=costs.inside, between=costs.between)
    return Membership(
        spec=spec,
        participants=tuple([member.actor_id for member in members]),
        members=tuple(members),
        topology=topology,
        bitwise=capabilities.bitwise and spec.in_rank_order,
        chunk_nbytes=capabilities.by_host_nbytes if spec.hosts else capabilities.chunk_nbytes,
        pricing=capabilities.pricing,
        **more,
    )


def on_backend(spec: GroupSpec, backend: str) -> GroupSpec:
    """The spec of a group with another backend, or with the chosen one."""
    line = backends.get(backend)
    ops = backends.ops_of(backend)
    return replace(spec, backend=backend, ops=ops, coalesces=line.coalesces, memory=line.memory)


def placed(spec: GroupSpec, machines: Sequence[str]) -> GroupSpec:
    """The spec of a group with its ranks' hosts (`GroupSpec.hosts`); `machines` are those of `Member`, by rank."""
    topology, pricing = Topology.of(machines), backends.get(spec.backend).pricing
    # A library's broadcast is not hierarchical, even if each rank has its own host.
    counts = pricing.by_host and 1 < topology.host_count < spec.world_size + bool(pricing.rings)
    return replace(spec, hosts=topology.hosts if counts else ())


def unknown(name: Any, detail: str) -> UnknownGroupError:
    """The error for an unknown group name, with a hint if the value is not a name."""
    if not isinstance(name, str):
        detail = f"{a_type(name)} is not the name of a group; check the order of the arguments, or name them"
    op = as_name(getattr(name, "name", name))
    if op.upper() in ReduceOp.__members__:
        detail += f". A reduce op is given by name here: op={op.lower()!r}"
    return UnknownGroupError(group_name=as_name(name), detail=detail)


def is_participant(handle: Any) -> bool:
    """Whether the actor's class has the mixin."""
    return hasattr(handle, "_raycollect_run")
