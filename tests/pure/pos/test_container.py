"""Containers: what is kept as tensors, what goes by value, and that nothing is lost on the way."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.backends.arrays import describe_value, is_tensor
from raycollect.core.model import Structure
from raycollect.pos import Container, obstacle, unkept
from raycollect.pos.container import DEEPEST


class T:
    """A tensor of these tests."""

    def __repr__(self) -> str:
        return "T"  # the same in every process that collects the tests


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


class MyList(list):  # type: ignore[type-arg]
    pass


UNKEPT: list[tuple[Any, str]] = [
    (np.array(2.5), "a numpy.ndarray without dimensions (return np.array([x]) or x.reshape(1), and it is kept)"),
    (np.float32(2.5), "a numpy.float32 (return np.array([x]) or x.reshape(1), and it is kept)"),
    (2.5, "a float (return np.array([x]) or x.reshape(1), and it is kept)"),
    (np.ones(3), "a numpy.ndarray"),
    ("text", "a str"),
    ([np.ones(3), 1], "a list ([1] is an int)"),
    (OrderedDict(), "a collections.OrderedDict (it is empty)"),
    (MyList([A]), f"a {__name__}.MyList, a subclass of list (give a plain one, list(x))"),
]


@pytest.mark.parametrize(("value", "text"), UNKEPT, ids=[text for _, text in UNKEPT])
def test_what_is_not_kept_is_told_with_the_cure_where_it_is_a_number(value: Any, text: str) -> None:
    assert unkept(value, is_tensor, describe_value) == text


_TREES: st.SearchStrategy[Any] = st.recursive(
    st.builds(T),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-3, 3), inner, min_size=1, max_size=3)
    ),
    max_leaves=12,
)


def _travelled(structure: Structure) -> Structure:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(structure), type=Structure)


@given(_TREES, _TREES)
def test_any_tree_is_put_together_again_travels_and_is_told_from_any_other(value: Any, other: Any) -> None:
    first, second = _of(value), _of(other)
    assert first is not None
    assert second is not None
    assert first.structure.build(first.tensors) == value
    assert _travelled(first.structure) == first.structure
    assert hash(_travelled(first.structure)) == hash(first.structure)
    assert (first.structure == second.structure) == (str(first.structure) == str(second.structure))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"w": A, "b": None}, "['b'] is a NoneType"),
        ({"layers": [A, (B, 3)]}, "['layers'][1][1] is an int"),
        ([A, []], "[1] is empty"),
        ({}, "it is empty"),
        ({"w": A, (1, 2): B}, "it has the key (1, 2), and keys are strings or integers"),
        ([A, {"x": {2.5: A}}], "[1]['x'] has the key 2.5, and keys are strings or integers"),
        ([{"state": {0: {"step": 1, "exp_avg": A}}}], "[0]['state'][0]['step'] is an int"),
    ],
)
def test_what_keeps_a_value_from_being_kept_is_named(value: Any, text: str) -> None:
    assert _of(value) is None
    assert obstacle(value, _is_t) == text


def test_what_is_nested_too_deep_is_named() -> None:
    value: Any = A
    for _ in range(DEEPEST + 1):
        value = [value]
    assert _of(value) is None
    assert obstacle(value, _is_t) == "[0]" * DEEPEST + f" is nested more than {DEEPEST} deep"


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_has_no_obstacle(name: str) -> None:
    value = KEPT[name][0]
    assert isinstance(value, T) or obstacle(value, _is_t) == ""


def _changed(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda given: given.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_changed("a", np.ones(4)), r"\['a'\] is float64\[4\].*, and was float64\[3\].* when it was returned"),
        (_changed("c", np.ones(1)), r"\['c'\] is float64\[1\].*, and was missing when it was returned"),
        (lambda given: given.pop("b"), r"\['b'\]\[0\] is missing, and was float64\[2\]"),
        (lambda given: given.update(a=given.pop("a")), "the order of its names"),
        (_changed("b", (np.zeros(2),)), "or the type of its lists"),
        (_changed("a", 3), r"\['a'\] is an int"),
    ],
)
def test_a_value_stands_for_the_tensors_of_now_or_says_what_is_different(
    change: Callable[[dict[str, Any]], object], words: str
) -> None:
    given: dict[str, Any] = {"a": np.ones(3), "b": [np.zeros(2)]}
    container = Container.of(given, is_tensor)
    assert container is not None
    assert container.current() is container
    given["a"] = fresh = np.zeros(3)
    current = container.current()
    assert isinstance(current, Container)
    assert current.tensors[0] is fresh
    change(given)
    told_of = container.current()
    assert isinstance(told_of, str)
    assert re.match(f".*{words}", told_of)


class Computed(Mapping[str, Any]):
    """A mapping that computes its values on each access."""

    def __init__(self, compute: Callable[[str], Any]) -> None:
        self._compute = compute
        self.count = 0

    def __getitem__(self, name: str) -> Any:
        self.count += 1
        return self._compute(name)

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def __len__(self) -> int:
        return 3


class Overridden(dict[str, Any]):
    """A dict that computes what it gives."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) * 2


def test_a_mapping_that_computes_its_values_goes_by_value(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a=np.ones(2), b=np.ones(3))
    with np.load(tmp_path / "t.npz") as file:
        computed = Computed(lambda name: np.ones(2))
        for value in (file, computed, [computed], {"x": file}, Overridden(a=np.ones(2)), Computed(lambda _: [A])):
            assert Container.of(value, lambda leaf: is_tensor(leaf) or _is_t(leaf)) is None
            assert "on each access" in obstacle(value, is_tensor)
        assert computed.count <= 8, "no more than one value is computed to find that out"


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_mapping_that_gives_views_of_the_same_memory_is_kept(library: str) -> None:
    whole = np.arange(12.0) if library == "numpy" else pytest.importorskip("torch").arange(12.0)
    container = Container.of(Computed(lambda name: whole["abc".index(name) * 4 :][:4]), is_tensor)
    assert container is not None
    assert container.structure.names == tuple("abc")
    container.tensors[1][:] = 7
    assert list(whole[4:8]) == [7] * 4
