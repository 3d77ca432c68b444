"""Wake-ups through shared memory: process-shared POSIX semaphores, one per rank, posted by any peer.

A wake-up has no meaning by itself: a woken rank reads the words in shared memory again. So a superfluous wake-up only
costs a check, and a rank that leaves early has nothing to clean up.
"""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

SEM_NBYTES = 64  # room for one `sem_t` (32 bytes in glibc on 64 bits), a cache line each
_RETRY = frozenset({errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT})
_CLOCK_MONOTONIC = 1


class TimeSpec(ctypes.Structure):
    """A time in seconds and nanoseconds, as the system's waits take it."""

    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _LibC:
    """The semaphore calls. ctypes releases the GIL around each."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.init = self._call(libc, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self.post = self._call(libc, "sem_post", ctypes.c_void_p)
        self.try_wait = self._call(libc, "sem_trywait", ctypes.c_void_p)
        spec = ctypes.POINTER(TimeSpec)
        if hasattr(libc, "sem_clockwait"):  # glibc 2.30 and later
            self.clock_wait = self._call(libc, "sem_clockwait", ctypes.c_void_p, ctypes.c_int, spec)
        else:
            self.clock_wait = None
            self.timed_wait = self._call(libc, "sem_timedwait", ctypes.c_void_p, spec)

    @staticmethod
    def _call(libc: ctypes.CDLL, name: str, *argtypes: Any) -> Any:
        function = getattr(libc, name)
        function.argtypes = argtypes
        function.restype = ctypes.c_int
        return function


_libc = cache(_LibC)


class Semaphore:
    """One rank's semaphore.

    Attributes:
        ring: Posts it; it fails only at a count of 2^31, when the rank is awake anyway. Like `take`, it is libc's own
            function, since every run calls it several times.
        take: Takes one post, if any; returns 0 if it took one. Always a full barrier.
    """

    def __init__(self, held: ctypes.Array[ctypes.c_char], at: int) -> None:
        self._libc = libc = _libc()
        self._held = held  # keeps the memory
        self._address = address = ctypes.addressof(held) + at
        self.ring: Callable[[], int] = partial(libc.post, address)
        self.take: Callable[[], int] = partial(libc.try_wait, address)

    def wait(self, timeout_s: float) -> bool:
        """Takes one post; False after a timeout or a signal. For the semaphore of this rank."""
        libc = self._libc
        # sem_timedwait counts by the wall clock, which may jump: callers wait in short slices.
        until_s = (time.monotonic() if libc.clock_wait else time.time()) + timeout_s
        spec = ctypes.byref(TimeSpec(int(until_s), int((until_s % 1.0) * 1e9)))
        if libc.clock_wait:
            returned = libc.clock_wait(self._address, _CLOCK_MONOTONIC, spec)
        else:
            returned = libc.timed_wait(self._address, spec)
        return returned == 0 or _check()

    def drain(self) -> None:
        """Takes all posts; read the words afterwards, never before."""
        while self.take() == 0:
            pass

    def init(self) -> None:
        """Initializes it, in one process, before any other process maps it."""
        if self._libc.init(self._address, 1, 0) != 0:
            _check()


def semaphores(memory: memoryview, count: int, *, init: bool) -> list[Semaphore]:
    """The semaphores of all ranks.

    Args:
        memory: Writable shared memory of `count` x `SEM_NBYTES` bytes, 8-byte aligned; kept alive.
        count: The number of ranks.
        init: True in the process that initializes them, before any other process maps them.
    """
    held = (ctypes.c_char * (count * SEM_NBYTES)).from_buffer(memory)
    result = [Semaphore(held, rank * SEM_NBYTES) for rank in range(count)]
    if init:
        for semaphore in result:
            semaphore.init()
    return result


def _check() -> bool:
    number = ctypes.get_errno()
    if number not in _RETRY:
        raise OSError(number, "semaphore in shared memory")
    return False
