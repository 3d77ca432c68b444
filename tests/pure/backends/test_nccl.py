"""What `nccl` computes, on the fake of cupy: the conformance suite's cases on arrays of GPUs.

So do ranks that share a GPU with an old NCCL, and do without it, bit by bit. There each rank stands for a process:
memory of others is reached where it was opened, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

from raycollect.backends.nccl import ipc_group, ops
from raycollect.backends.nccl import run as _nccl_run
from raycollect.backends.nccl.fold_kernels import AT_ONCE
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from tests.pure.backends.streams import sums
from tests.pure.conformance import (
    CASE_RULES,
    DTYPES,
    KINDS,
    REDUCTIONS,
    SPREADS,
    WORLDS,
    Case,
    allowed,
    run_launch,
)
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
from tests.pure.on_one_gpu import sharing
from tests.pure.operands import left_fold, operand
from tests.support.values import replace

TeamOf = Callable[..., AbstractContextManager[tuple[Any, Any]]]

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
RULES = CASE_RULES | {("layout", "library"): lambda layout, library: layout != "reversed" or library != "torch"}
SELECTED = pairwise(PARAMETERS, RULES)

each_way = pytest.mark.parametrize("team_of", [team_on_gpus, sharing])
"""With a GPU for each rank, and with one for all."""


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


@pytest.mark.parametrize("world", [2, 3, 5, pytest.param(8, marks=pytest.mark.full)])
def test_every_two_values_meet_on_a_gpu_that_ranks_share(world: int) -> None:
    with sharing(world, seed=world) as (_, team):
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


@each_way
@pytest.mark.parametrize("inplace", [True, False])
def test_arrays_without_dimensions(team_of: TeamOf, inplace: bool) -> None:
    cases = [
        GpuCase(case=Case(kind=kind, op=op, dtype=dtype, size=1, layout="0-d", inplace=inplace), library=library)
        for dtype, library, (kind, op) in product(
            ("float64", "int16"),
            LIBRARIES,
            ((OpKind.ALLREDUCE, ReduceOp.PRODUCT), (OpKind.REDUCE, ReduceOp.MAX), (OpKind.BROADCAST, None)),
        )
    ]
    with team_of(3) as (_, team):
        check(team, cases)


@each_way
@pytest.mark.parametrize("how", LAYOUTS)
def test_a_million_elements(team_of: TeamOf, how: str) -> None:
    cases = [
        Case(kind=OpKind.ALLREDUCE, op=ReduceOp.SUM, dtype="float32", size=1_000_001, layout=how),
        Case(kind=OpKind.ALLGATHER, dtype="uint8", size=1_000_001, layout=how, spread="uneven", inplace=True),
    ]
    with team_of(2) as (_, team):
        check(team, [GpuCase(case=case) for case in cases])


# ------------------------------------------------------------------------------- sends


@each_way
@pytest.mark.parametrize("seed", range(3))
def test_everyone_sends_to_everyone(team_of: TeamOf, seed: int) -> None:
    with team_of(3, seed=seed) as (_, team):
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


@each_way
@pytest.mark.parametrize("seed", range(3))
def test_several_agreements_and_kernels_in_one_launch(team_of: TeamOf, seed: int) -> None:
    with team_of(3, seed=seed) as (_, team):
        expected = left_fold(ReduceOp.SUM, [operand(rank, "int32", 500, 1) for rank in range(3)])
        for _ in range(3):
            for rank, rows in enumerate(team.must(body_several, team.launch())):
                for row in rows:
                    np.testing.assert_array_equal(row, expected + np.int32(rank))


# ------------------------------------------------------------------------------- on a GPU that ranks share


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_every_reduction_of_every_dtype_is_the_left_fold(seed: int) -> None:
    """Also where NCCL has another order, or nothing."""
    turns, cases = cycle(product(LAYOUTS, LIBRARIES, (False, True))), []
    for (op, dtype), kind in zip(product(ReduceOp, DTYPES), cycle(REDUCTIONS)):
        if allowed(op, dtype):
            how, library, inplace = next(turns)
            case = Case(
                kind=kind, dtype=dtype, op=op, size=1023, layout=how, inplace=inplace, spread="uneven", seed=seed
            )
            cases.append(GpuCase(case=case, library="cupy" if how == "reversed" else library))
    with sharing(3, seed=seed) as (_, team):
        check(team, cases)


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "complex64"]
    + [pytest.param(dtype, marks=pytest.mark.full) for dtype in ("float8_e4m3fn", "int8", "bool")],
)
def test_more_ranks_than_one_kernel_takes(dtype: str) -> None:
    """What is folded so far stays wide in between."""
    ops = [op for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MAX) if allowed(op, dtype)]
    with sharing(AT_ONCE + 2) as (_, team):
        check(team, [GpuCase(case=Case(kind=OpKind.ALLREDUCE, dtype=dtype, op=op, size=700)) for op in ops])


def test_a_nan_wins() -> None:
    """As in the backends for the host, and not as in NCCL."""
    expected = np.array([np.nan, np.nan, 1.0], np.float32)

    def body(communicator: Communicator, launches: list[Launch]) -> list[np.ndarray]:
        caller, found = Caller(), []
        for launch, op in zip(launches, (ReduceOp.MIN, ReduceOp.MAX), strict=True):
            values = np.array([1.0, np.nan, 1.0] if communicator.rank else [np.nan, 1.0, 1.0], np.float32)
            array = pending(values)
            communicator.launch(launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=op)).wait(5)
            communicator.end(launch, True)
            found.append(read_elsewhere(array, caller.other))
        return found

    with sharing(2) as (_, team):
        for results in team.must(body, [team.launch(), team.launch()]):
            for found in results:
                np.testing.assert_array_equal(found, expected)


def body_together(communicator: Any, launch: Launch, count: int) -> tuple[list[int], list[np.ndarray]]:
    """Sums that share their meetings; how many at a time, and the results."""
    caller = Caller()
    with caller["non-blocking"]:
        arrays = [pending(np.arange(at, dtype=np.int64) + communicator.rank) for at in range(count)]
        kernels, done = [sums(one) for one in arrays], []
        while sum(done) < count:
            done.append(communicator.launch_together(launch, kernels[sum(done) :]))
        communicator.end(launch, True)
    return done, [read_elsewhere(one, caller.other) for one in arrays]


def test_kernels_that_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_group, "TOGETHER", 7)
    with sharing(3) as (_, team):
        for done, results in team.must(body_together, team.launch(), 10):
            assert done == [7, 3]
            for at, found in enumerate(results):
                np.testing.assert_array_equal(found, 3 * np.arange(at) + 3)


@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_in_one_process_use_its_own_pointers(processes: int) -> None:
    """A process can't open its own handles; the fake refuses that, as CUDA does."""
    cases = [GpuCase(case=Case(kind=kind, dtype="int32", size=999)) for kind in (OpKind.ALLGATHER, OpKind.ALLTOALL)]
    cases.append(GpuCase(case=Case(kind=OpKind.ALLREDUCE, op=ReduceOp.SUM, dtype="int32", size=999)))
    with sharing(3, processes=processes) as (fake, team):
        check(team, cases)
        assert bool(fake.counts["ipcOpenMemHandle"]) == (processes > 1)
