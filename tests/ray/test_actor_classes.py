"""Kinds of classes and methods that Ray's actors allow: with the mixin they do what they do without it, and more."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import ray

import raycollect as col

T = TypeVar("T")


def decorated(method):
    @functools.wraps(method)
    def around(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    return around


class Root:
    """No participant."""

    def which(self):
        return np.zeros(2)

    def get_inherited(self):
        return self.which() + 1


class Left(Root, col.CollectiveParticipant):
    """It has no `which` of its own."""


class Right(Root):
    """It has."""

    def which(self):
        return np.full(2, 5.0)


class Abstract(ABC):
    """A base that asks for a method."""

    @abstractmethod
    def get_abstract(self): ...


class Kinds(Left, Right, Abstract, Generic[T]):
    """Every kind of method that Ray takes for one."""

    def get(self, value=1):
        return np.full(3, float(value))

    get_partial = functools.partialmethod(get, 7)
    same = get

    @col.by_value
    def plain(self, value):
        return np.full(3, float(value))

    plain_partial = functools.partialmethod(plain, 7)

    def get_abstract(self):
        return np.ones(4)

    @decorated
    def get_decorated(self):
        return np.ones(5)

    def get_twice(self):
        assert type(self.get()) is np.ndarray
        return self.get() * 2

    @staticmethod
    def static():
        return "static"

    @classmethod
    def of_class(cls):
        return cls.__name__

    @property
    def odd(self):
        raise AssertionError("nobody asks for it")

    def counted(self):
        sent = yield np.ones(2)
        return sent


class Heir(Kinds[int]):
    """Names a method of its base otherwise."""

    also = Kinds.get


EXPECTED = {
    "which": np.full(2, 5.0),
    "get_inherited": np.full(2, 6.0),
    "get": np.ones(3),
    "also": np.ones(3),
    "same": np.ones(3),
    "get_partial": np.full(3, 7.0),
    "get_abstract": np.ones(4),
    "get_decorated": np.ones(5),
    "get_twice": np.full(3, 2.0),
}


@pytest.fixture(scope="module")
def heir(cluster):
    made = ray.remote(Heir).options(num_cpus=0).remote()
    yield made
    ray.kill(made)


@pytest.mark.parametrize("name", EXPECTED)
def test_tensors_of_methods_of_each_kind_are_kept(heir, tidy, name):
    ref = getattr(heir, name).remote()
    assert type(ray.get(ref)) is col.Handle
    col.allreduce_refs([ref])
    np.testing.assert_array_equal(col.get(ref), EXPECTED[name])


def test_methods_by_value_and_static_methods(heir):
    assert ray.get(heir.plain.remote(2)).tolist() == [2.0] * 3
    assert ray.get(heir.plain_partial.remote()).tolist() == [7.0] * 3
    assert ray.get([heir.static.remote(), heir.of_class.remote()]) == ["static", "Heir"]
    with pytest.raises(TypeError):
        heir.get.remote(1, 2, 3)


def test_outside_of_actors_a_class_is_as_without_the_mixin():
    for name in dir(Kinds):
        found = inspect.getattr_static(Kinds, name)
        owner = next(cls for cls in Kinds.__mro__ if name in vars(cls))
        assert found is vars(owner)[name]
    one = Heir()
    for name, expected in EXPECTED.items():
        np.testing.assert_array_equal(getattr(one, name)(), expected)
    items = one.counted()
    next(items)
    with pytest.raises(StopIteration) as caught:
        items.send("sent")
    assert caught.value.value == "sent"
    with pytest.raises(TypeError, match="abstract"):
        type("Part", (Abstract, col.CollectiveParticipant), {})()


@ray.remote
@dataclass
class Fields(col.CollectiveParticipant):
    """A dataclass."""

    scale: float = 1.0
    held: list[Any] = field(default_factory=list)

    def get(self):
        return np.full(2, self.scale)


def test_dataclasses_are_actors(actors):
    (one,) = actors(Fields, 1)
    ref = one.get.remote()
    col.allreduce_refs([ref])
    assert col.get(ref).tolist() == [1.0, 1.0]
