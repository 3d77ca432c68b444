"""Whose arrays go where, and what is refused as wrong by then: the planner and the check should have seen it."""

from __future__ import annotations

import numpy as np
import pytest

from raycollect.backends.completion import (
    movement,
    reduction,
    scattered_reduction,
    transfers,
    translated,
)
from raycollect.core.model import Kernel, OpKind
from raycollect.errors import InternalError, KernelError, PlanAbortedError

RANKS = (1, 4, 6)


def row(size: int, dtype: str = "int32") -> np.ndarray:
    return np.arange(size).astype(dtype)


ONE, EACH = row(4), (row(3), row(4), row(5))


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


def test_a_foreign_exception_becomes_a_kernel_error_and_ours_stay() -> None:
    with pytest.raises(KernelError, match="ValueError: no") as caught, translated(OpKind.SEND, "g", 3):
        raise ValueError("no")
    assert (caught.value.rank, caught.value.op, caught.value.group_name) == (3, "send", "g")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(PlanAbortedError), translated(OpKind.SEND, "g", 3):
        raise PlanAbortedError(detail="aborted")
