"""What backends know about tensors: how each becomes a numpy array, storage ranges, reduction rules, access by chunks.

A tensor of whatever library is worked on as a numpy array over its own memory; nothing is copied. bfloat16 and the
8-bit floats are the dtypes of `ml_dtypes`. torch is never imported here: where nobody else did, nobody has its tensors.
What lies in a device's memory is told of in `device_arrays`, element types in `elements`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Any, cast

import numpy as np

from raycollect.model import TensorInfo
from raycollect.words import a_type

from .device_arrays import DeviceArray, Interface, empty_on_device, is_cupy, on_gpu, shown_by_torch, view_of_cupy
from .elements import NARROW, TORCH_DTYPES, Array, is_number, name_of, native, torch_name

__all__ = [
    "NARROW",
    "Array",
    "DeviceArray",
    "Flat",
    "Stretch",
    "byte_range",
    "copy_to_host",
    "describe",
    "empty",
    "info",
    "is_number",
    "is_tensor",
    "is_writeable",
    "library",
    "memory",
    "native",
    "overlap",
    "overlaps_itself",
    "owner",
    "place",
    "place_of",
    "restore",
    "split",
    "view",
]

OVERLAP_WORK = 10_000
"""How many candidates numpy may try to decide whether two strided views meet."""


_DLPACK_CPU = 1
_TORCH_MODULES = "torch", "torch.nn.parameter"
"""Where the classes of torch's own tensors say that they are from."""
_DLPACK_VIEW: dict[str, Any] = {"copy": False} if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else {}
"""Before 2.1 numpy could not ask for a copy, nor forbid one."""

# ---------------------------------------------------------------------------------------------- any library's tensor


def view(value: object) -> Array | DeviceArray | None:
    """Gives a tensor's memory as an array; None for what collectives don't work on.

    Tensors are numpy arrays, torch tensors, cupy arrays, and objects that show CPU memory by DLPack or numpy's array
    interface, or memory of an NVIDIA GPU by DLPack or the CUDA array interface. Not among them: subclasses (masked
    arrays, matrices), scalars, structured, object, text and date arrays, torch's sparse, quantized, meta and lazily
    conjugated or negated tensors.
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
    """Tells whether a value is a tensor that collectives work on; see `view`."""
    return view(value) is not None


def memory(tensor: object) -> Array | DeviceArray:
    """Gives the memory, as of now, of what was a tensor when it was kept; see `view`.

    Raises:
        TypeError: It has become something else, such as a torch tensor whose storage was given back.
    """
    seen = view(tensor)
    if seen is None:
        raise TypeError(f"{a_type(tensor, in_full=True)} without memory of its own")
    return seen


def describe(tensor: object) -> TensorInfo:
    """Describes a tensor of any library.

    Raises:
        TypeError: It has no memory; see `memory`.
    """
    return info(memory(tensor), library(tensor))


def library(value: object) -> str:
    """Names the library whose tensors `restore` and `empty` shall make for one who has this one."""
    if isinstance(value, DeviceArray):
        return value.library
    tensor_type = _torch_type()
    if tensor_type is not None and isinstance(value, tensor_type):
        return "torch"
    return "cupy" if is_cupy(value) or (type(value) is not np.ndarray and on_gpu(value) is not None) else "numpy"


def info(array: Array | DeviceArray, library: str = "numpy") -> TensorInfo:
    """Describes a tensor as `view` gave it; the byte order is left out, because kernels convert it.

    Args:
        array: The tensor.
        library: Whose tensor it was.
    """
    dtype = array.dtype
    device = array.device if isinstance(array, DeviceArray) else "cpu"
    return TensorInfo(shape=array.shape, dtype=name_of(dtype), itemsize=dtype.itemsize, device=device, library=library)


def empty(tensor: TensorInfo) -> Any:
    """Allocates a tensor of that shape, dtype and library, C order, contents undefined.

    Raises:
        MemoryError: There is no memory for it.
    """
    if tensor.device == "cpu":
        return restore(np.empty(tensor.shape, np.dtype(tensor.dtype)), tensor.library)
    return empty_on_device(tensor)


def restore(array: Array, library: str) -> Any:
    """Turns a fresh array into a tensor of a library, over the same memory; where it can't, the array stays one."""
    torch = sys.modules.get("torch")
    if library != "torch" or torch is None or not hasattr(torch, name_of(array.dtype)):
        return array
    if array.dtype not in NARROW:
        return torch.from_numpy(array)
    bits = array.view(np.int16 if array.itemsize > 1 else np.uint8)
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def split(array: Array | DeviceArray, count: int) -> tuple[Array | DeviceArray, ...] | None:
    """Cuts a contiguous tensor along its first axis into equal pieces, one per rank, that are views of it.

    Args:
        array: [count, ...], which gives pieces [...]; or [count * n, ...], which gives pieces [n, ...].
        count: The number of pieces.

    Returns:
        The pieces; None where the tensor can't be cut so.
    """
    shape = array.shape
    if not shape or shape[0] % count or not _shadow(array).flags.c_contiguous:
        return None
    whole = array.tensor if isinstance(array, DeviceArray) else array
    each = shape[0] // count
    rows = whole if each == 1 and len(shape) > 1 else whole.reshape(count, each, *shape[1:])
    return tuple(DeviceArray(row) if isinstance(array, DeviceArray) else row for row in rows)


def _torch_type() -> Any:
    """The class of torch's tensors; None where torch was not imported, or not yet whole."""
    return getattr(sys.modules.get("torch"), "Tensor", None)


def _view_of_torch(tensor: Any) -> Array | DeviceArray | None:
    torch: Any = sys.modules["torch"]
    dtype = TORCH_DTYPES.get(torch_name(tensor.dtype))
    if dtype is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.numel() and not tensor.untyped_storage().nbytes():  # its storage was given back
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
        except TypeError:  # it is older than the argument, and than copies
            return np.from_dlpack(value)
    except Exception:  # noqa: BLE001 - foreign code that can't show its memory may say so by any exception
        return None


def _view_of_interface(value: Any) -> Array | None:
    name = "__array_interface__"
    if not hasattr(type(value), name) and name not in getattr(value, "__dict__", ()):  # asks no `__getattr__`
        return None
    try:
        interface = value.__array_interface__
        if not isinstance(interface.get("data"), tuple):  # a buffer, which may be a copy
            return None
        return np.asarray(Interface(interface, value))
    except Exception:  # noqa: BLE001 - as above
        return None


# ---------------------------------------------------------------------------------------------- storage


def byte_range(array: Array | DeviceArray) -> tuple[int, int]:
    """Gives the addresses [start, stop) that the array's elements lie in; empty for an array without elements."""
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
    """Where and how an array lies: equal as long as everything else here says the same of it."""
    dtype, array = array.dtype, _shadow(array)
    return array.ctypes.data, array.shape, array.strides, dtype, array.flags.writeable


def place_of(tensor: object) -> tuple[Any, ...]:
    """The same for a tensor of any library, and several times cheaper: for those who ask again and again.

    Raises:
        TypeError: It has no memory any more; see `memory`.
    """
    if type(tensor) is not np.ndarray:
        return _place_of_torch(tensor) if _is_plain_torch(tensor) else place(memory(tensor))
    if tensor.base is not None:  # only an array that owns its memory can move it (`ndarray.resize`)
        return tensor.shape, tensor.strides, tensor.dtype, tensor.flags.num
    try:
        address: Any = addressof(c_char.from_buffer(tensor))  # type: ignore[arg-type]  # arrays are buffers
    except (TypeError, ValueError):  # read-only, empty, with gaps, or of a type that buffers do not know
        address = tensor.__array_interface__["data"]
    return address, tensor.shape, tensor.strides, tensor.dtype


def _place_of_torch(tensor: Any) -> tuple[Any, ...]:
    """The same for torch, with all that assigning to `tensor.data` can change."""
    if not tensor.data_ptr():  # empty, or its storage was given back
        return place(memory(tensor))
    where = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return *where, tensor.is_conj(), tensor.is_neg()


def _is_plain_torch(tensor: object) -> bool:
    """Whether it is a tensor of torch's own, of no subclass but that for parameters; told at once."""
    kind = type(tensor)
    if kind.__module__ not in _TORCH_MODULES:
        return False
    torch: Any = sys.modules["torch"]
    return kind is torch.Tensor or kind is torch.nn.Parameter


def has_version(tensor: object) -> bool:
    """Whether torch counts how often a tensor was written, so that it can tell that a gradient would be wrong."""
    return _is_plain_torch(tensor) and not cast("Any", tensor).is_inference()


def raise_versions(tensors: Sequence[Any]) -> None:
    """Tells torch that tensors were written, as its own operations do; see `has_version`."""
    raise_version: Any = sys.modules["torch"].autograd.graph.increment_version
    try:
        raise_version(tensors)
    except TypeError:  # older ones take them one by one
        for tensor in tensors:
            raise_version(tensor)


def is_writeable(array: Array | DeviceArray) -> bool:
    """Tells whether an array may be written."""
    return _shadow(array).flags.writeable


def overlap(a: Array | DeviceArray, b: Array | DeviceArray) -> bool:
    """Tells whether two arrays share an element's storage; where that is too hard to tell, whether they may."""
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
    """Gives the object that lives as long as a tensor's memory: the array under a numpy view, a torch storage."""
    while isinstance(tensor, np.ndarray) and isinstance(tensor.base, np.ndarray):
        tensor = tensor.base
    tensor_type = _torch_type()
    if tensor_type is not None and isinstance(tensor, tensor_type):
        return tensor.untyped_storage()
    return tensor.data.mem if is_cupy(tensor) else tensor  # type: ignore[attr-defined]  # cupy has no types


def copy_to_host(array: Array | DeviceArray) -> Array:
    """Copies a tensor as `view` gave it into a fresh array, C order."""
    if isinstance(array, DeviceArray):
        return np.asarray(cast("Array", view(array.to_host())), order="C")
    return np.array(array, order="C", copy=True, subok=False)


def _shadow(array: Array | DeviceArray) -> Array:
    return array.shadow if isinstance(array, DeviceArray) else array


# ---------------------------------------------------------------------------------------------- chunks


class Flat:
    """Any array as a flat C-order row of native elements, read and written by chunks.

    Kernels see one kind of array. Where the array is contiguous and native, chunks are views of it; else a chunk is a
    copy, so that the memory beyond the array itself is that of a chunk (P8).

    Attributes:
        size: The number of elements.
        dtype: Their type, native byte order.
        direct: Whether chunks are views.
    """

    __slots__ = ("_array", "_line", "direct", "dtype", "size")

    def __init__(self, array: Array) -> None:
        base = array.view(np.ndarray)
        self.size: int = base.size
        self.dtype: np.dtype[Any] = native(base.dtype)
        self.direct: bool = base.flags.c_contiguous and base.flags.aligned and base.dtype.isnative
        self._array = base
        self._line = base.reshape(-1) if self.direct else base[:0] if base.ndim else base.reshape(1)[:0]

    @property
    def address(self) -> int:
        """Where the first element lies."""
        return int(self._array.ctypes.data)

    def read(self, lo: int, hi: int) -> Array:
        """Gives elements [lo, hi): a view where `direct`, else a copy."""
        if self.direct:
            return self._line[lo:hi]
        chunk: Array = self._array.flat[lo:hi]
        return chunk.astype(self.dtype, copy=False)

    def stretches(self, lo: int, hi: int) -> Sequence[Stretch]:
        """Cuts elements [lo, hi) into stretches of which each lies in one array: there is but one."""
        return ((lo, hi, self, lo, hi),)

    def fill(self, chunk: Array, lo: int, hi: int) -> None:
        """Copies elements [lo, hi) to a chunk of as many."""
        chunk[...] = self.read(lo, hi)

    def target(self, lo: int, hi: int) -> Array:
        """Gives a place to write elements [lo, hi) to; `commit` it afterwards."""
        return self._line[lo:hi] if self.direct else np.empty(hi - lo, self.dtype)

    def commit(self, lo: int, hi: int, target: Array) -> None:
        """Brings what was written into a `target` to the array; nothing to do where `direct`."""
        if not self.direct and hi > lo:
            self._array.flat[lo:hi] = target

    def write(self, lo: int, hi: int, values: Array) -> None:
        """Writes elements [lo, hi)."""
        if self.direct:
            self._line[lo:hi] = values
        else:
            self.commit(lo, hi, values)


Stretch = tuple[int, int, Flat, int, int]
"""Elements [first, last) of a row, and the one array in which they lie, as its elements [start, stop)."""
