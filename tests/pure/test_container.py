"""Containers: what is kept as tensors, what goes by value, and that nothing is lost on the way."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.backends.arrays import is_tensor
from raycollect.pos import Container, Structure

CALM = settings(deadline=None)  # the machine's load is none of these tests' business


class T:
    """A tensor of these tests."""


A, B, C = T(), T(), T()


def _is_t(value: Any) -> bool:
    return isinstance(value, T)


def _of(value: Any) -> Container | None:
    return Container.of(value, _is_t)


KEPT: dict[str, tuple[Any, str, tuple[Any, ...], tuple[Any, ...]]] = {
    "tensor": (A, "tensor", (), (A,)),
    "list": ([A, B], "list", (), (A, B)),
    "list of one": ([A], "list", (), (A,)),
    "tuple": ((B, A), "tuple", (), (B, A)),
    "dict": ({"x": A, "y": B}, "dict", ("x", "y"), (A, B)),
    "dict by number": ({7: A, 1: B}, "dict", (7, 1), (A, B)),
    "dict by both": ({"7": A, 7: B}, "dict", ("7", 7), (A, B)),
    "ordered dict": (OrderedDict(b=A, a=B), "dict", ("b", "a"), (A, B)),
    "another mapping": (UserDict(a=A), "dict", ("a",), (A,)),
    "the same tensor twice": ([A, A], "list", (), (A, A)),
}


@pytest.mark.parametrize("name", KEPT)
def test_is_kept(name: str) -> None:
    value, kind, names, tensors = KEPT[name]
    container = _of(value)
    assert container is not None
    assert container.structure == Structure(kind, names)
    assert [id(t) for t in container.tensors] == [id(t) for t in tensors]
    assert container.value is value, "the very object that the method returned"


class Pair(NamedTuple):
    x: Any
    y: Any


class MyList(list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "text",
        b"bytes",
        [],
        (),
        {},
        [A, 1],
        [1, A],
        (A, None),
        {"x": A, "y": 2},
        {("a", 1): A},
        {True: A},
        {1.5: A},
        {b"a": A},
        {None: A},
        [[A]],
        {"x": [A]},
        {A},
        iter([A]),
        Pair(A, B),
        MyList([A]),
    ],
    ids=repr,
)
def test_goes_by_value(value: Any) -> None:
    assert _of(value) is None


@CALM
@given(
    kind=st.sampled_from(["list", "tuple", "dict", "tensor"]),
    names=st.lists(st.text(max_size=4) | st.integers(-5, 5), min_size=1, max_size=5, unique=True),
)
def test_what_was_taken_apart_is_put_together_again(kind: str, names: list[Any]) -> None:
    tensors = [T() for _ in names]
    value: Any = {"list": tensors, "tuple": tuple(tensors), "dict": dict(zip(names, tensors, strict=True))}.get(
        kind, tensors[0]
    )
    container = _of(value)
    assert container is not None
    again = Container.build(container.structure, container.tensors)
    assert again.value == value
    assert type(again.value) is type(value)
    assert again.structure == container.structure
    assert again.tensors == container.tensors
    if kind == "dict":
        assert list(again.value) == list(value), "in the same order"


def test_building_with_new_tensors_keeps_the_form() -> None:
    structure = Structure("dict", ("w", "b"))
    assert structure.build([A, B]) == {"w": A, "b": B}
    assert Structure("list").build((A, B)) == [A, B]
    assert Structure("tuple").build([A, B]) == (A, B)
    assert Structure().build([A]) is A


def test_a_dict_of_another_count_is_not_built() -> None:
    with pytest.raises(ValueError, match="zip"):
        Structure("dict", ("w", "b")).build([A])


def test_a_later_change_of_the_callers_list_does_not_change_the_container() -> None:
    value = [A, B]
    container = _of(value)
    assert container is not None
    value.append(C)
    assert container.tensors == (A, B)


def test_structures_are_shown_with_their_names() -> None:
    assert str(Structure("list")) == "list"
    assert str(Structure("dict", ("a", 1))) == "dict['a', 1]"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (np.zeros(3), True),
        (np.zeros(()), True),
        ([np.zeros(1), np.zeros(2)], True),
        (np.float32(1), False),
        (np.array(["a"]), False),
        (np.array([None]), False),
        (np.ma.masked_array([1.0]), False),
        ([np.zeros(1), np.float32(1)], False),
    ],
)
def test_numpy_arrays_of_numbers_are_tensors(value: Any, kept: bool) -> None:
    assert (Container.of(value, is_tensor) is not None) == kept
