"""Kernels that end before `launch` returns, and what backends share around a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import numpy as np

from raycollect.errors import InternalError, KernelError, RaycollectError
from raycollect.model import Kernel, OpKind, ReduceOp

from .arrays import Flat

__all__ = ["DONE", "Done", "chunks", "movement", "reduce_op", "reduction", "translated"]


class Done:
    """The completion of a kernel that has ended already."""

    __slots__ = ()

    def wait(self, timeout_s: float) -> None:
        """Returns at once."""


DONE = Done()


def chunks(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Cuts `size` elements into ranges [lo, hi) of at most `step`; none where there are no elements."""
    step = max(1, step)
    for lo in range(0, size, step):
        yield lo, min(lo + step, size)


def reduction(kernel: Kernel) -> tuple[Flat, Flat]:
    """Gives source and target of a reduction.

    Raises:
        InternalError: They differ in size or dtype; the planner should have seen it.
    """
    src, dst = Flat(kernel.src), Flat(kernel.dst)
    if src.size != dst.size or src.dtype != dst.dtype:
        raise InternalError(detail=f"allreduce of {src.size} x {src.dtype} into {dst.size} x {dst.dtype}")
    return src, dst


def movement(kernel: Kernel, *, is_root: bool) -> tuple[Flat | None, Flat | None, Flat]:
    """Gives what a rank reads and what it writes in a broadcast, a send or a receive; third, whichever there is.

    The root reads `src` (or `dst`, where that is its one array) and writes `dst` only if it is another array.

    Raises:
        InternalError: The array is missing.
    """
    read = kernel.dst if kernel.src is None else kernel.src
    write = kernel.src if kernel.dst is None else kernel.dst
    if read is None or write is None:
        raise InternalError(detail=f"{kernel.kind.value} without an array")
    if not is_root:
        dst = Flat(write)
        return None, dst, dst
    src, other = Flat(read), Flat(write) if write is not read else None
    if other is not None and (src.size != other.size or src.dtype != other.dtype):
        raise InternalError(detail=f"{kernel.kind.value} of {src.size} x {src.dtype} into {other.size} x {other.dtype}")
    return src, other, src


def reduce_op(kernel: Kernel) -> ReduceOp:
    """Gives the reduce op of a reduction.

    Raises:
        InternalError: It has none.
    """
    if kernel.op is None:
        raise InternalError(detail=f"{kernel.kind.value} without a reduce op")
    return kernel.op


class translated:  # noqa: N801 - used like a function
    """Around a kernel: numpy's warnings are off, and a foreign exception becomes a KernelError.

    A class and not a generator: it is entered twice per plan, and this is several times faster.
    """

    __slots__ = ("_errstate", "_group_name", "_kind", "_rank")

    def __init__(self, kind: OpKind, group_name: str, rank: int) -> None:
        self._kind = kind
        self._group_name = group_name
        self._rank = rank
        self._errstate = np.errstate(all="ignore")

    def __enter__(self) -> None:
        self._errstate.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._errstate.__exit__(kind, exc, trace)
        if isinstance(exc, Exception) and not isinstance(exc, RaycollectError):
            detail = f"{type(exc).__name__}: {exc}"
            raise KernelError(op=self._kind.value, group_name=self._group_name, rank=self._rank, detail=detail) from exc
