"""Orders in shared memory whose reader dies, stands still or begins anew, or whose writer is interrupted (P4, P2)."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.channel import OrderBell
from raycollect.channel.doorbell import IN_FLIGHT
from raycollect.driver.controller import Controller
from tests.faults.groups import restart
from tests.support.actors import Worker
from tests.support.waiting import stop, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def rung(monkeypatch):
    """Whether each order, of all participants, found a cell."""
    found, send = [], OrderBell.send

    def noted(self, order):
        found.append(send(self, order))
        return found[-1]

    monkeypatch.setattr(OrderBell, "send", noted)
    return found


def listening(workers, name="rung"):
    """A group whose members listen at the bell, and refs of their buffers."""
    group = col.declare_collective_group(workers, group_name=name)
    refs = [worker.get_buffer.remote() for worker in workers]
    for _ in range(2):  # the first plan is an actor task, the second comes over the connection
        col.allreduce_refs(refs, name)
    assert wait_until(lambda: all(peer._listens for peer in peers(workers)))
    return group, refs


def peers(workers):
    leased = Controller.current().participants._peers
    return [leased[worker._ray_actor_id.hex()] for worker in workers]


def pids(workers):
    return ray.get([worker.call.remote(lambda self: os.getpid()) for worker in workers])


def stop_second(workers, rung):
    """Stops the second actor's process, from where `rung` begins anew; returns its id."""
    pid = pids(workers)[1]
    rung.clear()
    stop(pid)
    return pid


def holds(refs, value):
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(10, value))


def test_who_dies_with_an_order_in_its_cell_is_named(actors, rung):
    workers = actors(Worker, 3)
    _, refs = listening(workers)
    pid = stop_second(workers, rung)
    work = col.allreduce_refs(refs, "rung", async_op=True)
    assert rung == [True] * 3
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.RaycollectError) as caught:
        work.wait(30)
    assert isinstance(caught.value, (errors.ParticipantDiedError, errors.GroupBrokenError)), caught.value
    assert "rank 1" in str(caught.value)


def test_orders_that_find_no_cell_keep_their_place_behind_those_that_did(actors, rung):
    workers = actors(Worker, 2)
    _, refs = listening(workers)  # 4 by now
    pid = stop_second(workers, rung)
    works = [col.allreduce_refs(refs, "rung", async_op=True, op="sum" if turn % 2 else "max") for turn in range(40)]
    assert rung.count(False) >= 2 * (40 - IN_FLIGHT - 1)  # each may have taken one
    assert works[0].cancel()
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(errors.PlanAbortedError):
        works[0].wait(30)
    for work in works[1:]:
        work.wait(30)
    holds(refs, 4.0 * 2**20)
    rung.clear()
    col.allreduce_refs(refs, "rung", op="max")
    assert rung == [True, True], "there are cells again"


def test_who_was_restarted_listens_at_a_bell_of_its_own(actors, rung):
    workers = actors(Worker, 2, max_restarts=1)
    group, _ = listening(workers)
    restart(workers[1])
    with pytest.raises(errors.GroupBrokenError):
        col.allreduce_refs([worker.get_buffer.remote() for worker in workers], "rung")
    group.destroy()
    _, refs = listening(workers, "again")
    rung.clear()
    for _ in range(3):
        col.allreduce_refs(refs, "again", op="max")
    assert rung == [True] * 6


def test_the_lease_ends_with_orders_in_their_cells(actors, rung):
    workers = actors(Worker, 2)
    group, refs = listening(workers)
    pid = stop_second(workers, rung)
    works = [col.allreduce_refs(refs, "rung", async_op=True) for _ in range(3)]
    assert rung == [True] * 6
    group.destroy()
    os.kill(pid, signal.SIGCONT)
    for work in works:
        with pytest.raises(errors.RaycollectError):
            work.wait(30)
    _, refs = listening(workers, "again")
    rung.clear()
    col.allreduce_refs(refs, "again", op="max")
    assert rung == [True, True]
