"""Registers, checks and packs messages: the fields' annotations are the schema."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from raycollect import errors
from raycollect.channel.packing import pack, unpack
from raycollect.errors import ProtocolError, RankReport, RaycollectError, Violation

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Callable[[_M], _M]:
        """What it says is for type checkers only."""
        return lambda decorator: decorator


class Message:
    """Base of all messages."""

    __slots__ = ()


_Reader = Callable[[Any], Any]  # turns a value off the wire into a field's value; raises TypeError where it can't

_M = TypeVar("_M", bound=type[Message])

Error = Annotated[dict[str, Any], RaycollectError]  # what `raycollect.errors.to_wire` made

MESSAGES: dict[str, type[Message]] = {}  # name on the wire -> class
_FIELDS: dict[type[Message], tuple[str, ...]] = {}
_READERS: dict[str, tuple[tuple[str, _Reader], ...]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: _M) -> _M:
    """Makes a class a frozen dataclass with slots, and registers it under its name."""
    made: _M = typing.cast(Any, dataclass(frozen=True, slots=True, kw_only=True))(cls)
    hints = typing.get_type_hints(made, include_extras=True)
    names = tuple(f.name for f in fields(typing.cast(Any, made)))
    MESSAGES[made.__name__] = made
    _FIELDS[made] = names
    _READERS[made.__name__] = tuple((name, _reader(hints[name])) for name in names)
    return made


def _reader(hint: Any) -> _Reader:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint == Error:
        return _read_error
    if hint in (Violation, RankReport):
        return _fields_of(hint)
    if hint is float:
        return _read_float
    if hint in (int, str, bytes, bool, types.NoneType):
        return _exactly(hint)
    if origin is list:
        return _list_of(_reader(args[0]))
    if origin is tuple and args[1:] == (Ellipsis,):
        read = _list_of(_reader(args[0]))
        return lambda value: tuple(read(value))
    if origin is dict and args == (str, Any):
        return _read_dict
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and args[1] is types.NoneType:
        some = _reader(args[0])
        return lambda value: None if value is None else some(value)
    raise TypeError(f"no wire form for a field of type {hint}")


def _exactly(expected: type) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) is not expected:  # not isinstance: True is no int here
            raise TypeError(f"{type(value).__name__}, expected {expected.__name__}")
        return value

    return read


def _read_float(value: Any) -> float:
    if type(value) not in (float, int):
        raise TypeError(f"{type(value).__name__}, expected float")
    return float(value)


def _read_dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise TypeError(f"{type(value).__name__}, expected a dict with str keys")
    return value


def _read_error(value: Any) -> dict[str, Any]:
    # Types only: `from_wire` finds missing and unknown fields.
    error = _read_dict(value)
    cls, values = getattr(errors, str(error.get("type")), None), error.get("fields")
    if isinstance(cls, type) and issubclass(cls, RaycollectError) and type(values) is dict:
        _read_fields(cls, values)
    return error


def _fields_of(cls: type) -> _Reader:
    def read(value: Any) -> dict[str, Any]:
        found = _read_dict(value)
        _read_fields(cls, found)
        return found

    return read


def _read_fields(cls: type, values: dict[str, Any]) -> None:
    for name, read in _readers(cls):
        if name in values:
            read(values[name])


@cache
def _readers(cls: type) -> tuple[tuple[str, _Reader], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((field.name, _reader(hints[field.name])) for field in fields(typing.cast(Any, cls)))


def _list_of(read: _Reader) -> _Reader:
    def read_list(value: Any) -> list[Any]:
        if type(value) is not list:
            raise TypeError(f"{type(value).__name__}, expected list")
        return [read(item) for item in value]

    return read_list


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
