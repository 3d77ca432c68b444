"""The functions of `cupy`."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays
from ._arrays import asarray, ndarray, ufunc
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


def arange(*args: Any, dtype: Any = None) -> ndarray:
    return asarray(np.arange(*args).astype(dtype) if dtype is not None else np.arange(*args))


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    seen = asarray(a, dtype)
    return seen if seen.flags.c_contiguous else seen.copy()


def from_dlpack(array: Any) -> ndarray:
    """A view of one of the fake's own arrays, or of what lends one."""
    if array.__dlpack_device__()[0] != 2:
        raise ValueError("only memory of CUDA devices")
    capsule = array.__dlpack__(stream=current().current_queue().handle or 1)
    found: ndarray = capsule.array.view()
    return found


_UFUNCS = (
    *("minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("true_divide", "fmin", "fmax"),
)

FUNCTIONS: dict[str, Any] = {
    **{
        function.__name__: function
        for function in (*(empty, full, zeros, ones, arange, asarray, ascontiguousarray, from_dlpack),)
    },
    **{name: ufunc(getattr(np, name)) for name in _UFUNCS},
    **{name: getattr(_arrays, name) for name in ("add", "multiply")},
    "ndarray": ndarray,
}
"""What the module has."""
