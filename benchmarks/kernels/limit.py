"""The bound of an allreduce on one host: the adding and copying alone, over the same bytes, with nobody to wait for."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.kernels.operands import Array, Operands
from benchmarks.kernels.player import FileRendezvous, Place

BLOCK_NBYTES = 256 << 10
"""How much of a slice is added, then copied, at a time: it stays in the cache of a core."""


class LimitPlayer:
    """Adds up its slice of all ranks' arrays in place, in shared memory, and copies it to all; no barrier.

    Each rank reads and writes its slice of every array: 2 n bytes per rank, as any allreduce in place has to at least.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._rendezvous = FileRendezvous(place.directory)
        self._made = 0
        self._files: list[int] = []

    def empty(self, size: int) -> Array:
        """An array in a memory file of its own, which the others map."""
        self._drop()
        nbytes = -(-size * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.memfd_create("limit")
        self._files.append(file)
        os.ftruncate(file, nbytes)
        self._made += 1
        self._rendezvous.put(f"{self._made}.{self._place.rank}", f"/proc/{os.getpid()}/fd/{file}".encode())
        return self._map(file, nbytes)[:size]

    def bind(self, operands: Operands) -> Callable[[], Any]:
        """One pass over this rank's slice of all arrays."""
        own, rank, ranks = operands.dst, self._place.rank, self._place.ranks
        parts = [own if other == rank else self._open(other, own.size) for other in range(ranks)]
        low, high, step = rank * own.size // ranks, (rank + 1) * own.size // ranks, BLOCK_NBYTES // 4
        blocks = [[part[at : min(at + step, high)] for part in parts] for at in range(low, high, step)]

        def once() -> None:
            for first, *others in blocks:
                for other in others:
                    np.add(first, other, out=first)
                for other in others:
                    other[...] = first

        return once

    def close(self) -> None:
        """Closes the file; the memory goes with the last mapping."""
        self._drop()

    def _drop(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _open(self, rank: int, size: int) -> Array:
        file = os.open(self._rendezvous.get(f"{self._made}.{rank}").decode(), os.O_RDWR)
        try:
            return self._map(file, os.fstat(file).st_size)[:size]
        finally:
            os.close(file)

    @staticmethod
    def _map(file: int, nbytes: int) -> Array:
        mapped = mmap.mmap(file, nbytes)
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)  # where the system allows it for shared memory
        except (OSError, AttributeError):
            pass
        return np.frombuffer(mapped, np.float32)
