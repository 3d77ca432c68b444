"""Errors in other forms: in one line, and as plain values that cross the channel."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from raycollect.errors import _base, _faults, _groups, _others, _refused, _weights
from raycollect.errors._base import RaycollectError
from raycollect.errors._faults import KernelError
from raycollect.errors._others import ProtocolError
from raycollect.errors._refused import RefusedError

_ERRORS: dict[str, type[RaycollectError]] = {
    name: value
    for module in (_base, _refused, _groups, _faults, _others, _weights)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, RaycollectError) and value is not _weights.PushError
}
"""Type on the wire -> class. A PushError holds receipts, which no message carries: it goes as a VersionError."""


def brief(error: RaycollectError) -> str:
    """An error in one line: its type, what failed and where; without the traceback and the remedy."""
    if isinstance(error, RefusedError) and error.violations:
        more = len(error.violations) - 1
        text = f"{error.op} was refused: {error.violations[0]}" + (f", and {more} more" if more else "")
    else:
        text = str(error)
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


def to_wire(error: RaycollectError) -> dict[str, Any]:
    """Turns an error into plain values for msgpack; the inverse of `from_wire`.

    An error of a subclass, as a backend may have one, goes as the nearest class of this package.
    """
    cls = next(one for one in type(error).__mro__ if _ERRORS.get(one.__name__) is one)
    if cls is RaycollectError and cls is not type(error):  # which would lose the text
        cls, error = KernelError, KernelError(detail=f"{type(error).__name__}: {error}")
    values = {f.name: getattr(error, f.name) for f in fields(cls)}
    return {"type": cls.__name__, "fields": msgspec.to_builtins(values, builtin_types=(bytes,))}


def from_wire(value: dict[str, Any]) -> RaycollectError:
    """Builds the error that `to_wire` described.

    Raises:
        ProtocolError: The value describes no error of this package.
    """
    try:
        cls = _ERRORS.get(value["type"])
        if cls is None:
            raise ProtocolError(detail=f"unknown error type {value['type']!r}")
        values = value["fields"]
        _refuse_unknown(cls, values)
        error = msgspec.convert(values, cls)
        for name in ("violations", "reports"):
            for part, told in zip(getattr(error, name, ()), values.get(name, ()), strict=True):
                _refuse_unknown(type(part), told)
        return error
    except (msgspec.ValidationError, KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ProtocolError(detail=f"malformed error on the wire: {exc}") from exc


def _refuse_unknown(cls: Any, values: dict[str, Any]) -> None:
    if unknown := values.keys() - {one.name for one in fields(cls)}:
        raise ProtocolError(detail=f"a {cls.__name__} has no {', '.join(map(str, unknown))[:300]}")
