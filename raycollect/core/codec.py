"""Values on the wire: msgspec Structs in msgpack's format, checked against their annotations as they are decoded.

A `Wire` value is an array of its fields, in order. Decoding does not trust the network (P9): a value that does not have
exactly the type of its annotation raises `ProtocolError`.
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

MOST_NBYTES = 64 << 20
"""The longest value of a codec that compresses, before compression. What is sent is never longer."""

MEMORY_PER_BYTE = 17
"""Roughly, the memory of a decoded program and its bytes, per encoded byte: 13 to 18 were measured."""

_COMPRESSED = b"\xc1"  # first byte of compressed values; msgpack never uses it
_MOST_TOLD = 300  # the longest reason in an error, in characters
_MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, LookupError, OverflowError, RecursionError, zlib.error)


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the classes whose values cross a process: frozen, slotted, an array of their fields on the wire.

    The last field has no default, so that an array that lacks items is refused.
    """


def _as_builtin(value: Any) -> Any:
    # A value of a subclass of str, float or int, such as numpy's float64, is encoded as its base.
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} has no form on the wire")


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code}")


_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_as_builtin).encode


class Codec(Generic[_T]):
    """Encodes and decodes the values of one annotation. The decoder is created on first use.

    A module assigns it like ``_ADDRESSES = Codec[_Address](_Address, "address of a rank")``, where `_Address` is a
    `Wire` class. `tests/pure/core/test_codec.py` finds all codecs of that form.

    Args:
        hint: The annotation: a `Wire` class, or another that msgspec decodes, such as ``str`` or ``tuple[int, str]``.
        what: The name of such a value in errors.
        version: A byte before the value; values of other versions are refused. 0: no such byte.
        long_nbytes: The size from which values are compressed; 0: never.
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
        """Encodes a value; the inverse of `decode`.

        Raises:
            ProtocolError: A part of it has no form on the wire, or it is longer than `MOST_NBYTES`.
        """
        try:
            data = _encode(value)
        except UnicodeEncodeError:  # such as an odd file name in a traceback, whose error must still be sent
            plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_as_builtin)
            data = msgpack.packb(plain, unicode_errors="backslashreplace")
        except _MALFORMED as exc:
            what = f"{self._what} ({type(value).__name__})"
            raise ProtocolError(detail=f"a {what} that can't be written: {str(exc)[:_MOST_TOLD]}") from exc
        if self._version:
            return bytes((self._version,)) + data
        return data if not self._long_nbytes or len(data) < self._long_nbytes else self._zipped(data)

    def decode(self, data: bytes | bytearray) -> _T:
        """Decodes a value.

        Raises:
            ProtocolError: The value is malformed, or of another version.
            RaycollectError: The value's class refuses it.
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
        except RaycollectError:  # of the value's class, which is more specific
            raise
        except _MALFORMED as exc:
            raise ProtocolError(detail=f"malformed {self._what}: {str(exc)[:_MOST_TOLD]}") from exc

    def _zipped(self, data: bytes) -> bytes:
        if len(data) > MOST_NBYTES:
            raise ProtocolError(
                detail=f"too large: its {self._what} takes {len(data)} bytes, the limit is {MOST_NBYTES}"
            )
        zipped = _COMPRESSED + zlib.compress(data, 1)
        return zipped if len(zipped) < len(data) else data


def _unzipped(data: bytes | bytearray) -> bytes:
    unzip = zlib.decompressobj()
    result = unzip.decompress(data[1:], MOST_NBYTES)
    if unzip.unconsumed_tail:
        raise ValueError(f"more than {MOST_NBYTES} bytes")
    return result
