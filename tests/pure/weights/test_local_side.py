"""A rank's tensors and its layouts: what is to be written lies in memory of its own."""

from __future__ import annotations

import numpy as np
import pytest

from raycollect import layout
from raycollect.backends import arrays
from raycollect.errors import AliasError, TensorReplacedError
from raycollect.pos import Container
from raycollect.weights.local_side import LocalSide
from tests.pure.dtensors import FakeDTensor, FakeMesh, Shard


def side(tensors, *, is_written):
    layouts = {name: layout(tensor.shape, mesh={"one": 1}, dtype=tensor.dtype.name) for name, tensor in tensors.items()}
    return LocalSide("subscribe", Container.of(tensors, arrays.is_tensor), layouts, 0, is_written=is_written)


WHOLE = np.arange(24.0).reshape(4, 6)
OVERLAPPING = {
    "tied": {"a": WHOLE, "b": WHOLE, "c": np.zeros(3)},
    "in part": {"a": WHOLE[:3], "c": np.zeros(3), "b": WHOLE[2:]},
    "inside": {"a": WHOLE, "b": WHOLE[1, 2:4]},
}


@pytest.mark.parametrize("what", OVERLAPPING)
def test_what_overlaps_is_read_and_not_written(what):
    side(OVERLAPPING[what], is_written=False)
    with pytest.raises(AliasError, match=r"tensor '[ab]'.*overlapping tensor '[ab]'"):
        side(OVERLAPPING[what], is_written=True)


def test_neighbours_and_interleaved_columns_are_written():
    local = side({"a": WHOLE[:2], "b": WHOLE[2:], "none": WHOLE[:0]}, is_written=True)
    assert [tensor.shape for tensor in local.live()] == [(2, 6), (2, 6), (0, 6)]
    side({"left": WHOLE[:, :3], "right": WHOLE[:, 3:]}, is_written=True)


def test_what_overlaps_itself_is_read_and_not_written():
    repeated = np.lib.stride_tricks.as_strided(WHOLE, (4, 6), (0, 8))
    side({"a": repeated}, is_written=False)
    with pytest.raises(AliasError, match=r"tensor 'a'.*overlapping itself"):
        side({"a": repeated}, is_written=True)


@pytest.mark.parametrize("is_written", [False, True])
def test_the_local_tensors_of_dtensors_are_those_of_now(is_written):
    """`to_empty`, `to` and `cpu` of a module keep its DTensors, and give them other local tensors."""
    dtensor = FakeDTensor(WHOLE.copy(), (4, 6), FakeMesh(np.arange(1), (0,)), (Shard(0),))
    local = side({"w": dtensor}, is_written=is_written)
    assert np.may_share_memory(local.live()[0], dtensor.to_local())
    dtensor._local_tensor = fresh = WHOLE + 1
    assert np.may_share_memory(local.live()[0], fresh)
    assert local.owners()[0] is fresh
    dtensor._local_tensor = WHOLE.astype("float32")
    with pytest.raises(TensorReplacedError):
        local.live()
