"""How values are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycollect.errors.text import MOST_LISTED, a_type, listed, shown


class ObjectRef:
    pass


@pytest.mark.parametrize(
    ("value", "words", "in_full"),
    [
        ([], "a list", "a list"),
        (1, "an int", "an int"),
        (None, "a NoneType", "a NoneType"),
        (np.ones(1), "an ndarray", "a numpy.ndarray"),
        (ObjectRef(), "an ObjectRef", f"a {__name__}.ObjectRef"),
    ],
)
def test_a_value_is_named_by_its_type(value: Any, words: str, in_full: str) -> None:
    assert a_type(value) == words
    assert a_type(value, in_full=True) == in_full


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, ""), (1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2, and 1 more"), (10_000, "0, 1, 2, and 9997 more")],
)
def test_a_long_list_is_cut_and_counted(count: int, words: str) -> None:
    assert listed(range(count), most=3) == words
    assert listed(iter(range(count)), "; ").count(";") == min(max(count - 1, 0), MOST_LISTED)


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), [10**5000] * 50, {10**5000: "x" * 10_000}, "x" * 10**6, list(range(10**5)), float("nan")],
    ids=range(7),
)
def test_no_value_is_long_in_words(value: Any) -> None:
    """Python itself refuses to write a number of 5,000 digits."""
    assert len(shown(value)) < 1000


def test_a_short_value_is_written_as_python_does() -> None:
    for value in (7, -1, "g", None, True, [1, "a"], 2**64):
        assert shown(value) == repr(value)
