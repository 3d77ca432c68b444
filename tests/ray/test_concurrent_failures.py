"""Collectives of threaded actors, which wait for their operands: who fails or stays away is named, and others go on."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actors import Gate, buffers, wait_and_leave, wait_in
from tests.support.checks import assert_works
from tests.support.waiting import has_ended, wait_until

THREADS = 4


@pytest.fixture
def occupy(actors, gate):
    """Lets a method of a worker run until the gate opens: gives its ref, once it has begun."""

    def begin(worker, wait=wait_in):
        (begun,) = actors(Gate, 1, max_concurrency=8)
        ref = worker.make.remote(wait, gate, begun)
        ray.get(begun.wait.remote())
        return ref

    return begin


@pytest.mark.parametrize("when", ["before", "while it is waited for"])
def test_a_producer_that_raises(make_group, gate, when):
    workers, refs = make_group(2, THREADS)

    def fail(self, gate):
        ray.get(gate.wait.remote())
        raise ValueError("spilled")

    if when == "before":
        ray.get(gate.open.remote())
    bad = workers[1].make.remote(fail, gate)
    if when == "before":
        ray.wait([bad])
    work = col.allreduce_refs([refs[0], bad], async_op=True)
    ray.get(gate.open.remote())
    with pytest.raises(errors.ProducerFailedError, match="spilled") as caught:
        work.wait()
    assert caught.value.violations[0].rank == 1
    np.testing.assert_array_equal(ray.get(workers[0].read.remote()), np.ones(10))
    assert_works(refs)


def test_cancel(make_group, gate, occupy):
    workers, refs = make_group(2, THREADS)
    blocked = occupy(workers[1])
    work = col.allreduce_refs([refs[0], blocked], async_op=True)
    follower = col.allreduce_refs(refs, async_op=True)
    assert work.cancel()
    with pytest.raises(errors.PlanAbortedError, match="cancelled"):
        work.wait()
    make_group.group.statistics()  # what has answered has heard of it
    ray.get(gate.open.remote())
    follower.wait()
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 2))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_participant_that_dies_while_one_waits(make_group, gate, victim):
    """If the rank that makes the operand dies, Ray may tell of the operand before the connection tells of the rank."""
    workers, refs = make_group(3, THREADS)
    pid = make_group.group.status().members[victim].pid
    late = workers[1].make.remote(wait_in, gate)
    work = col.allreduce_refs([refs[0], late, refs[2]], async_op=True)
    ray.kill(workers[victim])
    with pytest.raises((errors.ParticipantDiedError, errors.TensorLostError)) as caught:
        work.wait()
    error = caught.value
    lost = isinstance(error, errors.TensorLostError)
    assert (error.violations[0].rank if lost else error.rank) == victim
    assert victim == 1 or not lost
    assert wait_until(lambda: has_ended(pid)), "as long as it lives it takes part"
    with pytest.raises((errors.GroupBrokenError, errors.ParticipantDiedError) if lost else errors.GroupBrokenError):
        col.allreduce_refs(refs)
    ray.get(gate.open.remote())
    living = [worker for rank, worker in enumerate(workers) if rank != victim]
    col.declare_collective_group(living, group_name="living")
    assert_works(buffers(living), group_name="living")


def test_a_group_that_is_destroyed_while_one_waits(make_group, gate, occupy):
    workers, refs = make_group(2, THREADS)
    blocked = occupy(workers[1], wait_and_leave)
    work = col.allreduce_refs([refs[0], blocked], async_op=True)
    col.destroy_collective_group()
    with pytest.raises(errors.PlanAbortedError, match="destroyed"):
        work.wait()
    ray.get(gate.open.remote())
    ray.wait([blocked])
    assert [one[0] for one in ray.get([worker.read.remote() for worker in workers])] == [1, 1]
    col.declare_collective_group(workers)
    refs = buffers(workers)
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[1]), np.full(10, 2))
