"""`step.plan()`: what each run of a captured step does, told without a run."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.planner.report import Explanation
from raycollect.planner.report_rows import Methods
from tests.support.actor_pool import reusable
from tests.support.actors import Buffers, Worker


@reusable
@ray.remote
class Trainer(Buffers):
    """Counts what it is asked for."""

    def __init__(self):
        super().__init__(np.zeros(100, np.float64))
        self.runs = 0

    def gradient(self):
        self.runs += 1
        self.buffer[:] = self.runs
        return self.buffer

    def parts(self):
        return {"one": np.ones(10, np.float32), "two": np.ones((2, 3), np.float32)}

    def apply(self, gradient, rate=1.0):
        assert gradient is self.buffer
        return rate * float(gradient[0])

    @col.by_value
    def count(self):
        return self.runs


@pytest.fixture
def trainers(actors):
    made = actors(Trainer, 2)
    col.declare_collective_group(made, group_name="digits")
    return made


def training(trainers):
    with col.capture() as step:
        rate = step.argument("rate", 0.5)
        gradients = [step.call(one.gradient) for one in trainers]
        col.allreduce_refs(gradients, group_name="digits")
        for one, gradient in zip(trainers, gradients, strict=True):
            step.call(one.apply, gradient, rate=rate)
    return step


def test_a_step_of_refs_is_explained_as_col_plan_explains_its_calls(actors):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = [worker.get_buffer.remote() for worker in workers]

    def calls():
        pieces = col.allgather_refs(None, refs)
        col.allreduce_refs(pieces, op="max")
        col.broadcast_refs(refs, src_rank=1)

    with col.capture() as step:
        calls()
    found = step.plan()

    (stage,) = found.stages
    assert isinstance(stage, Explanation)
    assert stage.rows == col.plan(calls).rows
    assert (found.participants, found.calls) == (2, 3)
    assert "allgather" in found.explain()
    assert all(np.all(array == 1) for array in col.get(refs))
    step.close()


def test_stages_are_methods_and_plans_in_order(trainers):
    step = training(trainers)
    step.run()

    found = step.plan()

    first, plan, last = found.stages
    assert isinstance(first, Methods)
    assert isinstance(last, Methods)
    assert [(one.call, one.method) for one in first.calls] == [(0, "gradient"), (1, "gradient")]
    assert [(row.call, row.op, row.nbytes, row.dtypes) for row in plan.rows] == [
        (2, "allreduce sum", 800, ("float64",))
    ]
    assert [(one.call, one.method, one.after) for one in last.calls] == [(3, "apply", (0,)), (4, "apply", (1,))]
    assert len({one.actor for one in first.calls}) == 2
    assert all("Trainer" in one.actor for one in first.calls)
    assert (found.participants, found.calls, found.launches) == (2, 5, 1)
    step.close()
