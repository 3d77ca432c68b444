"""`pg_options`: a user's options for a backend, as plain values that are sent to all members. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from raycollect.errors.text import a_type, shown


def read(given: Any) -> tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]:
    """Reads options from None, a dict, or an object of a vendor's package by its public attributes.

    Returns:
        `GroupSpec.options`, and every problem.
    """
    if given is None:
        return (), ()
    problems: list[str] = []
    named = given if isinstance(given, Mapping) else _attributes(given)
    if not named and not isinstance(given, Mapping):
        problems.append(f"pg_options is {a_type(given)}, neither a dict nor an object with public attributes")
    try:
        plain = _plain(named, "pg_options", problems)
    except RecursionError:
        problems, plain = ["pg_options contains recursive lists or dicts"], ()
    return (() if problems else plain), tuple(problems)


def _attributes(given: Any) -> dict[str, Any]:
    if type(given).__module__ == "builtins":
        return {}
    # read-only attributes are no options
    public = [name for name in dir(given) if not name.startswith("_")]
    settable = [name for name in public if getattr(getattr(type(given), name, None), "fset", True) is not None]
    values: dict[str, Any] = {}
    for name in settable:
        with suppress(Exception):  # foreign code: numpy's arrays have attributes that raise
            values[name] = getattr(given, name)
    return {name: value for name, value in values.items() if not callable(value)}


def _plain(value: Any, where: str, problems: list[str]) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, f"{where}[{at}]", problems) for at, item in enumerate(value))
    if isinstance(value, Mapping) and all(type(name) is str for name in value):
        return tuple((name, _plain(value[name], f"{where}.{name}", problems)) for name in sorted(value))
    travels = "only strings, numbers, booleans, None, and lists and dicts (by name) of these travel to the members"
    problems.append(f"{where} is {shown(value)}, {a_type(value)}; {travels}")
    return None
