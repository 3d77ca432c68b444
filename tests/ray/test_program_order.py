"""A collective in program order comes after the methods that its driver called before, and before those called later.

However a method is called, and whatever becomes of it; see `tests/pure/driver/test_order_model.py` for random programs.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import ray
from ray.exceptions import RayError

import raycollect as col
from raycollect.driver import dispatch
from raycollect.driver.participant_link import ParticipantLink
from raycollect.member import plan_queue
from raycollect.member.methods import KEPT
from tests.support.actor_pool import reusable

SLOW_S = 0.02  # how long a method takes: whoever does not wait for it sees what was before


class Slow(col.CollectiveParticipant):
    """Changes its array slowly, in methods of all kinds."""

    def __init__(self):
        self.buffer = np.ones(3, np.int64)

    def get_buffer(self):
        return self.buffer

    def _change(self):
        time.sleep(SLOW_S)
        self.buffer *= 3
        self.buffer += 1

    def change(self, _argument=None):
        self._change()

    @ray.method(num_returns=2)
    def two(self):
        self._change()
        return self.buffer.copy(), 1

    def listed(self):
        self._change()
        return [self.buffer.copy(), self.buffer.copy()]

    @col.by_value
    def value(self):
        self._change()
        return {"its own": self.buffer}

    def items(self):
        yield self.buffer.copy()
        self._change()
        yield 1

    def fails(self):
        self._change()
        raise ValueError("as it has to")

    def counts(self):
        return 1


Slow = reusable(ray.remote(Slow))


@ray.remote
def late():
    time.sleep(SLOW_S)


@ray.remote
def failing():
    time.sleep(SLOW_S)
    raise ValueError("as it has to")


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def passed_on(actor):
    """Another handle of the same actor."""
    return ray.get(ray.put(actor))


CHANGES = {
    "plain": lambda one: one.change.remote(),
    "no returns": lambda one: one.change.options(num_returns=0).remote(),
    "named task": lambda one: one.change.options(name="of another name").remote(),
    "two returns": lambda one: one.two.remote(),
    "a list": lambda one: one.listed.remote(),
    "a list as two": lambda one: one.listed.options(num_returns=2).remote(),
    "by value": lambda one: one.value.remote(),
    "generator": lambda one: one.items.options(num_returns="streaming").remote(),
    "generator of two": lambda one: one.items.options(num_returns=2).remote(),
    "raises": lambda one: one.fails.remote(),
    "late argument": lambda one: one.change.remote(late.remote()),
    "private": lambda one: one._change.remote(),
    "ray_call": lambda one: one.__ray_call__.remote(lambda self: self._change()),
    "in a thread": lambda one: in_a_thread(one.change.remote),
    "handle passed on": lambda one: passed_on(one).change.remote(),
    "several": lambda one: (one.counts.remote(), one.change.remote(), one.counts.remote()),
}


@pytest.fixture
def pair(actors):
    """Two of them in a group, and refs to their arrays."""

    def make(**declared):
        workers = actors(Slow, 2)
        col.declare_collective_group(workers, **declared)
        return workers, [one.get_buffer.remote() for one in workers]

    return make


@pytest.mark.parametrize("how", CHANGES)
def test_a_collective_keeps_its_place_among_methods(pair, how):
    workers, refs = pair()
    expected = np.ones((2, 3), np.int64)
    for is_async in (False, True, True, False):
        held = CHANGES[how](workers[0])
        work = col.allreduce_refs(refs, async_op=is_async)
        after = CHANGES[how](workers[1])
        if is_async:
            work.wait()
        expected[0] = expected[0] * 3 + 1
        expected[:] = expected.sum(0)
        expected[1] = expected[1] * 3 + 1
        read = [one.__ray_call__.remote(lambda self: self.buffer.copy()) for one in workers]
        np.testing.assert_array_equal(ray.get(read), expected)
        del held, after


@pytest.mark.parametrize("how", ["its argument fails", "it is cancelled"])
def test_a_call_that_never_runs_holds_nobody_up(pair, how):
    workers, refs = pair()
    values = {(1, 1)}
    for _ in range(3):
        workers[0].change.remote()
        if how == "its argument fails":
            lost = workers[0].change.remote(failing.remote())
        else:  # once it has gone out: else Ray 2.60 leaves a gap among the calls, and begins none after it for 30 s
            lost = workers[0].change.remote()
            ray.get(late.remote())
            ray.cancel(lost)
        col.allreduce_refs(refs, timeout_s=30)
        with suppress(RayError):  # Ray may have begun it before it heard
            ray.get(lost)
        once = {(3 * first + 1, second) for first, second in values}
        twice = {(3 * first + 1, second) for first, second in once} if how == "it is cancelled" else set()
        values = {(sum(one), sum(one)) for one in once | twice}
    first, second = (int(found[0]) for found in col.get(refs))
    assert (first, second) in values


def test_calls_of_others_do_not_make_it_forget(pair, actors):
    """More calls of another process than the actor remembers come between a method and the collective after it."""
    workers, refs = pair()
    caller = actors(ray.remote(num_cpus=0)(_Caller), 1)[0]
    workers[0].change.remote()
    ray.get(caller.call.remote(workers[0], KEPT + 10))
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[1]), np.full(3, 5))


class _Caller:
    def call(self, actor, count):
        ray.get([actor.counts.remote() for _ in range(count)])


@pytest.fixture
def tasks(monkeypatch):
    """The actor tasks that collectives take: programs and fences."""
    found = []

    def noted(name, method):
        def call(self, *args):
            found.append(name)
            return method(self, *args)

        return call

    for name in ("submit", "fence"):
        monkeypatch.setattr(ParticipantLink, name, noted(name, getattr(ParticipantLink, name)))
    return found


def be_patient(_self):
    """However busy the machine is, an actor does not ask for what is on its way."""
    plan_queue.ASK_S = 60.0


def test_no_actor_task_is_needed(actors, tasks):
    workers = actors(Slow, 2, max_restarts=0)  # that end with this test
    col.declare_collective_group(workers)
    refs = [one.get_buffer.remote() for one in workers]
    ray.get([one.__ray_call__.remote(be_patient) for one in workers])
    col.allreduce_refs(refs)  # the first does not know what was called before the group was declared
    tasks.clear()
    for name in ("change", "counts", "listed", "get_buffer"):
        for _ in range(3):
            held = [getattr(one, name).remote() for one in workers]
            col.allreduce_refs(refs)
            del held
        assert tasks == [], name


def test_a_method_after_one_that_goes_on_waits_behind_a_fence(pair, tasks, gate):
    workers, refs = pair()
    col.barrier()
    tasks.clear()
    workers[0].change.remote(gate.wait.remote())
    work = col.allreduce_refs(refs, async_op=True)
    workers[1].change.remote()
    workers[1].change.remote()
    assert tasks == ["fence"]
    ray.get(gate.open.remote())
    work.wait()
    np.testing.assert_array_equal(ray.get(workers[1].value.remote())["its own"], np.full(3, 3 * (5 * 9 + 4) + 1))


def test_a_program_that_is_too_long_for_a_message_is_an_actor_task(pair, tasks, monkeypatch):
    _, refs = pair()
    col.allreduce_refs(refs)
    tasks.clear()
    monkeypatch.setattr(dispatch, "ORDER_NBYTES", 100)
    col.broadcast_refs(refs)
    assert tasks == ["submit"] * 2
    np.testing.assert_array_equal(col.get(refs[1]), np.full(3, 2))


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_plan_takes_its_place_on_all_actors_at_once(pair, monkeypatch, is_captured):
    """Another thread's calls can't come between: one of them would wait for the other, and the plan for both."""
    workers, refs = pair()
    with col.capture(timeout_s=5) as step:
        col.allreduce_refs(refs)
    submit, keep, others = ParticipantLink.submit_in_order, ParticipantLink.keep_behind, []

    def call():
        workers[1].change.remote(workers[0].counts.remote())

    def come_between():
        if not others:
            others.append(threading.Thread(target=call))
            others[0].start()
            others[0].join(0.5)  # long enough for two calls, if nothing keeps them

    def submit_and_call(self, *args, **named):
        submit(self, *args, **named)
        come_between()

    def keep_and_call(self, *args):
        keep(self, *args)
        come_between()

    col.barrier()  # what is called before is known from here on
    if is_captured:
        monkeypatch.setattr(ParticipantLink, "keep_behind", keep_and_call)
        step.run()
    else:
        monkeypatch.setattr(ParticipantLink, "submit_in_order", submit_and_call)
        col.allreduce_refs(refs, timeout_s=5)
    others[0].join()
    np.testing.assert_array_equal(ray.get(workers[1].value.remote())["its own"], np.full(3, 3 * (2 * 3 + 1) + 1))
