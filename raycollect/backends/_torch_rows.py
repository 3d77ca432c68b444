"""Tensors as `torch.distributed` takes them: flat rows of bytes, read and written by chunks, in any device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from raycollect.errors import InternalError
from raycollect.model import ReduceOp

from .arrays import Array, DeviceArray, Flat
from .folds import finish, fold

__all__ = ["Row", "is_native", "row"]

_NATIVE_DTYPES = frozenset({"int8", "uint8", "int32", "int64", "float32", "float64"})
"""What the libraries for CPU memory reduce as well as numpy does: no 16-bit float, which they round at each step."""

_NATIVE_OPS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG})

_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
"""Where floats are left to numpy: a comparison keeps a NaN or loses it, as its place in the ring has it."""


def is_native(op: ReduceOp, dtype: str) -> bool:
    """Tells whether the libraries for CPU memory reduce these as numpy does."""
    return dtype in _NATIVE_DTYPES and op in _NATIVE_OPS and not (op in _ORDERED and dtype.startswith("float"))


class Row(Protocol):
    """A tensor as a row of elements. Chunks are tensors of bytes: every library moves those, whatever the dtype.

    Attributes:
        size: The number of elements.
        itemsize: Bytes per element.
    """

    size: int
    itemsize: int

    def read(self, lo: int, hi: int) -> Any:
        """Gives elements [lo, hi) as bytes; perhaps a view, which must not be written."""
        ...

    def write(self, lo: int, hi: int, values: Any) -> None:
        """Writes elements [lo, hi) from bytes."""
        ...

    def room(self, count: int) -> Any:
        """Gives bytes for `count` elements, where this row's are, contents undefined."""
        ...

    def typed(self, values: Any) -> Any:
        """Gives bytes as elements, for the library to reduce."""
        ...

    def is_native(self, op: ReduceOp) -> bool:
        """Tells whether the library shall reduce."""
        ...

    def fold(self, op: ReduceOp, parts: Sequence[Any], out: Any) -> None:
        """Folds bytes in rank order; for rows that are not native."""
        ...

    def finish(self, op: ReduceOp, values: Any, world_size: int) -> None:
        """Turns the library's sum into the average, for AVG only."""
        ...


def row(array: Array | DeviceArray) -> Row:
    """Gives a tensor as a row."""
    return _DeviceRow(array.tensor) if isinstance(array, DeviceArray) else _HostRow(array)


class _HostRow:
    """An array in CPU memory. What the library can't reduce, numpy folds."""

    def __init__(self, array: Array) -> None:
        self._flat = Flat(array)
        self._writeable = array.flags.writeable
        self.size = self._flat.size
        self.itemsize = self._flat.dtype.itemsize

    def read(self, lo: int, hi: int) -> Any:
        chunk = np.ascontiguousarray(self._flat.read(lo, hi))
        if not chunk.flags.writeable:  # torch has no read-only tensors, and warns of them
            chunk = chunk.copy()
        return torch.from_numpy(chunk.view(np.uint8))

    def write(self, lo: int, hi: int, values: Any) -> None:
        self._flat.write(lo, hi, self._array(values))

    def room(self, count: int) -> Any:
        return torch.empty(count * self.itemsize, dtype=torch.uint8)

    def typed(self, values: Any) -> Any:
        return values.view(getattr(torch, self._flat.dtype.name))

    def is_native(self, op: ReduceOp) -> bool:
        return is_native(op, self._flat.dtype.name)

    def fold(self, op: ReduceOp, parts: Sequence[Any], out: Any) -> None:
        fold(op, [self._array(part) for part in parts], self._array(out))

    def finish(self, op: ReduceOp, values: Any, world_size: int) -> None:
        finish(op, self._array(values), world_size)

    def _array(self, values: Any) -> Array:
        array: Array = values.numpy().view(self._flat.dtype)
        return array


class _DeviceRow:
    """A tensor in a device's memory. The library of the device reduces, whatever the dtype; one with gaps is copied."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._line = tensor.contiguous().as_strided(
            (tensor.numel(),), (1,)
        )  # a view may keep the stride of one element
        self._is_copy = not tensor.is_contiguous()
        self.size = tensor.numel()
        self.itemsize = tensor.element_size()

    def read(self, lo: int, hi: int) -> Any:
        return self._line[lo:hi].view(torch.uint8)

    def write(self, lo: int, hi: int, values: Any) -> None:
        self._line[lo:hi] = self.typed(values)
        if self._is_copy and hi == self.size:
            self._tensor.copy_(self._line.view(self._tensor.shape))

    def room(self, count: int) -> Any:
        return torch.empty(count * self.itemsize, dtype=torch.uint8, device=self._tensor.device)

    def typed(self, values: Any) -> Any:
        return values.view(self._tensor.dtype)

    def is_native(self, op: ReduceOp) -> bool:
        return True

    def fold(self, op: ReduceOp, parts: Sequence[Any], out: Any) -> None:
        raise InternalError(detail="a fold of tensors that their library reduces")

    def finish(self, op: ReduceOp, values: Any, world_size: int) -> None:
        if op is ReduceOp.AVG:
            self.typed(values).div_(world_size)
