"""What a call or each run of a captured step would do, told by the refs themselves, without doing it."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.errors import (
    BatchError,
    CollectiveTimeoutError,
)
from raycollect.planner.report import Explanation, MethodCalls
from tests.support.actor_pool import reusable
from tests.support.actors import Buffers, Worker, wait_in

pytestmark = pytest.mark.usefixtures("tidy")


def made(worker, shape, dtype="float32", count=0):
    """A ref of a new array of ones, or of a list of them."""

    def build(self):
        arrays = [np.ones(shape, dtype) for _ in range(max(count, 1))]
        return arrays if count else arrays[0]

    return worker.make.remote(build)


@pytest.fixture
def pair(actors):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    return workers


def unchanged(refs):
    return all(np.all(array == 1) for array in col.get(refs))


def test_a_function_is_explained_as_one_batch(pair):
    refs = [made(worker, 10) for worker in pair]
    others = [made(worker, 20) for worker in pair]

    def step():
        pieces = col.allgather_refs(None, refs)
        col.allreduce_refs(pieces)
        for each in (refs, others):
            col.broadcast_refs(each, src_rank=1)
        return "anything"

    found = col.plan(step)

    assert [row.op for row in found.rows] == [
        "allgather",
        "allreduce sum",
        "broadcast from rank 1",
        "broadcast from rank 1",
    ]
    assert [row.made_nbytes for row in found.rows] == [80, 0, 0, 0]
    assert found.rows[1].tensors == 2
    assert found.rows[1].after == (0,)
    assert found.rows[2].bundle == found.rows[3].bundle
    assert found.rows[2].packed == (2, 2, 1)
    assert unchanged([*refs, *others])


# ---------------------------------------------------------------------------------------------- refusals


def test_a_function_without_calls_is_an_error(pair):
    with pytest.raises(BatchError, match="'len' called no operation"):
        col.plan(len, "")


def test_a_method_that_does_not_return_in_time_is_named(pair, gate):
    refs = [made(pair[0], 4), pair[1].make.remote(wait_in, gate)]
    ray.wait(refs[:1])  # that one is not late
    with pytest.raises(CollectiveTimeoutError) as late:
        col.plan(col.allreduce_refs, refs, timeout_s=3)  # in which the other is asked
    ray.get(gate.open.remote())
    assert late.value.missing == (1,)


def test_a_plan_inside_a_batch_adds_nothing_to_it(pair):
    refs = [made(worker, 4) for worker in pair]
    with col.batch() as b:
        found = col.plan(col.allreduce_refs, refs)
    assert len(found.rows) == 1
    assert b.refs == []
    assert unchanged(refs)


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
    assert isinstance(first, MethodCalls)
    assert isinstance(last, MethodCalls)
    assert [(one.call, one.method) for one in first.calls] == [(0, "gradient"), (1, "gradient")]
    assert [(row.call, row.op, row.nbytes, row.dtypes) for row in plan.rows] == [
        (2, "allreduce sum", 800, ("float64",))
    ]
    assert [(one.call, one.method, one.after) for one in last.calls] == [(3, "apply", (0,)), (4, "apply", (1,))]
    assert len({one.actor for one in first.calls}) == 2
    assert all("Trainer" in one.actor for one in first.calls)
    assert (found.participants, found.calls, found.launches) == (2, 5, 1)
    step.close()
