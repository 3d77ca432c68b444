"""Driver calls that cupy lacks: the start of an allocation, the UUID of a device; and a unique process id."""

from __future__ import annotations

import ctypes
import os
import uuid
from functools import cache

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_DRAWN = uuid.uuid4().bytes


def process() -> bytes:
    """Identifies this process uniquely, also among containers with equal process ids."""
    return os.getpid().to_bytes(4, "little") + _DRAWN


def allocation(pointer: int) -> tuple[int, int] | None:
    """Finds the allocation of the current device that contains an address: its start and its length in bytes.

    Pools divide their allocations, and an IPC handle names a whole one. None if the driver does not know the address.
    """
    driver = _driver()
    if driver is None:
        return None
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(pointer))
    return None if status else (base.value, nbytes.value)


def uuid_of(device: int) -> bytes:
    """Returns the UUID of a device, or of this process's MIG instance; empty if unknown."""
    driver = _driver()
    ask = getattr(driver, "cuDeviceGetUuid_v2", None)  # since CUDA 11.4
    number, value = ctypes.c_int(), (ctypes.c_uint8 * 16)()
    if driver is None or ask is None or driver.cuDeviceGet(ctypes.byref(number), ctypes.c_int(device)):
        return b""
    return b"" if ask(ctypes.byref(value), number) else bytes(value)


@cache
def _driver() -> ctypes.CDLL | None:
    # The driver's library, which the runtime has already loaded.
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
