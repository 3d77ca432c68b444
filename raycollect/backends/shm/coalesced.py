"""Rows over several arrays: kernels that are launched together are staged as one, without extra copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from raycollect.backends.arrays import Array, Flat, native
from raycollect.backends.kernels import remembered
from raycollect.core.memory_vectors import MemoryVectors
from raycollect.core.model import Kernel

# Elements [first, last) of a row, the array that holds them, and their range [start, stop) in it
_Span = tuple[int, int, Flat, int, int]
# Vectors take less time for so many arrays in a chunk, of at most so many bytes on average
_MANY = 8
_SMALL_NBYTES = 4 << 10


class CoalescedRow(Flat):
    """Consecutive arrays of one type as a flat row of native elements; see `Flat`."""

    __slots__ = ("_cached_spans", "_ends", "_flats", "_vectors", "nbytes")

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._flats = [Flat(array) for array in arrays if array.size]
        self._ends = list(accumulate(flat.size for flat in self._flats))
        # Every kernel has the same chunks
        self._cached_spans: dict[tuple[int, int], list[_Span]] = {}
        self._vectors: dict[tuple[int, int], MemoryVectors | None] = {}
        self.direct: bool = False
        self.size: int = self._ends[-1] if self._ends else 0
        self.dtype: np.dtype[Any] = (self._flats or [Flat(arrays[0])])[0].dtype
        self.nbytes: int = self.size * self.dtype.itemsize

    def _spans(self, lo: int, hi: int) -> Sequence[_Span]:
        """Cuts elements [lo, hi) into segments that each lie in one array."""
        spans = self._cached_spans.get((lo, hi))
        if spans is None:
            spans = self._cached_spans[lo, hi] = list(self._cut(lo, hi))
        return spans

    def read(self, lo: int, hi: int) -> Array:
        """Returns a copy of elements [lo, hi)."""
        chunk: Array = np.empty(hi - lo, self.dtype)
        self.fill(chunk, lo, hi)
        return chunk

    def fill(self, chunk: Array, lo: int, hi: int) -> None:
        """Copies elements [lo, hi) to a chunk of equal size."""
        vectors = self._vectors_of(lo, hi) if chunk.flags.c_contiguous else None
        if vectors is not None and vectors.gather(chunk.ctypes.data):
            return
        parts = [flat.read(start, stop) for _, _, flat, start, stop in self._spans(lo, hi)]
        if parts:
            np.concatenate(parts, out=chunk)

    def write(self, lo: int, hi: int, values: Array) -> None:
        """Writes elements [lo, hi)."""
        vectors = self._vectors_of(lo, hi) if values.flags.c_contiguous else None
        if vectors is not None and vectors.scatter(values.ctypes.data):
            return
        for first, last, flat, start, stop in self._spans(lo, hi):
            flat.write(start, stop, values[first - lo : last - lo])

    def _vectors_of(self, lo: int, hi: int) -> MemoryVectors | None:
        """The places of elements [lo, hi); None if arrays are few, large, or not contiguous."""
        if (lo, hi) not in self._vectors:
            spans, itemsize = self._spans(lo, hi), self.dtype.itemsize
            vectors = None
            is_small = (hi - lo) * itemsize <= len(spans) * _SMALL_NBYTES
            if is_small and len(spans) >= _MANY and all(flat.direct for _, _, flat, _, _ in spans):
                vectors = MemoryVectors(
                    [(flat.address + at * itemsize, (end - at) * itemsize) for _, _, flat, at, end in spans]
                )
            self._vectors[lo, hi] = vectors
        return self._vectors[lo, hi]

    def _cut(self, lo: int, hi: int) -> Iterator[_Span]:
        at = bisect_right(self._ends, lo)
        while lo < hi:
            flat, end = self._flats[at], min(hi, self._ends[at])
            before = self._ends[at] - flat.size
            yield lo, end, flat, lo - before, end - before
            lo, at = end, at + 1


def coalesced(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Coalesces kernels of one kind, op and root into one kernel per dtype, in the order of their first arrays."""
    return remembered(kernels, "coalesced", _coalesce)


def _coalesce(kernels: Sequence[Kernel]) -> list[Kernel]:
    first, by_type = kernels[0], dict[np.dtype[Any], list[Kernel]]()
    for kernel in kernels:
        by_type.setdefault(native(kernel.sample.dtype), []).append(kernel)
    coalesced = []
    for some in by_type.values():
        src = _side([kernel.src for kernel in some])
        in_place = all(kernel.src is kernel.dst for kernel in some)
        dst = src if in_place else _side([kernel.dst for kernel in some])
        coalesced.append(Kernel(kind=first.kind, src=src, dst=dst, op=first.op, peer=first.peer))
    return coalesced


def _side(arrays: Sequence[Array | None]) -> CoalescedRow | None:
    given = [array for array in arrays if array is not None]
    return CoalescedRow(given) if given else None
