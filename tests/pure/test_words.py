"""How values are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycollect.words import a_type


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
