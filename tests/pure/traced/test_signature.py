"""Which calls of a step's function share a trace, and what stands for their values."""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.errors import InvalidArgumentError
from raycollect.traced.signature import CallReader


class Pair(NamedTuple):
    a: int
    b: int


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


def read(value: Any, **options: Any) -> tuple[Any, list[Any]]:
    leaves: list[Any] = []
    reader = CallReader(lambda value: None, **options)
    return reader.read(reader.values((value,), {}), leaves), leaves


def same(call: Any, other: Any, **options: Any) -> bool:
    first, second = read(call, **options)[0], read(other, **options)[0]
    return first == second and hash(first) == hash(second)


SHARED = [
    (1, 2),
    (0.5, float("nan")),
    (True, False),
    ("a", "longer"),
    (b"", b"x"),
    (1j, 2j),
    ([1, (2.5, "x")], [3, (0.0, "")]),
    ({"a": 1, "b": [None]}, {"a": 2, "b": [None]}),
    (np.zeros(3), np.ones(3)),
    (np.float32(1), np.float32(2)),
    (Color.RED, Color.RED),
    (None, None),
    (len, len),
    (Pair(1, 2), Pair(1, 2)),
]

APART = [
    (1, 1.0),
    (1, True),
    (1, None),
    (1, "1"),
    ([1], (1,)),
    ([1], [1, 1]),
    ([[1], 1], [1, [1]]),
    ({"a": 1}, {"b": 1}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1: 0}, {True: 0}),
    (np.zeros(3), np.zeros(4)),
    (np.zeros(3), np.zeros(3, np.float32)),
    (np.zeros(3), [0.0, 0.0, 0.0]),
    (np.float32(1), np.float64(1)),
    (Color.RED, Color.BLUE),
    (Color.RED, 1),
    (len, max),
    (object(), object()),
    ({1, 2}, {1, 2}),
    (Pair(1, 2), Pair(1, 3)),
]


@pytest.mark.parametrize(("call", "other"), SHARED)
def test_calls_that_share_a_trace(call: Any, other: Any) -> None:
    assert same(call, other)


@pytest.mark.parametrize(("call", "other"), APART)
def test_calls_that_are_traced_each(call: Any, other: Any) -> None:
    assert not same(call, other)
    assert same(call, call)


def test_a_static_nan_is_traced_once() -> None:
    assert same(float("nan"), float("nan"), static=("value",))


@pytest.mark.parametrize("value", [np.zeros(2), [np.zeros(2)], {"a": np.zeros(1)}])
def test_an_array_is_not_static(value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read(value, static=("value",))
    assert caught.value.violations[0].field == "static"


def test_an_unknown_static_parameter_is_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        CallReader(lambda rate: None, ("depth",))
    assert caught.value.violations[0].found == "'depth'"


@pytest.mark.parametrize("value", [OrderedDict(a=1), object(), {1}, bytearray(b"x"), np.array([None]), range(3)])
def test_values_of_other_types_are_no_leaves(value: Any) -> None:
    assert read(value)[1] == []


def test_torch_tensors_are_leaves() -> None:
    torch = pytest.importorskip("torch")
    assert same(torch.zeros(2), torch.ones(2))
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same(torch.zeros(2), np.zeros(2, np.float32))


def test_a_call_is_read_as_python_binds_it() -> None:
    def function(a: int, /, b: int = 2, *rest: int, c: int, **more: int) -> None: ...

    reader = CallReader(function)
    calls: list[tuple[tuple[int, ...], dict[str, int]]] = [((1,), {"c": 3}), ((1, 2), {"c": 3})]
    reads = []
    for args, kwargs in calls:
        leaves: list[Any] = []
        reads.append((reader.read(reader.values(args, kwargs), leaves), leaves))
    assert reads[0] == reads[1]
    assert reads[0][1] == [1, 2, 3]
    assert reader.values((1, 2, 4, 5), {"c": 3, "d": 6}) == [1, 2, (4, 5), 3, {"d": 6}]
    with pytest.raises(TypeError, match="missing"):
        reader.values((1,), {})


def test_the_object_of_a_method_is_no_part_of_the_key() -> None:
    reader = CallReader(lambda self, rate: None, bound=True)
    assert reader.read((object(), 1.0), []) == reader.read((object(), 2.0), [])
    assert reader.traced(("it", 1.0), lambda *_: "leaf").args == ("it", "leaf")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


@given(VALUES)
def test_leaves_are_found_in_the_order_in_which_they_are_traced(value: Any) -> None:
    reader = CallReader(lambda value: None)
    leaves: list[Any] = []
    key = reader.read((value,), leaves)
    traced_leaves: list[Any] = []
    reader.traced((value,), lambda _, name, leaf: traced_leaves.append(leaf))
    assert list(map(repr, leaves)) == list(map(repr, traced_leaves))
    again: list[Any] = []
    assert reader.read((value,), again) == key
