"""The codec of frozen values: the annotations of a class are its form on the wire, and what is checked when it is read.

A dataclass or named tuple is an array of its fields, in order; an enum is its value; a dict is an array of pairs. Where
a field may be of several classes, each begins with its place among them. A reader takes nothing from the network on
trust (P9): each value has exactly the type of its annotation, or a `ProtocolError` is raised.

In ``Annotated``, a container lists the values that a field may have, a `Form` says how a field travels otherwise, and
`PACKED` makes it bytes of its own: values that many others hold are written and read once. `ONCE` is the same for what
is too large to be compared: `Codec.encode_all` writes an object once, however many of the values hold it.
"""

from __future__ import annotations

import enum
import threading
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, cached_property, lru_cache
from operator import attrgetter
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgpack

from raycollect.errors import ProtocolError, RaycollectError

_T = TypeVar("_T")
_Name = TypeVar("_Name")
Reader = Callable[[Any], Any]  # makes the value of what came; raises TypeError, ValueError or LookupError
Writer = Callable[[Any], Any]  # makes what msgpack packs

_UNIONS = (typing.Union, types.UnionType)
_SCALARS = (int, str, bytes, bool, types.NoneType)
_MALFORMED = (ValueError, TypeError, LookupError, OverflowError, RecursionError, zlib.error, msgpack.UnpackException)
_COMPRESSED = b"\xc1"  # begins what is compressed; msgpack never uses it
_MOST_UNZIPPED = 64 << 20
_MOST_TOLD = 300  # how many characters of a reason an error tells

PACKED, ONCE = "packed", "once"


class Form(NamedTuple):
    """How a field travels, in place of what its annotation says."""

    write: Writer
    read: Reader


class Codec(Generic[_T]):
    """Writes and reads the values of one annotation. What it needs is made when it is first used.

    Args:
        hint: The annotation: a class, or a tuple of fields.
        what: What such a value is called in errors.
        version: Goes before the fields, and another one is refused; 0: none goes.
        long_nbytes: From how many bytes on values are compressed; 0: never.
    """

    def __init__(self, hint: Any, what: str, *, version: int = 0, long_nbytes: int = 0) -> None:
        self._hint = hint
        self._what = what
        self._version = version
        self._long_nbytes = long_nbytes

    @cached_property
    def _write(self) -> Writer:
        return writer(self._hint) or _same

    @cached_property
    def _read(self) -> Callable[[Any], _T]:
        return reader(self._hint)

    def encode(self, value: _T) -> bytes:
        """Writes a value; the inverse of `decode`."""
        plain = self._write(value)
        data: bytes = msgpack.packb((self._version, *plain) if self._version else plain)
        if not self._long_nbytes or len(data) < self._long_nbytes:
            return data
        return _COMPRESSED + zlib.compress(data, 1)

    def encode_all(self, values: Mapping[_Name, _T]) -> dict[_Name, bytes]:
        """Writes values by their names, and what they have in common (`ONCE`) once."""
        _once.known = {}
        try:
            return {name: self.encode(value) for name, value in values.items()}
        finally:
            _once.known = None

    def decode(self, data: bytes | bytearray) -> _T:
        """Reads a value.

        Raises:
            ProtocolError: It is no such value, or one of another version.
            RaycollectError: What the value's class itself refuses.
        """
        read = self._read
        try:
            if self._long_nbytes and data[:1] == _COMPRESSED:
                data = _unzipped(data)
            values = msgpack.unpackb(data, use_list=False)
            if not self._version:
                return read(values)
            version, *rest = values
            if version == self._version:
                return read(tuple(rest))
        except RaycollectError:  # of the value itself, which says it better
            raise
        except _MALFORMED as exc:
            raise ProtocolError(detail=f"malformed {self._what}: {str(exc)[:_MOST_TOLD]}") from exc
        raise ProtocolError(
            detail=f"a {self._what} of version {str(version)[:_MOST_TOLD]}, this process reads {self._version}: driver "
            "and actors must run the same raycollect"
        )


class _Once(threading.local):
    """What this thread has written, by identity: the value, which keeps its identity as long, and its bytes."""

    known: dict[int, tuple[Any, bytes]] | None = None


_once = _Once()


def _unzipped(data: bytes | bytearray) -> bytes:
    unzip = zlib.decompressobj()
    found = unzip.decompress(data[1:], _MOST_UNZIPPED)
    if unzip.unconsumed_tail:
        raise ValueError(f"more than {_MOST_UNZIPPED} bytes")
    return found


@cache
def reader(hint: Any) -> Reader:
    """What reads values of an annotation; TypeError: they have no form on the wire."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _READERS:
        return _READERS[hint]
    if origin is Annotated:
        return _marked(*args)
    if origin is tuple and args[1:] != (Ellipsis,):
        return _record(tuple, dict(enumerate(args)))
    if origin in (tuple, list):
        return _items(args[0], origin)
    if origin in (dict, Mapping):
        return _items(tuple[args], dict)  # type: ignore[valid-type]
    if _is_optional(hint):
        some = reader(args[0])
        return lambda value: None if value is None else some(value)
    if origin in _UNIONS:
        return _any_of(args)
    if hasattr(hint, "__supertype__"):
        return reader(hint.__supertype__)
    if _is_enum(hint):
        return _member_of(hint)
    if _is_record(hint):
        return _record(hint, _annotations(hint))
    raise TypeError(f"no wire form for a field of type {hint}")


@cache
def writer(hint: Any) -> Writer | None:
    """What makes plain values of those of an annotation; None: they are plain."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        if isinstance(args[1], Form):
            return args[1].write
        write = writer(args[0])
        if args[1] is ONCE:
            return lambda value: _packed_once(value, write)
        return lru_cache(maxsize=1024)(lambda value: _packed(value, write)) if args[1] is PACKED else write
    if origin is tuple and args[1:] == (Ellipsis,):
        item = writer(args[0])
        return None if item is None else lambda values: list(map(item, values))
    if origin is tuple:
        return _record_writer([f"value[{at}]" for at in range(len(args))], args, is_tuple=True)
    if origin in (dict, Mapping) and hint != dict[str, Any]:
        pairs = writer(tuple[tuple[args], ...]) or list  # type: ignore[valid-type]
        return lambda value: pairs(value.items())
    if _is_optional(hint):
        some = writer(args[0])
        return None if some is None else lambda value: None if value is None else some(value)
    if origin in _UNIONS:
        return _writer_of_any(args)
    if _is_record(hint):
        hints = _annotations(hint)
        if is_dataclass(hint) and len(hints) > 1 and not any(map(writer, hints.values())):
            return attrgetter(*hints)  # faster, and a tuple
        return _record_writer([f"value.{name}" for name in hints], hints.values(), is_tuple=not is_dataclass(hint))
    return attrgetter("_value_") if _is_enum(hint) else None


def _same(value: Any) -> Any:
    return value


def _packed(value: Any, write: Writer | None) -> bytes:
    data: bytes = msgpack.packb(value if write is None else write(value))
    return data


def _packed_once(value: Any, write: Writer | None) -> bytes:
    known = _once.known
    if known is None:
        return _packed(value, write)
    found = known.get(id(value))
    if found is None:
        found = known[id(value)] = value, _packed(value, write)
    return found[1]


def _wrong(value: Any, expected: str, name: object = "") -> TypeError:
    return TypeError(f"{name}: {type(value).__name__}, expected {expected}".removeprefix(": "))


def _exactly(expected: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not expected:  # not isinstance: True is no int here
            raise _wrong(value, expected.__name__)
        return value

    return read


def _read_float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _wrong(value, "float")
    return float(value)


def _read_dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise _wrong(value, "a dict with str keys")
    return value


_READERS: dict[Any, Reader] = {
    Any: _same,
    float: _read_float,
    dict[str, Any]: _read_dict,
    **{scalar: _exactly(scalar) for scalar in _SCALARS},
}


def _items(hint: Any, make: Callable[[Any], Any]) -> Reader:
    read = reader(hint)
    plain = frozenset((hint,)) if hint in _SCALARS else None

    def read_items(value: Any) -> Any:
        if type(value) is not tuple and type(value) is not list:
            raise _wrong(value, "list")
        if plain is not None and plain.issuperset(map(type, value)):
            return make(value)
        return make(map(read, value))

    return read_items


def _marked(hint: Any, mark: Any) -> Reader:
    if isinstance(mark, Form):
        return mark.read
    read = reader(hint)
    if mark is ONCE:
        return lambda data: read(msgpack.unpackb(data, use_list=False))
    if mark is PACKED:
        return lru_cache(maxsize=256)(lambda data: read(msgpack.unpackb(data, use_list=False)))

    def read_known(value: Any) -> Any:
        if read(value) not in mark:
            raise ValueError(f"{str(value)[:80]!r} is not possible")
        return value

    return read_known


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _member_of(*kinds: type[enum.Enum]) -> Reader:
    known = {(type(one.value), one.value): one for kind in kinds for one in kind}

    def read(value: Any) -> enum.Enum:
        found = known.get((type(value), value))
        if found is None:
            raise ValueError(f"{str(value)[:80]!r} is no {' or '.join(kind.__name__ for kind in kinds)}")
        return found

    return read


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields"))


def _annotations(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [one.name for one in fields(cls) if one.init] if is_dataclass(cls) else cls._fields
    return {name: hints[name] for name in names}


def _record(cls: type, hints: Mapping[Any, Any]) -> Reader:
    """Reads a class, or a tuple, by a function that is compiled, as those of `dataclasses` are."""
    known: dict[str, Any] = {"cls": cls, "wrong": _wrong}
    all_of = "".join(f"f{at}, " for at in range(len(hints)))
    lines = ["if type(value) is not tuple and type(value) is not list: raise wrong(value, 'list')"]
    lines.append(f"({all_of}) = value")
    for at, (name, hint) in enumerate(hints.items()):
        if hint in _SCALARS:
            known[f"t{at}"] = hint
            lines.append(f"if type(f{at}) is not t{at}: raise wrong(f{at}, {hint.__name__!r}, {name!r})")
            continue
        args = typing.get_args(hint)
        some = args[0] if _is_optional(hint) else hint
        test = "" if some is hint else f"if f{at} is not None: "
        if some is hint and typing.get_origin(hint) is tuple and args[1:] == (Ellipsis,) and args[0] in _SCALARS:
            known[f"s{at}"] = frozenset(args[:1]).issuperset  # most have nothing to convert
            test = f"if type(f{at}) is not tuple or not s{at}(map(type, f{at})): "
        known[f"r{at}"] = reader(some)
        lines.append(f"{test}f{at} = r{at}(f{at})")
    named = all_of if issubclass(cls, tuple) else ", ".join(f"{name}=f{at}" for at, name in enumerate(hints))
    return _compiled([*lines, f"return ({all_of})" if cls is tuple else f"return cls({named})"], known)


def _record_writer(places: Iterable[str], hints: Iterable[Any], *, is_tuple: bool) -> Writer | None:
    """Writes the fields at these places; None: it is a plain tuple."""
    writes, parts = dict[str, Any](), []
    for at, (place, hint) in enumerate(zip(places, hints, strict=True)):
        some = typing.get_args(hint)[0] if _is_optional(hint) else hint
        write = writes[f"w{at}"] = writer(some)
        made = f"w{at}({place})" if some is hint else f"None if {place} is None else w{at}({place})"
        parts.append(place if write is None else made)
    return None if is_tuple and not any(writes.values()) else _compiled([f"return ({', '.join(parts)}, )"], writes)


def _compiled(lines: Iterable[str], known: dict[str, Any]) -> Callable[[Any], Any]:
    exec("def made(value):\n    " + "\n    ".join(lines), known)
    made: Callable[[Any], Any] = known["made"]
    return made


def _is_optional(hint: Any) -> bool:
    args = typing.get_args(hint)
    return typing.get_origin(hint) in _UNIONS and len(args) == 2 and args[1] is types.NoneType


def _any_of(args: tuple[Any, ...]) -> Reader:
    if all(map(_is_enum, args)):
        return _member_of(*args)
    reads = [reader(one) for one in args if one not in _SCALARS]
    if not all(one in _SCALARS or _is_record(one) for one in args):
        raise TypeError(f"no wire form for a field of type {' | '.join(map(str, args))}")

    def read(value: Any) -> Any:
        if type(value) in args:  # a scalar
            return value
        if type(value) is not tuple or not reads:
            raise _wrong(value, " or ".join(one.__name__ for one in args))
        at, *rest = value
        if type(at) is not int or not 0 <= at < len(reads):
            raise _wrong(at, "the place of a class")
        return reads[at](tuple(rest))

    return read


def _writer_of_any(args: tuple[Any, ...]) -> Writer | None:
    writes = {one: writer(one) for one in args if one not in _SCALARS}
    if all(map(_is_enum, args)) or not any(writes.values()):
        return next(iter(writes.values()), None)
    places = {one: at for at, one in enumerate(writes)}
    return lambda value: (places[type(value)], *writes[type(value)](value)) if type(value) in places else value  # type: ignore[misc]
