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

    def get(self):
        return self.weights

    @col.by_value
    def fill(self, value, name=None):
        for array in [self.weights[name]] if name else self.weights.values():
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


@pytest.mark.parametrize("count", COUNTS)
def test_versions_of_very_many_tensors_are_right_and_a_tensor_that_differs_is_named(actors, count):
    trainer, replica, *rollouts = actors(Model, 4)
    refs = [actor.make.remote(count, 0) for actor in (trainer, replica, *rollouts)]
    name = f"many {count}"
    with col.publish(refs[:2], name) as pub, col.subscribe(name, refs[2:]) as sub:
        for value in (1, 2, 3):
            ray.get([actor.fill.remote(value) for actor in (trainer, replica)])
            pub.put()
            (receipt,) = pub.push([sub])
            assert hold(rollouts, value)
            assert [one.nbytes for one in receipt.ranks] == [receipt.version.nbytes] * 2
            assert all(one.digests == receipt.version.digests for one in receipt.ranks)
        assert receipt.version.dtypes.keys() == set(names(count))
        wrong = names(count)[count // 3]
        ray.get(replica.fill.remote(4, wrong))
        with pytest.raises(errors.VersionNotPutError) as caught:
            pub.put()
        assert repr(wrong) in caught.value.detail
        ray.get(trainer.fill.remote(4, wrong))
        pub.put()
        assert pub.push([sub])[0].version.number == 4
        held = col.get([rollout.get.remote() for rollout in rollouts])
        assert [float(one[wrong][0]) for one in held] == [4.0, 4.0]
