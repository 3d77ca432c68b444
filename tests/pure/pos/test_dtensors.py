"""DTensors among what a process keeps: they stand for their local tensors, and their handles say how these lie."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.core.model import TENSOR, Address, Key
from raycollect.engine.run_cache import single
from raycollect.pos import Container, obstacle
from raycollect.pos.handle import Handle
from tests.pure.dtensors import FakeDTensor, FakeMesh, Shard


def dtensor(coordinate: Any = (1,)) -> FakeDTensor:
    return FakeDTensor(np.zeros((2, 6), np.float32), (4, 6), FakeMesh(np.arange(2), coordinate), (Shard(0),))


def kept(value: Any) -> Container:
    found = Container.of(value, arrays.is_tensor)
    assert found is not None
    return found


def test_a_dtensor_is_kept_as_its_local_tensor() -> None:
    one, plain = dtensor(), np.ones(3)
    found = kept({"plain": plain, "w": one})
    assert [tensor is local for tensor, local in zip(found.tensors, (plain, one._local_tensor), strict=True)] == [
        True
    ] * 2
    ((at, placement),) = found.placements
    assert (at, placement.at, placement.shape) == (1, 1, (4, 6))
    alone = kept(one)
    assert alone.structure is TENSOR
    assert alone.value is one
    assert kept(plain).placements == ()


def test_one_of_another_mesh_and_what_lies_beside_others_go_by_value() -> None:
    assert Container.of(dtensor(None), arrays.is_tensor) is None
    assert Container.of({"w": dtensor(), "x": None}, arrays.is_tensor) is None
    assert obstacle({"w": dtensor(), "x": None}, arrays.is_tensor) == "['x'] is a NoneType"


def test_no_short_path_is_for_dtensors() -> None:
    plain = np.ones((2, 6), np.float32)
    assert single([kept(plain)]) is plain
    assert single([kept(dtensor())]) is None


def test_placements_travel_with_the_handle() -> None:
    found = kept({"w": dtensor()})
    handle = Handle(
        key=Key(b"k" * 28),
        actor_id="a",
        actor="A",
        address=Address(host="h", port=1, secret=b"s"),
        structure=found.structure,
        infos=tuple(map(arrays.describe, found.tensors)),
        placements=found.placements,
    )
    assert pickle.loads(pickle.dumps(handle)).placements == found.placements
