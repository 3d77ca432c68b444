"""Folds on a GPU: the elements of all ranks at once, in rank order, by one kernel.

A kernel reads one element of each rank, folds them in registers, and writes the result to all targets: for w ranks w
reads and, in an allreduce, w writes per element, the minimum of memory traffic. `fold_kernels` has their source.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from raycollect.backends.nccl.fold_kernels import has_tables, launch, name_of, shapes, wide_of
from raycollect.backends.nccl.ops import combiner
from raycollect.backends.nccl.ops import fold as fold_rows
from raycollect.core.model import ReduceOp

_PARTS = {"complex64": "float32", "complex128": "float64"}  # Complex types, whose sums are those of their parts


class Folder:
    """Folds on the GPU `device`, its number in this process."""

    def __init__(self, device: int) -> None:
        self._cupy = import_module("cupy")
        self._device = device
        self._tables: dict[str, tuple[Any, Any]] = {}

    def row(self, address: int, nbytes: int, dtype: np.dtype[Any]) -> Any:
        """Views memory as a cupy array, [n]; does not keep the memory alive."""
        memory = self._cupy.cuda.UnownedMemory(address, nbytes, None, self._device)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray((nbytes // dtype.itemsize,), dtype, memptr=pointer)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueues a copy on cupy's current stream."""
        runtime = self._cupy.cuda.runtime
        if nbytes and to != source:
            stream = self._cupy.cuda.get_current_stream().ptr
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDeviceToDevice, stream)

    def fold(
        self, op: ReduceOp, dtype: np.dtype[Any], sources: Sequence[int], targets: Sequence[int], nbytes: int
    ) -> None:
        """Enqueues a fold on cupy's current stream.

        `sources` are the addresses of the ranks' elements, in rank order, of `nbytes` each; `targets`, those of the
        result, may be among them. `op` must be valid for the dtype.
        """
        if not nbytes:
            return
        if len(sources) == 1:
            for target in targets:
                self.copy(target, sources[0], nbytes)
            return
        if dtype.kind == "c" and op is ReduceOp.PRODUCT:
            self._times(dtype, sources, targets, nbytes)
            return
        dtype = np.dtype(_PARTS.get(dtype.name, dtype))
        tables, world, count = self._tables_of(dtype), len(sources), nbytes // dtype.itemsize
        rows, total = list(sources), list[int]()
        workspaces: list[Any] = []  # held until the kernels are enqueued
        for shape in shapes(world, len(targets) if len(targets) == world else 1):
            some, rows = rows[: shape.reads], rows[shape.reads :]
            into = list(targets[: shape.writes])
            if not into:
                workspaces.append(self._cupy.empty(count, wide_of(op, dtype)))
                into = [int(workspaces[-1].data.ptr)]
            launch(dtype, world, name_of(op, shape), [*total, *some, *tables, *into], count)
            total = into
        for target in targets[len(into) :]:
            self.copy(target, targets[0], nbytes)

    def _times(self, dtype: np.dtype[Any], sources: Sequence[int], targets: Sequence[int], nbytes: int) -> None:
        # Rounds at each step; a compiler might fuse steps.
        total = self._cupy.empty(nbytes // dtype.itemsize, dtype)
        fold_rows(combiner(ReduceOp.PRODUCT, dtype), [self.row(source, nbytes, dtype) for source in sources], total)
        for target in targets:
            self.copy(target, int(total.data.ptr), nbytes)

    def _tables_of(self, dtype: np.dtype[Any]) -> tuple[int, ...]:
        # For 8-bit floats: float32 by their bits, [256], and their bits by the upper half of float32, [65536].
        if not has_tables(dtype):
            return ()
        if dtype.name not in self._tables:
            wide = np.arange(1 << 8, dtype=np.uint8).view(dtype).astype(np.float32)
            halves = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
            with np.errstate(all="ignore"):
                short = halves.astype(dtype).view(np.uint8)
            self._tables[dtype.name] = self._cupy.asarray(wide), self._cupy.asarray(short)
        return tuple(int(table.data.ptr) for table in self._tables[dtype.name])
