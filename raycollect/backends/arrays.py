"""What backends know about numpy arrays: description, reduction rules, storage ranges, flat access by chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from raycollect.model import ReduceOp, TensorInfo

__all__ = [
    "FOLDS",
    "Array",
    "Flat",
    "byte_range",
    "empty_like",
    "finish",
    "fold",
    "info",
    "is_tensor",
    "overlap",
    "overlaps_itself",
    "owner",
    "place",
    "refusal_reason",
]

Array = NDArray[Any]

KINDS = "biufc"
"""The numpy kinds that are tensors: bool, signed, unsigned, float, complex."""

FOLDS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.AVG: np.add,
}
"""How two ranks' elements become one. On bool numpy's add is a logical or, its multiply a logical and."""

REFUSED: dict[ReduceOp, tuple[str, str]] = {
    ReduceOp.AVG: ("biu", "an average of whole numbers is no whole number"),
    ReduceOp.MIN: ("c", "complex numbers have no order"),
    ReduceOp.MAX: ("c", "complex numbers have no order"),
}
"""Reduce op -> the kinds for which it has no meaning, and why."""

OVERLAP_WORK = 10_000
"""How many candidates numpy may try to decide whether two strided views meet."""


def is_tensor(value: object) -> bool:
    """Tells whether a value is an array that collectives work on: not masked, structured, of objects or text."""
    return type(value) in (np.ndarray, np.memmap) and value.dtype.kind in KINDS  # type: ignore[attr-defined]


def info(array: Array) -> TensorInfo:
    """Describes an array; the byte order is left out, because kernels convert it."""
    dtype = array.dtype
    return TensorInfo(shape=array.shape, dtype=_name(dtype), itemsize=dtype.itemsize)


def empty_like(tensor: TensorInfo) -> Array:
    """Allocates an array of that shape and dtype, C order, contents undefined.

    Raises:
        MemoryError: There is no memory for it.
    """
    return np.empty(tensor.shape, np.dtype(tensor.dtype))


def refusal_reason(op: ReduceOp, dtype: str) -> str | None:
    """Says why `op` has no meaning for elements of that dtype, or None where it has one."""
    kinds, why = REFUSED.get(op, ("", ""))
    if np.dtype(dtype).kind not in KINDS:
        return f"{op.name} of {dtype}: elements are not numbers"
    return f"{op.name} of {dtype}: {why}" if np.dtype(dtype).kind in kinds else None


def byte_range(array: Array) -> tuple[int, int]:
    """Gives the addresses [start, stop) that the array's elements lie in; empty for an array without elements."""
    start = stop = int(array.ctypes.data)
    if array.size == 0:
        return start, start
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    for extent, stride in zip(array.shape, array.strides, strict=True):
        span = (extent - 1) * stride
        if span < 0:
            start += span
        else:
            stop += span
    return start, stop + array.itemsize


def place(array: Array) -> tuple[Any, ...]:
    """Where and how an array lies: equal as long as everything else here says the same of it."""
    return array.ctypes.data, array.shape, array.strides, array.dtype, array.flags.writeable


def overlap(a: Array, b: Array) -> bool:
    """Tells whether two arrays share an element's storage; where that is too hard to tell, whether they may."""
    a_start, a_stop = byte_range(a)
    b_start, b_stop = byte_range(b)
    if max(a_start, b_start) >= min(a_stop, b_stop):
        return False
    try:
        return bool(np.shares_memory(a, b, cast("Any", OVERLAP_WORK)))
    except RuntimeError:  # numpy's TooHardError, which moved between versions
        return True


def overlaps_itself(array: Array) -> bool:
    """Tells whether two elements may share an address (broadcast strides); such an array can't be a target."""
    if array.size == 0:
        return False
    reach = array.itemsize
    dims = zip(array.strides, array.shape, strict=True)
    for stride, extent in sorted((abs(stride), extent) for stride, extent in dims if extent > 1):
        if stride < reach:
            return True
        reach += (extent - 1) * stride
    return False


def owner(array: Array) -> Array:
    """Gives the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def fold(op: ReduceOp, parts: Sequence[Array], out: Array) -> None:
    """Left-folds the ranks' parts in rank order into `out`, which may be the storage of ``parts[0]``.

    This one expression defines the bits of a reduction (P7). For AVG it is the sum of `parts` over their number.

    Args:
        op: The reduce op.
        parts: One native 1-D array per rank, [n] each, in rank order.
        out: Native 1-D, [n].
    """
    ufunc = FOLDS[op]
    if len(parts) == 1:
        np.copyto(out, parts[0])
    else:
        ufunc(parts[0], parts[1], out=out)
        for part in parts[2:]:
            ufunc(out, part, out=out)
    finish(op, out, len(parts))


def finish(op: ReduceOp, out: Array, world_size: int) -> None:
    """Turns the sum into the average, for AVG only."""
    if op is ReduceOp.AVG:
        np.divide(out, world_size, out=out)


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    return _native(dtype).name


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


class Flat:
    """Any array as a flat C-order row of native elements, read and written by chunks.

    Kernels see one kind of array. Where the array is contiguous and native, chunks are views of it; else a chunk is a
    copy, so that the memory beyond the array itself is that of a chunk (P8).

    Attributes:
        size: The number of elements.
        dtype: Their type, native byte order.
        direct: Whether chunks are views.
    """

    __slots__ = ("_array", "_line", "direct", "dtype", "size")

    def __init__(self, array: Array) -> None:
        base = array.view(np.ndarray)
        self.size = base.size
        self.dtype = _native(base.dtype)
        self.direct = base.flags.c_contiguous and base.flags.aligned and base.dtype.isnative
        self._array = base
        self._line = base.reshape(-1) if self.direct else base[:0] if base.ndim else base.reshape(1)[:0]

    def read(self, lo: int, hi: int) -> Array:
        """Gives elements [lo, hi): a view where `direct`, else a copy."""
        if self.direct:
            return self._line[lo:hi]
        chunk: Array = self._array.flat[lo:hi]
        return chunk.astype(self.dtype, copy=False)

    def target(self, lo: int, hi: int) -> Array:
        """Gives a place to write elements [lo, hi) to; `commit` it afterwards."""
        return self._line[lo:hi] if self.direct else np.empty(hi - lo, self.dtype)

    def commit(self, lo: int, hi: int, target: Array) -> None:
        """Brings what was written into a `target` to the array; nothing to do where `direct`."""
        if not self.direct and hi > lo:
            self._array.flat[lo:hi] = target

    def write(self, lo: int, hi: int, values: Array) -> None:
        """Writes elements [lo, hi)."""
        if self.direct:
            self._line[lo:hi] = values
        else:
            self.commit(lo, hi, values)
