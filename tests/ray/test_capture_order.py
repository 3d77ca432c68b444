"""Captured steps among plans and methods that wait for each other: runs go behind them; and what dropped ones keep."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.ray.capturing import Learner
from tests.ray.gates import gate  # noqa: F401 - a fixture
from tests.ray.workers import Worker

WAIT_S = 30.0


@pytest.fixture
def trio(actors):
    """Three actors with buffers: (actors, refs)."""
    workers = actors(Worker, 3)
    refs = [worker.get_buffer.remote() for worker in workers]
    ray.wait(refs, num_returns=3)
    return workers, refs


def chained(first, second, opened):
    """A method queued on one actor that waits for one on another, which waits for a gate: gives what it returns."""
    value = first.call.remote(lambda self, opened: 1.0, opened)
    return second.make.remote(lambda self, value: self.buffer, value)


def summed(refs, group_name):
    with col.capture(timeout_s=WAIT_S) as step:
        col.allreduce_refs(refs, group_name=group_name)
    step.run()
    return step


PENDING = {
    "a plan": lambda refs: lambda: col.allreduce_refs(refs, "far", async_op=True),
    "a run": lambda refs: partial(summed(refs, "far").run, async_op=True),
}
"""What waits on an actor for a method -> what begins it."""


@pytest.mark.parametrize("name", PENDING)
def test_run_follows_methods_for_which_pending_plans_wait(trio, gate, name):  # noqa: F811
    """Else it would hold the turn of the first actor, for whose queued method the second waits."""
    (first, second, third), refs = trio
    col.declare_collective_group([second, third], group_name="far")
    col.declare_collective_group([first, second], group_name="near")
    step = summed(refs[:2], "near")
    begin = PENDING[name](refs[1:])
    late = chained(first, second, gate.wait.remote())
    pending = begin()
    runs = [step.run(async_op=True) for _ in range(2)]
    assert not pending.done()
    assert not runs[0].done()
    ray.get(gate.open.remote())
    for one in (pending, *runs):
        one.wait(WAIT_S)
    ray.wait([late])
    np.testing.assert_array_equal(ray.get(first.read.remote()), ray.get(second.read.remote()))
    step.run()


@pytest.mark.parametrize("carrier", ["doorbell", pytest.param("channel", marks=pytest.mark.full)])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "by value"])
def test_run_comes_between_the_methods_before_and_after_it(trio, gate, request, carrier, kept):  # noqa: F811
    if carrier == "channel":
        request.getfixturevalue("by_channel")
    workers, refs = trio
    col.declare_collective_group(workers)
    step = summed(refs, "default")
    for turn in range(5):
        opened = gate.wait.remote() if turn == 0 else None  # the first time none has begun
        for worker in workers:
            (worker.make if kept else worker.call).remote(fill, opened)
        runs = [step.run(async_op=True) for _ in range(1 + turn % 3)]
        found = [worker.read.remote() for worker in workers]
        [worker.call.remote(fill, None) for worker in workers]
        if turn == 0:
            assert not runs[0].done()
            ray.get(gate.open.remote())
        for one in ray.get(found):
            np.testing.assert_array_equal(one, np.full(10, 3.0 ** len(runs)))
        for run in runs:
            run.wait(WAIT_S)
        for one in ray.get([worker.read.remote() for worker in workers]):
            np.testing.assert_array_equal(one, np.ones(10))
        step.run()


def fill(self, opened):
    self.buffer[:] = 1
    return self.buffer


def test_ended_unawaited_runs_do_not_delay_the_next_one(trio):
    """They have ended, and the next one is the first to notice."""
    (first, second, _), refs = trio
    col.declare_collective_group([first, second], group_name="near")
    step = summed(refs[:2], "near")
    for _ in range(20):
        runs = [step.run(async_op=True) for _ in range(3)]
        runs[-1].wait(WAIT_S)
        runs += [step.run(async_op=True)]
        for one in runs:
            one.wait(WAIT_S)


@ray.remote
class Coroutine(col.CollectiveParticipant):
    """An async actor, whose tasks may come in another order than they were submitted in, where arguments are long."""

    def __init__(self):
        self.taken = []
        self.buffer = np.ones(3)

    def get_buffer(self):
        return self.buffer

    def take(self, value, number):
        self.taken.append((len(value), number))

    @col.by_value
    async def read(self):
        return self.taken


def test_a_long_run_and_plans_behind_it_on_actors_with_coroutines(actors):
    workers = actors(Coroutine, 2)
    col.declare_collective_group(workers)
    refs = [worker.get_buffer.remote() for worker in workers]
    with col.capture(timeout_s=WAIT_S) as step:
        value, number = step.argument("value"), step.argument("number")
        for worker in workers:
            step.call(worker.take, value, number)
    step.run(value=b"", number=-1)
    for turn in range(10):
        run = step.run(async_op=True, value=bytes(500_000), number=turn)
        plans = [col.allreduce_refs(refs, op="max", async_op=True) for _ in range(3)]
        for one in (*reversed(plans), run):
            one.wait(WAIT_S)
    expected = [(0, -1), *((500_000, turn) for turn in range(10))]
    assert ray.get([worker.read.remote() for worker in workers]) == [expected] * 2


def test_a_dropped_step_that_failed_is_freed_without_the_collector(actors):
    (worker,) = actors(Learner, 1)

    def drop():
        with col.capture() as step:
            step.call(worker.fail_at, 1)
        with pytest.raises(errors.MethodError):
            step.run()
        return weakref.ref(step)

    gc.collect()
    gc.disable()
    try:
        assert drop()() is None
    finally:
        gc.enable()
