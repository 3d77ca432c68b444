"""Groups that are refused, and actors that cannot be driven: by name, and the next call works."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.ray_bridge import ray_actors
from tests.support.actors import Worker
from tests.support.checks import refused
from tests.support.waiting import wait_until


def test_group_errors(actors):
    a, b = actors(Worker, 2)
    with refused(errors.UnknownGroupError, "'nope'"):
        col.destroy_collective_group("nope")
    with refused(errors.UnknownGroupError):
        col.barrier()
    col.declare_collective_group([a, b])
    with refused(errors.GroupExistsError, "'default'"):
        col.declare_collective_group([a, b])
    for wrong, text in (({"ranks": [0, 0]}, "permutation"), ({"options": {"colour": 1}}, "colour")):
        with refused(errors.InvalidGroupError, text):
            col.declare_collective_group([a, b], **{"group_name": "g", **wrong})
    with refused(errors.UnknownBackendError, "'mpi'", "shm"):
        col.declare_collective_group([a, b], backend="mpi", group_name="g")
    with refused(errors.BackendUnavailableError, "local"):
        col.declare_collective_group([a, b], backend="local", group_name="g")
    col.declare_collective_group([a, b], group_name="g")


def test_actor_without_a_handle_raises_actor_gone_error(cluster, actors):
    (kept,) = actors(Worker, 1)
    ref = Worker.options(num_cpus=0).remote().get_buffer.remote()
    weak = ray_actors.actor_handle(ref.task_id().actor_id().hex())
    with pytest.raises(ray.exceptions.RayActorError):
        while True:  # Ray ends it in its own time: until then it works
            ray.get(weak.read.remote())
    with pytest.raises(errors.ActorGoneError, match="keep a handle"):
        col.allreduce_refs([ref, kept.get_buffer.remote()])


def when_accepted(submit):
    """What `submit` returns once Ray takes it: an ended call counts as pending for a moment longer."""
    made = []

    def accepted():
        with contextlib.suppress(ray.exceptions.PendingCallsLimitExceeded, errors.DispatchError):
            made.append(submit())
        return bool(made)

    assert wait_until(accepted)
    return made[0]


def test_too_many_pending_calls_in_mid_submit(actors, gate):
    a = actors(Worker, 1)[0]
    b = actors(Worker, 1, max_pending_calls=1)[0]
    group = when_accepted(lambda: col.declare_collective_group([a, b]))
    refs = [a.get_buffer.remote(), when_accepted(b.get_buffer.remote)]
    ray.wait(refs, num_returns=2)
    opened = gate.wait.remote()
    # It can't begin yet, so that the plan behind it has to ask for an actor task.
    blocked = when_accepted(lambda: b.call.remote(lambda self, _: None, opened))
    with pytest.raises(errors.DispatchError, match=r"rank 1.*PendingCallsLimitExceeded"):
        col.allreduce_refs(refs)
    np.testing.assert_array_equal(ray.get(a.read.remote()), np.ones(10))  # rank 0 is out of it already
    ray.get(gate.open.remote())
    ray.get(blocked)
    assert group.status().state == "alive"
    assert when_accepted(lambda: col.allreduce_refs(refs)) == refs
    np.testing.assert_array_equal(when_accepted(lambda: col.get(refs[1])), np.full(10, 2))


def test_ray_client_is_refused(cluster, monkeypatch):
    from ray.util.client import ray as client

    monkeypatch.setattr("ray._private.worker.Worker.connected", property(lambda self: False))
    monkeypatch.setattr(client, "is_connected", lambda: True)
    for use in (lambda: col.allreduce_refs([]), col.timeline, col.progress, col.live):
        with pytest.raises(errors.RayClientError):
            use()
