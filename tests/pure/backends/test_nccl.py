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
from tests.gpu.again import body_again
from tests.pure.conformance import (
    CASE_RULES,
    DTYPES,
    KINDS,
    REDUCTIONS,
    SPREADS,
    WORLDS,
    Case,
    run_launch,
)
from tests.pure.covering import pairwise
from tests.pure.on_gpu import (
    LAYOUTS,
    LIBRARIES,
    STREAMS,
    Caller,
    GpuCase,
    GpuTeam,
    check,
    gpus,
    pending,
    read_elsewhere,
    team_on_gpus,
)
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


# ------------------------------------------------------------------------------- kernels that come again


@pytest.mark.parametrize("how", ["plain", "every other"])
@pytest.mark.parametrize(
    ("kind", "inplace"), [found for found in product(KINDS, (False, True)) if found != (OpKind.SEND, True)]
)
def test_a_kernel_that_comes_again(kind: OpKind, inplace: bool, how: str) -> None:
    """With other numbers each time; nothing of it is left when it is gone."""
    peer = 0 if kind is OpKind.SEND else -1
    op = ReduceOp.SUM if kind in REDUCTIONS else None
    case = Case(kind=kind, dtype="int32", size=60, op=op, root=2, peer=peer, inplace=inplace, layout=how)
    ranks = (0, 2) if kind is OpKind.SEND else (0, 1, 2)
    with team_on_gpus(3) as (fake, team):
        before = [fake.allocated(rank) for rank in ranks]
        launches = [team.launch(ranks) for _ in range(4)]
        assert team.must(body_again, launches, case, ranks=ranks) == [[""] * 4] * len(ranks)
        assert [fake.allocated(rank) for rank in ranks] == before


def test_a_kernel_that_comes_again_in_another_group() -> None:
    """What it keeps of the first one is not used there."""

    def body(communicator: Communicator, launches: list[Launch]) -> Any:
        for launch in launches:
            run_launch(communicator, launch, kernels[communicator.rank])
        return read_elsewhere(kernels[communicator.rank].dst, Caller().other).tolist()

    with gpus(2):
        teams, kernels = [GpuTeam(2), GpuTeam(2)], [Kernel(kind=OpKind.BARRIER)] * 2

        def make(communicator: Communicator) -> None:
            array = pending(np.full(3, communicator.rank + 1, np.int32))
            kernels[communicator.rank] = Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)

        teams[0].must(make)
        assert teams[0].must(body, [teams[0].launch()]) == [[3] * 3] * 2
        teams[0].close()
        assert teams[1].must(body, [teams[1].launch() for _ in range(2)]) == [[12] * 3] * 2
        teams[1].close()
