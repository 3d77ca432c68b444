"""Driver calls that cupy lacks: the UUID of a device, and the mode of stream captures."""

from __future__ import annotations

import ctypes
from functools import cache

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class RelaxedCapture:
    """Lets the calling thread query events and allocate memory while another thread captures a CUDA graph.

    Otherwise these calls fail and spoil a capture of mode "global", which is the default of torch.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = exchange_capture_mode(_RELAXED)

    def __exit__(self, *exc: object) -> None:
        exchange_capture_mode(self._before)


def exchange_capture_mode(mode: int) -> int:
    """Sets how captures of other threads restrict the calling thread; returns the former mode."""
    driver = _driver()
    if driver is None:
        return mode
    value = ctypes.c_int(mode)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value


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
