"""Tensors of any library as numpy arrays over their own memory: views, layout, overlap, and access by chunks.

Nothing is copied. bfloat16 and 8-bit floats are the dtypes of `ml_dtypes`. torch is never imported here: a process
without it has no torch tensors. Tensors in device memory are in `device_arrays`, element types in
`elements`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Any, cast

import numpy as np

from raycollect.backends.device_arrays import (
    DeviceArray,
    Interface,
    empty_on_device,
    is_cupy,
    on_gpu,
    shown_by_torch,
    view_of_cupy,
)
from raycollect.backends.elements import NARROW, TORCH_DTYPES, Array, is_number, name_of, native, torch_name
from raycollect.backends.unsuited import describe_value, resolved
from raycollect.core.model import TensorInfo

__all__ = ["NARROW", "Array", "DeviceArray", "describe_value", "is_number", "native", "resolved"]  # re-exported

OVERLAP_WORK = 10_000  # How many candidates numpy may try to decide whether two strided views overlap


_DLPACK_CPU = 1
_TORCH_MODULES = "torch", "torch.nn.parameter"  # The modules of torch's own tensor classes
# numpy before 2.1 has no `copy` argument
_DLPACK_VIEW: dict[str, Any] = {"copy": False} if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else {}


def view(value: object) -> Array | DeviceArray | None:
    """Returns a tensor's memory as an array, or None if collectives don't accept the value.

    Tensors are numpy arrays, torch tensors, cupy arrays, and objects that expose CPU memory by DLPack or numpy's array
    interface, or memory of an NVIDIA GPU by DLPack or the CUDA array interface. Not accepted: subclasses (masked
    arrays, matrices), scalars, structured, object, text and date arrays; torch's sparse, nested, quantized and meta
    tensors, and lazily conjugated or negated ones. `describe_value` says why a value is refused.
    """
    if type(value) in (np.ndarray, np.memmap):
        array = cast("Array", value)
        return array if is_number(array.dtype) else None
    tensor_type = _torch_type()
    if tensor_type is not None and isinstance(value, tensor_type):
        return _view_of_torch(value)
    if isinstance(value, np.ndarray | np.generic | type):
        return None
    if is_cupy(value):
        return view_of_cupy(value)
    lent = on_gpu(value)
    if lent is not None:
        return lent
    seen = _view_of_dlpack(value)
    if seen is None:
        seen = _view_of_interface(value)
    return seen if seen is not None and is_number(seen.dtype) else None


def is_tensor(value: object) -> bool:
    """Tells whether collectives accept a value; see `view`."""
    if type(value) is np.ndarray:
        return is_number(cast("Array", value).dtype)
    tensor_type = _torch_type()
    if tensor_type is not None and isinstance(value, tensor_type):
        return _dtype_of_torch(value) is not None
    return view(value) is not None


def is_scalar(tensor: object) -> bool:
    """Tells whether a tensor has no dimensions."""
    shape = getattr(tensor, "shape", None)  # not all tensors have the attribute
    return not (shape if isinstance(shape, tuple) else memory(tensor).shape)


def memory(tensor: object) -> Array | DeviceArray:
    """Returns the current memory of a value that was a tensor; see `view`.

    Raises:
        TypeError: It is no longer a tensor, such as a torch tensor whose storage was freed.
    """
    seen = view(tensor)
    if seen is None:
        raise TypeError(f"{describe_value(tensor)}, which is no longer a tensor")
    return seen


def describe(tensor: object) -> TensorInfo:
    """Describes a tensor of any library; raises TypeError like `memory`."""
    return info(memory(tensor), library(tensor))


def library(value: object) -> str:
    """Names the library in which `restore` and `empty` make tensors like this one."""
    if isinstance(value, DeviceArray):
        return value.library
    tensor_type = _torch_type()
    if tensor_type is not None and isinstance(value, tensor_type):
        return "torch"
    return "cupy" if is_cupy(value) or (type(value) is not np.ndarray and on_gpu(value) is not None) else "numpy"


def info(array: Array | DeviceArray, library: str = "numpy") -> TensorInfo:
    """Describes a tensor returned by `view`; omits the byte order, which kernels convert."""
    dtype = array.dtype
    device = array.device if isinstance(array, DeviceArray) else "cpu"
    return TensorInfo(shape=array.shape, dtype=name_of(dtype), itemsize=dtype.itemsize, device=device, library=library)


def empty(tensor: TensorInfo) -> Any:
    """Allocates a C-order tensor of that shape, dtype, device and library; may raise MemoryError."""
    if tensor.device == "cpu":
        return restore(np.empty(tensor.shape, np.dtype(tensor.dtype)), tensor.library)
    return empty_on_device(tensor)


def restore(array: Array, library: str) -> Any:
    """Turns a fresh array into a tensor of a library over the same memory, or returns it if that is impossible."""
    torch = sys.modules.get("torch")
    if library != "torch" or torch is None or not hasattr(torch, name_of(array.dtype)):
        return array
    if array.dtype not in NARROW:
        return torch.from_numpy(array)
    bits = array.view(np.int16 if array.itemsize > 1 else np.uint8)
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def split(array: Array | DeviceArray, count: int) -> tuple[Array | DeviceArray, ...] | None:
    """Cuts a contiguous tensor along its first axis into equal views, one per rank; None if that is impossible.

    [count, ...] gives pieces [...], and [count * n, ...] gives pieces [n, ...].
    """
    shape = array.shape
    if not shape or shape[0] % count or not _shadow(array).flags.c_contiguous:
        return None
    whole = array.tensor if isinstance(array, DeviceArray) else array
    each = shape[0] // count
    rows = whole if each == 1 and len(shape) > 1 else whole.reshape(count, each, *shape[1:])
    return tuple(DeviceArray(row, array.is_read_only) if isinstance(array, DeviceArray) else row for row in rows)


def as_bytes(array: Array) -> Array:
    """The bytes of an array in C order: its memory, or a copy if it has gaps."""
    flat: Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat


def box_of(array: Array, at: Sequence[int], size: Sequence[int]) -> Array:
    """A box of an array, as a view."""
    place: Any = (*(slice(lo, lo + n) for lo, n in zip(at, size, strict=True)), ...)  # ...: a view of scalars, too
    box: Array = array[place]
    return box


def _torch_type() -> Any:
    # None while torch is not imported, or only in part.
    return getattr(sys.modules.get("torch"), "Tensor", None)


def _dtype_of_torch(tensor: Any) -> np.dtype[Any] | None:
    # numpy's dtype; None if collectives don't accept the tensor.
    torch: Any = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.numel() and not tensor.untyped_storage().nbytes():  # its storage was freed
        return None
    return TORCH_DTYPES.get(torch_name(tensor.dtype))


def _view_of_torch(tensor: Any) -> Array | DeviceArray | None:
    dtype = _dtype_of_torch(tensor)
    if dtype is None:
        return None
    plain = tensor.detach()
    if plain.device.type != "cpu":
        return DeviceArray(plain)
    return shown_by_torch(plain, dtype.itemsize).view(dtype)


def _view_of_dlpack(value: Any) -> Array | None:
    if not (hasattr(type(value), "__dlpack__") and hasattr(type(value), "__dlpack_device__")):
        return None
    try:
        if value.__dlpack_device__()[0] != _DLPACK_CPU:
            return None
        try:
            return np.from_dlpack(value, **_DLPACK_VIEW)
        except TypeError:  # older versions lack the argument, and never copy
            return np.from_dlpack(value)
    except Exception:  # noqa: BLE001 - foreign code may refuse by any exception
        return None


def _view_of_interface(value: Any) -> Array | None:
    name = "__array_interface__"
    if not hasattr(type(value), name) and name not in getattr(value, "__dict__", ()):  # does not call `__getattr__`
        return None
    try:
        interface = value.__array_interface__
        if not isinstance(interface.get("data"), tuple):  # a buffer, which may be a copy
            return None
        return np.asarray(Interface(interface, value))
    except Exception:  # noqa: BLE001 - as above
        return None


def byte_range(array: Array | DeviceArray) -> tuple[int, int]:
    """Returns the address range [start, stop) of the elements; empty if there are none."""
    array = _shadow(array)
    start = stop = int(array.ctypes.data)
    if array.size == 0:
        return start, start
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    for extent, stride in zip(array.shape, array.strides, strict=True):
        span = (extent - 1) * stride
        if span < 0:
            start += span
        else:
            stop += span
    return start, stop + array.itemsize


def place(array: Array | DeviceArray) -> tuple[Any, ...]:
    """Returns an array's address and layout, to compare for equality."""
    dtype, array = array.dtype, _shadow(array)
    # numpy gives an empty array a different made-up address each time.
    address = array.ctypes.data if array.size else 0
    return address, array.shape, array.strides, dtype, array.flags.writeable


def place_of(tensor: object) -> tuple[Any, ...]:
    """Does the same for a tensor of any library, several times cheaper, for frequent checks.

    Raises:
        TypeError: Its memory was freed; see `memory`.
    """
    if type(tensor) is not np.ndarray:
        return _place_of_torch(tensor) if is_plain_torch(tensor) else place(memory(tensor))
    if tensor.base is not None:  # only an array that owns its memory can move it (`ndarray.resize`)
        return tensor.shape, tensor.strides, tensor.dtype, tensor.flags.num
    try:
        address: Any = addressof(c_char.from_buffer(tensor))  # type: ignore[arg-type]  # arrays are buffers
    except (TypeError, ValueError):  # read-only, empty, with gaps, or of a type without a buffer format
        address = tensor.__array_interface__["data"]
    return address, tensor.shape, tensor.strides, tensor.dtype


def _place_of_torch(tensor: Any) -> tuple[Any, ...]:
    # Includes everything that assigning to `tensor.data` can change.
    if not tensor.data_ptr() and tensor.numel():  # its storage was freed
        return place(memory(tensor))
    where = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return *where, tensor.is_conj(), tensor.is_neg()


def is_plain_torch(tensor: object) -> bool:
    """Tells whether it is a tensor of torch's own classes."""
    kind = type(tensor)
    if kind.__module__ not in _TORCH_MODULES:
        return False
    torch: Any = sys.modules["torch"]
    return kind is torch.Tensor or kind is torch.nn.Parameter


def has_version(tensor: object) -> bool:
    """Tells whether torch's autograd counts the writes to a tensor."""
    return type(tensor) is not np.ndarray and is_plain_torch(tensor) and not cast("Any", tensor).is_inference()


def raise_versions(tensors: Sequence[Any]) -> None:
    """Tells torch that tensors were written, as its own operations do; see `has_version`."""
    raise_version: Any = sys.modules["torch"].autograd.graph.increment_version
    try:
        raise_version(tensors)
    except TypeError:  # older versions take one tensor
        for tensor in tensors:
            raise_version(tensor)


def is_writeable(array: Array | DeviceArray) -> bool:
    """Tells whether an array may be written."""
    return _shadow(array).flags.writeable


def is_lent_by_ray(array: Array | DeviceArray) -> bool:
    """Tells whether an array is a view of a Ray object, as arguments of methods and values of refs are."""
    return type(getattr(owner(array), "base", None)).__module__.startswith("ray.")


def overlap(a: Array | DeviceArray, b: Array | DeviceArray) -> bool:
    """Tells whether two arrays share memory of an element; True if that is too hard to decide."""
    a, b = _shadow(a), _shadow(b)
    a_start, a_stop = byte_range(a)
    b_start, b_stop = byte_range(b)
    if max(a_start, b_start) >= min(a_stop, b_stop):
        return False
    try:
        return bool(np.shares_memory(a, b, cast("Any", OVERLAP_WORK)))
    except RuntimeError:  # numpy's TooHardError, which moved between versions
        return True


def overlaps_itself(array: Array | DeviceArray) -> bool:
    """Tells whether two elements may share an address (broadcast strides); such an array can't be a target."""
    array = _shadow(array)
    if array.size == 0:
        return False
    reach = array.itemsize
    dims = zip(array.strides, array.shape, strict=True)
    for stride, extent in sorted((abs(stride), extent) for stride, extent in dims if extent > 1):
        if stride < reach:
            return True
        reach += (extent - 1) * stride
    return False


def owner(tensor: object) -> object:
    """Returns the object that lives as long as a tensor's memory: numpy's base array, or torch's storage."""
    while isinstance(tensor, np.ndarray) and isinstance(tensor.base, np.ndarray):
        tensor = tensor.base
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor_type = _torch_type()
    if tensor_type is not None and isinstance(tensor, tensor_type):
        return tensor.untyped_storage()
    return _owner_of_cupy(tensor) if is_cupy(tensor) else tensor


def _owner_of_cupy(tensor: Any) -> object:
    # cupy's memory does not support weak references. Pool memory takes attributes, and such an object lives as long.
    # Other memory has its own owner, or is held by its first array, which all views hold.
    memory = tensor.data.mem
    try:
        if not hasattr(memory, "_raycollect"):
            memory._raycollect = Tie()
        return cast("object", memory._raycollect)
    except AttributeError:
        holder: object = getattr(memory, "_owner", None)
        if holder is None:
            holder = tensor if tensor.base is None else tensor.base
        return holder


class Tie:
    """An attribute of an object, to which weak references refer in its place."""

    __slots__ = ("__weakref__",)


def copy_to_host(array: Array | DeviceArray) -> Array:
    """Copies a tensor returned by `view` to a fresh C-order array."""
    if isinstance(array, DeviceArray):
        return np.asarray(cast("Array", view(array.to_host())), order="C")
    return np.array(array, order="C", copy=True, subok=False)


def _shadow(array: Array | DeviceArray) -> Array:
    return array.shadow if isinstance(array, DeviceArray) else array


class Flat:
    """Any array as a flat C-order row of native elements, read and written by chunks.

    Where the array is contiguous and native, chunks are views of it; else a chunk is a copy, so that the extra memory
    is that of one chunk (P8).
    """

    __slots__ = ("_array", "_line", "direct", "dtype", "size")

    def __init__(self, array: Array) -> None:
        base = array.view(np.ndarray)
        self.size: int = base.size
        self.dtype: np.dtype[Any] = native(base.dtype)  # in native byte order
        # whether chunks are views
        self.direct: bool = base.flags.c_contiguous and base.flags.aligned and base.dtype.isnative
        self._array = base
        self._line = base.reshape(-1) if self.direct else base[:0] if base.ndim else base.reshape(1)[:0]

    @property
    def address(self) -> int:
        """The address of the first element."""
        return int(self._array.ctypes.data)

    def read(self, lo: int, hi: int) -> Array:
        """Returns elements [lo, hi): a view where `direct`, else a copy."""
        if self.direct:
            return self._line[lo:hi]
        chunk: Array = self._array.flat[lo:hi]
        return chunk.astype(self.dtype, copy=False)

    def fill(self, chunk: Array, lo: int, hi: int) -> None:
        """Copies elements [lo, hi) to a chunk of equal size."""
        chunk[...] = self.read(lo, hi)

    def target(self, lo: int, hi: int) -> Array:
        """Returns memory in which to write elements [lo, hi); `commit` it afterwards."""
        return self._line[lo:hi] if self.direct else np.empty(hi - lo, self.dtype)

    def commit(self, lo: int, hi: int, target: Array) -> None:
        """Copies a written `target` to the array; does nothing where `direct`."""
        if not self.direct and hi > lo:
            self._array.flat[lo:hi] = target

    def write(self, lo: int, hi: int, values: Array) -> None:
        """Writes elements [lo, hi)."""
        if self.direct:
            self._line[lo:hi] = values
        else:
            self.commit(lo, hi, values)
