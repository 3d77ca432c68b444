"""The errors of the CUDA runtime and of NCCL."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Those of CUDA's error codes that the fake knows."""

    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    UNLOADING = 4
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_HANDLE = 400
    NOT_READY = 600
    CAPTURE_UNSUPPORTED = 900


_NAMES = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    4: "cudaErrorCudartUnloading: driver shutting down",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    600: "cudaErrorNotReady: device not ready",
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
}


class CUDARuntimeError(RuntimeError):
    """What the CUDA runtime refuses; `status` is its code."""

    def __init__(self, status: int) -> None:
        self.status = int(status)
        super().__init__(_NAMES.get(self.status, f"cudaError{self.status}"))

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return (type(self), (self.status,))


_INFO, _WARN = "(run with NCCL_DEBUG=INFO for details)", "(run with NCCL_DEBUG=WARN for details)"
_NCCL_STATUSES = {
    0: "NCCL_ERROR_SUCCESS: no error",
    1: f"NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error {_INFO}",
    2: f"NCCL_ERROR_SYSTEM_ERROR: unhandled system error {_INFO}",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error - please report this issue to the NCCL developers",
    4: f"NCCL_ERROR_INVALID_ARGUMENT: invalid argument {_WARN}",
    5: f"NCCL_ERROR_INVALID_USAGE: invalid usage {_WARN}",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}
"""cupy has no words for 7 (in progress) and 8 (a timeout): looking for them raises KeyError."""


class NcclError(RuntimeError):
    """What NCCL refuses; `status` is its code."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_NCCL_STATUSES[status])

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return (type(self), (self.status,))
