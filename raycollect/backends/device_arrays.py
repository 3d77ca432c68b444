"""Tensors in device memory: torch's and cupy's, and others on an NVIDIA GPU, through cupy.

torch and cupy are imported here only for their own tensors, and cupy for tensors that only it can view.
"""

from __future__ import annotations

import sys
from ctypes import c_char_p, c_uint64, c_void_p, py_object, pythonapi
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from raycollect.backends.elements import TORCH_DTYPES, Array, is_number, torch_name
from raycollect.core.model import TensorInfo

_DLPACK_CUDA = 2
_NO_STREAM = -1  # Nothing is read, so the exporter need not synchronize
# The name of a DLPack 1.0 capsule, and the offset of the flags in its struct; the lowest flag means read-only
_VERSIONED, _FLAGS_AT = b"dltensor_versioned", 24
# Bytes per element -> a type of that size
_BITS = {np.dtype(name).itemsize: np.dtype(name) for name in ("u1", "u2", "u4", "u8", "c16")}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArray:
    """A tensor in device memory as the host describes it; only its library reads it."""

    tensor: Any = field(repr=False)  # torch's, detached, or a `cupy.ndarray`; showing its elements copies them
    is_read_only: bool = False  # as its library says
    library: str = field(init=False)  # ``"torch"`` or ``"cupy"``
    dtype: np.dtype[Any] = field(init=False)  # numpy's
    device: str = field(init=False)  # ``"cuda:0"``
    # An array of the same address, shape and strides, for questions about layout; its elements must never be touched.
    # (With unified addressing, device and host addresses never coincide.)
    shadow: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tensor = self.tensor
        if is_cupy(tensor):
            where = tensor.data.ptr, tensor.shape, tensor.strides, tensor.itemsize
            shadow = _shown(tensor, *where, is_read_only=self.is_read_only)
            fields = "cupy", np.dtype(tensor.dtype), f"cuda:{tensor.device.id}", shadow
        else:
            dtype = TORCH_DTYPES[torch_name(tensor.dtype)]
            fields = "torch", dtype, str(tensor.device), shown_by_torch(tensor, tensor.element_size())
        for name, value in zip(("library", "dtype", "device", "shadow"), fields, strict=True):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each dimension, in elements."""
        return self.shadow.shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.shadow.size

    @property
    def nbytes(self) -> int:
        """The number of bytes of its elements."""
        return self.shadow.nbytes

    @property
    def address(self) -> int:
        """The address of the first element, in device memory; 0 if there is none."""
        return int(self.shadow.ctypes.data) if self.shadow.size else 0

    def to_host(self) -> Any:
        """Copies it to host memory, after the work on the caller's stream: a numpy array, or torch's."""
        return self.tensor.get() if self.library == "cupy" else self.tensor.cpu()

    def take(self, other: DeviceArray) -> None:
        """Copies another tensor of equal size, dtype and device into this one, on the caller's stream."""
        if self.library == "cupy":
            bits_view(self)[...] = bits_view(other).reshape(self.shape)
        else:
            there = other.tensor if other.library == "torch" else import_module("torch").from_dlpack(other.tensor)
            self.tensor.copy_(there.reshape(self.tensor.shape))


class Interface:
    """Memory described to numpy, and the owner that the resulting array keeps alive."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def device_id(device: str) -> int:
    """The number of a device in this process: 1 for ``"cuda:1"``."""
    return int(device.partition(":")[2] or 0)


def is_cupy(value: Any) -> bool:
    """Tells whether a value is a `cupy.ndarray`, not a subclass; does not import cupy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and type(value) is getattr(cupy, "ndarray", None)


def view_of_cupy(array: Any, *, is_read_only: bool = False) -> DeviceArray | None:
    """Views a cupy array as an operand of collectives; None if its elements are not numbers."""
    return DeviceArray(array, is_read_only) if is_number(np.dtype(array.dtype)) else None


def on_gpu(value: Any) -> DeviceArray | None:
    """Views an object of another library on an NVIDIA GPU as a cupy array over its memory; None if it is not one.

    Such an object has the CUDA array interface or DLPack.
    """
    kind = type(value)
    try:  # the class of JAX's arrays has the attribute, but JAX arrays on the CPU do not
        if hasattr(kind, "__cuda_array_interface__") and hasattr(value, "__cuda_array_interface__"):
            array = import_module("cupy").asarray(value)
            is_read_only = bool(value.__cuda_array_interface__["data"][1])  # cupy drops it
        elif hasattr(kind, "__dlpack_device__") and value.__dlpack_device__()[0] == _DLPACK_CUDA:
            array = import_module("cupy").from_dlpack(value)
            is_read_only = _is_read_only(value)
        else:
            return None
    except Exception:  # noqa: BLE001 - foreign code may refuse by any exception, or cupy is missing
        return None
    return view_of_cupy(array, is_read_only=is_read_only)


def _is_read_only(value: Any) -> bool:
    # From the flags of DLPack 1.0, which cupy drops; older exporters have none.
    try:
        capsule = value.__dlpack__(stream=_NO_STREAM, max_version=(1, 0))
    except TypeError:
        return False
    pythonapi.PyCapsule_IsValid.argtypes = pythonapi.PyCapsule_GetPointer.argtypes = (py_object, c_char_p)
    pythonapi.PyCapsule_GetPointer.restype = c_void_p
    if not pythonapi.PyCapsule_IsValid(capsule, _VERSIONED):
        return False
    address = pythonapi.PyCapsule_GetPointer(capsule, _VERSIONED)
    return bool(c_uint64.from_address(address + _FLAGS_AT).value & 1)


def cupy_view(array: DeviceArray) -> Any:
    """Views a tensor as a `cupy.ndarray` over the same memory, which it keeps alive."""
    return _cupy_view(array, array.dtype)


def bits_view(array: DeviceArray) -> Any:
    """Does the same with a plain element type of equal size, for copies: cupy lacks some types."""
    return _cupy_view(array, _BITS[array.dtype.itemsize])


def _cupy_view(array: DeviceArray, dtype: np.dtype[Any]) -> Any:
    if array.library == "cupy":
        return array.tensor if array.dtype == dtype else array.tensor.view(dtype)
    cupy, shadow = import_module("cupy"), array.shadow
    reach = sum((extent - 1) * stride for extent, stride in zip(shadow.shape, shadow.strides, strict=True))
    nbytes = reach + shadow.itemsize if shadow.size else 0  # torch has no negative strides
    memory = cupy.cuda.UnownedMemory(array.address, nbytes, array.tensor, device_id(array.device))
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, dtype, memptr=pointer, strides=array.shadow.strides)


def empty_on_device(tensor: TensorInfo) -> Any:
    """Allocates a C-order tensor of that shape, dtype, device and library; may raise MemoryError."""
    use_torch = tensor.library == "torch" or (tensor.library != "cupy" and "torch" in sys.modules)
    return _empty_of_torch(tensor) if use_torch else _empty_of_cupy(tensor)


def _empty_of_torch(tensor: TensorInfo) -> Any:
    torch = import_module("torch")
    try:
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=tensor.device)
    except torch.cuda.OutOfMemoryError as exc:
        raise MemoryError(str(exc)) from exc


def _empty_of_cupy(tensor: TensorInfo) -> Any:
    cupy = import_module("cupy")
    try:
        with cupy.cuda.Device(device_id(tensor.device)):
            return cupy.empty(tensor.shape, np.dtype(tensor.dtype))
    except cupy.cuda.memory.OutOfMemoryError as exc:
        raise MemoryError(str(exc)) from exc


def put_on_gpu(value: Any, library: str) -> Any:
    """Copies a torch or numpy tensor to the current GPU, for library "torch" or "cupy"; else returns it unchanged."""
    torch = sys.modules.get("torch")
    if library == "torch" and torch is not None and isinstance(value, torch.Tensor):
        return value.to("cuda") if torch.cuda.is_available() else value
    if library == "cupy" and isinstance(value, np.ndarray):
        try:
            cupy = import_module("cupy")
            return cupy.asarray(value) if cupy.cuda.runtime.getDeviceCount() else value
        except Exception:  # noqa: BLE001 - not installed, or no driver: cupy raises many kinds
            return value
    return value


def shown_by_torch(tensor: Any, itemsize: int) -> Array:
    """Views the memory of a torch tensor as an array of bare elements.

    This avoids `Tensor.numpy`, after which torch never again resizes the storage.
    """
    strides = tuple(stride * itemsize for stride in tensor.stride())
    return _shown(tensor, tensor.data_ptr(), tuple(tensor.shape), strides, itemsize)


def _shown(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    *,
    is_read_only: bool = False,
) -> Array:
    interface = {
        "data": (address, is_read_only),
        "shape": shape,
        "strides": strides,
        "typestr": f"|V{itemsize}",
        "version": 3,
    }
    return np.asarray(Interface(interface, owner))
