"""The shared memory of this process, and the mapped memory of others."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from raycollect.channel.messages import ArenaStatistics
from raycollect.core import shared_memory
from raycollect.core.model import BufferRef, Segment
from raycollect.pos import process_memory
from raycollect.pos.arena import GRAIN, NAME, Arena, map_file
from raycollect.pos.limit import arena_limit

_READ_NBYTES = 64 << 20  # at a time, so that signals can be handled in between
_log = logging.getLogger("raycollect")


class Segments:
    """A `SegmentSource`. The first allocation makes the arena; a forked child begins without one.

    Attributes:
        reads_processes: Whether this process may read the memory of others, as far as is known.
    """

    _current: ClassVar[Segments | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def current(cls) -> Segments:
        """The instance of this process."""
        if cls._current is None:
            with cls._making:
                if cls._current is None:
                    cls._current = segments = cls()
                    os.register_at_fork(after_in_child=segments._begin_in_child)
        return cls._current

    def __init__(self) -> None:
        self._begin()

    def _begin_in_child(self) -> None:
        if self._arena is not None:
            self._arena.abandon()
        self._begin()

    def _begin(self) -> None:
        """Resets the state; in a forked child a thread that no longer exists may hold the lock."""
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._missing = ""
        self._own: Segment | None = None
        self._lo, self._hi = 1, 0
        self._opened: WeakValueDictionary[Segment, NDArray[np.uint8]] = WeakValueDictionary()
        self.reads_processes: bool = True
        self._process = process_memory.own()

    @property
    def arena(self) -> Arena:
        """The arena of this process; raises OSError without one, and logs a warning with the reason once."""
        return self._arena or self._make()

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocates a block of the arena; see `Arena.allocate`. Raises OSError without an arena."""
        return self.arena.allocate(nbytes)

    def locate(self, address: int, nbytes: int) -> BufferRef | None:
        """The position of bytes of this process in its arena; None if they are elsewhere."""
        if self._lo <= address and address + nbytes <= self._hi and self._own is not None:
            return BufferRef(self._own, address - self._lo, nbytes)
        return None

    def locate_in_process(self, address: int, nbytes: int) -> BufferRef | None:
        """Where bytes of this process lie in its memory; None where no other process may ask for that."""
        return BufferRef(self._process, address, nbytes) if self._process is not None else None

    def open(self, segment: Segment) -> Any:
        """Maps the arena of a process of this machine and user as a writable array, uint8 [segment.nbytes].

        Raises:
            OSError: The process has ended, or does not allow access to its memory.
        """
        arena = self._arena
        if arena is not None and segment == self._own:
            return arena.root
        with self._lock:
            mapped = self._opened.get(segment)
            if mapped is None:
                mapped = self._opened[segment] = _open(segment)
            return mapped

    def read(self, pieces: Sequence[tuple[BufferRef, memoryview]]) -> None:
        """Copies pieces of a process of this machine and user: of its arena, or of all its memory.

        Raises:
            OSError: The process is gone, or does not let this one see its memory.
        """
        segment = pieces[0][0].segment
        if segment.fd == process_memory.NO_FILE:
            try:
                process_memory.read(pieces)
            except OSError as exc:
                if exc.errno in process_memory.REFUSED:
                    self.reads_processes = False
                raise
            return
        if segment == self._own and self._arena is not None:
            for ref, into in pieces:
                into[:] = self._arena.root[ref.offset : ref.offset + ref.nbytes].data
            return
        with shared_memory.opened(segment, NAME, os.O_RDONLY) as fd:
            for ref, into in pieces:
                _read(fd, ref, into)

    def statistics(self) -> ArenaStatistics:
        """The state of the arena, and the mapped memory of others."""
        arena = self._arena
        own = ArenaStatistics(limit=self._future_limit(), mapped=0) if arena is None else arena.statistics()
        with self._lock:
            return replace(own, mapped=sum(segment.nbytes for segment in self._opened))

    def _future_limit(self) -> int:
        """The limit of the arena that the first allocation will make; 0: it will make none."""
        try:
            return 0 if self._missing else -(-arena_limit(os.environ) // GRAIN) * GRAIN
        except OSError:
            return 0

    def _make(self) -> Arena:
        with self._lock:
            if self._arena is None and not self._missing:
                self._try()
            if self._arena is None:
                raise OSError(self._missing)
            return self._arena

    def _try(self) -> None:
        try:
            limit = arena_limit(os.environ)
            if limit == 0:
                self._missing = "the arena is disabled"
                return
            arena = Arena(limit)
        except (OSError, AttributeError, OverflowError) as exc:
            self._missing = f"shared memory for tensors is not available: {exc}"
            _log.warning("%s; tensors are in ordinary memory, and collectives copy them", self._missing)
            return
        self._arena, self._own = arena, arena.segment
        self._lo, self._hi = arena.address, arena.address + arena.segment.nbytes


def _read(fd: int, ref: BufferRef, into: memoryview) -> None:
    done = 0
    while done < ref.nbytes:
        count = os.preadv(fd, [into[done : done + _READ_NBYTES]], ref.offset + done)
        if not count:
            raise OSError(errno.ESTALE, "the memory of an arena ended early")
        done += count


def _open(segment: Segment) -> NDArray[np.uint8]:
    with shared_memory.opened(segment, NAME, os.O_RDWR) as fd:
        return map_file(fd, segment.nbytes)
