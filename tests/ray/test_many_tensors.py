"""Dicts of very many tensors: right at once and in loops, in batches and between layouts; one odd tensor is named."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support import actor_pool

COUNTS = [20_000, pytest.param(100_000, marks=pytest.mark.full)]


def names(count):
    return [f"layers.{at // 100}.experts.{at % 100}.weight" for at in range(count)]


@actor_pool.reusable
@ray.remote(num_cpus=0)
class Model(col.CollectiveParticipant):
    """Holds a dict of small tensors."""

    def __init__(self):
        self.weights = {}

    def make(self, count, value, odd=-1):
        self.weights = {name: np.full(3 + (at == odd), value, np.float32) for at, name in enumerate(names(count))}
        return self.weights

    @col.by_value
    def fill(self, value):
        for array in self.weights.values():
            array.fill(value)

    @col.by_value
    def holds(self, value):
        return all(array[0] == value == array[-1] for array in self.weights.values())


def hold(actors, value):
    return all(ray.get([actor.holds.remote(value) for actor in actors]))


@pytest.mark.parametrize("count", COUNTS)
def test_a_broadcast_of_very_many_tensors_is_right_at_once_and_in_a_loop(actors, count):
    models = actors(Model, 2)
    group = col.declare_collective_group(models, group_name="many")
    refs = [actor.make.remote(count, float(rank)) for rank, actor in enumerate(models)]
    for value in (5.0, 6.0):
        ray.get(models[0].fill.remote(value))
        col.broadcast_refs(refs, group_name="many")
        assert hold(models, value)
    ray.get(models[0].fill.remote(7.0))
    with col.batch():
        col.broadcast_refs(refs, group_name="many")
    assert hold(models, 7.0)
    odd = models[1].make.remote(count, 1.0, odd=count - 1)
    with pytest.raises(errors.MismatchError) as caught:
        col.broadcast_refs([refs[0], odd], group_name="many")
    (violation,) = caught.value.violations
    assert (violation.rank, violation.field) in ((0, "shape"), (1, "shape"))
    assert names(count)[-1] in violation.found
    assert hold(models[1:], 1.0), "nothing was written"
    group.destroy()


@pytest.mark.parametrize("count", COUNTS)
def test_a_reshard_of_very_many_tensors_is_right_at_once_and_in_a_loop(actors, count):
    models = actors(Model, 2)
    group = col.declare_collective_group(models, group_name="many")
    refs = [actor.make.remote(count, float(rank)) for rank, actor in enumerate(models)]
    layouts = {name: col.layout([3], mesh={"rank": 1}, spec=()) for name in names(count)}
    for value in (5.0, 6.0):
        ray.get(models[0].fill.remote(value))
        col.reshard_refs(refs[:1], refs[1:], src=layouts, dst=layouts, group_name="many")
        assert hold(models, value)
    group.destroy()
