"""What CUDA IPC needs and cupy has no call for: where an allocation begins, and which process this is."""

from __future__ import annotations

import ctypes
import os
import uuid
from functools import cache

__all__ = ["PROCESS_NBYTES", "allocation", "process"]

PROCESS_NBYTES = 20
"""The length of what `process` gives."""

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")

_DRAWN = uuid.uuid4().bytes


def process() -> bytes:
    """Names this process: no other one has that name, not even one with the same id in another container."""
    return os.getpid().to_bytes(4, "little") + _DRAWN


def allocation(pointer: int) -> tuple[int, int] | None:
    """Finds the allocation that an address of the current device lies in.

    Pools cut their allocations up, and a handle always names the whole of one.

    Returns:
        Where it begins, and its length in bytes; None where the driver can't tell.
    """
    driver = _driver()
    if driver is None:
        return None
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(pointer))
    return None if status else (base.value, nbytes.value)


@cache
def _driver() -> ctypes.CDLL | None:
    """The driver's library, which the runtime has loaded already."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
