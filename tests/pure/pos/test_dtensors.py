"""DTensors among what a process keeps: they stand for their local tensors, and their handles say how these lie."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import TENSOR, Address, Key
from raycollect.engine.run_cache import single
from raycollect.pos import Absence, Container, State, Store, obstacle
from raycollect.pos.handle import Handle
from tests.pure.dtensors import FakeDTensor, FakeMesh, Shard


def dtensor(coordinate: Any = (1,)) -> FakeDTensor:
    return FakeDTensor(np.zeros((2, 6), np.float32), (4, 6), FakeMesh(np.arange(2), coordinate), (Shard(0),))


def contain(value: Any) -> Container:
    container = Container.of(value, arrays.is_tensor)
    assert container is not None
    return container


def test_a_dtensor_is_kept_as_its_local_tensor() -> None:
    sharded, plain = dtensor(), np.ones(3)
    container = contain({"plain": plain, "w": sharded})
    assert [
        tensor is local for tensor, local in zip(container.tensors, (plain, sharded._local_tensor), strict=True)
    ] == [True] * 2
    ((at, placement),) = container.placements
    assert (at, placement.at, placement.shape) == (1, 1, (4, 6))
    alone = contain(sharded)
    assert alone.structure is TENSOR
    assert alone.value is sharded
    assert contain(plain).placements == ()


def test_one_of_another_mesh_and_what_lies_beside_others_go_by_value() -> None:
    assert Container.of(dtensor(None), arrays.is_tensor) is None
    assert Container.of({"w": dtensor(), "x": None}, arrays.is_tensor) is None
    assert obstacle({"w": dtensor(), "x": None}, arrays.is_tensor) == "['x'] is a NoneType"


VALUES: dict[str, Callable[[FakeDTensor], Any]] = {
    "alone": lambda sharded: sharded,
    "in a dict": lambda sharded: {"plain": np.ones(3), "w": [sharded]},
}


@pytest.mark.parametrize("name", VALUES)
def test_the_local_tensor_is_that_of_now(name: str) -> None:
    """`to_empty`, `to` and `cpu` of a module keep its DTensors, and give them other local tensors."""
    store, key, sharded = Store(), Key(b"k" * 28), dtensor()
    store.put(key, contain(VALUES[name](sharded)))
    before = store.current(key)
    assert store.current(key) is before
    sharded._local_tensor = fresh = np.ones((2, 6), np.float32)
    now = store.current(key)
    assert isinstance(now, Container)
    assert now.tensors[-1] is fresh
    assert store.current(key) is now is store.look(key)
    for other in (np.ones((2, 6), np.float64), np.ones((3, 6), np.float32), None):
        sharded._local_tensor = other
        absence = store.current(key)
        assert isinstance(absence, Absence)
        assert absence.state is State.REPLACED
        assert absence.detail
    sharded._local_tensor = fresh
    assert store.current(key) is now


def test_no_short_path_is_for_dtensors() -> None:
    plain = np.ones((2, 6), np.float32)
    assert single([contain(plain)]) is plain
    assert single([contain(dtensor())]) is None


def test_placements_travel_with_the_handle() -> None:
    container = contain({"w": dtensor()})
    handle = Handle(
        key=Key(b"k" * 28),
        actor_id="a",
        actor="A",
        address=Address(host="h", port=1, secret=b"s"),
        structure=container.structure,
        infos=tuple(map(arrays.describe, container.tensors)),
        placements=container.placements,
    )
    assert pickle.loads(pickle.dumps(handle)).placements == container.placements
