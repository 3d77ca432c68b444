"""The groups inside a group over several hosts, so that its plans may go host by host."""

from __future__ import annotations

import secrets
from dataclasses import replace

from raycollect import backends, staging
from raycollect.group import Membership
from raycollect.model import GroupSpec

__all__ = ["inner_groups"]

_ROUTED = ("tcp", "gloo", "torch:gloo")
"""The backends over which plans of several hosts may go host by host."""


def inner_groups(membership: Membership) -> tuple[Membership, ...]:
    """The groups inside a group over several hosts: one per host, and the lowest ranks of all; see `Membership`."""
    spec, topology = membership.spec, membership.roster.topology
    everybody = all(member.participant for member in membership.members)
    if spec.backend not in _ROUTED or not everybody or not 1 < topology.host_count < spec.world_size:
        return ()
    hosts = [topology.on(host) for host in range(topology.host_count)]
    groups = [(f"host-{number}", "shm", ranks) for number, ranks in enumerate(hosts)]
    groups.append(("leaders", spec.backend, tuple(ranks[0] for ranks in hosts)))
    return tuple(
        Membership(
            spec=_spec(spec, f"{spec.name}/{name}", backend, len(ranks)),
            members=tuple(replace(membership.members[rank], rank=at) for at, rank in enumerate(ranks)),
            costs=membership.costs,
        )
        for name, backend, ranks in groups
    )


def _spec(outer: GroupSpec, name: str, backend: str, world_size: int) -> GroupSpec:
    return replace(
        outer,
        name=name,
        group_id=secrets.token_hex(8),
        backend=backend,
        world_size=world_size,
        ops=backends.ops_of(backend),
        options=outer.options if backend == outer.backend else (),
        memory=staging.memory_of(backend),
        parent=outer.group_id,
    )
