"""Reshards from the layouts to the arrays: plan, encode, decode and run on ranks in threads, against plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycollect.errors import AliasError, LayoutError, ReadOnlyError
from raycollect.planner import Reshard, Roster, Topology, plan
from raycollect.planner.layout import layout
from raycollect.planner.reshard import rounds
from tests.pure.communicators import ThreadTeam
from tests.pure.fleet import Convoy
from tests.pure.resharding import Layouts, bound, empty_of, held_by, request_of, scenes, whole_tensors

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


@contextmanager
def convoy_of(world: int, backend: str = "local") -> Iterator[Convoy]:
    """Ranks in threads."""
    team = None if backend == "local" else ThreadTeam(backend, world)
    convoy = Convoy([tuple(range(world))], (lambda _: team.communicators) if team else None)
    try:
        yield convoy
    finally:
        convoy.close()
        if team:
            team.close()


def run(
    convoy: Convoy,
    reshard: Reshard,
    src: Mapping[int, Any],
    dst: Mapping[int, Any] | None,
    hosts: Sequence[int] = (),
) -> dict[int, Any]:
    """Runs a reshard; sides are by their own ranks. Returns the outcomes by rank of the group."""
    roster = convoy.rosters[0]
    roster = Roster(spec=roster.spec, members=roster.members, topology=Topology(hosts=tuple(hosts) or roster.topology.hosts))
    keys: dict[int, Any] = {}
    for side, ranks, odd in ((src, reshard.src_ranks, 0), (dst or {}, reshard.dst_ranks, 1)):
        for at, value in side.items():
            keys[2 * ranks[at] + odd] = convoy.keep(ranks[at], value)
    asked = request_of(reshard, roster.spec, made=dst is None)
    operands = tuple((rank, keys.get(a), keys.get(b)) for rank, a, b in asked.operands)
    from dataclasses import replace

    return convoy.run([replace(asked, operands=operands)], [roster])


def fill(side: Layouts, ranks: int, held: Mapping[int, Any]) -> dict[int, Any]:
    return {rank: held.get(rank, {}) for rank in range(ranks)}


@given(scenes(), st.sampled_from(["local", "local", "shm", "tcp"]), st.integers(1, 3), st.integers(0, 99))
@settings(CALM, max_examples=60)
def test_targets_hold_what_numpy_says(scene: Any, backend: str, hosts: int, seed: int) -> None:
    src, dst, src_ranks, dst_ranks = scene
    reshard = bound(src, dst, src_ranks, dst_ranks)
    whole = whole_tensors(src, seed)
    given, taken, expected = held_by(src, whole, seed), empty_of(dst), held_by(dst, whole)
    world = max(reshard.ranks) + 1
    with convoy_of(world, backend) as convoy:
        outcomes = run(convoy, reshard, given, taken, [rank % hosts for rank in range(world)])
    for outcome in outcomes.values():
        if outcome.error is not None:
            raise outcome.error
    for rank, tensors in expected.items():
        for key, array in tensors.items():
            np.testing.assert_array_equal(taken[rank][key], array, err_msg=f"{key} on rank {rank}")
