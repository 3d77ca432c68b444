"""The return values of methods that Ray calls: tensors are stored, and Ray gets a handle; other values go by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.core.model import TENSOR, task_key
from raycollect.errors.text import a_type
from raycollect.member.participant import Participant
from raycollect.pos import Container, unkept
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import direct_transport, ray_actors
from raycollect.ray_bridge.call_tokens import LentToken

BY_VALUE = "__raycollect_by_value__"
"""The attribute of methods whose return values always go by value."""

_INERT = frozenset({type(None), bool, int, float, complex, str, bytes, Handle})
_MOST_ITEMS = 64  # of a list, tuple or dict that is inspected

UNKNOWN = 0
"""A placeholder for an index: the caller chose a `num_returns`, which is unknown here."""


def keep(here: Participant, method: Callable[..., Any], task: bytes, value: Any, lent: LentToken | None = None) -> Any:
    """Stores the return value of a method, if it consists of tensors; returns the value for Ray."""
    if type(value) in (list, tuple) and not hasattr(method, BY_VALUE):
        return Returns(here, task, value, lent)
    return keep_item(here, method, task, 1, value, lent, is_all=True)


def keep_item(
    here: Participant,
    method: Callable[..., Any],
    task: bytes,
    index: int,
    value: Any,
    lent: LentToken | None = None,
    *,
    streamed: bool = False,
    is_all: bool = False,
) -> Any:
    """Stores a return value or an item, if it consists of tensors; `is_all`: there are no other items."""
    container = None if hasattr(method, BY_VALUE) else _container_of(value)
    if container is not None and index != UNKNOWN:
        handle = here.keep(task_key(task, index), container, lent, streamed=streamed)
        return direct_transport.Returned(handle, value, {type(tensor) for tensor in container.tensors})
    if not isinstance(value, Handle):
        reason = _NOT_DECLARED
        if container is None:
            marked = hasattr(method, BY_VALUE)
            reason = a_type(value, in_full=True) if marked else unkept(value, arrays.is_tensor, arrays.describe_value)
        whose = task if is_all or index == UNKNOWN else task_key(task, index)  # other items may be tensors
        here.store.pass_by(whose, reason)
    return value


def _container_of(value: Any) -> Container | None:
    """The container of a value that consists of tensors; None: the value goes by value."""
    container = Container.of(value, arrays.is_tensor)
    return None if container is not None and container.structure is TENSOR and arrays.is_scalar(value) else container


_NOT_DECLARED = "an item of a generator whose num_returns is the caller's and not @ray.method(num_returns=n)"


class Returns:
    """A list or tuple that a method returns to Ray; only Ray knows the number of the caller's refs.

    With `num_returns=n` Ray takes the items one by one: each item is stored under its own ref. Otherwise Ray pickles
    the whole list as one value, which is stored under the single ref if it holds only tensors.
    """

    def __init__(self, here: Participant, task: bytes, value: Any, lent: LentToken | None) -> None:
        self._here = here
        self._task = task
        self._value = value
        self._lent = lent
        self._is_inert = True

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self._value)))

    def __getitem__(self, i: int) -> Any:
        returned = keep_item(self._here, Returns, self._task, i + 1, self._value[i])
        self._is_inert = self._is_inert and needs_nothing(returned)
        if i == len(self._value) - 1:
            self._here.methods.note_end(self._task, is_over=self._is_inert)
        return returned

    def __reduce__(self) -> tuple[Any, ...]:
        returned = keep_item(self._here, Returns, self._task, 1, self._value, self._lent)
        if type(returned) is direct_transport.Returned and self._lent is None:
            self._here.keeps(ray_actors.current_method())
        self._here.methods.note_end(self._task, is_over=needs_nothing(returned))
        return _same, (returned,)


def needs_nothing(returned: Any) -> bool:
    """Whether Ray needs no tensor of this process to return the result of a method."""
    return type(returned) is direct_transport.Returned or _is_inert(returned)


def _is_inert(value: Any) -> bool:
    """Whether no plan can write a part of the value: Ray may pickle it later."""
    kind = type(value)
    if kind in _INERT or isinstance(value, np.generic):
        return True
    if kind in (list, tuple):
        return len(value) <= _MOST_ITEMS and all(map(_is_inert, value))
    return kind is dict and len(value) <= _MOST_ITEMS and all(map(_is_inert, (*value, *value.values())))


def _same(value: Any) -> Any:
    return value
