"""Values that travel with the runs of captured steps: what methods are given, and what they give back.

msgpack, with extensions for what it lacks: tuples, long integers, complex numbers, numpy's arrays and scalars, the CPU
tensors of any library. Each value comes out as it went in, by type too, but for bytearrays, which become bytes, and
subclasses, which become what they are made of: an enum's member its number or text, a named tuple a tuple. Nothing is
pickled, so that nothing but values comes out.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import msgpack
import numpy as np

from raycollect.backends import arrays
from raycollect.errors import ProtocolError
from raycollect.model import TensorInfo
from raycollect.words import a_type

__all__ = ["pack_value", "pack_values", "unpack_value", "unpack_values"]

_TUPLE, _LONG, _ARRAY, _SCALAR, _TENSOR, _COMPLEX = range(1, 7)

_MARK = msgpack.ExtType(_TUPLE, b"")
"""What a tuple begins with, which travels as a list: so the depth is bounded as that of lists is."""

_PLAIN = re.compile(r"[<>|=]?[biufcSUmM]\d+(\[\w+\])?")
"""numpy's short names of the types whose elements are plain bytes."""

_NARROW: dict[str, np.dtype[Any]] = {dtype.name: dtype for dtype in arrays.NARROW}

_HEAD = struct.Struct("<BB")
"""Of an array: the bytes of its dtype's name, the number of its dimensions. The name and the extents follow."""

_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    MemoryError,
    RecursionError,
    struct.error,
    msgpack.UnpackException,
)
"""What reading bytes that nobody wrote may raise."""

_PARTS_OF_COMPLEX = struct.Struct("<dd")

_LONGS = range(-(1 << 63), 1 << 64)
"""The integers that msgpack itself writes."""


def pack_value(value: Any) -> bytes:
    """Writes one value; the inverse of `unpack_value`.

    Args:
        value: None, a bool, int, float, complex, str or bytes; a list, tuple or dict of such values, or what inherits
            from one of these; a numpy array or scalar, a CPU tensor of any library.

    Raises:
        TypeError: It is, or holds, something else; the message names its type.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_extend, strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, OverflowError, RecursionError) as exc:
        raise TypeError(f"{_described_type(value)} that is nested too deep, or too long ({exc})") from exc
    return packed


def unpack_value(data: bytes) -> Any:
    """Reads one value. Arrays are contiguous, writable, and have memory of their own.

    Raises:
        ProtocolError: The bytes are no such thing.
    """
    try:
        return msgpack.unpackb(
            data, strict_map_key=False, ext_hook=_restored, list_hook=_listed, unicode_errors="surrogatepass"
        )
    except _MALFORMED as exc:
        raise ProtocolError(detail=f"a malformed value: {exc}") from exc


def pack_values(values: Sequence[Any]) -> bytes:
    """Writes values; nothing at all where there are none. The inverse of `unpack_values`.

    Raises:
        TypeError: As `pack_value`.
    """
    return pack_value(list(values)) if values else b""


def unpack_values(data: bytes) -> tuple[Any, ...]:
    """Reads values.

    Raises:
        ProtocolError: The bytes are no such thing.
    """
    if not data:
        return ()
    values = unpack_value(data)
    if type(values) is not list:
        raise ProtocolError(detail=f"{a_type(values)} where values were due")
    return tuple(values)


# ---------------------------------------------------------------------------------------------- writing


def _extend(value: Any) -> Any:
    """Writes what msgpack itself does not.

    Raises:
        TypeError: It can't be written.
    """
    if isinstance(value, np.generic) and _is_plain(value.dtype):
        return msgpack.ExtType(_SCALAR, _array_bytes(np.asarray(value)))
    if type(value) in (np.ndarray, np.memmap) and _is_plain(value.dtype):
        return msgpack.ExtType(_ARRAY, _array_bytes(value))
    base = next((one for one in _BASES if isinstance(value, one)), None)
    if base is not None:
        return _BASES[base](value)
    memory = arrays.view(value)
    if memory is None:
        raise TypeError(f"{_described_type(value)} can't travel with a run")
    if isinstance(memory, arrays.DeviceArray):
        raise TypeError(f"a tensor in the memory of {memory.device} can't travel with a run")
    name = arrays.library(value).encode()
    return msgpack.ExtType(_TENSOR, bytes((len(name),)) + name + _array_bytes(memory))


def _long_or_int(value: int) -> Any:
    plain = int(value)
    if plain in _LONGS:
        return plain
    return msgpack.ExtType(_LONG, plain.to_bytes(plain.bit_length() // 8 + 1, "little", signed=True))


_BASES: dict[type, Callable[[Any], Any]] = {
    tuple: lambda value: [_MARK, *value],
    int: _long_or_int,
    complex: lambda value: msgpack.ExtType(_COMPLEX, _PARTS_OF_COMPLEX.pack(value.real, value.imag)),
    float: float.__float__,
    str: str.__str__,  # of an enum's member its value, which `str` is not
    bytes: lambda value: bytes(memoryview(value)),
    dict: dict,
    list: list,
}
"""Python's own types -> how what inherits from them is written; of some, they themselves."""


def _array_bytes(array: arrays.Array) -> bytes:
    """An array's dtype, shape and elements, C order."""
    name = _name(array.dtype).encode()
    shape = struct.pack(f"<{array.ndim}Q", *array.shape)
    return b"".join((_HEAD.pack(len(name), array.ndim), name, shape, array.tobytes()))


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return bool(_name(dtype))


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    """What a dtype is called on the way, with its byte order; empty where its elements are no plain bytes."""
    if dtype in arrays.NARROW:
        return dtype.name
    return dtype.str if _PLAIN.fullmatch(dtype.str) else ""


@lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name; the inverse of `_name`.

    Raises:
        ValueError, TypeError: There is none.
    """
    if name in _NARROW:
        return _NARROW[name]
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"no dtype is called {name!r}")
    return np.dtype(name)


def _described_type(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    of = f" with elements {value.dtype}" if isinstance(value, np.ndarray) else ""
    return f"a value of type {name}{of}"


# ---------------------------------------------------------------------------------------------- reading


def _restored(code: int, data: bytes) -> Any:
    """Reads an extension.

    Raises:
        ValueError: It is none of ours.
    """
    read = _READERS.get(code)
    if read is None:
        raise ValueError(f"extension type {code}")
    return read(data)


def _listed(items: list[Any]) -> list[Any] | tuple[Any, ...]:
    return tuple(items[1:]) if items and items[0] is _MARK else items


def _tuple(data: bytes) -> Any:
    if data:
        raise ValueError("a mark with something in it")
    return _MARK


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _complex(data: bytes) -> complex:
    return complex(*_PARTS_OF_COMPLEX.unpack(data))


def _array(data: bytes) -> arrays.Array:
    array, elements = _described(data, np.empty)
    array.reshape(-1).view(np.uint8)[...] = elements
    return array


def _scalar(data: bytes) -> Any:
    array = _array(data)
    if array.shape:
        raise ValueError(f"a scalar of shape {array.shape}")
    return array[()]


def _tensor(data: bytes) -> Any:
    """A tensor of the library that it came from; a numpy array where that was not imported here."""
    start = 1 + data[0]
    library = data[1:start].decode()
    made = list[Any]()

    def make(shape: Sequence[int], dtype: np.dtype[Any]) -> arrays.Array:
        if not arrays.is_number(dtype):
            raise ValueError(f"a tensor of {dtype}")
        native = arrays.native(dtype)
        info = TensorInfo(shape=tuple(shape), dtype=native.name, itemsize=native.itemsize, library=library)
        made.append(arrays.empty(info))
        return cast("arrays.Array", arrays.memory(made[0]))

    array, elements = _described(data[start:], make)
    array.reshape(-1).view(np.uint8)[...] = elements
    return made[0]


def _described(
    data: bytes, make: Callable[[Sequence[int], np.dtype[Any]], arrays.Array]
) -> tuple[arrays.Array, arrays.Array]:
    """Makes the array that is described at the beginning, once its elements are known to be there.

    Returns:
        (the array, the bytes of its elements as uint8)

    Raises:
        ValueError: They are not.
    """
    name_nbytes, ndim = _HEAD.unpack_from(data)
    shape_at = _HEAD.size + name_nbytes
    shape = struct.unpack_from(f"<{ndim}Q", data, shape_at)
    elements = np.frombuffer(data, np.uint8, offset=shape_at + 8 * ndim)
    dtype = _dtype(data[_HEAD.size : shape_at].decode())
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    if nbytes != elements.size:
        raise ValueError(f"{elements.size} bytes for {dtype}{list(shape)}")
    return make(shape, dtype), elements


_READERS: dict[int, Callable[[bytes], Any]] = {
    _TUPLE: _tuple,
    _LONG: _long,
    _ARRAY: _array,
    _SCALAR: _scalar,
    _TENSOR: _tensor,
    _COMPLEX: _complex,
}
