"""Streams over Ray: parts of a version reach receivers before the others are made, and are seen all at once."""

from __future__ import annotations

import os

import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.ray.weight_actors import Weights, looks, replicas

SHAPES = {f"layer{at}": (4, 6) for at in range(6)}
NBYTES = 6 * 4 * 6 * 4


@pytest.fixture
def gate(tmp_path):
    """What lets the last layer be made, when it is written."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def tells_of_each(actor):
    """Has a trainer tell of each part, however small."""

    def inside(_):
        from raycollect.weights import agent

        agent.TOLD_NBYTES = 1

    ray.get(actor.__ray_call__.remote(inside))


def ahead(actor, sub):
    """How many bytes a stream has brought to a receiver."""

    def inside(_, subscription):
        from raycollect.weights.agent import _locked

        with _locked() as agents:
            return [one._ahead for one in agents.receivers[subscription].values()]

    return sum(ray.get(actor.__ray_call__.remote(inside, sub._id)))


def test_layers_are_moved_while_the_last_is_computed_and_seen_all_at_once(actors, name, gate):
    trainer, *rollouts = actors(Weights, 3)
    tells_of_each(trainer)
    with (
        col.publish(replicas([trainer], SHAPES), name) as pub,
        col.subscribe(name, replicas(rollouts, SHAPES)) as sub,
    ):
        stream = pub.stream([sub])
        stream.call("fill_each", 1, until=str(gate))
        while min(ahead(one, sub) for one in rollouts) < NBYTES * 5 // 6:
            stream._pump(0.01)  # what `part` and `commit` do
        assert looks(rollouts, sub) == [([0.0], 0)] * 2
        with pytest.raises(errors.UnknownVersionError):
            sub.update()
        gate.write_text("go")
        (receipt,) = stream.commit()
        assert receipt.version == stream.version == sub.version()
        assert all(one.digests == stream.version.digests for one in receipt.ranks)
        assert receipt.nbytes == 2 * NBYTES  # each byte once
        assert looks(rollouts, sub) == [([1.0], 1)] * 2


def test_parts_behind_methods_and_what_is_no_part(actors, name):
    trainers, rollout = actors(Weights, 2), actors(Weights, 1)[0]
    with (
        col.publish(replicas(trainers, SHAPES), name) as pub,
        col.subscribe(name, replicas([rollout], SHAPES)) as sub,
    ):
        stream = pub.stream([sub])
        for at in range(3):
            for one in trainers:
                one.fill.remote(2, [f"layer{at}"])
            stream.part(f"layer{at}")
        for one in trainers:
            one.fill.remote(2)  # the others; it has no meaning for parts
        (receipt,) = stream.commit()
        assert looks([rollout], sub) == [([2.0], 1)]
        assert receipt.nbytes == NBYTES
        with pytest.raises(errors.InvalidArgumentError, match="'other'"):
            pub.stream([sub]).part("other")
        with col.subscribe(name, replicas(actors(Weights, 1), SHAPES)) as late:
            assert late.update().version == receipt.version


def test_tensors_that_a_method_yields_take_the_place_of_those_published(actors, name):
    trainer, rollout = actors(Weights, 2)
    with (
        col.publish(replicas([trainer], SHAPES), name) as pub,
        col.subscribe(name, replicas([rollout], SHAPES)) as sub,
    ):
        stream = pub.stream([sub])
        stream.call("make_each", 3)
        stream.commit()
        assert looks([rollout], sub) == [([3.0], 1)]
        assert looks([trainer], None) == [([0.0], 0)]


def test_pain_1_a_layer_that_fails_leaves_no_half_version(actors, name):
    trainer, rollout = actors(Weights, 2)
    with (
        col.publish(replicas([trainer], SHAPES), name) as pub,
        col.subscribe(name, replicas([rollout], SHAPES)) as sub,
    ):
        ray.get(trainer.fill.remote(1))
        pub.put()
        sub.update()
        stream = pub.stream([sub])
        stream.call("fill_each", 2, fails_at="layer4")
        with pytest.raises(errors.VersionNotPutError, match="'fill_each' raised ValueError: no such layer") as raised:
            stream.commit()
        assert raised.value.rank == 0
        assert looks([rollout], sub) == [([1.0], 1)]
        assert sub.update().version.number == 1  # and what it had can be had again
        again = pub.stream([sub])
        again.call("fill_each", 2)
        (receipt,) = again.commit()
        assert (receipt.version.number, receipt.skipped) == (2, 0)
        assert looks([rollout], sub) == [([2.0], 2)]
        with pytest.raises(errors.VersionNotPutError, match="another version was put"):
            stream.commit()


@pytest.mark.parametrize("who", ["trainer", "receiver"])
def test_pain_2_a_death_in_the_middle_of_a_stream(actors, name, who, gate):
    trainer, *rollouts = actors(Weights, 3)
    tells_of_each(trainer)
    with (
        col.publish(replicas([trainer], SHAPES), name) as pub,
        col.subscribe(name, replicas(rollouts, SHAPES)) as sub,
    ):
        stream = pub.stream([sub])
        stream.call("fill_each", 1, until=str(gate))
        while not ahead(rollouts[1], sub):
            stream._pump(0.01)
        ray.kill(trainer if who == "trainer" else rollouts[0])
        if who == "trainer":
            with pytest.raises(errors.VersionNotPutError, match="its process has ended"):
                stream.commit()
            assert looks(rollouts, sub) == [([0.0], 0)] * 2
        else:
            gate.write_text("go")
            assert stream.commit()[0].lost == (0,)
            assert looks(rollouts[1:], sub) == [([1.0], 1)]
