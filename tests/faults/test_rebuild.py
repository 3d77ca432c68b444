"""A group that has lost a member, or its connections, is formed again."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.faults.groups import assert_sums, kill
from tests.support.actors import Gate, Worker, block, filled

BACKENDS = ["shm", pytest.param("tcp", marks=pytest.mark.full), "gloo"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rebuild_over_the_survivors(actors, backend):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers, backend=backend)
    assert_sums(group)
    refs = filled(workers, (1, 2, 3))
    kill(workers[1])
    with pytest.raises((errors.ParticipantDiedError, errors.GroupBrokenError), match=r"group\.rebuild|declare"):
        while True:  # until the driver has heard of it
            col.allreduce_refs(refs)
    assert group.rebuild() is group
    assert (group.epoch, group.world_size, group.backend) == (1, 2, backend)
    assert group.actors == (workers[0], workers[2])
    assert group.status().state == "alive"
    assert_sums(group)
    with pytest.raises(errors.RefusedError):
        col.allreduce_refs(refs)  # one of them was the dead member's


@pytest.mark.parametrize("backend", BACKENDS)
def test_rebuild_with_a_replacement_at_the_same_rank(actors, backend):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers, backend=backend, group_name="team")
    ray.kill(workers[0])
    (other,) = actors(Worker, 1)
    group.rebuild([other, workers[2], workers[1]])
    assert group.actors == (other, workers[2], workers[1])
    assert_sums(group)
    group.rebuild([workers[1], other, workers[2]])  # nobody has died: it is another order
    assert group.epoch == 2
    assert_sums(group)


def test_rebuild_aborts_running_plans_and_ignores_late_arrivals(actors):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)
    (gate,), others = actors(Gate, 1, max_concurrency=8), actors(Worker, 2)
    refs = filled(workers, (1, 2))
    blocked = block(workers[1], gate)
    work = col.allreduce_refs(refs, async_op=True)
    group.rebuild(others)  # it does not wait for those that are busy, and are no members any more
    with pytest.raises(errors.PlanAbortedError):
        work.wait(30)
    ray.get(workers[0].read.remote())  # behind the plan, which it has given up by then
    ray.get([gate.open.remote(), blocked])
    for found, value in zip(col.get(refs), (1, 2), strict=True):
        np.testing.assert_array_equal(found, np.full(7, value))
    assert_sums(group)


def test_rebuild_waits_for_running_methods_of_kept_members(actors):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)
    gates = actors(Gate, 2, max_concurrency=8)
    refs = filled(workers, (1, 2))
    before = block(workers[1], gates[0])
    work = col.allreduce_refs(refs, async_op=True)
    after = block(workers[1], gates[1])
    thread = threading.Thread(target=group.rebuild)
    thread.start()  # it waits for the member that is busy
    ray.get([gates[0].open.remote(), before])
    work.wait(30)
    assert thread.is_alive()
    ray.get([gates[1].open.remote(), after])
    thread.join(30)
    assert not thread.is_alive()
    assert group.epoch == 1
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(7, 3))
    assert_sums(group)


def test_a_group_that_could_not_be_rebuilt_may_be_rebuilt_again(actors):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers, backend="shm")

    def forget(self):
        from dataclasses import replace

        from raycollect import backends

        self.whole = backends.BACKENDS["shm"]
        backends.BACKENDS["shm"] = replace(self.whole, libraries=("no_such_library",), install="pip install it")

    def remember(self):
        from raycollect import backends

        backends.BACKENDS["shm"] = self.whole

    ray.get(workers[1].call.remote(forget))
    with pytest.raises(errors.BackendNotInstalledError, match="pip install it"):
        group.rebuild()
    assert group.status().state == "broken"
    refs = filled(workers, (1, 2))
    with pytest.raises(errors.GroupBrokenError, match=r"could not be rebuilt.*pip install it"):
        col.allreduce_refs(refs)
    ray.get(workers[1].call.remote(remember))
    group.rebuild()
    assert_sums(group)


def test_rebuild_without_a_live_member_raises_group_broken_error(actors):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)
    for worker in workers:
        kill(worker)  # ray.kill leaves it time to answer
    with pytest.raises(errors.GroupBrokenError, match="no member is alive"):
        group.rebuild()
    group.destroy()
