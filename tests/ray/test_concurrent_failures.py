"""Collectives that wait for their operands, on plain and threaded actors: who fails or stays away is named."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver import dispatch
from tests.support.actors import buffers, wait_in
from tests.support.checks import assert_works
from tests.support.waiting import has_ended, wait_until

THREADS = 4


def test_a_producer_that_raises_while_it_is_waited_for(make_group, gate):
    workers, refs = make_group(2, THREADS)

    def fail(self, gate):
        ray.get(gate.wait.remote())
        raise ValueError("spilled")

    bad = workers[1].make.remote(fail, gate)
    work = col.allreduce_refs([refs[0], bad], async_op=True)
    ray.get(gate.open.remote())
    with pytest.raises(errors.ProducerFailedError, match="spilled") as caught:
        work.wait()
    assert caught.value.violations[0].rank == 1
    np.testing.assert_array_equal(ray.get(workers[0].read.remote()), np.ones(10))
    assert_works(refs)


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


def test_failed_send_of_an_order_aborts_the_call(make_group, monkeypatch):
    """The order reaches rank 0 only: it is aborted there, and no tensor is touched."""
    workers, refs = make_group(3)
    order, told = dispatch.ParticipantLink.order, []

    def second_fails(self, message, letters=None):
        told.append(self.info["actor"])
        if len(told) == 2:
            raise errors.ConnectionLostError(detail="cut")
        order(self, message, letters)

    with monkeypatch.context() as patch, pytest.raises(errors.ParticipantDiedError, match="no order") as caught:
        patch.setattr(dispatch.ParticipantLink, "order", second_fails)
        col.allreduce_refs(refs)
    assert caught.value.rank == 1
    assert len(told) == 2
    for found in ray.get([worker.read.remote() for worker in workers]):
        np.testing.assert_array_equal(found, np.ones(10))
    assert_works(refs)
