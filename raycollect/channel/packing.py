"""msgpack with this project's limits, and with types, which the library lacks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from raycollect.errors import ProtocolError

MAX_ITEMS = 65_536  # the longest list or map: a header that lies about its length must not make us allocate for it

# The library has no type stubs; imported by name, its functions are `Any` here and typed right below.
_msgpack = importlib.import_module("msgpack")
_packb: Callable[..., bytes] = _msgpack.packb
_unpackb: Callable[..., Any] = _msgpack.unpackb
_UnpackException: type[Exception] = _msgpack.exceptions.UnpackException


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def pack(value: Any) -> bytes:
    """Packs plain values; raises ProtocolError on other values."""
    try:
        # A lone surrogate (an odd file name in somebody's traceback) must not keep an error from being told.
        return _packb(value, unicode_errors="backslashreplace")
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ProtocolError(detail=f"can't be packed: {exc}") from exc


def unpack(data: bytes | bytearray) -> Any:
    """Unpacks one value, never an extension type, with `str` and `bytes` kept apart.

    Raises:
        ProtocolError: It is not msgpack, or breaks a limit.
    """
    try:
        return _unpackb(
            data,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, _UnpackException) as exc:
        raise ProtocolError(detail=f"malformed msgpack: {exc}") from exc
