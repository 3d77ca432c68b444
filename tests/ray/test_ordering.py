"""Collectives among the methods of plain and threaded actors, and what keeps them apart."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError

import raycollect as col
from raycollect import errors
from raycollect.driver import dispatch
from tests.support.actors import wait_in
from tests.support.checks import assert_works


@pytest.mark.parametrize("threads", [1, 4])
def test_a_call_waits_for_the_methods_that_return_its_operands(make_group, gate, threads):
    workers, refs = make_group(3, threads)
    late = workers[1].make.remote(wait_in, gate)
    work = col.allreduce_refs([refs[0], late, refs[2]], async_op=True)
    behind = col.allreduce_refs(refs, async_op=True)
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        behind.wait(timeout_s=0.3)
    assert not work.done()
    ray.get(gate.open.remote())
    work.wait()
    behind.wait()
    np.testing.assert_array_equal(col.get(late), np.full(10, 9))


@pytest.mark.parametrize("threads", [1, 4])
def test_get_waits_for_the_calls_that_write_a_tensor_and_no_longer_than_it_may(make_group, gate, threads):
    workers, refs = make_group(2, threads)
    handle = ray.get(refs[0])
    late = workers[1].make.remote(wait_in, gate)
    work = col.allreduce_refs([refs[0], late], async_op=True)
    for given in (refs[0], handle, [handle, refs[0]]):
        with pytest.raises(GetTimeoutError, match="allreduce, which writes the tensor, has not ended in time"):
            col.get(given, timeout_s=0.2)
    ray.get(gate.open.remote())
    for found in col.get([handle, refs[0]], timeout_s=60):
        np.testing.assert_array_equal(found, np.full(10, 2))
    work.wait()


def test_failed_send_of_an_order_aborts_the_call(make_group, monkeypatch):
    """The order reaches rank 0 only: it is aborted there, and no tensor is touched."""
    workers, refs = make_group(3)
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
    assert_works(refs)
