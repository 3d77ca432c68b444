"""Values and lists in words, none of which is ever long."""

from __future__ import annotations

import itertools
import os
import reprlib
from collections.abc import Iterable

MOST_LISTED = 20
"""The default for how many items a text lists."""

_MOST_BITS = 1 << 10
"""Larger numbers are not written out: Python refuses to write some, and takes long over others."""

_VOWELS = ("a", "e", "i", "o", "nd")
"""How names begin that are spoken with a vowel first; "ndarray" is spelt."""


def a_type(value: object, *, in_full: bool = False) -> str:
    """The type of a value with its article: ``"a list"``; `in_full` with the module: ``"a numpy.ndarray"``."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}" if in_full and kind.__module__ != "builtins" else kind.__qualname__
    return f"{'an' if name.lower().startswith(_VOWELS) else 'a'} {name}"


def too_large(exc: BaseException) -> str:
    """What memory was missing for, in the words of whoever should have given it."""
    said = str(exc) if isinstance(exc, MemoryError) else f"{type(exc).__name__}: {exc}"
    return f"too large for the memory that is left ({said or 'MemoryError'})"


def listed(parts: Iterable[object], between: str = ", ", most: int = MOST_LISTED) -> str:
    """A list in words; of a long one the beginning and the count of the rest: ``"a, b, and 17 more"``."""
    given = iter(parts)
    words = list(map(str, itertools.islice(given, most)))
    more = sum(1 for _ in given)
    return between.join([*words, f"and {more} more"] if more else words)


def as_name(value: object) -> str:
    """What was given as a name: a text as it is, anything else as `shown` has it."""
    return value if isinstance(value, str) else shown(value)


MOST_NAME = 1000
"""The longest name of a group, in characters."""


def is_unicode(text: str) -> bool:
    """Whether a text can be sent: half of a surrogate pair can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_path(value: object) -> bool:
    """Whether a file can have this path, a string or what has one."""
    path = value.__fspath__() if isinstance(value, os.PathLike) else value
    try:
        return isinstance(path, str) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def not_a_name(value: object) -> str:
    """Why a value can't be the name of a group or of a publication; empty where it can."""
    if not isinstance(value, str) or not value:
        return f"{shown(value)}, not a non-empty string"
    if len(value) > MOST_NAME:
        return f"{shown(value)}, of {len(value)} characters, not at most {MOST_NAME}"
    return "" if is_unicode(value) else f"{shown(value)}, which is not Unicode text"


class _Short(reprlib.Repr):
    """`reprlib.repr`, also of numbers that Python does not write."""

    def repr_int(self, number: int, level: int) -> str:
        bits = number.bit_length()
        return super().repr_int(number, level) if bits <= _MOST_BITS else f"<a whole number of {bits} bits>"


_short = _Short()


def shown(value: object) -> str:
    """A value as Python writes it, cut to fit into a sentence."""
    return _short.repr(value)
