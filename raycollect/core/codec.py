"""Values on the wire: msgspec Structs in msgpack's format, whose annotations are what is checked when they are read.

A `Wire` value is an array of its fields, in order. A reader takes nothing from the network on trust (P9): each value
has exactly the type of its annotation, or a `ProtocolError` is raised.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgpack
import msgspec

from raycollect.errors import ProtocolError, RaycollectError

_T = TypeVar("_T")

_COMPRESSED = b"\xc1"  # begins what is compressed; msgpack never uses it
_MOST_UNZIPPED = 64 << 20
_MOST_TOLD = 300  # how many characters of a reason an error tells
_MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, LookupError, OverflowError, RecursionError, zlib.error)


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the classes whose values cross a process: frozen, slotted, an array of their fields on the wire.

    The last field has no default, so that an array that lacks items is refused.
    """


def _as_builtin(value: Any) -> Any:
    # A value of a subclass of str, float or int, such as numpy's float64, travels as one of that class.
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} has no form on the wire")


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code}")


_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_as_builtin).encode


class Codec(Generic[_T]):
    """Writes and reads the values of one annotation. What reads them is made when it is first used.

    Args:
        hint: The annotation: a class, or a tuple of fields.
        what: What such a value is called in errors.
        version: A byte that goes before the value, and another one is refused; 0: none goes.
        long_nbytes: From how many bytes on values are compressed; 0: never.
    """

    def __init__(self, hint: Any, what: str, *, version: int = 0, long_nbytes: int = 0) -> None:
        self._hint = hint
        self._what = what
        self._version = version
        self._long_nbytes = long_nbytes

    @cached_property
    def _read(self) -> Callable[[Any], _T]:
        read: Callable[[Any], _T] = msgspec.msgpack.Decoder(self._hint, ext_hook=_refuse_extension).decode
        return read

    def encode(self, value: _T) -> bytes:
        """Writes a value; the inverse of `decode`.

        Raises:
            ProtocolError: A part of it has no form on the wire.
        """
        try:
            data = _encode(value)
        except UnicodeEncodeError:  # an odd file name in somebody's traceback must not keep an error from being told
            plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_as_builtin)
            data = msgpack.packb(plain, unicode_errors="backslashreplace")
        except _MALFORMED as exc:
            what = f"{self._what} ({type(value).__name__})"
            raise ProtocolError(detail=f"a {what} that can't be written: {str(exc)[:_MOST_TOLD]}") from exc
        if self._version:
            return bytes((self._version,)) + data
        return data if not self._long_nbytes or len(data) < self._long_nbytes else _COMPRESSED + zlib.compress(data, 1)

    def decode(self, data: bytes | bytearray) -> _T:
        """Reads a value.

        Raises:
            ProtocolError: It is no such value, or one of another version.
            RaycollectError: What the value's class itself refuses.
        """
        try:
            if self._version and data[0] != self._version:
                raise ProtocolError(
                    detail=f"a {self._what} of version {data[0]}, this process reads {self._version}: driver and "
                    "actors must run the same raycollect"
                )
            if self._long_nbytes and data[:1] == _COMPRESSED:
                data = _unzipped(data)
            return self._read(memoryview(data)[1:] if self._version else data)
        except RaycollectError:  # of the value itself, which says it better
            raise
        except _MALFORMED as exc:
            raise ProtocolError(detail=f"malformed {self._what}: {str(exc)[:_MOST_TOLD]}") from exc


def _unzipped(data: bytes | bytearray) -> bytes:
    unzip = zlib.decompressobj()
    found = unzip.decompress(data[1:], _MOST_UNZIPPED)
    if unzip.unconsumed_tail:
        raise ValueError(f"more than {_MOST_UNZIPPED} bytes")
    return found
