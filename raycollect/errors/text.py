"""Short texts of values and lists, for messages."""

from __future__ import annotations

import itertools
import os
import reprlib
from collections.abc import Iterable

MOST_LISTED = 20
"""How many items a text lists by default."""

_MOST_BITS = 1 << 10
"""Numbers of more bits are not written out: Python refuses some of them, and is slow for others."""

_VOWELS = ("a", "e", "i", "o", "nd")
"""The beginnings of names whose article is "an"; "ndarray" is spelled out when read."""


def a_type(value: object, *, in_full: bool = False) -> str:
    """Returns the type of a value with its article, ``"a list"``; with `in_full`, ``"a numpy.ndarray"``."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}" if in_full and kind.__module__ != "builtins" else kind.__qualname__
    return f"{'an' if name.lower().startswith(_VOWELS) else 'a'} {name}"


def too_large(exc: BaseException) -> str:
    """Returns a text for a failed allocation, with the allocator's own message."""
    said = str(exc) if isinstance(exc, MemoryError) else f"{type(exc).__name__}: {exc}"
    return f"too large for the memory that is left ({said or 'MemoryError'})"


def listed(parts: Iterable[object], between: str = ", ", most: int = MOST_LISTED) -> str:
    """Joins the items of a list. A long list is cut: ``"a, b, and 17 more"``."""
    given = iter(parts)
    words = list(map(str, itertools.islice(given, most)))
    more = sum(1 for _ in given)
    return between.join([*words, f"and {more} more"] if more else words)


def as_name(value: object) -> str:
    """Returns a text unchanged, and any other value as `shown` writes it."""
    return value if isinstance(value, str) else shown(value)


MOST_NAME = 1000
"""The longest name of a group, in characters."""


def is_unicode(text: str) -> bool:
    """Returns whether a text can be encoded; half of a surrogate pair can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_path(value: object) -> bool:
    """Returns whether a value is a valid path of a file: a string or an `os.PathLike`."""
    path = value.__fspath__() if isinstance(value, os.PathLike) else value
    try:
        return isinstance(path, str) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def not_a_name(value: object) -> str:
    """Returns why a value can't be the name of a group or publication; empty if it can."""
    if not isinstance(value, str) or not value:
        return f"{shown(value)}, not a non-empty string"
    if len(value) > MOST_NAME:
        return f"{shown(value)}, of {len(value)} characters, not at most {MOST_NAME}"
    return "" if is_unicode(value) else f"{shown(value)}, which is not Unicode text"


class _Short(reprlib.Repr):
    """`reprlib.Repr` that also handles integers of any size."""

    def repr_int(self, number: int, level: int) -> str:
        bits = number.bit_length()
        return super().repr_int(number, level) if bits <= _MOST_BITS else f"<a whole number of {bits} bits>"


_short = _Short()


def shown(value: object) -> str:
    """Returns the `repr` of a value, cut to fit into a sentence."""
    return _short.repr(value)
