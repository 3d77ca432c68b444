"""A short way through Ray's serialization, for values that the library sends with each call.

Ray serializes all but bytes by cloudpickle, which calls Python code for each class and function that it meets: 100 to
150 us for a value of some hundred bytes, in a call that takes 200. The forms here take a third of that, or less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import ray
from ray import _raylet
from ray._private import serialization
from ray._private.serialization import SerializationContext

from raycollect.core import threads
from raycollect.ray_bridge.hooks import hook
from raycollect.ray_bridge.ray_session import core_worker

_raylet_types: Any = _raylet  # its type stubs lack some names

_forms: dict[type, Callable[[Any], Any]] = {}


class PackedRef(NamedTuple):
    """A ref as plain values, for another process."""

    binary: bytes
    owner: bytes
    status: bytes

    @classmethod
    def of(cls, ref: Any) -> PackedRef:
        """Packs a ref, which also has to be passed to `as_bytes` or `as_pickled`, so that Ray counts it."""
        _, owner, status = core_worker().serialize_object_ref(ref)
        return cls(ref.binary(), owner, status)

    def ref(self) -> Any:
        """The ref, which this process borrows from now on, unless it owns it."""
        unpack: Any = serialization._object_ref_deserializer
        return unpack(self.binary, "", self.owner, self.status, None)


def take_over(kind: type, form: Callable[[Any], Any | None]) -> bool:
    """Has Ray serialize values of exactly this type in a form that `as_bytes` or `as_pickled` makes.

    Args:
        kind: The type.
        form: Makes the form; None: Ray's own way for this value.

    Returns:
        False where this Ray offers no way.
    """
    if not _is_supported():
        return False
    _forms[kind] = form
    hook(SerializationContext, "serialize", _with_forms)
    return True


def as_bytes(data: bytes, ref: Any) -> Any:
    """A value that arrives as bytes; Ray counts a ref with it."""
    serialized = _raylet_types.RawSerializedObject(data)
    # The class has no argument for the ref
    _raylet_types.SerializedObject.__init__(serialized, serialized.metadata, [ref])
    return serialized


def as_pickled(pickled: bytes, ref: Any) -> Any:
    """A value that arrives unpickled, from the pickle of a list of it alone; Ray counts a ref with it."""
    metadata, place = _of_pickles()
    nested = _raylet_types.Pickle5SerializedObject(metadata, pickled, _raylet_types.Pickle5Writer(), [ref])
    return _raylet_types.MessagePackSerializedObject(metadata, place, [], nested)


@cache
def _of_pickles() -> tuple[bytes, bytes]:
    # Ray's name for pickled objects, and how it says that the whole value is the first of them.
    place = _raylet_types.MessagePackSerializer.dumps(object(), lambda _: 0)
    return ray._private.ray_constants.OBJECT_METADATA_TYPE_PYTHON, place


def _is_supported() -> bool:
    try:
        forms = as_bytes(b"", None), as_pickled(b"", None)
        return all(form.contained_object_refs == [None] for form in forms)
    except Exception as exc:  # noqa: BLE001 - another Ray
        threads.failed("looking for a short way through Ray's serialization", exc)
        return False


def _with_forms(serialize: Callable[..., Any]) -> Callable[..., Any]:
    def short(self: SerializationContext, value: Any) -> Any:
        form = _forms.get(type(value))
        serialized = None if form is None else form(value)
        return serialize(self, value) if serialized is None else serialized

    return short
