"""The parameters of functions, of Python's and of Cython's, which show theirs in the first line of their text."""

from __future__ import annotations

import inspect
import re
from typing import Any

_SHOWN = re.compile(r"^(?:[\w.]+\.)?\w+\((?P<takes>.*)\)(?: -> [\w.]+)?$")


def parameters_of(function: Any) -> list[str] | None:
    """The names of the parameters that can be given by position, without `self`; None: it does not tell."""
    shown = _SHOWN.match((inspect.getdoc(function) or "").partition("\n")[0])
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        found = None
    if found is not None and not any(one.kind is one.VAR_POSITIONAL for one in found):
        named = (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) if (one := next(iter(found), None)) else ()
        return [one.name for one in found if one.kind in named and one.name not in ("self", "cls")]
    if shown is None:
        return None
    return [name for name in map(_name, shown["takes"].split(",")) if name not in ("", "self", "cls", "/")]


def _name(parameter: str) -> str:
    words = parameter.partition("=")[0].split()
    return words[-1].lstrip("\\*") if words else ""
