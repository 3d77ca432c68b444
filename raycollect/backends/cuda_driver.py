"""A driver call that cupy lacks: the UUID of a device."""

from __future__ import annotations

import ctypes
from functools import cache

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")


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
