"""Tensors of GPUs, and of the host beside them, over sockets: `tcp`, `gloo` and torch's; on a fake of cupy.

Ranks of `gloo` have to be processes, as its library lets no other thread go on: `test_backends_gloo` has its test.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.engine.device_staging import memory_of
from tests.fake_cupy import Fake
from tests.pure.conformance import is_absent
from tests.pure.meaning import takers
from tests.pure.mixed import (
    DTYPES,
    HOMES,
    KINDS,
    PEER,
    ROOT,
    SOCKETS,
    WORLD,
    Mixed,
    collective,
    devices_of,
    empty_like,
    faked,
    is_on_gpu,
    mixing,
    named,
    numbers,
    same,
)


@pytest.fixture(scope="module")
def absent() -> dict[str, str]:
    """Why backends can't be tested here; their libraries are imported before there is a cupy for them to look at."""
    return {backend: is_absent(backend) for backend in SOCKETS}


@pytest.fixture(scope="module")
def fake(absent: dict[str, str]) -> Iterator[Fake]:
    with faked() as made:
        yield made


@pytest.fixture(scope="module", params=SOCKETS)
def one(request: pytest.FixtureRequest, fake: Fake, absent: dict[str, str]) -> Iterator[Mixed]:
    """One fleet for all tests of a backend: to connect takes longer than most of them."""
    if why := absent[request.param]:
        pytest.skip(why)
    with mixing(fake) as make:
        yield make(request.param)


@pytest.mark.parametrize("backend", ["gloo", *SOCKETS])
def test_they_work_in_the_memory_of_the_host(backend: str) -> None:
    assert memory_of(backend) == "cpu"


def test_of_torchs_backends_only_those_of_the_host_have_stand_ins() -> None:
    assert [memory_of(f"torch:{name}") for name in ("gloo", "mpi", "nccl", "xccl")] == ["cpu", "cpu", "", ""]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_have_their_tensors_on_devices_of_different_kinds(one: Mixed, kind: OpKind, gaps: bool) -> None:
    turn = 2 * KINDS.index(kind) + gaps
    dtype = DTYPES[turn % len(DTYPES)]
    given, expected = collective(kind, np.random.default_rng(turn), dtype)
    source = devices_of(turn, HOMES["tcp"])
    target = [random.Random(turn + rank).choice((None, rank)) for rank in range(WORLD)]
    gives = {r: one.put(value, source[r], gaps=gaps) for r, value in enumerate(given) if value is not None}
    takes = {r: one.put(empty_like(expected[r]), target[r], gaps=gaps) for r in takers(kind, WORLD, ROOT, PEER)}
    keys = [{r: one.fleet.keep(r, value) for r, value in side.items()} for side in (gives, takes)]
    one.fleet.must(kind, *keys, **named(kind))
    assert one.fleet.dirty == [0] * WORLD
    for r, value in takes.items():
        same(value, expected[r])
        assert all(is_on_gpu(part) == (target[r] is not None) for part in (value if type(value) is list else [value]))


def test_all_tensors_on_gpus(one: Mixed) -> None:
    values = [numbers(np.random.default_rng(rank), "float64")(5000) for rank in range(WORLD)]
    tensors = [one.put(value, rank) for rank, value in enumerate(values)]
    one.fleet.must(OpKind.ALLREDUCE, one.fleet.keep_all(tensors))
    for tensor in tensors:
        same(tensor, sum(values))


def test_lists_travel_packed_or_not(one: Mixed) -> None:
    where, rng = random.Random(3), np.random.default_rng(3)
    sizes = [3, 17, 1, 20_000, 30_000, 70_001, 0]
    values = [[numbers(rng, "float32")(size) for size in sizes] for _ in range(WORLD)]
    tensors = [[one.put(value, where.choice((None, r))) for value in values[r]] for r in range(WORLD)]
    one.fleet.must(OpKind.ALLREDUCE, one.fleet.keep_all(tensors))
    for tensor in tensors:
        same(tensor, [sum(values[r][at] for r in range(WORLD)) for at in range(len(sizes))])


def test_what_is_written_again_is_brought_again(one: Mixed) -> None:
    tensors = [one.put(np.full(5, rank + 1.0), (None, 1, None)[rank]) for rank in range(WORLD)]
    keys = one.fleet.keep_all(tensors)
    for turn in range(4):
        for rank, tensor in enumerate(tensors):
            with one.cupy.cuda.Device(rank):
                tensor[...] = float(rank + turn)
        one.fleet.must(OpKind.ALLREDUCE, keys)
        for tensor in tensors:
            same(tensor, np.full(5, sum(rank + turn for rank in range(WORLD))))


def test_imperative_calls(one: Mixed) -> None:
    tensors = [one.put(np.arange(7) + rank, (0, None, 2)[rank]) for rank in range(WORLD)]
    assert [outcome.error for outcome in one.fleet.call(OpKind.ALLREDUCE, tensors)] == [None] * WORLD
    for tensor in tensors:
        same(tensor, 3 * np.arange(7) + 3)


def test_a_dtype_that_is_refused_is_refused_for_all_and_nothing_is_written(one: Mixed) -> None:
    tensors = [one.put(np.arange(4, dtype=("int32", "int64", "int32")[r]), (0, None, 2)[r]) for r in range(WORLD)]
    outcomes: list[Any] = one.fleet.call(OpKind.ALLREDUCE, tensors, op=ReduceOp.SUM)
    assert all("dtype" in str(outcome.error) for outcome in outcomes)
    for tensor in tensors:
        same(tensor, np.arange(4))
