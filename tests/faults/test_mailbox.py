"""Letters in shared memory whose reader dies, stands still or begins anew (P4, P2)."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.channel.mailbox import CELLS
from raycollect.driver.controller import Controller
from tests.faults.groups import restart
from tests.support.actors import Worker
from tests.support.waiting import stop

pytestmark = pytest.mark.timeout(120)


def declared(workers, name="letters"):
    """A group, and refs of its members' buffers after two sums."""
    group = col.declare_collective_group(workers, group_name=name)
    refs = [worker.get_buffer.remote() for worker in workers]
    for _ in range(2):  # the first plan is an actor task
        col.allreduce_refs(refs, name)
    return group, refs


def letters(workers):
    """How many letters were written to each of them."""
    leased = Controller.current().participants._peers
    return [leased[worker._ray_actor_id.hex()].slot.number for worker in workers]


def pids(workers):
    return ray.get([worker.call.remote(lambda self: os.getpid()) for worker in workers])


def stop_second(workers):
    """Stops the second actor's process; returns its id."""
    pid = pids(workers)[1]
    stop(pid)
    return pid


def holds(refs, value):
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(10, value))


def test_who_dies_with_a_letter_in_its_cell_is_named(actors):
    workers = actors(Worker, 3)
    _, refs = declared(workers)
    pid = stop_second(workers)
    before = letters(workers)
    work = col.allreduce_refs(refs, "letters", async_op=True)
    assert letters(workers) == [number + 1 for number in before]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.RaycollectError) as caught:
        work.wait(30)
    assert isinstance(caught.value, (errors.ParticipantDiedError, errors.GroupBrokenError)), caught.value
    assert "rank 1" in str(caught.value)


def test_letters_that_find_no_cell_keep_their_place_behind_those_that_did(actors):
    workers = actors(Worker, 2)
    _, refs = declared(workers)  # 4 by now
    pid = stop_second(workers)
    before = letters(workers)
    works = [col.allreduce_refs(refs, "letters", async_op=True, op="sum" if turn % 2 else "max") for turn in range(40)]
    assert letters(workers)[1] == before[1] + CELLS, "no more, as nobody takes them"
    assert works[0].cancel()
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(errors.PlanAbortedError):
        works[0].wait(30)
    for work in works[1:]:
        work.wait(30)
    holds(refs, 4.0 * 2**20)
    before = letters(workers)
    col.allreduce_refs(refs, "letters", op="max")
    assert letters(workers) == [number + 1 for number in before], "there are cells again"


def test_who_was_restarted_has_a_slot_of_its_own(actors):
    workers = actors(Worker, 2, max_restarts=1)
    group, _ = declared(workers)
    restart(workers[1])
    with pytest.raises(errors.GroupBrokenError):
        col.allreduce_refs([worker.get_buffer.remote() for worker in workers], "letters")
    group.destroy()
    _, refs = declared(workers, "again")
    before = letters(workers)
    for _ in range(3):
        col.allreduce_refs(refs, "again", op="max")
    assert letters(workers) == [number + 3 for number in before]


def test_the_lease_ends_with_letters_in_their_cells(actors):
    workers = actors(Worker, 2)
    group, refs = declared(workers)
    pid = stop_second(workers)
    before = letters(workers)
    works = [col.allreduce_refs(refs, "letters", async_op=True) for _ in range(3)]
    assert letters(workers) == [number + 3 for number in before]
    group.destroy()
    os.kill(pid, signal.SIGCONT)
    for work in works:
        with pytest.raises(errors.RaycollectError):
            work.wait(30)
    _, refs = declared(workers, "again")
    before = letters(workers)
    col.allreduce_refs(refs, "again", op="max")
    assert letters(workers) == [number + 1 for number in before]
