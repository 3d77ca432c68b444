"""What ranks compute that share a GPU with an old NCCL, on the fake of cupy: the conformance suite's cases, bit by bit.

Each rank stands for a process: memory of others is reached where it was opened, and nowhere else.
"""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

from raycollect.backends.nccl import ipc_group
from raycollect.backends.nccl.fold_kernels import AT_ONCE
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from tests.pure.backends.streams import sums
from tests.pure.backends.test_nccl import SELECTED, body_several, case_of
from tests.pure.conformance import DTYPES, REDUCTIONS, Case, allowed
from tests.pure.on_gpu import LAYOUTS, LIBRARIES, Caller, GpuCase, check, pending, read_elsewhere, sends
from tests.pure.on_one_gpu import sharing
from tests.pure.operands import left_fold, operand


@pytest.mark.parametrize("world", [2, 3, 5, pytest.param(8, marks=pytest.mark.full)])
def test_every_two_values_meet(world: int) -> None:
    with sharing(world, seed=world) as (_, team):
        check(team, [case_of(chosen) for chosen in SELECTED if chosen["world"] == world])


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


@pytest.mark.parametrize("inplace", [True, False])
def test_arrays_without_dimensions(inplace: bool) -> None:
    cases = [
        GpuCase(case=Case(kind=kind, op=op, dtype=dtype, size=1, layout="0-d", inplace=inplace), library=library)
        for dtype, library, (kind, op) in product(
            ("float64", "int16"), LIBRARIES, ((OpKind.ALLREDUCE, ReduceOp.PRODUCT), (OpKind.BROADCAST, None))
        )
    ]
    with sharing(3) as (_, team):
        check(team, cases)


def test_many_elements() -> None:
    cases = [
        Case(kind=OpKind.ALLREDUCE, op=ReduceOp.SUM, dtype="float32", size=1_000_001),
        Case(kind=OpKind.ALLREDUCE, op=ReduceOp.SUM, dtype="float32", size=1_000_001, layout="column", inplace=True),
        Case(kind=OpKind.ALLTOALL, dtype="uint8", size=1_000_001, spread="uneven", inplace=True),
    ]
    with sharing(2) as (_, team):
        check(team, [GpuCase(case=case) for case in cases])


@pytest.mark.parametrize("seed", range(2))
def test_everyone_sends_to_everyone(seed: int) -> None:
    with sharing(3, seed=seed) as (_, team):
        check(team, sends(3))


@pytest.mark.parametrize("seed", range(3))
def test_several_agreements_and_kernels_in_one_launch(seed: int) -> None:
    with sharing(3, seed=seed) as (_, team):
        expected = left_fold(ReduceOp.SUM, [operand(rank, "int32", 500, 1) for rank in range(3)])
        for rank, rows in enumerate(team.must(body_several, team.launch())):
            for row in rows:
                np.testing.assert_array_equal(row, expected + np.int32(rank))


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
