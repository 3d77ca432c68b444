"""The memory of another process of this machine and user, read from wherever a tensor lies: one copy, none in between.

The system allows process_vm_readv where it allows to trace that process: not under Yama's scope 1 and above, nor in
some containers. Shared memory serves there.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from raycollect.core.model import BufferRef, Segment

NO_FILE = -1
"""The descriptor of a segment that is a process's own memory; offsets are addresses in that process."""

REFUSED = (errno.EPERM, errno.ENOSYS)
"""The errors of a system that will not allow it later, either."""

_STARTED = 19  # the field in /proc/<pid>/stat, counted from the state on
_MOST_NBYTES = 64 << 20  # at a time: the interpreter may have a signal to handle


class _IoVector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def own() -> Segment | None:
    """The memory of this process; None where the system does not tell when a process has started."""
    try:
        return Segment(os.getpid(), NO_FILE, _started(os.getpid()), 1 << 62)
    except OSError:
        return None


def read(pieces: Sequence[tuple[BufferRef, memoryview]]) -> None:
    """Copies pieces of the memory of a process.

    Raises:
        OSError: The process is gone, or does not let this one see its memory.
    """
    segment = pieces[0][0].segment
    for ref, into in pieces:
        done = 0
        while done < ref.nbytes:
            done += _read(segment.pid, ref.offset + done, into[done : done + _MOST_NBYTES])
    # It lives still, so its id has been no other's meanwhile.
    if _started(segment.pid) != segment.token:
        raise OSError(errno.ESRCH, "the memory of another process")


def _read(pid: int, address: int, into: memoryview) -> int:
    here = _IoVector(ctypes.addressof(ctypes.c_char.from_buffer(into)), into.nbytes)
    there = _IoVector(address, into.nbytes)
    count = int(_process_vm_readv()(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
    if count <= 0:
        number = ctypes.get_errno() if count else errno.EFAULT
        raise OSError(number, os.strerror(number))
    return count


def _started(pid: int) -> bytes:
    """When a process started: with its id, this names it."""
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).rpartition(b")")[2].split()[_STARTED]
    finally:
        os.close(fd)


@lru_cache(maxsize=1)
def _process_vm_readv() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    spans, number = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = (ctypes.c_int, spans, number, spans, number, number)
    function.restype = ctypes.c_ssize_t
    return function
