"""Element types: which are numbers, and their names in numpy and torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

KINDS = "biufc"  # The numpy kinds that collectives accept: bool, signed, unsigned, float, complex

# The floats of `ml_dtypes`. To numpy most of them are void types, so their kind is useless.
NARROW: frozenset[np.dtype[Any]] = frozenset(
    np.dtype(getattr(ml_dtypes, name)) for name in dir(ml_dtypes) if name.startswith(("bfloat16", "float8_"))
)

# torch's name of an element type, which is also numpy's -> numpy's type
TORCH_DTYPES: dict[str, np.dtype[Any]] = {
    dtype.name: dtype
    for dtype in (*map(np.dtype, "?bhilqBHILQefdFD"), *NARROW)  # all types by their C codes, some twice
}


def is_number(dtype: np.dtype[Any]) -> bool:
    """Tells whether collectives accept elements of a dtype."""
    return dtype.kind in KINDS or dtype in NARROW


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same type in this machine's byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype[Any]) -> str:
    """Returns numpy's name of a type in native byte order."""
    return native(dtype).name


@lru_cache(maxsize=64)
def torch_name(dtype: Any) -> str:
    """Returns torch's name of one of its types, which is also numpy's."""
    return str(dtype).removeprefix("torch.")


def convert(to: Array, array: Array) -> None:
    """Copies elements, and converts them if the dtypes differ: rounded to nearest, as in numpy."""
    if to.dtype == array.dtype:
        np.copyto(to, array)
        return
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # the results are infinities and NaN
        np.copyto(to, array, casting="unsafe")


def converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """Returns a copy of another dtype; see `convert`."""
    result: Array = np.empty(array.shape, dtype)
    convert(result, array)
    return result
