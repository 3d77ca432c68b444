"""What `nccl` computes, on the fake of cupy: the conformance suite's cases on arrays of GPUs.

So do ranks that share a GPU with an old NCCL, and do without it, bit by bit. There each rank stands for a process:
memory of others is reached where it was opened, and nowhere else.
"""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

from raycollect.backends.nccl import ops
from raycollect.backends.nccl import run as _nccl_run
from raycollect.backends.nccl.fold_kernels import AT_ONCE
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
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
    pending,
    read_elsewhere,
    team_on_gpus,
)
from tests.pure.on_one_gpu import sharing
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
RULES = CASE_RULES | {("layout", "library"): lambda layout, library: layout != "reversed" or library != "torch"}
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


@pytest.mark.parametrize("world", [2, 3, 5, pytest.param(8, marks=pytest.mark.full)])
def test_every_two_values_meet_on_a_gpu_that_ranks_share(world: int) -> None:
    with sharing(world, seed=world) as (_, team):
        check(team, [case_of(chosen) for chosen in SELECTED if chosen["world"] == world])


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
        caller, results = Caller(), []
        for launch, op in zip(launches, (ReduceOp.MIN, ReduceOp.MAX), strict=True):
            values = np.array([1.0, np.nan, 1.0] if communicator.rank else [np.nan, 1.0, 1.0], np.float32)
            array = pending(values)
            communicator.launch(launch, (Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=op),))
            communicator.end(launch, True)
            results.append(read_elsewhere(array, caller.other))
        return results

    with sharing(2) as (_, team):
        for results in team.must(body, [team.launch(), team.launch()]):
            for values in results:
                np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_in_one_process_use_its_own_pointers(processes: int) -> None:
    """A process can't open its own handles; the fake refuses that, as CUDA does."""
    cases = [GpuCase(case=Case(kind=kind, dtype="int32", size=999)) for kind in (OpKind.ALLGATHER, OpKind.ALLTOALL)]
    cases.append(GpuCase(case=Case(kind=OpKind.ALLREDUCE, op=ReduceOp.SUM, dtype="int32", size=999)))
    with sharing(3, processes=processes) as (fake, team):
        check(team, cases)
        assert bool(fake.counts["ipcOpenMemHandle"]) == (processes > 1)
