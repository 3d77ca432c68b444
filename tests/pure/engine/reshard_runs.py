"""Reshards as ranks run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raycollect.planner import Membership, Reshard, Topology
from tests.pure.fleet import Convoy
from tests.pure.resharding import (
    request_of,
)
from tests.support.values import replace


def run(
    convoy: Convoy,
    reshard: Reshard,
    src: Mapping[int, Any],
    dst: Mapping[int, Any] | None,
    hosts: Sequence[int] = (),
    **arguments: Any,
) -> dict[int, Any]:
    """Runs a reshard; sides are by their own ranks. Returns the outcomes by rank of the group."""
    declared = convoy.memberships[0]
    places = Topology(hosts=tuple(hosts) or declared.topology.hosts)
    membership = Membership(spec=declared.spec, participants=declared.participants, topology=places)
    keys: dict[int, Any] = {}
    for side, ranks, odd in ((src, reshard.src_ranks, 0), (dst or {}, reshard.dst_ranks, 1)):
        for at, value in side.items():
            keys[2 * ranks[at] + odd] = convoy.keep(ranks[at], value)
    request = request_of(reshard, membership.spec, made=dst is None, **arguments)
    operands = tuple((rank, keys.get(a), keys.get(b)) for rank, a, b in request.operands)
    return convoy.run([replace(request, operands=operands)], [membership])


def must(outcomes: Mapping[int, Any]) -> dict[int, Any]:
    """What each rank made; raises the first error."""
    for outcome in outcomes.values():
        if outcome.error is not None:
            raise outcome.error
    return {rank: [container.value for container in outcome.outputs] for rank, outcome in outcomes.items()}
