"""The codec of the arguments and results of captured steps' runs.

msgpack, with extensions for tuples, long integers, complex numbers, numpy's arrays and scalars, and CPU tensors of any
library. Values keep their types, except that bytearrays become bytes, and subclasses become their base: an enum's
member its number or text, a named tuple a tuple. Nothing is pickled, so that reading runs no code.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

import msgpack
import numpy as np

from raycollect.backends import arrays
from raycollect.core.model import TensorInfo
from raycollect.errors import ProtocolError
from raycollect.errors.text import a_type

_TUPLE, _LONG, _ARRAY, _SCALAR, _TENSOR, _COMPLEX = range(1, 7)

# The first item of a tuple, which is packed as a list: so its depth is bounded like that of lists.
_MARK = msgpack.ExtType(_TUPLE, b"")

# numpy's short names of dtypes whose elements are plain bytes.
_PLAIN = re.compile(r"[<>|=]?[biufcSUmM]\d+(\[\w+\])?")

_NARROW: dict[str, np.dtype[Any]] = {dtype.name: dtype for dtype in arrays.NARROW}

# Of an array: the bytes of its dtype's name, the number of its dimensions. The name and the extents follow.
_HEAD = struct.Struct("<BB")

# The exceptions of reading corrupt bytes.
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

_PARTS_OF_COMPLEX = struct.Struct("<dd")
_LONGS = range(-(1 << 63), 1 << 64)  # the integers that msgpack itself writes


def pack_value(value: Any) -> bytes:
    """Packs one value; the inverse of `unpack_value`.

    Args:
        value: None, a bool, int, float, complex, str or bytes; a list, tuple or dict of such values, or an instance of
            a subclass of these; a numpy array or scalar, a CPU tensor of any library.

    Raises:
        TypeError: The value is, or contains, another type; the message names the type.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_extend, strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, OverflowError, RecursionError) as exc:
        raise TypeError(f"{_described_type(value)} that is nested too deep, or too long ({exc})") from exc
    return packed


def unpack_value(data: bytes) -> Any:
    """Unpacks one value; arrays are contiguous, writable, and own their memory. Raises ProtocolError on other bytes."""
    try:
        return msgpack.unpackb(
            data, strict_map_key=False, ext_hook=_restored, list_hook=_listed, unicode_errors="surrogatepass"
        )
    except _MALFORMED as exc:
        raise ProtocolError(detail=f"a malformed value: {exc}") from exc


def pack_values(values: Sequence[Any]) -> bytes:
    """Packs values, no values as empty bytes; the inverse of `unpack_values`. Raises TypeError as `pack_value`."""
    return pack_value(list(values)) if values else b""


def unpack_values(data: bytes) -> tuple[Any, ...]:
    """Unpacks values; raises ProtocolError on other bytes."""
    if not data:
        return ()
    values = unpack_value(data)
    if type(values) is not list:
        raise ProtocolError(detail=f"{a_type(values)} where values were due")
    return tuple(values)


def _extend(value: Any) -> Any:
    if isinstance(value, np.generic) and _name(value.dtype):
        return msgpack.ExtType(_SCALAR, _array_bytes(np.asarray(value)))
    if type(value) in (np.ndarray, np.memmap) and _name(value.dtype):
        return msgpack.ExtType(_ARRAY, _array_bytes(value))
    base = next((kind for kind in _BASES if isinstance(value, kind)), None)
    if base is not None:
        return _BASES[base](value)
    memory = arrays.view(arrays.resolved(value))
    if memory is None:
        raise TypeError(f"{_described_type(value)}, which can't travel as a plain value")
    if isinstance(memory, arrays.DeviceArray):
        raise TypeError(f"a tensor in the memory of {memory.device}, which can't travel as a plain value")
    name = arrays.library(value).encode()
    return msgpack.ExtType(_TENSOR, bytes((len(name),)) + name + _array_bytes(memory))


def _long_or_int(value: int) -> Any:
    plain = int(value)
    if plain in _LONGS:
        return plain
    return msgpack.ExtType(_LONG, plain.to_bytes(plain.bit_length() // 8 + 1, "little", signed=True))


# Python's own types -> the function that packs instances of subclasses; for some types, also of the type itself.
_BASES: dict[type, Callable[[Any], Any]] = {
    tuple: lambda value: [_MARK, *value],
    int: _long_or_int,
    complex: lambda value: msgpack.ExtType(_COMPLEX, _PARTS_OF_COMPLEX.pack(value.real, value.imag)),
    float: float.__float__,
    str: str.__str__,  # for a member of an enum the value, unlike `str`
    bytes: lambda value: bytes(memoryview(value)),
    dict: dict,
    list: list,
}


def _array_bytes(array: arrays.Array) -> bytes:
    name = _name(array.dtype).encode()
    shape = struct.pack(f"<{array.ndim}Q", *array.shape)
    return b"".join((_HEAD.pack(len(name), array.ndim), name, shape, array.tobytes()))


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype on the wire, with its byte order; empty if its elements are not plain bytes."""
    if dtype in arrays.NARROW:
        return dtype.name
    return dtype.str if _PLAIN.fullmatch(dtype.str) else ""


@lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any]:
    if name in _NARROW:
        return _NARROW[name]
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"no dtype is called {name!r}")
    return np.dtype(name)


def _described_type(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"a value of type {name}{arrays.describe_value(value).removeprefix(a_type(value, in_full=True))}"


def _restored(code: int, data: bytes) -> Any:
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


def _array(data: bytes) -> arrays.Array:
    return _filled(data, np.empty)


def _scalar(data: bytes) -> Any:
    array = _array(data)
    if array.shape:
        raise ValueError(f"a scalar of shape {array.shape}")
    return array[()]


def _tensor(data: bytes) -> Any:
    # A tensor of its original library, or of numpy if the library is missing.
    start = 1 + data[0]
    library = data[1:start].decode()
    if library == "torch":
        with suppress(ImportError):
            import_module(library)  # as Ray does for a tensor in the arguments of a method
    tensors = list[Any]()

    def make(shape: Sequence[int], dtype: np.dtype[Any]) -> arrays.Array:
        if not arrays.is_number(dtype):
            raise ValueError(f"a tensor of {dtype}")
        native = arrays.native(dtype)
        info = TensorInfo(shape=tuple(shape), dtype=native.name, itemsize=native.itemsize, library=library)
        tensors.append(arrays.empty(info))
        return cast("arrays.Array", arrays.memory(tensors[0]))

    _filled(data[start:], make)
    return tensors[0]


def _filled(data: bytes, make: Callable[[Sequence[int], np.dtype[Any]], arrays.Array]) -> arrays.Array:
    # Makes the array after checking that the elements are complete.
    name_nbytes, ndim = _HEAD.unpack_from(data)
    shape_at = _HEAD.size + name_nbytes
    shape = struct.unpack_from(f"<{ndim}Q", data, shape_at)
    elements = np.frombuffer(data, np.uint8, offset=shape_at + 8 * ndim)
    dtype = _dtype(data[_HEAD.size : shape_at].decode())
    if math.prod(shape, start=dtype.itemsize) != elements.size:
        raise ValueError(f"{elements.size} bytes for {dtype}{list(shape)}")
    array = make(shape, dtype)  # of a tensor in native byte order
    array.reshape(-1)[...] = elements.view(dtype)
    return array


_READERS: dict[int, Callable[[bytes], Any]] = {
    _TUPLE: _tuple,
    _LONG: lambda data: int.from_bytes(data, "little", signed=True),
    _ARRAY: _array,
    _SCALAR: _scalar,
    _TENSOR: _tensor,
    _COMPLEX: lambda data: complex(*_PARTS_OF_COMPLEX.unpack(data)),
}
