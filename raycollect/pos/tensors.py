"""Tensors in the arena of this process: the public constructors, and the outputs of collectives.

Participants of one machine work on such tensors in place, without a copy. Otherwise they are ordinary numpy arrays and
torch tensors, created in any process, with or without Ray; their memory is freed with their last view. Without shared
memory, they are in ordinary memory, and a warning is logged once.

A forked child shares the tensors of its parent: each sees the writes of the other.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, SupportsIndex

import numpy as np

from raycollect.backends import arrays
from raycollect.channel.messages import ArenaStatistics
from raycollect.core.model import TensorInfo
from raycollect.errors import ArenaFullError, refusal, wrong_argument
from raycollect.errors.text import shown
from raycollect.pos.segments import Segments

Shape = SupportsIndex | Iterable[SupportsIndex]

_LIBRARIES = ("numpy", "torch")

MOST_DIMENSIONS = 64
"""The most dimensions of an array of numpy, in any version."""


def empty(shape: Shape, dtype: Any = np.float64, *, like: object = None, library: str | None = None) -> Any:
    """Creates a tensor in shared memory, in C order, with undefined contents.

    Args:
        shape: The extent of each dimension, or the only one.
        dtype: An element type of numpy or torch, or its name: ``"bfloat16"``.
        like: A tensor whose library the result has; its other properties are ignored, as in numpy.
        library: ``"numpy"`` or ``"torch"``, instead of `like`.

    Raises:
        ArenaFullError: The arena has no room for it; also a MemoryError.
        InvalidArgumentError: The shape, the dtype or the library is invalid; also a ValueError.
    """
    constructor = _Constructor("empty", like, library)
    return constructor.finish(constructor.allocate_array(shape, dtype))


def zeros(shape: Shape, dtype: Any = np.float64, *, like: object = None, library: str | None = None) -> Any:
    """Creates a tensor of zeros in shared memory; see `empty`."""
    return _filled("zeros", shape, 0, dtype, like, library)


def ones(shape: Shape, dtype: Any = np.float64, *, like: object = None, library: str | None = None) -> Any:
    """Creates a tensor of ones in shared memory; see `empty`."""
    return _filled("ones", shape, 1, dtype, like, library)


def full(shape: Shape, fill_value: Any, dtype: Any = None, *, like: object = None, library: str | None = None) -> Any:
    """Creates a tensor in shared memory filled with `fill_value`, broadcast to the shape; see `empty`.

    Its element type is that of the value if `dtype` is None.
    """
    value = on_host(fill_value)
    return _filled("full", shape, value, value.dtype if dtype is None else dtype, like, library)


def array(object: Any, dtype: Any = None, *, like: object = None, library: str | None = None) -> Any:
    """Copies a tensor of any library and device, or an array-like, into shared memory; see `empty`.

    Element type and library default to those of the object; a cupy array needs `library` or `like`.
    """
    constructor = _Constructor("array", like if library is not None or like is not None else object, library)
    seen = on_host(object)
    copy = constructor.allocate_array(seen.shape, seen.dtype if dtype is None else dtype)
    np.copyto(copy, seen, casting="unsafe")
    return constructor.finish(copy)


def arena_statistics() -> ArenaStatistics:
    """Returns statistics of this process's shared memory for tensors, which the first tensor creates."""
    return Segments.current().statistics()


def allocate(info: TensorInfo) -> Any:
    """Allocates an output of a collective, contents undefined: in the arena if possible, else in ordinary memory."""
    if info.device != "cpu" or not info.nbytes:
        return arrays.empty(info)
    try:
        memory = Segments.current().allocate(info.nbytes)
    except (ArenaFullError, OSError):
        return arrays.empty(info)
    return arrays.restore(memory.view(np.dtype(info.dtype)).reshape(info.shape), info.library)


def on_host(value: Any) -> arrays.Array:
    """Converts a tensor of any library and device, or an array-like, to an array; a view if possible."""
    value = arrays.resolved(value)
    seen = arrays.view(value)
    if isinstance(seen, arrays.DeviceArray):
        return arrays.copy_to_host(seen)
    return np.asarray(value) if seen is None else seen


class _Constructor:
    """One call of a constructor: checks its arguments and creates the tensor."""

    def __init__(self, op: str, like: object, library: str | None) -> None:
        self._op = op
        self._library = arrays.library(like) if library is None else library
        if not isinstance(self._library, str) or self._library not in _LIBRARIES:
            raise self._refused("library", self._library, "'numpy' or 'torch'")
        if self._library == "torch":
            import_module("torch")  # `arrays` looks for it among the modules that are loaded

    def allocate_array(self, shape: Shape, dtype: Any) -> arrays.Array:
        extents, element = self._shape(shape), self._dtype(dtype)
        nbytes = int(np.prod(extents, dtype=object)) * element.itemsize
        if not nbytes:
            return np.empty(extents, element)
        try:
            memory = Segments.current().allocate(nbytes)
        except OSError:  # no arena; a warning was logged
            return np.empty(extents, element)
        return memory.view(element).reshape(extents)

    def finish(self, array: arrays.Array) -> Any:
        return arrays.restore(array, self._library)

    def _shape(self, shape: Shape) -> tuple[int, ...]:
        try:
            extents = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
        except TypeError:
            extents = (-1,)
        if len(extents) > MOST_DIMENSIONS or not all(0 <= extent < 1 << 63 for extent in extents):
            raise self._refused("shape", shape, f"at most {MOST_DIMENSIONS} integers of at least 0, below 2**63")
        return extents

    def _dtype(self, dtype: Any) -> np.dtype[Any]:
        torch = sys.modules.get("torch")
        name = str(dtype).removeprefix("torch.") if torch and isinstance(dtype, torch.dtype) else dtype
        try:
            element = np.dtype(name)
        except (TypeError, ValueError, SyntaxError):  # as numpy refuses odd texts
            element = np.dtype(object)
        if not arrays.is_number(element):
            raise self._refused("dtype", dtype, "a number type of numpy or ml_dtypes")
        if self._library == "torch" and not (element.isnative and hasattr(torch, element.name)):
            raise self._refused("dtype", dtype, "a type of torch")
        return element

    def _refused(self, field: str, value: object, expected: str) -> Exception:
        return refusal(self._op, "", (wrong_argument(field, shown(value), expected),))


def _filled(op: str, shape: Shape, value: Any, dtype: Any, like: object, library: str | None) -> Any:
    constructor = _Constructor(op, like, library)
    filled = constructor.allocate_array(shape, dtype)
    try:
        np.copyto(filled, value, casting="unsafe")
    except (TypeError, ValueError) as exc:
        raise constructor._refused("fill_value", value, f"a number ({exc})") from exc
    return constructor.finish(filled)
