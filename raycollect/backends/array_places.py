"""The places of many tensors, to tell in half the time of single comparisons whether they are where they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from operator import attrgetter, eq
from typing import Any

import numpy as np

from raycollect.backends.arrays import place_of

Places = tuple[list[int], list[Any]] | list[Any]
"""The addresses and the layouts of numpy's arrays; or of each tensor the result of `place_of`."""


def places_of(tensors: Sequence[object]) -> Places:
    """Returns the places of many tensors; see `place_of` and `are_at`."""
    if set(map(type, tensors)) == {np.ndarray}:
        with suppress(TypeError, ValueError):  # as in `place_of`
            return list(map(addressof, map(_first_byte, tensors))), list(map(_layout, tensors))
    return list(map(place_of, tensors))


def are_at(tensors: Sequence[object], places: Places) -> bool:
    """Whether many tensors are where they were.

    Raises:
        TypeError: As `place_of`.
    """
    if type(places) is list:
        return len(tensors) == len(places) and all(map(eq, map(place_of, tensors), places))
    addresses, layouts = places
    if len(tensors) != len(addresses) or set(map(type, tensors)) != {np.ndarray}:
        return False
    try:
        return all(map(eq, map(addressof, map(_first_byte, tensors)), addresses)) and all(
            map(eq, map(_layout, tensors), layouts)
        )
    except (TypeError, ValueError):  # one is read-only now, or has gaps
        return False


_first_byte: Callable[[Any], Any] = c_char.from_buffer
_layout: Callable[[Any], tuple[Any, ...]] = attrgetter("shape", "dtype")  # without gaps, as `from_buffer` demands
