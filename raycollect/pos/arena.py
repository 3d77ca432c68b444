"""The memory of one process for tensors that other processes of its machine can map: one sparse anonymous file.

The memfd has the size of the limit from the start, and is mapped once and sealed: it takes only address space, and
since it can't shrink, processes that map it are never killed by SIGBUS. Pages get memory when a block needs them. A
freed block leaves its pages to the next one, because the first touch of a page costs about ten times a later write.
Free memory beyond `spare` is returned to the system as holes in the file. The kernel frees the rest with the last
process that has the file open or mapped.

Memory is taken and returned in grains of 2 MiB, the size of a huge page, by MADV_POPULATE_WRITE (Linux 5.14). Unlike
`posix_fallocate`, that also allocates huge pages if the system supports them by madvise.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycollect.channel.messages import ArenaStatistics
from raycollect.core import shared_memory
from raycollect.core.model import Segment
from raycollect.errors import ArenaFullError
from raycollect.pos.extents import Extents

NAME = "raycollect-arena"
"""The name of the memory in /proc."""
GRAIN = 2 << 20
"""The unit in which memory is taken and returned; large blocks begin at a multiple of it."""
ALIGN = 64
"""Every block begins at a multiple of it: a cache line."""
SPARE = 256 << 20
"""The least free memory that is reserved for the next blocks."""

_HEAD = 4096  # the token's page
_MADV_POPULATE_WRITE = 23  # the module mmap lacks it


class Arena:
    """Shared memory of this process, in blocks. Any thread may use it; a forked child can't.

    Args:
        limit: The most bytes it may hold; rounded up to whole grains.
        spare: The least free memory that it reserves; at least as much as is in use.

    Raises:
        OSError: This system has no memfd, or this process lacks address space.
    """

    def __init__(self, limit: int, spare: int = SPARE) -> None:
        nbytes = _up(limit)
        self._pid = os.getpid()
        self._fd = shared_memory.create(NAME, nbytes)
        # All of it, uint8 [limit]; its views keep the memory alive
        self.root: np.ndarray[Any, np.dtype[np.uint8]] = map_file(self._fd, nbytes)
        self.address: int = int(self.root.ctypes.data)  # of its first byte in this process
        # Its description for other processes of this machine
        self.segment: Segment = Segment(self._pid, self._fd, secrets.token_bytes(shared_memory.TOKEN_NBYTES), nbytes)
        self._spare = spare
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int]] = deque()
        self._free = Extents((_HEAD, nbytes))
        self._backed = Extents()
        self._in_use = self._blocks = 0
        self._back(0, GRAIN)
        self.root[: shared_memory.TOKEN_NBYTES] = np.frombuffer(self.segment.token, np.uint8)

    def __del__(self) -> None:
        with suppress(AttributeError):  # the constructor has failed
            if os.getpid() == self._pid:  # in a forked child the descriptor may be another file's
                os.close(self._fd)

    def abandon(self) -> None:
        """Closes a forked child's copy of the file, which would keep the memory alive after the parent's death."""
        with suppress(OSError):
            os.close(self._fd)

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocates a block, uint8 [nbytes] with undefined contents; it is freed with the last view of it.

        It is aligned to `ALIGN`, from 2 MiB on to `GRAIN`, and its pages have memory.

        Raises:
            ArenaFullError: The limit is reached, no free range is long enough, or the system has no memory.
            OSError: This is a forked child of the process that created the arena.
        """
        if os.getpid() != self._pid:
            raise OSError("the arena belongs to the process from which this one was forked")
        size = -(-max(nbytes, 1) // ALIGN) * ALIGN
        with self._settled():
            lo = self._free.best_fit(size, GRAIN if nbytes >= GRAIN else ALIGN)
            if lo is None:
                raise self._full(nbytes, "")
            hi = lo + size
            block = _Block(self, lo, hi, nbytes)
            self._free.remove(lo, hi)
            self._in_use += size
            self._blocks += 1
            missing = self._backed.gaps(_down(lo), _up(hi))
        try:
            for gap in missing:
                self._back(*gap)
        except OSError as exc:
            with self._settled():  # releases grains of this block only, which may have got memory
                for gap in self._backed.gaps(_up(lo), _down(hi)):
                    self._release(*gap)
            del block  # now, instead of with the exception's frames
            raise self._full(nbytes, str(exc)) from exc
        return np.asarray(block)

    def statistics(self) -> ArenaStatistics:
        """Its current state."""
        with self._settled():
            in_use, backed = self._in_use, self._backed.total
            return ArenaStatistics(
                limit=self.segment.nbytes, in_use=in_use, backed=backed, blocks=self._blocks, mapped=0
            )

    def _full(self, nbytes: int, detail: str) -> ArenaFullError:
        return ArenaFullError(nbytes=nbytes, in_use=self._in_use, limit=self.segment.nbytes, detail=detail)

    def _take_back(self, lo: int, hi: int) -> None:
        """Called by the garbage collector in any thread, at any point, even while the thread holds the lock."""
        self._returned.append((lo, hi))
        self._settle()

    def _settle(self) -> None:
        """Processes freed blocks. A thread that holds the lock does this itself right after releasing it."""
        while self._returned and os.getpid() == self._pid and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    @contextmanager
    def _settled(self) -> Iterator[None]:
        try:
            with self._lock:
                self._drain()
                yield
        finally:
            self._settle()

    def _drain(self) -> None:
        if not self._returned:
            return
        while self._returned:
            lo, hi = self._returned.popleft()
            self._free.add(lo, hi)
            self._in_use -= hi - lo
            self._blocks -= 1
        self._trim()

    def _trim(self) -> None:
        """Returns whole grains beyond the spare, from the ends of the largest free ranges."""
        excess = self._backed.total - self._in_use - max(self._spare, self._in_use)
        if excess < GRAIN:
            return
        for lo, hi in sorted(((_up(lo), _down(hi)) for lo, hi in self._free), key=lambda span: span[0] - span[1]):
            for start, stop in reversed(self._backed.within(lo, hi)):
                start = max(start, stop - _down(excess))
                if start < stop and self._release(start, stop):
                    self._backed.remove(start, stop)
                    excess -= stop - start

    def _back(self, lo: int, hi: int) -> None:
        """Allocates memory for the grains from `lo` to `hi`, without the GIL and without `_lock`."""
        number = self._advise(lo, hi, _MADV_POPULATE_WRITE)
        while number == errno.EINTR:
            number = self._advise(lo, hi, _MADV_POPULATE_WRITE)
        if number == errno.EINVAL:  # an older kernel
            os.posix_fallocate(self._fd, lo, hi - lo)
        elif number:
            raise OSError(number, os.strerror(number))
        with self._settled():
            self._backed.add(lo, hi)

    def _release(self, lo: int, hi: int) -> bool:
        return self._advise(lo, hi, mmap.MADV_REMOVE) == 0

    def _advise(self, lo: int, hi: int, advice: int) -> int:
        """Calls madvise without the GIL, which the module mmap would hold; returns errno, or 0."""
        return ctypes.get_errno() if _libc().madvise(self.address + lo, hi - lo, advice) else 0


class _Block:
    """Held by numpy arrays over the bytes [lo, hi) of an arena; frees them with the last array."""

    __slots__ = ("_arena", "_hi", "_lo", "_nbytes")

    def __init__(self, arena: Arena, lo: int, hi: int, nbytes: int) -> None:
        self._arena, self._lo, self._hi, self._nbytes = arena, lo, hi, nbytes

    def __del__(self) -> None:
        self._arena._take_back(self._lo, self._hi)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        address = self._arena.address + self._lo
        return {"data": (address, False), "shape": (self._nbytes,), "typestr": "|u1", "version": 3}


def map_file(fd: int, nbytes: int) -> NDArray[np.uint8]:
    """Maps a file, with huge pages where available; the array and its views keep it mapped."""
    mapped = mmap.mmap(fd, nbytes)
    with suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _up(offset: int) -> int:
    return -(-offset // GRAIN) * GRAIN


def _down(offset: int) -> int:
    return offset // GRAIN * GRAIN
