"""Members of a group come, leave and are replaced; what goes on meanwhile ends well, or by a typed error."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.faults import elastic_soak, growth
from tests.faults.elastic_soak import Loop
from tests.faults.groups import assert_sums, kill
from tests.support.actors import Gate, Plain, Worker, filled
from tests.support.steps import Learner
from tests.support.waiting import wait_until


@pytest.mark.parametrize("backend", ["shm", *(pytest.param(one, marks=pytest.mark.full) for one in ("tcp", "gloo"))])
def test_members_come_leave_and_are_replaced(actors, backend):
    workers = actors(Worker, 5)
    group = col.declare_collective_group(workers[:3], backend=backend)
    assert group.add(workers[3]) is group
    assert (group.actors, group.epoch, group.backend) == (tuple(workers[:4]), 1, backend)
    assert_sums(group)
    refs = filled(group.actors, range(4))
    group.remove([0, workers[2]])
    assert group.actors == (workers[1], workers[3])
    col.allreduce_refs([refs[3], refs[1]])  # the refs of those that stay, at their ranks of now
    for found in col.get([refs[1], refs[3]]):
        np.testing.assert_array_equal(found, np.full(7, 4))
    with pytest.raises(errors.NotAMemberError):
        col.allreduce_refs(refs[:2])
    kill(workers[1])
    group.replace(0, workers[4])
    assert group.actors == (workers[4], workers[3])
    assert_sums(group)
    assert group.epoch == 3
    assert group.status().state == "alive"


def test_several_dead_members_are_replaced_at_once(actors):
    workers = actors(Worker, 5)
    group = col.declare_collective_group(workers[:3])
    for one in workers[:2]:
        kill(one)
    with pytest.raises(errors.ActorGoneError, match="rank 1"):
        group.replace(workers[0], workers[4])
    group.replace([1, workers[0]], [workers[3], workers[4]])
    assert group.actors == (workers[4], workers[3], workers[2])
    assert_sums(group)


def test_bad_input_changes_nothing(actors):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers[:2])
    plain = Plain.options(num_cpus=0).remote()
    wrong = [
        (lambda: group.add(workers[1]), r"Buffers\(.*\) is a member already: rank 1"),
        (lambda: group.add([]), "no actor is given"),
        (lambda: group.add([plain, "me"]), r"Plain\(.*\) lacks the mixin .*; not an actor handle: a str"),
        (lambda: group.add(workers[2:] * 2), "more than once"),
        (lambda: group.add(workers[2], timeout_s=-1), "timeout_s"),
        (lambda: group.remove([0, 1]), "no member would be left: destroy"),
        (lambda: group.remove([1, workers[1]]), "rank 1 more than once"),
        (lambda: group.remove(workers[2]), r"Buffers\(.*\) is not a member"),
        (
            lambda: group.remove([2, True, "a"]),
            "2 is neither a rank from 0 to 1 .*; True is neither .*; 'a' is neither",
        ),
        (lambda: group.replace(0, workers[2]), r"alive, or not known to be dead: rank 0 \(Buffers.*ray\.kill"),
        (lambda: group.replace([0, 1], workers[2]), "2 members to replace, but 1 actors"),
        (lambda: group.replace(1, workers[0]), "is a member already"),
    ]
    for call, text in wrong:
        with pytest.raises(errors.InvalidGroupError, match=text):
            call()
    kill(workers[2])
    with pytest.raises(errors.ActorGoneError, match="rank 2"):
        group.add(workers[2])
    assert (group.epoch, group.actors) == (0, tuple(workers[:2]))
    assert_sums(group)
    group.destroy()
    with pytest.raises(errors.UnknownGroupError, match="destroyed"):
        group.remove(0)


def test_a_change_waits_for_methods_and_plans_and_loses_neither(actors):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers[:2])
    gates = actors(Gate, 2, max_concurrency=8)
    waits = [worker.make.remote(_wait_and_give, gate) for worker, gate in zip(workers, gates, strict=False)]
    work = col.allreduce_refs(waits, async_op=True)
    with pytest.raises(errors.CollectiveTimeoutError, match="busy with a method"):
        group.remove(1, timeout_s=3)
    thread = threading.Thread(target=group.add, args=workers[2:])
    thread.start()
    ray.get(gates[0].open.remote())
    assert thread.is_alive()
    ray.get(gates[1].open.remote())
    assert [float(found[0]) for found in col.get(work.wait(30))] == [2.0, 2.0]
    thread.join(30)
    assert group.world_size == 3
    assert_sums(group)


def _wait_and_give(self, gate):
    ray.get(gate.wait.remote())
    return np.ones(4)


def test_loops_of_other_threads_go_on_while_members_change(actors):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers[:2])
    refs = dict(zip(workers, filled(workers, (1, 1, 1)), strict=True))
    done, count, strange = threading.Event(), [0], []

    def loop():
        while not done.is_set():
            try:
                col.allreduce_refs([refs[actor] for actor in group.actors], op="max")
                count[0] += 1
            except (errors.GroupError, errors.MissingMemberError, errors.NotAMemberError, errors.PlanAbortedError):
                pass  # it was called for the members of before
            except BaseException as exc:
                strange.append(exc)
                raise

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for _ in range(4):
            before = count[0]
            group.add(workers[2])
            group.remove(2)
            assert wait_until(lambda before=before: count[0] > before or bool(strange))
    finally:
        done.set()
        thread.join(30)
    assert not strange
    assert_sums(group)


def test_members_in_a_call_of_their_own_hear_that_the_group_has_changed(actors):
    """Only some make the call: it ends by an error, and the next one has the ranks of now."""
    workers = actors(Worker, 3, max_concurrency=4)
    group = col.declare_collective_group(workers)

    def own(self):
        buffer = np.ones(3)
        try:
            col.allreduce(buffer)
        except errors.GroupBrokenError as exc:
            return str(exc)
        return "it ended well"

    waiting = workers[0].call.remote(own)
    assert wait_until(lambda: "member_communicator.py" in str(group.status()))  # it is a call of this group by then
    group.remove(2)
    assert "members of the group have changed" in ray.get(waiting, timeout=30)
    assert_sums(group)


# ---------------------------------------------------------------------------------------------- steps


def test_short_soak_of_a_step_with_a_kill_per_second(tidy):
    outcome = elastic_soak.soak(Loop(backend="shm", size=2, lasting=1), seconds=2, every_s=1, looks=1)
    assert not outcome.loop.wrong
    assert outcome.kills >= 1


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "is_traced"), [("shm", True), ("tcp", True), ("gloo", True), ("shm", False)])
def test_soak_leaves_nothing(tidy, backend, is_traced):
    loop = Loop(backend=backend, is_traced=is_traced)
    outcome = elastic_soak.soak(loop, seconds=20, every_s=1, looks=2)
    assert not outcome.loop.wrong
    assert not outcome.grew, list(growth.by_class(outcome.looks[0], outcome.looks[-1]))
    assert outcome.kills >= 3


def test_a_step_goes_on_with_the_members_of_now_and_a_captured_step_ends(actors):
    learners = actors(Learner, 4)
    group = col.declare_collective_group(learners[:3])

    @col.step
    def total():
        made = [one.steady.remote() for one in group.actors]
        col.allreduce_refs(made)
        return made[0]

    def captured():
        with col.capture() as made:
            col.allreduce_refs([one.steady.remote() for one in group.actors])
        made.run()
        return made

    def ends(captured):
        with pytest.raises(errors.CaptureBrokenError, match=r"(?s)changed.*capture the step again.*raycollect.step"):
            captured.run()
        captured.close()

    first = captured()
    assert total().tolist() == [3.0]
    group.remove(0)
    ends(first)
    assert total().tolist() == [2.0]
    second = captured()
    group.add(learners[3])
    ends(second)
    assert total().tolist() == [3.0]
    third = captured()
    kill(learners[1])
    with pytest.raises(errors.RaycollectError):
        while True:
            total()
    group.replace(learners[1], learners[0])
    ends(third)
    assert total().tolist() == [3.0]
    group.rebuild()
    assert total().tolist() == [3.0]
    total.close()
