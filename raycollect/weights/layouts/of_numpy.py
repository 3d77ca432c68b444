"""Stand-ins of numpy: arrays whose elements are identities, of a type that can be copied but not computed with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from raycollect.backends.elements import Array, is_number
from raycollect.planner.boxes import Point
from raycollect.weights.layouts.identities import Full, NotRecordedError

_OPAQUE = np.dtype("V8")
"""Eight bytes that mean nothing to numpy: it moves them, and refuses to compute with them."""

_REFUSALS = ("V8", "Void", "void", "with a sequence")
"""What numpy's messages have where it refuses to compute with elements of a plain array of this type."""


class _Elements(np.ndarray[Any, Any]):
    """An array of identities. Views of it are such arrays, too."""

    def __setitem__(self, key: Any, value: Any) -> None:
        elements = np.asarray(value)  # which makes one array of a list of these
        if elements.dtype != _OPAQUE:
            if not is_number(elements.dtype):
                raise NotRecordedError(f"numpy's assignment of elements of type {elements.dtype}")
            elements = np.zeros((), _OPAQUE)  # that is nothing
        super().__setitem__(key, elements)

    def fill(self, value: Any) -> None:
        """Writes something that comes from no full tensor."""
        self[...] = value

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        """The same elements: the local tensor that they end in has the dtype."""
        return self.copy()

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """The same elements as another class, not as another dtype."""
        if kwargs or not all(isinstance(one, type) and issubclass(one, np.ndarray) for one in args):
            raise NotRecordedError("numpy's view as another dtype")
        return super().view(*args)

    def __array_ufunc__(self, ufunc: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotRecordedError(f"numpy.{ufunc.__name__}")


class FullArrays(Mapping[str, Any]):
    """The full tensors by name, each made when it is asked for: a loader needs memory for those that it keeps."""

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
    """A local tensor into which nothing has come yet."""
    return _opaque(np.zeros(shape, np.int64).reshape(-1), shape)


def _opaque(ids: Array, shape: Point) -> Any:
    return ids.view(_OPAQUE).reshape(shape).view(_Elements)


def identities(value: Any) -> Array | None:
    """The identities in a local tensor; None where it has become something else."""
    if not isinstance(value, np.ndarray) or value.dtype != _OPAQUE:
        return None
    return np.ascontiguousarray(value).view(np.ndarray).reshape(-1).view(np.int64).reshape(value.shape)


def is_refusal(error: Exception) -> bool:
    """Whether numpy has refused to compute with identities."""
    return isinstance(error, TypeError | ValueError) and any(words in str(error) for words in _REFUSALS)
