"""A word in shared memory on which processes sleep; one system call wakes all of them (Linux).

With a semaphore per sleeper, a sleeper woken on the waker's core preempts the waker, which wakes the next one only when
the first sleeps again. With a futex all sleepers are runnable before the waker loses its core.

A wake-up has no meaning by itself, as with `semaphores`.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from raycollect.core.semaphores import TimeSpec

FUTEX_NBYTES = 64  # a cache line, of which the first 4 bytes are the word
STORES_IN_ORDER: bool = platform.machine() in ("x86_64", "AMD64")
"""Whether processors see each other's stores in program order."""

_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98}  # of the system call
_WAIT, _WAKE = 0, 1
_ALL = (1 << 31) - 1
_RETRY = frozenset({errno.EINTR, errno.ETIMEDOUT})


@cache
def _syscall() -> Any:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    return syscall


class Futex:
    """One word.

    Args:
        memory: Writable shared memory of `FUTEX_NBYTES` bytes, 4-byte aligned; kept alive.

    Attributes:
        word: The word, an unsigned number of 32 bits. Wakers change it first.
        wake: Wakes all sleepers; also a full barrier.

    Raises:
        OSError: The system call's number is unknown for this processor.
    """

    def __init__(self, memory: memoryview) -> None:
        number = _NUMBERS.get(platform.machine())
        if number is None or struct.calcsize("P") != 8:
            raise OSError(errno.ENOSYS, f"no futex is known for {platform.machine()}")
        self.word: memoryview = memory[:4].cast("I")
        self._held = (ctypes.c_char * FUTEX_NBYTES).from_buffer(memory)
        # Arguments are converted once: that takes longer than the call.
        call = partial(_syscall(), ctypes.c_long(number), ctypes.c_void_p(ctypes.addressof(self._held)))
        self.wake: Callable[[], int] = partial(call, ctypes.c_long(_WAKE), ctypes.c_long(_ALL))
        self._wait = partial(call, ctypes.c_long(_WAIT))

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Sleeps until woken, unless the word differs from `seen`; False after a timeout or a signal."""
        spec = TimeSpec(int(timeout_s), int((timeout_s % 1.0) * 1e9))
        if self._wait(ctypes.c_long(seen), ctypes.byref(spec)) == 0:
            return True
        number = ctypes.get_errno()
        if number == errno.EAGAIN:
            return True
        if number not in _RETRY:
            raise OSError(number, "futex in shared memory")
        return False
