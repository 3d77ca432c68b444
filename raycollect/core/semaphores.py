"""Wake-ups through shared memory: process-shared POSIX semaphores, one per rank, posted by any peer.

A wake-up carries no meaning of its own: whoever wakes looks at the words in shared memory again. So a superfluous one
only costs a look, and a rank that leaves in the middle has nothing to tidy up.
"""

from __future__ import annotations

import ctypes
import errno
import time
from typing import Any

SEM_NBYTES = 64  # room for one `sem_t` (32 bytes in glibc on 64 bits), a cache line each
_RETRY = frozenset({errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT})
_CLOCK_MONOTONIC = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _LibC:
    """The semaphore calls. ctypes releases the GIL around each."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.init = self._call(libc, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self.post = self._call(libc, "sem_post", ctypes.c_void_p)
        self.try_wait = self._call(libc, "sem_trywait", ctypes.c_void_p)
        spec = ctypes.POINTER(_TimeSpec)
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


class Semaphores:
    """The semaphores of all ranks.

    Args:
        memory: Writable shared memory of `count` x `SEM_NBYTES` bytes, 8-byte aligned; kept alive.
        count: The number of ranks.
        init: True in the one process that sets them up, before any other maps them.
    """

    def __init__(self, memory: memoryview, count: int, *, init: bool) -> None:
        self._libc = _LibC()
        self._held = (ctypes.c_char * (count * SEM_NBYTES)).from_buffer(memory)
        base = ctypes.addressof(self._held)
        self._sems = [base + rank * SEM_NBYTES for rank in range(count)]
        if init:
            for sem in self._sems:
                self._check(self._libc.init(sem, 1, 0))

    def ring(self, rank: int) -> None:
        """Posts one rank's semaphore."""
        self._libc.post(self._sems[rank])  # its one failure is a count of 2^31: awake already

    def wait(self, rank: int, timeout_s: float) -> bool:
        """Takes one post of a rank's own semaphore; False where none came in time, or a signal arrived."""
        libc, sem = self._libc, self._sems[rank]
        # sem_timedwait counts by the wall clock, which may jump: callers wait in short slices.
        until_s = (time.monotonic() if libc.clock_wait else time.time()) + timeout_s
        spec = _TimeSpec(int(until_s), int((until_s % 1.0) * 1e9))
        if libc.clock_wait:
            returned = libc.clock_wait(sem, _CLOCK_MONOTONIC, ctypes.byref(spec))
        else:
            returned = libc.timed_wait(sem, ctypes.byref(spec))
        return returned == 0 or self._check(returned)

    def take(self, rank: int) -> bool:
        """Takes one post, if there is one."""
        return bool(self._libc.try_wait(self._sems[rank]) == 0)

    def drain(self, rank: int) -> None:
        """Takes all posts that are there; look at the words afterwards, never before."""
        sem, take = self._sems[rank], self._libc.try_wait
        while take(sem) == 0:
            pass

    @staticmethod
    def _check(returned: int) -> bool:
        if returned == 0:
            return True
        number = ctypes.get_errno()
        if number not in _RETRY:
            raise OSError(number, "semaphore in shared memory")
        return False
