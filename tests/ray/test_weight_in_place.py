"""Receivers that have no second set of tensors: their methods see a whole version, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.ray.weight_actors import Weights, replicas, spoil


def run(actor, function, *args):
    """Runs a function in an actor, where methods may be refused."""
    return ray.get(actor.__ray_call__.remote(function, *args))


def test_versions_in_place_and_what_others_have_written_is_read_again(actors, name):
    trainer, rollout, newcomer = actors(Weights, 3)
    with (
        col.publish(replicas([trainer]), name) as pub,
        col.subscribe(name, replicas([rollout]), inplace=True) as sub,
    ):
        for number in (1, 2):
            ray.get(trainer.fill.remote(number))
            pub.put()
            assert sub.update().nbytes == sub.version().nbytes
            assert ray.get(rollout.look.remote(sub)) == ([number], number)
        ray.get(rollout.fill.remote(9, ["bias"]))  # its digest is known, but is not that of what lies there
        assert sub.update().nbytes == 5 * 4
        assert ray.get(rollout.look.remote(sub)) == ([2.0], 2)
        ray.kill(trainer)
        with col.subscribe(name, replicas([newcomer])) as late:  # which it serves
            assert late.update().version == sub.version()


def test_pain_1_a_receiver_that_is_dirty_refuses_to_compute(actors, name):
    trainer, rollout = actors(Weights, 2)
    refs = replicas([rollout])
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, refs, inplace=True) as sub:
        ray.get(trainer.fill.remote(1))
        pub.put()
        sub.update()
        ray.get(trainer.fill.remote(2))
        pub.put()
        run(trainer, spoil)
        with pytest.raises(errors.VersionNotWholeError, match="other bits than were put"):
            sub.update()
        with pytest.raises(errors.VersionDirtyError, match="in place has begun") as raised:
            ray.get(rollout.look.remote(sub))
        assert (raised.value.cause.rank, raised.value.cause.name) == (0, name)
        with pytest.raises(errors.TensorDirtyError):
            col.get(refs[0])
        pub.put()
        sub.update()
        assert ray.get(rollout.look.remote(sub)) == ([2.0], 3)
        np.testing.assert_equal(col.get(refs[0])["bias"], 2)
