"""What `nccl` computes, on the fake of cupy: the conformance suite's cases on arrays of GPUs."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

from raycollect.backends.nccl import ops
from raycollect.backends.nccl import run as _nccl_run
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from tests.pure.conformance import DTYPES, KINDS, REDUCTIONS, ROOTED, SPREADS, WORLDS, Case, allowed, run_launch
from tests.pure.covering import pairwise
from tests.pure.on_gpu import (
    LAYOUTS,
    LIBRARIES,
    STREAMS,
    Caller,
    GpuCase,
    check,
    cupy_of,
    pending,
    read_elsewhere,
    sends,
    team_on_gpus,
)
from tests.pure.operands import left_fold, operand
from tests.support.values import replace

PARAMETERS = {
    "kind": KINDS,
    "dtype": DTYPES,
    "op": (None, *ReduceOp),
    "world": WORLDS,
    "size": (0, 1, 7, 1024, 20_011),
    "root": range(max(WORLDS)),
    "layout": LAYOUTS,
    "spread": SPREADS,
    "inplace": (False, True),
    "staged": (False, True),
    "library": LIBRARIES,
    "stream": STREAMS,
}
RULES = {
    ("kind", "op"): lambda kind, op: (kind in REDUCTIONS) == (op is not None),
    ("kind", "root"): lambda kind, root: kind in ROOTED or root == 0,
    ("kind", "world"): lambda kind, world: kind is not OpKind.SEND or world > 1,
    ("kind", "inplace"): lambda kind, inplace: kind is not OpKind.SEND or not inplace,
    ("op", "dtype"): lambda op, dtype: op is None or allowed(op, dtype),
    ("world", "root"): lambda world, root: root < world,
    ("layout", "library"): lambda layout, library: layout != "reversed" or library != "torch",
}
SELECTED = pairwise(PARAMETERS, RULES)


def case_of(chosen: dict[str, Any]) -> GpuCase:
    own = {name: chosen[name] for name in ("library", "stream", "staged")}
    values = {name: value for name, value in chosen.items() if name not in ("world", *own)}
    peer = (chosen["root"] + 1) % chosen["world"] if chosen["kind"] is OpKind.SEND else -1
    return GpuCase(case=Case(**values, peer=peer), **own)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_an_average_of_8_bit_floats_of_one_rank(kind: OpKind, dtype: str) -> None:
    """NCCL takes it for an invalid argument there."""
    with team_on_gpus(1, nccl_version=22803) as (_, team):
        check(team, [GpuCase(case=Case(kind=kind, dtype=dtype, size=7, op=ReduceOp.AVG))])


@pytest.mark.parametrize(
    ("world", "seed"),
    [
        pytest.param(world, seed, marks=[pytest.mark.full] * ((at + seed) % 2))  # one order in which GPUs come for each
        for at, world in enumerate(WORLDS)
        for seed in range(2)
    ],
)
def test_every_two_values_meet(world: int, seed: int) -> None:
    with team_on_gpus(world, seed=seed) as (_, team):
        check(team, [case_of(chosen) for chosen in SELECTED if chosen["world"] == world])


def test_the_selection_has_every_reduction_of_every_dtype() -> None:
    tested = {(chosen["op"], chosen["dtype"]) for chosen in SELECTED if chosen["op"] is not None}
    assert tested == {(op, dtype) for op, dtype in product(ReduceOp, DTYPES) if allowed(op, dtype)}


# ------------------------------------------------------------------------------- bits


FOLDED = [
    *product(("int16", "uint16"), (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)),
    *product(("uint8", "int16", "int64"), (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)),
    ("bool", ReduceOp.BXOR),
    *product(("complex64", "complex128"), (ReduceOp.PRODUCT,)),
]
"""What NCCL does not reduce."""


@pytest.mark.parametrize(
    ("world", "fold_nbytes"),
    [
        pytest.param(world, fold_nbytes, marks=[pytest.mark.full] * ((world + at) % 2 == 0))
        for world in (1, 2, 3)
        for at, fold_nbytes in enumerate((150, 1 << 20))
    ],
)
def test_what_nccl_can_not_reduce_is_the_left_fold(
    monkeypatch: pytest.MonkeyPatch, world: int, fold_nbytes: int
) -> None:
    """In one chunk and in many, which end within pieces."""
    monkeypatch.setattr(_nccl_run, "FOLD_NBYTES", fold_nbytes)
    turns = cycle(product(SPREADS, LAYOUTS, LIBRARIES, (False, True)))
    cases = []
    for (dtype, op), kind, size in product(FOLDED, REDUCTIONS, (0, 1, 61)):
        assert ops.reduction_of(op, dtype, 22803) is None
        spread, how, library, inplace = next(turns)
        case = Case(kind=kind, dtype=dtype, size=size, op=op, root=world - 1, layout=how, spread=spread)
        own = "cupy" if how == "reversed" else library
        cases.append(GpuCase(case=replace(case, inplace=inplace), library=own))
    with team_on_gpus(world, seed=fold_nbytes) as (_, team):
        check(team, cases)


def test_folds_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nccl_run, "FOLD_NBYTES", 6000)
    kinds = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCESCATTER)
    with team_on_gpus(3) as (fake, team):

        def body(communicator: Communicator, launches: list[Launch]) -> None:
            src = [pending(np.ones(30_000, np.int16)) for _ in range(3)]
            fake.limit(fake.allocated(communicator.rank) + 6000, communicator.rank)
            for kind, launch in zip(kinds, launches, strict=True):
                given: Any = tuple(src) if kind is OpKind.REDUCESCATTER else src[0]
                dst = src[communicator.rank] if kind is OpKind.REDUCESCATTER else src[0]
                run_launch(communicator, launch, Kernel(kind=kind, src=given, dst=dst, op=ReduceOp.SUM, peer=0))

        team.must(body, [team.launch() for _ in kinds])


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_all_ranks_have_the_same_bits(world: int) -> None:
    """Not those of the left fold: NCCL's order is its own."""
    dtypes = ("float16", "float32", "float64", "complex64", "bfloat16")
    cases = [
        GpuCase(case=Case(kind=OpKind.ALLREDUCE, op=op, dtype=dtype, size=size, seed=world))
        for dtype, op, size in product(dtypes, (ReduceOp.SUM, ReduceOp.AVG), (1, 255, 30_001))
    ]
    with team_on_gpus(world) as (_, team):
        check(team, cases)


@pytest.mark.parametrize("inplace", [True, False])
def test_arrays_without_dimensions(inplace: bool) -> None:
    cases = [
        GpuCase(case=Case(kind=kind, op=op, dtype=dtype, size=1, layout="0-d", inplace=inplace), library=library)
        for dtype, library, (kind, op) in product(
            ("float64", "int16"),
            LIBRARIES,
            ((OpKind.ALLREDUCE, ReduceOp.PRODUCT), (OpKind.REDUCE, ReduceOp.MAX), (OpKind.BROADCAST, None)),
        )
    ]
    with team_on_gpus(3) as (_, team):
        check(team, cases)


@pytest.mark.parametrize("how", LAYOUTS)
def test_a_million_elements(how: str) -> None:
    cases = [
        Case(kind=OpKind.ALLREDUCE, op=ReduceOp.SUM, dtype="float32", size=1_000_001, layout=how),
        Case(kind=OpKind.ALLGATHER, dtype="uint8", size=1_000_001, layout=how, spread="uneven", inplace=True),
    ]
    with team_on_gpus(2) as (_, team):
        check(team, [GpuCase(case=case) for case in cases])


# ------------------------------------------------------------------------------- sends


@pytest.mark.parametrize("seed", range(3))
def test_everyone_sends_to_everyone(seed: int) -> None:
    with team_on_gpus(3, seed=seed) as (_, team):
        check(team, sends(3))


# ------------------------------------------------------------------------------- several agreements and kernels


def body_several(communicator: Communicator, launch: Launch) -> list[np.ndarray]:
    """Two agreements and several kernels in one launch, each of which uses what the one before has made."""
    rank, world, caller = communicator.rank, communicator.world_size, Caller()
    with caller["non-blocking"]:
        array = pending(operand(rank, "int32", 500, 1), "column")
        rows = tuple(pending(np.full(500, -1, np.int32), "reversed") for _ in range(world))
        ok = False
        try:
            communicator.agree(launch, b"a" * (rank + 1))
            learned = communicator.agree(launch, b"b" * (rank + 1))
            assert [bytes(arrival) for arrival in learned] == [b"b" * (of + 1) for of in launch.ranks]
            total = Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)
            communicator.launch(launch, total).wait(5)
            cupy_of(array)[...] += rank
            communicator.launch(launch, Kernel(kind=OpKind.BARRIER)).wait(5)
            communicator.launch(launch, Kernel(kind=OpKind.ALLGATHER, src=array, dst=rows, most=500)).wait(5)
            communicator.launch(launch, Kernel(kind=OpKind.ALLTOALL, src=rows, dst=rows, most=500)).wait(5)
            ok = True
        finally:
            communicator.end(launch, ok)
    return [read_elsewhere(row, caller.other) for row in rows]


@pytest.mark.parametrize("seed", range(6))
def test_several_agreements_and_kernels_in_one_launch(seed: int) -> None:
    with team_on_gpus(3, seed=seed) as (_, team):
        expected = left_fold(ReduceOp.SUM, [operand(rank, "int32", 500, 1) for rank in range(3)])
        for _ in range(3):
            for rank, rows in enumerate(team.must(body_several, team.launch())):
                for row in rows:
                    np.testing.assert_array_equal(row, expected + np.int32(rank))
