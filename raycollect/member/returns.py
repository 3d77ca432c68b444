"""What a method that Ray has called returns: tensors are kept, and Ray gets a handle; all else goes by value."""

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
"""The attribute of methods whose returns are never kept."""

_INERT = frozenset({type(None), bool, int, float, complex, str, bytes, Handle})
_MOST_ITEMS = 64  # of a list, tuple or dict that is looked into

UNKNOWN = 0
"""In place of an index: the caller chose a `num_returns` of its own, which can't be known here."""


def keep(here: Participant, method: Callable[..., Any], task: bytes, value: Any, lent: LentToken | None = None) -> Any:
    """Keeps all that a method returns, if it is to be kept; what Ray gets in its place."""
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
    """Keeps a return or an item, if it is to be kept; `is_all`: there are no others, however many refs there are."""
    container = None if hasattr(method, BY_VALUE) else _kept(value)
    if container is not None and index != UNKNOWN:
        handle = here.keep(task_key(task, index), container, lent, streamed=streamed)
        return direct_transport.Returned(handle, value, {type(tensor) for tensor in container.tensors})
    if not isinstance(value, Handle):
        found = _NOT_DECLARED
        if container is None:
            marked = hasattr(method, BY_VALUE)
            found = a_type(value, in_full=True) if marked else unkept(value, arrays.is_tensor, arrays.told)
        whose = task if is_all or index == UNKNOWN else task_key(task, index)  # the others may be tensors
        here.store.pass_by(whose, found)
    return value


def _kept(value: Any) -> Container | None:
    """What to keep of a value; None: it goes by value."""
    container = Container.of(value, arrays.is_tensor)
    return None if container is not None and container.structure is TENSOR and arrays.is_scalar(value) else container


_NOT_DECLARED = "an item of a generator whose num_returns is the caller's and not @ray.method(num_returns=n)"


class Returns:
    """A list or tuple that a method returns to Ray, which alone knows how many refs the caller asked for.

    With `num_returns=n` Ray takes the items one by one: each is kept under its own ref. Otherwise it pickles the whole:
    one value, which is kept under the one ref if it holds only tensors.
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
        found = keep_item(self._here, Returns, self._task, i + 1, self._value[i])
        self._is_inert = self._is_inert and needs_nothing(found)
        if i == len(self._value) - 1:
            self._here.methods.note_end(self._task, is_over=self._is_inert)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        found = keep_item(self._here, Returns, self._task, 1, self._value, self._lent)
        if type(found) is direct_transport.Returned and self._lent is None:
            self._here.keeps(ray_actors.current_method())
        self._here.methods.note_end(self._task, is_over=needs_nothing(found))
        return _same, (found,)


def needs_nothing(found: Any) -> bool:
    """Whether Ray reads no tensor here to tell what a method has returned."""
    return type(found) is direct_transport.Returned or _is_inert(found)


def _is_inert(value: Any) -> bool:
    """Whether a value certainly has no part that a plan could write: Ray may still be about to pickle it."""
    kind = type(value)
    if kind in _INERT or isinstance(value, np.generic):
        return True
    if kind in (list, tuple):
        return len(value) <= _MOST_ITEMS and all(map(_is_inert, value))
    return kind is dict and len(value) <= _MOST_ITEMS and all(map(_is_inert, (*value, *value.values())))


def _same(value: Any) -> Any:
    return value
