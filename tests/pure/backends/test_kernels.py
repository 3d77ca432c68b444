"""Whose arrays go where, and what is refused as wrong by then: the planner and the check should have seen it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends.kernels import (
    chunks,
    clipped,
    keep_own,
    movement,
    reduction,
    scattered_reduction,
    transfers,
    translated,
)
from raycollect.backends.shm import staged
from raycollect.backends.tcp import run
from raycollect.core.model import Kernel, OpKind
from raycollect.errors import InternalError, KernelError, PlanAbortedError

RANKS = (1, 4, 6)


@pytest.mark.parametrize(("backend", "module"), [("shm", staged), ("tcp", run)])
def test_a_backend_has_a_kernel_of_each_operation_that_it_names(backend: str, module: ModuleType) -> None:
    """`OperationSpec.kernels` makes the backends of this package name an operation."""
    missing = {kind.value for kind in backends.get(backend).ops} - {kind.value for kind in module._KERNELS}
    assert not missing, f"{module.__name__}._KERNELS lacks {missing}"


def row(size: int, dtype: str = "int32") -> np.ndarray:
    return np.arange(size).astype(dtype)


ONE, EACH = row(4), (row(3), row(4), row(5))


@pytest.mark.parametrize(
    ("kind", "src", "dst", "gives", "takes"),
    [
        (OpKind.ALLGATHER, ONE, EACH, {1: 4, 4: 4, 6: 4}, {1: 3, 4: 4, 6: 5}),
        (OpKind.GATHER, ONE, EACH, {4: 4}, {1: 3, 4: 4, 6: 5}),
        (OpKind.SCATTER, EACH, ONE, {1: 3, 4: 4, 6: 5}, {4: 4}),
        (OpKind.ALLTOALL, EACH, EACH, {1: 3, 4: 4, 6: 5}, {1: 3, 4: 4, 6: 5}),
    ],
)
def test_what_the_root_gives_and_takes(kind: OpKind, src: Any, dst: Any, gives: dict, takes: dict) -> None:
    give, take = transfers(Kernel(kind=kind, src=src, dst=dst, peer=4, most=5), RANKS, 4)
    assert {rank: flat.size for rank, flat in give.items()} == gives
    assert {rank: flat.size for rank, flat in take.items()} == takes


def test_what_others_give_and_take() -> None:
    give, take = transfers(Kernel(kind=OpKind.GATHER, src=ONE, peer=4, most=5), RANKS, 6)
    assert (list(give), list(take)) == ([4], [])
    give, take = transfers(Kernel(kind=OpKind.SCATTER, dst=ONE, peer=4, most=5), RANKS, 6)
    assert (list(give), list(take)) == ([], [4])


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (Kernel(kind=OpKind.ALLTOALL, src=EACH, dst=EACH[:2], most=5), "3 ranks without a piece for each"),
        (Kernel(kind=OpKind.ALLTOALL, src=ONE, dst=EACH, most=5), "3 ranks without a piece for each"),
        (Kernel(kind=OpKind.ALLTOALL, src=EACH, dst=EACH, most=4), "more than 4 elements"),
        (Kernel(kind=OpKind.ALLGATHER, src=row(3), dst=EACH, most=5), "3 x int32 into 4 x int32"),
        (Kernel(kind=OpKind.SCATTER, src=EACH, dst=row(4, "int64"), peer=4, most=5), "4 x int32 into 4 x int64"),
        (Kernel(kind=OpKind.GATHER, src=ONE, dst=(*EACH[:2], row(5, "f4")), peer=4, most=5), "several dtypes"),
    ],
)
def test_transfers_that_do_not_fit(kernel: Kernel, said: str) -> None:
    with pytest.raises(InternalError, match=said):
        transfers(kernel, RANKS, 4)


def test_other_kernels_that_do_not_fit() -> None:
    with pytest.raises(InternalError, match="reduce of 4"):
        reduction(Kernel(kind=OpKind.REDUCE, src=ONE, dst=row(3)))
    with pytest.raises(InternalError, match="reducescatter of 4"):
        scattered_reduction(Kernel(kind=OpKind.REDUCESCATTER, src=EACH, dst=row(3)), RANKS, 4)
    with pytest.raises(InternalError, match="broadcast of 4"):
        movement(Kernel(kind=OpKind.BROADCAST, src=ONE, dst=row(3)), is_root=True)
    with pytest.raises(InternalError, match="without an array"):
        movement(Kernel(kind=OpKind.BROADCAST), is_root=False)


@pytest.mark.parametrize("kind", [OpKind.BARRIER, OpKind.REDUCE])
def test_an_operation_without_a_kernel_is_named(kind: OpKind) -> None:
    kernel = Kernel(kind=kind, src=ONE, dst=row(4))
    with pytest.raises(KernelError) as caught, translated(kind, "g", 3):
        movement(kernel, is_root=True)
    assert caught.value.op == kind.value
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_what_a_rank_gives_itself_is_copied_unless_it_is_there() -> None:
    src, dst = row(10), tuple(np.zeros(10, "int32") for _ in RANKS)
    kernel = Kernel(kind=OpKind.ALLGATHER, src=src, dst=dst, most=10)
    keep_own(*transfers(kernel, RANKS, 4), 4, 3)
    np.testing.assert_array_equal(dst[1], src)
    assert not dst[0].any()
    assert not dst[2].any()
    src.flags.writeable = False  # nothing may be written where both are one
    keep_own(*transfers(Kernel(kind=OpKind.ALLGATHER, src=src, dst=(dst[0], src, dst[2]), most=10), RANKS, 4), 4, 3)


def test_chunks_and_what_a_smaller_piece_has_of_them() -> None:
    give, _ = transfers(Kernel(kind=OpKind.ALLTOALL, src=EACH, dst=EACH, most=5), RANKS, 4)
    assert list(chunks(5, 2)) == [(0, 2), (2, 4), (4, 5)]
    assert list(chunks(0, 2)) == []
    assert [clipped(give[1], lo, hi) for lo, hi in chunks(5, 2)] == [(0, 2), (2, 3), (3, 3)]


def test_a_foreign_exception_becomes_a_kernel_error_and_ours_stay() -> None:
    with pytest.raises(KernelError, match="ValueError: no") as caught, translated(OpKind.SEND, "g", 3):
        raise ValueError("no")
    assert (caught.value.rank, caught.value.op, caught.value.group_name) == (3, "send", "g")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(PlanAbortedError), translated(OpKind.SEND, "g", 3):
        raise PlanAbortedError(detail="aborted")
