"""Groups whose collectives are ordered by their operands: who fails or stays away is named, and the others go on."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver import dispatch
from tests.ray.data_ordered import assert_works, crew, gate, occupy, wait_and_leave, wait_in
from tests.ray.workers import buffers
from tests.waiting import has_ended, wait_until

__all__ = ["crew", "gate", "occupy"]  # fixtures


@pytest.mark.parametrize("when", ["before", "while it is waited for"])
def test_a_producer_that_raises(crew, gate, when):
    workers, refs = crew(2)

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
    assert_works(refs, workers)


def test_timeout_names_a_participant_that_is_not_ready(crew, gate):
    workers, refs = crew(3)
    late = workers[1].make.remote(wait_in, gate)
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        col.allreduce_refs([refs[0], late, refs[2]], timeout_s=3)  # in which the others are ready
    assert caught.value.missing == (1,)
    assert "rank 1 (Buffers(" in str(caught.value)
    assert "after 3 s" in str(caught.value)
    assert col.get(refs[0])[0] == 1
    ray.get(gate.open.remote())
    assert_works(refs, workers)
    assert_works([refs[0], late, refs[2]], workers)


def test_timeout_names_a_participant_busy_in_a_method(crew, gate, occupy):
    """Its operand is there, but the method that runs has its turn."""
    workers, refs = crew(3)
    running = occupy(workers[2])
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        col.allreduce_refs(refs, timeout_s=3)  # in which the others are ready
    assert caught.value.missing == (2,)
    ray.get(gate.open.remote())
    ray.wait([running])
    for found in ray.get([worker.read.remote() for worker in workers]):
        np.testing.assert_array_equal(found, np.ones(10))
    assert_works(refs, workers)


def test_call_without_a_ready_participant_ends_at_its_limit(crew, gate):
    workers, _ = crew(2)
    late = [worker.make.remote(wait_in, gate) for worker in workers]
    work = col.allreduce_refs(late, async_op=True, timeout_s=0.5)
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        work.wait()
    assert (caught.value.timeout_s, [one.rank for one in caught.value.reports]) == (0.5, [0, 1])
    ray.get(gate.open.remote())
    col.allreduce_refs(late)
    np.testing.assert_array_equal(col.get(late[0]), np.full(10, 2))


@pytest.mark.full
def test_call_without_a_limit_of_its_own_waits_for_participants(crew, gate):
    workers, _ = crew(2, timeout_s=3)
    late = [worker.make.remote(wait_in, gate) for worker in workers]
    work = col.allreduce_refs(late, async_op=True)
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        work.wait(timeout_s=4)
    ray.get(gate.open.remote())
    work.wait()
    np.testing.assert_array_equal(col.get(late[0]), np.full(10, 2))


@pytest.mark.parametrize("awaited", ["operand", "turn"])
def test_cancel(crew, gate, occupy, awaited):
    workers, refs = crew(2)
    blocked = occupy(workers[1])
    work = col.allreduce_refs([refs[0], blocked if awaited == "operand" else refs[1]], async_op=True)
    follower = col.allreduce_refs(refs, async_op=True)
    assert work.cancel()
    with pytest.raises(errors.PlanAbortedError, match="cancelled"):
        work.wait()
    crew.group.statistics()  # what has answered has heard of it
    ray.get(gate.open.remote())
    follower.wait()
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 2))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_participant_that_dies_while_one_waits(crew, gate, victim):
    """If the rank that makes the operand dies, Ray may tell of the operand before the connection tells of the rank."""
    workers, refs = crew(3)
    pid = crew.group.status().members[victim].pid
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
    col.declare_collective_group(living, group_name="living", ordering="data")
    assert_works(buffers(living), living, group_name="living")


@pytest.mark.parametrize("awaited", ["operand", "turn", "the others"])
def test_a_group_that_is_destroyed_while_one_waits(crew, gate, occupy, awaited):
    workers, refs = crew(2)
    blocked = occupy(workers[1], wait_and_leave)
    mine = 0 if awaited == "the others" else 1
    operands = [refs[0], blocked if awaited == "operand" else refs[1]]
    work = col.allreduce_refs(operands, async_op=True)
    col.destroy_collective_group()
    with pytest.raises(errors.PlanAbortedError, match="destroyed"):
        work.wait()
    ray.get(gate.open.remote())
    ray.wait([blocked])
    assert ray.get(workers[mine].read.remote())[0] == 1
    col.declare_collective_group(workers, ordering="data")
    refs = buffers(workers)
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[mine]), np.full(10, 2))


def test_failed_send_of_an_order_aborts_the_call(crew, monkeypatch):
    """The order reaches rank 0 only: it is aborted there, and no tensor is touched."""
    workers, refs = crew(3)
    order, told = dispatch.ParticipantLink.order, []

    def second_fails(self, message):
        told.append(self.info["actor"])
        if len(told) == 2:
            raise errors.ConnectionLostError(detail="cut")
        order(self, message)

    with monkeypatch.context() as patch, pytest.raises(errors.ParticipantDiedError, match="no order") as caught:
        patch.setattr(dispatch.ParticipantLink, "order", second_fails)
        col.allreduce_refs(refs)
    assert caught.value.rank == 1
    assert len(told) == 2
    for found in ray.get([worker.read.remote() for worker in workers]):
        np.testing.assert_array_equal(found, np.ones(10))
    assert_works(refs, workers)
