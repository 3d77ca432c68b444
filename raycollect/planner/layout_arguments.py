"""The arguments of `layout` and similar functions: their valid values, and the errors of others."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NoReturn

from raycollect.errors import refusal, wrong_argument
from raycollect.errors.text import is_unicode, shown
from raycollect.planner.boxes import Point

MOST_RANKS = 1 << 20
"""The most ranks of a layout."""

MOST_EXTENT = 1 << 62
"""The largest extent of a tensor."""

ITEMSIZES: dict[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""The dtypes that a layout may have -> bytes per element."""

_ALIASES = {
    "bool_": "bool",
    "int": "int64",
    "float": "float64",
    "complex": "complex128",
    "half": "float16",
    "single": "float32",
    "double": "float64",
    "longlong": "int64",
    "ulonglong": "uint64",
    "b1": "bool",
    **{f"{kind[0]}{nbytes}": f"{kind}{8 * nbytes}" for kind in ("int", "uint") for nbytes in (1, 2, 4, 8)},
    **{f"{kind[0]}{nbytes}": f"{kind}{8 * nbytes}" for kind in ("float", "complex") for nbytes in (2, 4, 8, 16)},
}
"""Other names that numpy and Python have for them."""

_KINDS = {
    "shape": "whole numbers from 0 on",
    "mesh": f"a dict of the size of each axis by its name, at least 1, of {MOST_RANKS} ranks at most",
    "spec": "for each dimension an axis, several axes, or None, such as ('tp', None)",
    "partial": "an axis, or several axes",
    "regions": "at least one Region, and nothing else",
    "region": "whole numbers from 0 on; for each dimension (first, behind the last), and a place in the local tensor",
}
"""The valid values of an argument."""

_MOST_TOLD = 1000


def refuse(field: str, actual: object, expected: str = "", *, op: str = "layout") -> NoReturn:
    """Raises the InvalidArgumentError of an argument; `actual` is a value, or a text about it."""
    text = actual if isinstance(actual, str) else shown(actual)
    raise refusal(op, "", (wrong_argument(field, text[:_MOST_TOLD], expected or _KINDS[field]),))


def whole(value: Any, most: int = MOST_EXTENT) -> int:
    """A whole number from 0 on, also one of numpy's; raises TypeError or ValueError."""
    number = operator.index(value)
    if isinstance(value, bool) or not 0 <= number <= most:
        raise ValueError(f"{shown(value)} is not a whole number from 0 to {most}")
    return number


def shape_of(value: Any) -> Point:
    """The extents of a tensor."""
    try:
        return tuple(map(whole, value))
    except (TypeError, ValueError):
        refuse("shape", shown(value))


def mesh_of(value: Any) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh, with their sizes."""
    ranks = 1
    try:
        axes = tuple((axis, whole(size, MOST_RANKS)) for axis, size in value.items())
    except (TypeError, ValueError, AttributeError):
        refuse("mesh", shown(value))
    for axis, size in axes:
        ranks *= size
        if not isinstance(axis, str) or not is_unicode(axis) or not 0 < ranks <= MOST_RANKS:
            refuse("mesh", shown(dict(value)))
    if not axes:
        refuse("mesh", shown(value))
    return axes


def axes_of(field: str, value: Any) -> tuple[str, ...]:
    """The axes that an argument names."""
    axes = (value,) if isinstance(value, str) else items_of(field, value)
    if not all(isinstance(axis, str) for axis in axes):
        refuse(field, shown(value))
    return axes


def items_of(field: str, value: Any) -> tuple[Any, ...]:
    """The items of an argument; a string has none."""
    try:
        if not isinstance(value, str):
            return tuple(value)
    except TypeError:
        pass
    refuse(field, shown(value))


def check_named(op: str, field: str, value: Any, kind: type[Any]) -> None:
    """Refuses a value that is not a dict of values of a class by name."""
    if not isinstance(value, Mapping) or not all(isinstance(item, kind) for item in value.values()):
        refuse(field, shown(value), f"a dict of {kind.__name__}s by name", op=op)
    if not all(isinstance(name, str) and is_unicode(name) for name in value):
        refuse(field, f"of the names {shown(list(value))}", "names in Unicode", op=op)


def dtype_name(dtype: Any) -> str:
    """The name that numpy has for a dtype of numpy, torch or Python, or for another name of it; without byte order."""
    # A dtype of numpy has a name, and its scalar types are classes.
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or dtype
    plain = str(name).removeprefix("torch.").lstrip("<>=|")
    return _ALIASES.get(plain, plain)
