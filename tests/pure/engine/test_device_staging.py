"""Tensors that lie elsewhere than their group's backend works: every operation, on a fake of cupy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

from raycollect.core.model import OpKind
from tests.pure.meaning import takers
from tests.pure.mixed import (
    BACKENDS,
    DTYPES,
    HOMES,
    KINDS,
    PEER,
    ROOT,
    WORLD,
    Mixed,
    collective,
    devices_of,
    empty_like,
    is_on_gpu,
    named,
    numbers,
    same,
    seeds,
)

# ---------------------------------------------------------------------------------------------- every operation


@seeds
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [*BACKENDS, "tcp"])
def test_ranks_may_have_their_tensors_on_devices_of_different_kinds(
    backend: str, kind: OpKind, mixed: Callable[[str], Mixed], request: pytest.FixtureRequest
) -> None:
    seed = request.node.callspec.params["fake"]
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    one = mixed(backend)
    for turn, dtype in enumerate(random.Random(seed).sample(DTYPES, 3)):
        given, expected = collective(kind, rng, dtype)
        source = devices_of(10 * seed + turn, HOMES[backend])
        target = [random.Random(seed + turn + rank).choice((None, rank)) for rank in range(WORLD)]
        gaps = bool(turn % 2)
        gives = {r: one.put(value, source[r], gaps=gaps) for r, value in enumerate(given) if value is not None}
        takes = {r: one.put(empty_like(expected[r]), target[r], gaps=gaps) for r in takers(kind, WORLD, ROOT, PEER)}
        keys = [{r: one.fleet.keep(r, value) for r, value in side.items()} for side in (gives, takes)]
        one.fleet.must(kind, *keys, **named(kind))
        assert one.fleet.dirty == [0] * WORLD
        for r, value in gives.items():
            in_place = kind in (OpKind.ALLREDUCE, OpKind.REDUCE) and expected[r] is not None
            same(value, expected[r] if in_place else given[r])
        for r, value in takes.items():
            same(value, expected[r])
            parts = value if type(value) is list else [value]
            assert all(is_on_gpu(part) == (target[r] is not None) for part in parts)


@seeds
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not OpKind.BROADCAST])
@pytest.mark.parametrize("backend", ["local", "nccl"])
def test_outputs_are_made_where_the_rank_has_what_it_gives(
    backend: str, kind: OpKind, mixed: Callable[[str], Mixed], request: pytest.FixtureRequest
) -> None:
    seed = request.node.callspec.params["fake"]
    one = mixed(backend)
    given, expected = collective(kind, np.random.default_rng([seed, 5]), "int32")
    devices = devices_of(seed, HOMES[backend])
    gives = {r: one.fleet.keep(r, one.put(v, devices[r])) for r, v in enumerate(given) if v is not None}
    arguments = named(kind) | ({"inplace": False} if kind in (OpKind.ALLREDUCE, OpKind.REDUCE) else {})
    takes: dict[int, Any] = dict.fromkeys(range(WORLD))
    ranks = (ROOT, PEER) if kind is OpKind.SEND else range(WORLD)
    made = dict(zip(ranks, one.fleet.must(kind, gives, takes, **arguments), strict=True))
    found = {rank: outcome.outputs[0].value for rank, outcome in made.items() if outcome.outputs}
    assert found
    for rank, value in found.items():
        same(value, expected[rank])
        where = devices[rank] if rank in gives else devices[ROOT]
        parts = value if isinstance(value, list) else [value]
        assert all(is_on_gpu(part) == (where is not None) for part in parts)


@seeds
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_may_hold_tensors_of_both_kinds_that_travel_packed_or_not(
    backend: str, mixed: Callable[[str], Mixed], request: pytest.FixtureRequest
) -> None:
    seed = request.node.callspec.params["fake"]
    rng, where = np.random.default_rng([seed, 3]), random.Random(seed)
    one = mixed(backend)
    sizes = [3, 17, 1, 20_000, 5, 30_000, 70_001, 0]  # some packed, some run together, some alone
    values = [[numbers(rng, "float32")(size) for size in sizes] for _ in range(WORLD)]
    tensors = [[one.put(value, where.choice((None, r))) for value in values[r]] for r in range(WORLD)]
    one.fleet.must(OpKind.ALLREDUCE, one.fleet.keep_all(tensors))
    for rank in range(WORLD):
        same(tensors[rank], [sum(values[r][at] for r in range(WORLD)) for at in range(len(sizes))])
