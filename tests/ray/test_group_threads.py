"""Several threads form, change, use and end groups at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from time import monotonic

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.core import threads
from raycollect.driver import member_discovery
from tests.support.actors import Gate, Worker, block, filled, groups_here
from tests.support.waiting import is_in, wait_until

WAIT_S = 20.0
LONG_S = 60.0  # far more than anything here takes


class Held:
    """A call in another thread that asks an actor which is busy until a gate opens."""

    def __init__(self, actors, call):
        (self.busy,), (self._gate,) = actors(Worker, 1), actors(Gate, 1, max_concurrency=8)
        self._end = block(self.busy, self._gate)
        self._thread = 0
        self.result: Future = threads.call_in_helper(self._run, call)
        assert wait_until(lambda: is_in(member_discovery.describe, self._thread))

    def _run(self, call):
        self._thread = threading.get_ident()
        return call(self.busy)

    def let_go(self):
        ray.get([self._gate.open.remote(), self._end], timeout=WAIT_S)


def ones(workers):
    return filled(workers, [1.0] * len(workers))


def test_forming_a_group_holds_up_no_call_of_another_thread(actors):
    """The group waits for a member that is busy. All other groups are used, formed, changed and ended meanwhile."""
    trio = actors(Worker, 3)
    known = col.declare_collective_group(trio[:2], group_name="known")
    refs = ones(trio)
    col.allreduce_refs(refs[:2], "known", timeout_s=WAIT_S)
    col.allreduce_refs(refs[:2], timeout_s=WAIT_S)
    held = Held(actors, lambda busy: col.declare_collective_group([*trio, busy], group_name="late", timeout_s=LONG_S))
    began_s = monotonic()
    col.allreduce_refs(refs[:2], "known", timeout_s=WAIT_S)
    col.allreduce_refs(refs[:2], timeout_s=WAIT_S)
    col.broadcast_refs(refs[1:], timeout_s=WAIT_S)  # derived now
    other = col.declare_collective_group(trio, group_name="other", timeout_s=WAIT_S)
    known.add(trio[2], timeout_s=WAIT_S)
    known.rebuild(trio[1:], timeout_s=WAIT_S)
    col.allreduce_refs(refs[1:], "known", timeout_s=WAIT_S)
    with pytest.raises(errors.UnknownGroupError):
        col.destroy_collective_group("late")  # it is none before it is formed
    other.destroy()
    assert monotonic() - began_s < LONG_S / 2
    assert not held.result.done()
    held.let_go()
    group = held.result.result(WAIT_S)
    assert group.world_size == 4
    col.allreduce_refs(ones(group.actors), "late", timeout_s=WAIT_S)
    np.testing.assert_array_equal(ray.get(trio[0].read.remote()), np.full(7, 4))


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_thread_that_declares_a_name_waits_for_the_first(actors, fails):
    pair = actors(Worker, 2)
    declare = lambda members: col.declare_collective_group(members, group_name="g", timeout_s=LONG_S)  # noqa: E731
    held = Held(actors, lambda busy: declare([pair[0], busy]))
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        col.declare_collective_group(pair, group_name="g", timeout_s=0.1)
    assert caught.value.group_name == "g"
    second = threads.call_in_helper(declare, pair)
    if fails:
        ray.kill(held.busy)
        with pytest.raises(errors.ActorGoneError):
            held.result.result(WAIT_S)
        assert second.result(WAIT_S).world_size == 2
        col.allreduce_refs(ones(pair), "g", timeout_s=WAIT_S)
    else:
        held.let_go()
        held.result.result(WAIT_S)
        with pytest.raises(errors.GroupExistsError):
            second.result(WAIT_S)


def test_a_group_that_is_destroyed_while_its_members_change_stays_destroyed(actors):
    pair = actors(Worker, 2)
    group = col.declare_collective_group(pair, group_name="g")
    held = Held(actors, lambda busy: group.add(busy, timeout_s=LONG_S))
    group.destroy()
    assert group.status(timeout_s=0).state == "destroyed"
    held.let_go()
    with pytest.raises(errors.UnknownGroupError):
        held.result.result(WAIT_S)
    col.declare_collective_group([*pair, held.busy], group_name="g", timeout_s=WAIT_S)
    col.allreduce_refs(ones([*pair, held.busy]), "g", timeout_s=WAIT_S)


def test_threads_derive_one_group_of_the_same_actors(actors):
    trio = actors(Worker, 3)
    refs = ones(trio)
    barrier = threading.Barrier(4)

    def call():
        barrier.wait(WAIT_S)
        for _ in range(5):
            col.broadcast_refs(refs, timeout_s=WAIT_S)

    for one in [threads.call_in_helper(call) for _ in range(4)]:
        one.result(WAIT_S)
    assert ray.get(trio[0].call.remote(groups_here)) == 1


def test_threads_form_use_and_end_groups_over_shared_actors(actors):
    """Each actor is leased, and given back, by several threads at once."""
    workers = actors(Worker, 4)

    def live(number):
        for turn in range(6):
            members = [workers[(number + turn) % 4], workers[(number + turn + 1 + number % 2) % 4]]
            name = f"group {number}"
            group = col.declare_collective_group(members, group_name=name, timeout_s=LONG_S)
            refs = [one.make.remote(lambda self: np.ones(5)) for one in members]
            col.allreduce_refs(refs, name, timeout_s=LONG_S)
            np.testing.assert_array_equal(col.get(refs), np.full((2, 5), 2))
            group.destroy()

    for one in [threads.call_in_helper(live, number) for number in range(4)]:
        one.result(3 * LONG_S)
    assert wait_until(lambda: not any(ray.get([one.call.remote(groups_here) for one in workers])))


# ---------------------------------------------------------------------------------------------- derived groups


def test_many_pairs_in_a_loop_keep_their_groups(actors):
    """The second round forms nothing."""
    workers = actors(Worker, 6)
    refs = ones(workers)
    pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
    for a, b in pairs:
        col.send_ref(refs[a], refs[b], timeout_s=WAIT_S)
    formed = ray.get([one.call.remote(groups_here) for one in workers])
    assert formed == [10] * 6
    for a, b in pairs:
        col.send_ref(refs[a], refs[b], timeout_s=WAIT_S)
    assert ray.get([one.call.remote(groups_here) for one in workers]) == formed


def test_a_derived_group_of_an_actor_that_died_leaves_its_other_members_at_once(actors):
    trio = actors(Worker, 3)
    refs = ones(trio)
    for members in (refs, refs[:2], refs[1:]):
        col.broadcast_refs(members, timeout_s=WAIT_S)
    assert ray.get(trio[1].call.remote(groups_here)) == 3
    ray.kill(trio[2])
    assert wait_until(lambda: ray.get(trio[1].call.remote(groups_here)) == 1)
    col.broadcast_refs(refs[:2], timeout_s=WAIT_S)
