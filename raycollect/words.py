"""A value in words, by its type."""

from __future__ import annotations

__all__ = ["a_type"]

_VOWELS = ("a", "e", "i", "o", "nd")
"""How names begin that are spoken with a vowel first; an ndarray is spelt."""


def a_type(value: object, *, in_full: bool = False) -> str:
    """The type of a value with its article: ``"a list"``, ``"an ObjectRef"``, ``"an ndarray"``.

    Args:
        value: The value.
        in_full: Whether a type that is not built in is named with its module: ``"a numpy.ndarray"``.
    """
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}" if in_full and kind.__module__ != "builtins" else kind.__qualname__
    return f"{'an' if name.lower().startswith(_VOWELS) else 'a'} {name}"
