"""Tensors as `torch.distributed` takes them: CPU arrays as they are, device tensors as rows of bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from raycollect.backends.arrays import Array, DeviceArray
from raycollect.backends.meshed import is_as_numpy
from raycollect.core.model import ReduceOp

# The libraries for CPU memory reduce these as numpy does. They round 16-bit floats at each step.
_NATIVE_DTYPES = frozenset({"int8", "uint8", "int32", "int64", "float32", "float64"})


def is_native(op: ReduceOp, dtype: str) -> bool:
    """Tells whether the libraries for CPU memory reduce these as numpy does."""
    return dtype in _NATIVE_DTYPES and is_as_numpy(op, dtype)


def host_tensor(array: Array) -> Any:
    """Wraps a flat, contiguous array as a tensor; the library must not write to one that is read-only."""
    if not array.flags.writeable:  # torch has no read-only tensors, and warns of them
        memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        array = np.ndarray(array.shape, array.dtype, memoryview(memory))
    return torch.from_numpy(array)


class Row:
    """A tensor in device memory as a row of elements; a tensor with gaps is copied.

    Chunks are tensors of bytes, which every library moves, whatever the dtype. The device's library reduces.
    """

    def __init__(self, array: DeviceArray) -> None:
        self._tensor = tensor = array.tensor
        self._line = tensor.contiguous().as_strided(
            (tensor.numel(),), (1,)
        )  # a view may keep the stride of one element
        self._is_copy = not tensor.is_contiguous()
        self.size: int = tensor.numel()
        self.itemsize: int = tensor.element_size()

    def read(self, lo: int, hi: int) -> Any:
        """Returns elements [lo, hi) as bytes; this may be a view, which must not be written."""
        return self._line[lo:hi].view(torch.uint8)

    def write(self, lo: int, hi: int, values: Any) -> None:
        """Writes elements [lo, hi) from bytes."""
        self._line[lo:hi] = self.typed(values)
        if self._is_copy and hi == self.size:
            self._tensor.copy_(self._line.view(self._tensor.shape))

    def room(self, count: int) -> Any:
        """Allocates bytes for `count` elements on the same device, contents undefined."""
        return torch.empty(count * self.itemsize, dtype=torch.uint8, device=self._tensor.device)

    def typed(self, values: Any) -> Any:
        """Views bytes as elements, for the library to reduce."""
        return values.view(self._tensor.dtype)

    def finish(self, op: ReduceOp, values: Any, world_size: int) -> None:
        """Turns the library's sum into the average, for AVG only."""
        if op is ReduceOp.AVG:
            self.typed(values).div_(world_size)
