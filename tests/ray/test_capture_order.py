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
from tests.support.actors import Worker
from tests.support.steps import Learner

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
def test_run_follows_methods_for_which_pending_plans_wait(trio, gate, name):
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
def test_run_comes_between_the_methods_before_and_after_it(trio, gate, request, carrier, kept):
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
