"""Placeholder arrays of numpy: their elements are identities, of a dtype that numpy copies but can't compute with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from raycollect.backends.elements import Array, is_number
from raycollect.planner.boxes import Point
from raycollect.weights.layouts.identities import Full, NotRecordedError

_OPAQUE = np.dtype("V8")
"""Eight opaque bytes: numpy copies them, and refuses to compute with them."""

_REFUSALS = ("V8", "Void", "void", "with a sequence")
"""Words in numpy's messages when it refuses to compute with a plain array of this dtype."""


class _Elements(np.ndarray[Any, Any]):
    """An array of identities, as are all its views."""

    def __setitem__(self, key: Any, value: Any) -> None:
        elements = np.asarray(value)  # joins a list of such arrays
        if elements.dtype != _OPAQUE:
            if not is_number(elements.dtype):
                raise NotRecordedError(f"numpy's assignment of elements of type {elements.dtype}")
            elements = np.zeros((), _OPAQUE)  # `NOTHING`
        super().__setitem__(key, elements)

    def fill(self, value: Any) -> None:
        """Writes elements of no full tensor."""
        self[...] = value

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the same elements: only the dtype of the local tensor counts."""
        return self.copy()

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the same elements as another class; another dtype is refused."""
        if kwargs or not all(isinstance(arg, type) and issubclass(arg, np.ndarray) for arg in args):
            raise NotRecordedError("numpy's view as another dtype")
        return super().view(*args)

    def __array_ufunc__(self, ufunc: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotRecordedError(f"numpy.{ufunc.__name__}")


class FullArrays(Mapping[str, Any]):
    """The full tensors by name, each made on access, so that a loader needs memory only for those that it keeps."""

    def __init__(self, fulls: Mapping[str, Full]) -> None:
        self._fulls = fulls

    def __getitem__(self, name: str) -> Any:
        full = self._fulls[name]
        return _opaque(np.arange(full.base, full.base + full.size, dtype=np.int64), full.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fulls)

    def __len__(self) -> int:
        return len(self._fulls)


def local_array(shape: Point) -> Any:
    """Returns an empty local tensor."""
    return _opaque(np.zeros(shape, np.int64).reshape(-1), shape)


def _opaque(ids: Array, shape: Point) -> Any:
    return ids.view(_OPAQUE).reshape(shape).view(_Elements)


def identities(value: Any) -> Array | None:
    """Returns the identities in a local tensor; None if it is no such array any more."""
    if not isinstance(value, np.ndarray) or value.dtype != _OPAQUE:
        return None
    return np.ascontiguousarray(value).view(np.ndarray).reshape(-1).view(np.int64).reshape(value.shape)


def is_refusal(error: Exception) -> bool:
    """Returns whether an error is numpy's refusal to compute with identities."""
    return isinstance(error, TypeError | ValueError) and any(words in str(error) for words in _REFUSALS)
