"""Tensors in the arena of this process: the public constructors, and the outputs of collectives.

Co-located participants work on such tensors where they are, without a copy. Otherwise they are ordinary numpy arrays
and torch tensors, made in any process, with Ray or without; their memory comes back when the last view of them is gone.
Where there is no shared memory to be had, a warning says so once, and they lie in ordinary memory.

A forked child sees the tensors of its parent where they are: what one of the two writes, the other reads.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, SupportsIndex

import numpy as np

from raycollect.backends import arrays
from raycollect.errors import ArenaFullError, Violation, refusal
from raycollect.model import TensorInfo
from raycollect.pos.arena import ArenaStatistics
from raycollect.pos.segments import Segments

Shape = SupportsIndex | Iterable[SupportsIndex]

_LIBRARIES = ("numpy", "torch")


def empty(shape: Shape, dtype: Any = np.float64, *, like: object = None, library: str | None = None) -> Any:
    """Makes a tensor in shared memory whose contents are undefined, C order.

    Args:
        shape: The extent of each dimension, or the only one.
        dtype: numpy's or torch's element type, or its name: ``"bfloat16"``.
        like: A tensor of the library whose tensor is wanted; nothing else of it matters, as in numpy.
        library: ``"numpy"`` or ``"torch"``, instead of `like`.

    Raises:
        ArenaFullError: The arena has no room for it; a MemoryError as well.
        InvalidArgumentError: The shape, the dtype or the library is none; a ValueError as well.
    """
    made = _Making("empty", like, library)
    return made.give(made.room(shape, dtype))


def zeros(shape: Shape, dtype: Any = np.float64, *, like: object = None, library: str | None = None) -> Any:
    """Makes a tensor of zeros in shared memory; see `empty`."""
    return _filled("zeros", shape, 0, dtype, like, library)


def ones(shape: Shape, dtype: Any = np.float64, *, like: object = None, library: str | None = None) -> Any:
    """Makes a tensor of ones in shared memory; see `empty`."""
    return _filled("ones", shape, 1, dtype, like, library)


def full(shape: Shape, fill_value: Any, dtype: Any = None, *, like: object = None, library: str | None = None) -> Any:
    """Makes a tensor in shared memory that holds a value everywhere; see `empty`.

    Args:
        shape: The extent of each dimension, or the only one.
        fill_value: The value, or values that can be broadcast to the shape.
        dtype: The element type; that of the value where it is None.
        like: As for `empty`.
        library: As for `empty`.
    """
    value = _seen(fill_value)
    return _filled("full", shape, value, value.dtype if dtype is None else dtype, like, library)


def array(object: Any, dtype: Any = None, *, like: object = None, library: str | None = None) -> Any:
    """Copies a tensor of any library and device, or what numpy can make an array of, into shared memory; see `empty`.

    Args:
        object: The tensor, or nested sequences of numbers.
        dtype: The element type; that of the object where it is None.
        like: As for `empty`.
        library: As for `empty`; where neither is given, that of the object.
    """
    made = _Making("array", like if library or like is not None else object, library)
    seen = _seen(object)
    copy = made.room(seen.shape, seen.dtype if dtype is None else dtype)
    np.copyto(copy, seen, casting="unsafe")
    return made.give(copy)


def arena_statistics() -> ArenaStatistics:
    """Tells what this process holds in shared memory for tensors; it is made when the first one is."""
    return Segments.current().statistics()


def allocate(info: TensorInfo) -> Any:
    """Makes an output of a collective, contents undefined: in the arena where that can be, else in ordinary memory.

    Raises:
        MemoryError: There is no memory for it.
    """
    if info.device != "cpu" or not info.nbytes:
        return arrays.empty(info)
    try:
        memory = Segments.current().allocate(info.nbytes)
    except (ArenaFullError, OSError):
        return arrays.empty(info)
    return arrays.restore(memory.view(np.dtype(info.dtype)).reshape(info.shape), info.library)


class _Making:
    """One call of a constructor: whose tensor it makes, and what it refuses."""

    def __init__(self, op: str, like: object, library: str | None) -> None:
        self._op = op
        self._library = library or arrays.library(like)
        if self._library not in _LIBRARIES:
            raise self._refused("library", library, "'numpy' or 'torch'")
        if self._library == "torch":
            import_module("torch")  # `arrays` looks for it among the modules that are loaded

    def room(self, shape: Shape, dtype: Any) -> arrays.Array:
        """Makes the array; it can become a tensor of the library."""
        extents, element = self._shape(shape), self._dtype(dtype)
        nbytes = int(np.prod(extents, dtype=object)) * element.itemsize
        if not nbytes:
            return np.empty(extents, element)
        try:
            memory = Segments.current().allocate(nbytes)
        except OSError:  # there is no arena; whoever found out has warned
            return np.empty(extents, element)
        return memory.view(element).reshape(extents)

    def give(self, made: arrays.Array) -> Any:
        """Turns what `room` made into a tensor of the library."""
        return arrays.restore(made, self._library)

    def _shape(self, shape: Shape) -> tuple[int, ...]:
        try:
            extents = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
        except TypeError:
            extents = (-1,)
        if any(extent < 0 for extent in extents):
            raise self._refused("shape", shape, "integers of at least 0")
        return extents

    def _dtype(self, dtype: Any) -> np.dtype[Any]:
        torch = sys.modules.get("torch")
        name = str(dtype).removeprefix("torch.") if torch and isinstance(dtype, torch.dtype) else dtype
        try:
            found = np.dtype(name)
        except TypeError:
            found = np.dtype(object)
        if not arrays.is_number(found):
            raise self._refused("dtype", dtype, "a type of numbers that numpy or ml_dtypes has")
        if self._library == "torch" and not (found.isnative and hasattr(torch, found.name)):
            raise self._refused("dtype", dtype, "a type that torch has")
        return found

    def _refused(self, field: str, found: object, expected: str) -> Exception:
        violation = Violation(kind="argument", rank=-1, field=field, found=repr(found), expected=expected)
        return refusal(self._op, "", (violation,))


def _filled(op: str, shape: Shape, value: Any, dtype: Any, like: object, library: str | None) -> Any:
    made = _Making(op, like, library)
    filled = made.room(shape, dtype)
    np.copyto(filled, value, casting="unsafe")
    return made.give(filled)


def _seen(value: Any) -> arrays.Array:
    """A value as an array, of the host's memory: a tensor's own where it lies there."""
    seen = arrays.view(value)
    if isinstance(seen, arrays.DeviceArray):
        return arrays.copy_to_host(seen)
    return np.asarray(value) if seen is None else seen
