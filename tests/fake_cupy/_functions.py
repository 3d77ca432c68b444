"""The functions of `cupy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _arrays
from ._arrays import _copy, asarray, ndarray, ufunc
from ._kernels import RawModule
from ._state import current

__all__ = ["FUNCTIONS"]


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    made = ndarray(shape, np.array(fill_value).dtype if dtype is None else dtype, order=order)
    made.fill(fill_value)
    return made


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def empty_like(prototype: ndarray, dtype: Any = None, *, shape: Any = None) -> ndarray:
    return ndarray(prototype.shape if shape is None else shape, prototype.dtype if dtype is None else dtype)


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return zeros(a.shape, a.dtype if dtype is None else dtype)


def ones_like(a: ndarray, dtype: Any = None) -> ndarray:
    return ones(a.shape, a.dtype if dtype is None else dtype)


def full_like(a: ndarray, fill_value: Any, dtype: Any = None) -> ndarray:
    return full(a.shape, fill_value, a.dtype if dtype is None else dtype)


def arange(*args: Any, dtype: Any = None) -> ndarray:
    return asarray(np.arange(*args).astype(dtype) if dtype is not None else np.arange(*args))


def array(obj: Any, dtype: Any = None, copy: bool = True) -> ndarray:
    seen = asarray(obj, dtype)
    shared = seen is obj or hasattr(type(obj), "__cuda_array_interface__")
    return seen.copy() if copy and shared else seen


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    seen = asarray(a, dtype)
    return seen if seen.flags.c_contiguous else seen.copy()


def asnumpy(a: Any, stream: Any = None) -> Any:
    return a.get(stream) if isinstance(a, ndarray) else np.asarray(a)


def copyto(dst: ndarray, src: Any, casting: str = "same_kind") -> None:
    if not isinstance(dst, ndarray) or not (isinstance(src, ndarray) or np.isscalar(src)):
        raise TypeError(f"Unsupported type {type(src)}")
    if isinstance(src, ndarray) and not np.can_cast(src.dtype, dst.dtype, casting):  # type: ignore[arg-type]
        raise TypeError(f"Cannot cast {src.dtype!r} to {dst.dtype!r} in {casting} casting mode")
    _copy(dst, src)


def concatenate(tup: Sequence[ndarray], axis: int | None = 0, out: ndarray | None = None) -> ndarray:
    parts = [part.ravel() if axis is None else part for part in tup]
    along = 0 if axis is None else axis
    like = np.concatenate([np.broadcast_to(np.zeros((), part.dtype), part.shape) for part in parts], axis=along)
    made = ndarray(like.shape, like.dtype) if out is None else out
    start = 0
    for part in parts:
        end = start + part.shape[along]
        index: list[Any] = [slice(None)] * made.ndim
        index[along] = slice(start, end)
        _copy(made[tuple(index)], part)
        start = end
    return made


def from_dlpack(array: Any) -> ndarray:
    """A view of one of the fake's own arrays, or of what lends one."""
    if array.__dlpack_device__()[0] != 2:
        raise ValueError("only memory of CUDA devices")
    capsule = array.__dlpack__(stream=current().current_queue().handle or 1)
    found: ndarray = capsule.array.view()
    return found


def shares_memory(a: ndarray, b: ndarray) -> bool:
    return bool(np.shares_memory(a._host(), b._host()))


may_share_memory = shares_memory

_UFUNCS = (
    *("minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_or", "logical_and", "logical_xor"),
    *("true_divide", "floor_divide", "greater", "less", "fmin", "fmax"),
)
_DTYPES = (
    *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "dtype"),
)

FUNCTIONS: dict[str, Any] = {
    **{
        function.__name__: function
        for function in (
            *(empty, full, zeros, ones, empty_like, zeros_like, ones_like, full_like, arange, asarray, array),
            *(ascontiguousarray, asnumpy, copyto, concatenate, from_dlpack, shares_memory),
        )
    },
    **{name: ufunc(getattr(np, name)) for name in _UFUNCS},
    **{name: getattr(_arrays, name) for name in ("add", "subtract", "multiply", "divide", "equal", "not_equal")},
    **{name: getattr(np, name) for name in _DTYPES},
    "may_share_memory": shares_memory,
    "ndarray": ndarray,
    "RawModule": RawModule,
}
"""What the module has."""
