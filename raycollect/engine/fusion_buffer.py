"""Fusion of small tensors: their fusion buffer, and the single kernel that moves them.

The launch of a kernel costs about as much as a copy of some hundred KiB. So the small tensors of one step are copied
into one buffer, one kernel moves the buffer, and its outputs are copied out again. The choice of tensors follows from
facts that all ranks have agreed on, so all ranks pack alike. Kernels fold element by element in rank order, so packing
changes no bits (P7).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends.array_copies import ArrayCopies
from raycollect.backends.arrays import Array, native
from raycollect.core.model import Kernel, OpKind, ReduceOp, TensorInfo
from raycollect.core.operations import PIECES, PIECEWISE
from raycollect.planner.fusion import PACKED_UP_TO_NBYTES

_LEAST_NBYTES = 64 << 10


class Item(NamedTuple):
    """One tensor of a kernel: an array, pieces or None on each side."""

    src: Any
    dst: Any
    most: int = 0  # see `model.Kernel.most`

    @property
    def sample(self) -> Any:
        """One of its arrays, or None; all have the same dtype and kind of device."""
        side = self.dst if self.src is None else self.src
        return side[0] if type(side) is tuple and side else side


def size_of(kind: OpKind, item: Item, count: int) -> int:
    """The maximum bytes of staging of an item over `count` ranks, equal on all ranks; -1: not packable."""
    sample = item.sample
    if not isinstance(sample, np.ndarray):
        return -1
    if kind not in PIECEWISE:
        return int(sample.nbytes)
    return item.most * int(sample.dtype.itemsize) * count * sum(PIECES[kind])  # twice where both sides are in pieces


def room(kind: OpKind, item: Item) -> int:
    """The bytes of staging of an item on this rank; 0 if it can't be packed."""
    if not isinstance(item.sample, np.ndarray):
        return 0
    sides = [
        sum(array.nbytes for array in side) if type(side) is tuple else side.nbytes for side in _staged(kind, item)
    ]
    return sum(sides) if max(sides) <= PACKED_UP_TO_NBYTES else 0


def dtype_of(item: Item) -> np.dtype[Any] | None:
    """The type of an item's elements, in this machine's byte order."""
    sample = item.sample
    return None if sample is None else native(sample.dtype)


def _staged(kind: OpKind, item: Item) -> list[Any]:
    # The sides that take memory: if one side has a piece per rank, the other side is a piece of it.
    gives, takes = PIECES[kind]
    if gives and takes:
        return [item.src, item.dst]
    first, second = (item.src, item.dst) if gives or kind not in PIECEWISE else (item.dst, item.src)
    return [second if first is None else first]


class FusionBuffer:
    """Staging memory with an exclusive user, between `take` and `give`."""

    __slots__ = ("__weakref__", "_lock", "memory")

    def __init__(self, memory: Array) -> None:
        self.memory: Array = memory
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Takes the buffer; False if it is in use."""
        return self._lock.acquire(blocking=False)

    def give(self) -> None:
        """Releases the buffer; not after a failure, as a slow rank may still write to it."""
        self._lock.release()


NO_BUFFER = FusionBuffer(np.empty(0, np.uint8))  # the buffer of a rank without elements to pack


class FusionPool:
    """The fusion buffers of one process. A buffer lives as long as a running or cached program refers to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[weakref.ref[FusionBuffer]] = []

    def take(self, nbytes: int, limit: int, allocate: Callable[[TensorInfo], Any]) -> FusionBuffer:
        """Takes the smallest free buffer that is large enough, or a new one of at most `limit` bytes if that suffices.

        Raises:
            MemoryError: Out of memory.
        """
        with self._lock:
            living = [block for block in (reference() for reference in self._blocks) if block is not None]
            self._blocks = [weakref.ref(block) for block in living]
        for block in sorted(living, key=lambda block: block.memory.nbytes):
            if block.memory.nbytes >= nbytes and block.take():
                return block
        # Powers of two, so that programs of many sizes share few blocks.
        size = max(nbytes, min(max(_LEAST_NBYTES, 1 << max(nbytes - 1, 0).bit_length()), limit))
        block = FusionBuffer(allocate(TensorInfo(shape=(size,), dtype="uint8", itemsize=1)))
        block.take()
        with self._lock:
            self._blocks.append(weakref.ref(block))
        return block


class _Rows:
    """Arrays of one dtype laid out one after the other in a block."""

    def __init__(self, block: FusionBuffer, dtype: np.dtype[Any]) -> None:
        usable = block.memory.nbytes // dtype.itemsize * dtype.itemsize
        self._line: Array = block.memory[:usable].view(dtype)
        self._end = 0

    def add(self, arrays: Sequence[Array]) -> tuple[Array, list[Array]]:
        """Makes one row for several arrays, and returns it with the part of each array."""
        start, parts = self._end, []
        for array in arrays:
            parts.append(self._line[self._end : self._end + array.size])
            self._end += array.size
        return self._line[start : self._end], parts

    def add_each(self, sides: Sequence[tuple[Array, ...]]) -> tuple[tuple[Array, ...], list[list[Array]]]:
        """Makes a row for each rank, from the pieces of several tensors."""
        rows = [self.add(pieces) for pieces in zip(*sides, strict=True)]
        return tuple(row for row, _ in rows), [parts for _, parts in rows]


class FusedKernel:
    """One kernel for several tensors of one dtype, staged in `block`, which has `room` for all items.

    `me` is the position of this rank in the launch; `kernel` has to be launched between `load` and `unload`.
    """

    __slots__ = ("_loads", "_unloads", "kernel")

    def __init__(
        self, kind: OpKind, op: ReduceOp | None, peer: int, *, items: Sequence[Item], me: int, block: FusionBuffer
    ) -> None:
        rows = _Rows(block, native(items[0].sample.dtype))
        reads = [item.src for item in items if item.src is not None]
        writes = [item.dst for item in items if item.dst is not None]
        src, loads, dst, unloads = _laid_out(kind, reads, writes, me, rows)
        most = sum(item.most for item in items)
        self.kernel: Kernel = Kernel(kind=kind, src=src, dst=dst, op=op, peer=peer, most=most)
        self._loads = ArrayCopies([(part.reshape(array.shape), array) for part, array in loads])
        self._unloads = ArrayCopies([(array, part.reshape(array.shape)) for array, part in unloads])

    def load(self) -> None:
        """Copies the kernel's inputs into the buffer."""
        self._loads.run()

    def unload(self) -> None:
        """Copies the kernel's outputs into the tensors."""
        self._unloads.run()


_Copies = list[tuple[Array, Array]]


def _laid_out(
    kind: OpKind, reads: Sequence[Any], writes: Sequence[Any], me: int, rows: _Rows
) -> tuple[Any, _Copies, Any, _Copies]:
    """Returns (src, copies into it, dst, copies out of it).

    Kernels may write where they read (`model.Kernel`), so most need no second array.
    """
    gives, takes = PIECES[kind]
    if gives and takes:
        src, given = rows.add_each(reads)
        dst, taken = rows.add_each(writes)
        return src, _each(given, reads), dst, _swapped(_each(taken, writes))
    if gives and reads:
        src, given = rows.add_each(reads)
        unloads = list(zip(writes, given[me], strict=True))
        return src, _each(given, reads), src[me] if writes else None, unloads
    if takes and writes:
        dst, taken = rows.add_each(writes)
        loads = list(zip(taken[me], reads, strict=True)) if reads else []
        return dst[me] if reads else None, loads, dst, _swapped(_each(taken, writes))
    row, parts = rows.add(reads or writes)
    loads = list(zip(parts, reads, strict=True)) if reads else []
    unloads = list(zip(writes, parts, strict=True)) if writes else []
    return row if reads else None, loads, row if writes else None, unloads


def _each(parts: Sequence[Sequence[Array]], sides: Sequence[tuple[Array, ...]]) -> _Copies:
    pairs = enumerate(parts)
    return [(part, side[rank]) for rank, row in pairs for part, side in zip(row, sides, strict=True)]


def _swapped(copies: _Copies) -> _Copies:
    return [(array, part) for part, array in copies]
