"""Registers, checks and packs messages: the fields' annotations are the schema."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from raycollect import errors
from raycollect.channel.packing import pack, unpack
from raycollect.core.codec import Form, Reader, reader
from raycollect.errors import ProtocolError, RaycollectError

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Callable[[_M], _M]:
        """What it says is for type checkers only."""
        return lambda decorator: decorator


class Message:
    """Base of all messages."""

    __slots__ = ()


_M = TypeVar("_M", bound=type[Message])

MESSAGES: dict[str, type[Message]] = {}  # name on the wire -> class
_FIELDS: dict[type[Message], tuple[str, ...]] = {}
_READERS: dict[str, tuple[tuple[str, Reader], ...]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: _M) -> _M:
    """Makes a class a frozen dataclass with slots, and registers it under its name."""
    made: _M = typing.cast(Any, dataclass(frozen=True, slots=True, kw_only=True))(cls)
    hints = typing.get_type_hints(made, include_extras=True)
    names = tuple(f.name for f in fields(typing.cast(Any, made)))
    MESSAGES[made.__name__] = made
    _FIELDS[made] = names
    _READERS[made.__name__] = tuple((name, reader(hints[name])) for name in names)
    return made


def _read_error(value: Any) -> dict[str, Any]:
    # Types only: `from_wire` finds missing and unknown fields.
    error = reader(dict[str, Any])(value)
    cls, values = getattr(errors, str(error.get("type")), None), error.get("fields")
    if isinstance(cls, type) and issubclass(cls, RaycollectError) and type(values) is dict:
        for name, read in _readers(typing.cast(Any, cls)):
            if name in values:
                read(values[name])
    return error  # type: ignore[no-any-return]


Error = Annotated[dict[str, Any], Form(dict, _read_error)]  # what `raycollect.errors.to_wire` made


@cache
def _readers(cls: Any) -> tuple[tuple[str, Reader], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((field.name, reader(hints[field.name])) for field in fields(cls))


def encode(message: Message) -> bytes:
    """Packs a message.

    Raises:
        ProtocolError: A field holds what msgpack can't carry.
    """
    cls = type(message)
    return pack({"t": cls.__name__, **{name: getattr(message, name) for name in _FIELDS[cls]}})


def decode(data: bytes | bytearray) -> Message:
    """Unpacks a message; the inverse of `encode`.

    Raises:
        ProtocolError: It is no message of the table, or has other fields or other types than the table says.
    """
    values = unpack(data)
    name: Any = values.pop("t", None) if type(values) is dict else None
    readers = _READERS.get(name) if type(name) is str else None
    if readers is None:
        shown = repr(name[:80]) if type(name) is str else f"of type {type(name).__name__}"  # it may be nested deeply
        raise ProtocolError(detail=f"unknown message name {shown}")
    if len(values) != len(readers):
        raise ProtocolError(detail=f"{name} has {len(values)} fields, expected {len(readers)}")
    field = ""
    try:
        for field, read in readers:
            values[field] = read(values[field])
        return MESSAGES[name](**values)
    except KeyError:
        raise ProtocolError(detail=f"{name} lacks the field {field!r}") from None
    except (TypeError, ValueError, OverflowError) as exc:
        raise ProtocolError(detail=f"{name}.{field}: {exc}") from exc
