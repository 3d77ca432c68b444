"""Element types: which are numbers that collectives work on, what they are called, and how torch calls them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["NARROW", "TORCH_DTYPES", "Array", "is_number", "name_of", "native", "torch_name"]

Array = NDArray[Any]

KINDS = "biufc"
"""The numpy kinds that are tensors: bool, signed, unsigned, float, complex."""

NARROW: frozenset[np.dtype[Any]] = frozenset(
    np.dtype(getattr(ml_dtypes, name)) for name in dir(ml_dtypes) if name.startswith(("bfloat16", "float8_"))
)
"""The floats that numpy itself lacks; it takes most of them for void types, so their kind says nothing."""

TORCH_DTYPES: dict[str, np.dtype[Any]] = {
    dtype.name: dtype
    for dtype in (*map(np.dtype, "?bhilqBHILQefdFD"), *NARROW)  # by their codes in C: all of them, some twice
}
"""torch's name of an element type, which is numpy's -> numpy's type."""


def is_number(dtype: np.dtype[Any]) -> bool:
    """Tells whether elements of a dtype are numbers that collectives work on."""
    return dtype.kind in KINDS or dtype in NARROW


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same type in this machine's byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype[Any]) -> str:
    """What numpy calls a type in this machine's byte order."""
    return native(dtype).name


@lru_cache(maxsize=64)
def torch_name(dtype: Any) -> str:
    """What torch calls one of its types, which is what numpy calls it."""
    return str(dtype).removeprefix("torch.")
