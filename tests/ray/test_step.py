"""Functions of plain code that run captured: what they are called with, return, and when they are traced."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.steps import Coroutines, Learner, captured_here
from tests.support.waiting import wait_until


class Report(NamedTuple):
    losses: Any
    rate: float


def noted(worker):
    return [args for args, _ in ray.get(worker.noted.remote())]


@pytest.fixture
def pair(actors):
    """Two actors in a declared group."""
    workers = [actors(Learner, 1, seed)[0] for seed in range(2)]
    col.declare_collective_group(workers)
    return workers


def training(workers):
    """An iteration, and how often its Python code ran."""
    traced = []

    def iteration(rate):
        traced.append(rate)
        gradients = [one.gradient.remote() for one in workers]
        col.allreduce_refs(gradients, op="avg")
        for one, gradient in zip(workers, gradients, strict=True):
            one.apply.remote(gradient, rate)
        return [one.loss.remote() for one in workers]

    return iteration, traced


# ---------------------------------------------------------------------------------------------- runs


def test_a_step_does_what_the_same_code_does_by_ray(actors, pair):
    plain = [actors(Learner, 1, seed)[0] for seed in range(2)]
    col.declare_collective_group(plain, group_name="plain")
    iteration, traced = training(pair)
    step = col.step(iteration)

    for rate in (0.5, 0.25, 0.125):
        gradients = [one.gradient.remote() for one in plain]
        col.allreduce_refs(gradients, group_name="plain", op="avg")
        for one, gradient in zip(plain, gradients, strict=True):
            one.apply.remote(gradient, rate)
        assert step(rate) == ray.get([one.loss.remote() for one in plain])

    assert len(traced) == 1
    assert step.cache_info() == (2, 1, 8, 1)
    for one, other in zip(pair, plain, strict=True):
        np.testing.assert_array_equal(*ray.get([one.read_weights.remote(), other.read_weights.remote()]))


def test_a_failed_trace_has_run_nothing_and_the_next_call_traces_again(pair):
    fails = [True]

    @col.step
    def step():
        made = pair[0].note.remote()
        if fails:
            raise KeyError(fails.pop())
        return made

    with pytest.raises(KeyError):
        step()
    assert noted(pair[0]) == []
    assert step() == 1


def test_a_step_that_calls_nothing_returns_what_the_function_does(cluster):
    @col.step
    def step(value):
        return {"value": value}

    assert [step(1), step(2)] == [{"value": 1}, {"value": 2}]
    assert step.start(3).wait() == {"value": 3}


def test_asynchronous_actors_take_part(actors):
    workers = actors(Coroutines, 2)
    col.declare_collective_group(workers)

    @col.step
    def step(scale):
        gradients = [one.gradient.remote(scale) for one in workers]
        col.allreduce_refs(gradients)
        return [one.add.remote(gradient) for one, gradient in zip(workers, gradients, strict=True)]

    assert step(1.0) == [6.0, 6.0]
    assert step(2.0) == [18.0, 18.0]


# ---------------------------------------------------------------------------------------------- arguments


def test_arrays_and_tensors_are_arguments(pair):
    torch = pytest.importorskip("torch")

    @col.step
    def step(array, tensor):
        return pair[0].echo.remote(array), pair[0].echo.remote([tensor])

    for scale in (1, 2, 3):
        array, (tensor,) = step(np.full((2, 3), scale), torch.full((4,), scale, dtype=torch.float16))
        np.testing.assert_array_equal(array, np.full((2, 3), scale))
        assert torch.equal(tensor, torch.full((4,), scale, dtype=torch.float16))
    assert step.cache_info().misses == 1
    step(np.full((3, 2), 1), torch.full((4,), 1, dtype=torch.float16))
    assert step.cache_info().misses == 2


def test_methods_get_arguments_as_they_were_when_they_were_called(pair):
    @col.step
    def step(value):
        values, array = [value, [0]], np.zeros(1)
        calls = [pair[0].echo.remote(values), pair[0].echo.remote([value, array]), pair[0].echo.remote(array)]
        values[1].append(1)
        array[0] = 1
        return [*calls, pair[0].echo.remote(values), pair[0].echo.remote([value, array])]

    for value in (2, 3):
        first, (_, second), third, fourth, (_, fifth) = step(value)
        assert (first, second.tolist(), third.tolist()) == ([value, [0]], [0], [0])
        assert (fourth, fifth.tolist()) == ([value, [0, 1]], [1])


def test_other_objects_are_static(pair):
    class Setting:
        pass

    one, two = Setting(), Setting()
    seen = []

    @col.step
    def step(workers, setting):
        seen.append(setting)
        return [one.loss.remote() for one in workers]

    for setting in (one, one, two, one):
        assert len(step(pair, setting)) == 2
    assert seen == [one, two]
    assert len(step(pair[:1], one)) == 1
    assert step.cache_info().misses == 3


def test_static_parameters_are_known_while_the_function_is_traced(pair):
    @col.step(static=("depth",))
    def step(depth, value):
        return [pair[0].echo.remote(value) for _ in range(depth)]

    assert [step(2, 1), step(0, 1), step(2, 3), step(3, 5)] == [[1, 1], [], [3, 3], [5, 5, 5]]
    assert step.cache_info() == (1, 3, 8, 3)


def test_traces_are_bounded(pair, caplog):
    @col.step
    def step(values):
        return pair[0].echo.remote(values)

    for count in (*range(12), 11):
        assert step([0] * count) == [0] * count
    assert step.cache_info() == (1, 12, 8, 8)
    assert len([one for one in caplog.records if "was traced for more than" in one.getMessage()]) == 1
    assert wait_until(lambda: ray.get(pair[0].call.remote(captured_here)) <= 8)


# ---------------------------------------------------------------------------------------------- results


def test_results_have_the_structure_that_the_function_returns(pair):
    outside, unused, marker = ray.put({"a": 1}), ray.put([2]), object()

    @col.step
    def step(rate):
        losses = tuple(one.loss.remote() for one in pair)
        pair[0].note.remote(outside)
        return {"report": Report(losses, rate), "refs": [outside, unused], "marker": marker, "none": None}

    for rate in (0.5, 0.75):
        found = step(rate)
        assert found == {
            "report": Report((5.0, 5.0), rate),
            "refs": [{"a": 1}, [2]],
            "marker": marker,
            "none": None,
        }
        assert type(found["report"]) is Report


def test_kept_values_stay_in_their_actors(pair):
    @col.step
    def step(scale):
        gradients = [one.gradient.remote(scale) for one in pair]
        col.allreduce_refs(gradients)
        return col.keep(gradients), pair[0].echo.remote(gradients[0])

    (first, value), (second, other) = step(1.0), step(2.0)
    assert all(isinstance(one, ray.ObjectRef) for one in first + second)
    for refs, expected in ((first, value), (second, other)):
        for found in col.get(refs):
            np.testing.assert_array_equal(found, expected)
    pair[0].apply.remote(first[0], 1.0)
    np.testing.assert_allclose(ray.get(pair[0].read_weights.remote()), 1 - value, rtol=1e-6)
    col.allreduce_refs(second)
    np.testing.assert_allclose(col.get(second[1]), 2 * other, rtol=1e-6)


def test_kept_values_of_several_runs_in_flight_are_their_own(pair):
    @col.step
    def step(size):
        return col.keep(pair[0].grow.remote()), size

    runs = [step.start(number) for number in range(5)]
    assert [(len(col.get(ref)), number) for ref, number in (run.wait() for run in runs)] == [
        (number + 1, number) for number in range(5)
    ]


# ---------------------------------------------------------------------------------------------- several at once


def test_any_thread_calls_a_step_and_records_only_its_own_calls(pair):
    entered, called = threading.Event(), threading.Event()
    traced = []

    @col.step
    def step(value):
        traced.append(threading.get_ident())
        if not entered.is_set():
            entered.set()
            assert called.wait(20)
        return pair[0].note.remote(value)

    found = []
    threads = [threading.Thread(target=lambda: found.append(step(3))) for _ in range(3)]
    for one in threads:
        one.start()
    assert entered.wait(20)
    assert ray.get(pair[1].note.remote("by Ray")) == 1
    called.set()
    for one in threads:
        one.join()
    assert sorted(found) == [1, 2, 3]
    assert len(traced) == 1


# ---------------------------------------------------------------------------------------------- methods, nested steps


class Trainer:
    def __init__(self, workers, scale):
        self.workers = workers
        self.scale = scale
        self.traced = 0

    @col.step
    def iteration(self, value):
        """What it does."""
        self.traced += 1
        return [one.echo.remote(value) for one in self.workers], self.scale


def test_methods_are_steps_of_their_objects(pair):
    one, other = Trainer(pair, 1), Trainer(pair[:1], 2)
    for value in (3, 4):
        assert one.iteration(value) == ([value, value], 1)
        assert other.iteration(value=value) == ([value], 2)
    assert (one.traced, other.traced) == (1, 1)
    assert Trainer.iteration.__doc__ == "What it does."
    assert one.iteration.cache_info() == (1, 1, 8, 1)
    assert [run.wait() for run in [one.iteration.start(value) for value in (5, 6)]] == [([5, 5], 1), ([6, 6], 1)]


def test_an_object_is_let_go_of_with_its_steps(pair):
    one = Trainer(pair, 1)
    one.iteration(3)
    assert ray.get(pair[0].call.remote(captured_here)) == 1
    dead = weakref.ref(one)
    gc.disable()
    try:
        del one
        assert dead() is None
        assert wait_until(lambda: ray.get(pair[0].call.remote(captured_here)) == 0)
    finally:
        gc.enable()


def test_a_step_in_a_step_is_a_part_of_it(pair):
    @col.step
    def inner(value):
        return pair[0].note.remote(value)

    @col.step
    def outer(value):
        first = inner(value)
        return first, inner(7), pair[1].note.remote(value)

    assert [outer(1), outer(2)] == [(1, 2, 1), (3, 4, 2)]
    assert inner.cache_info().currsize == 0
    assert noted(pair[0]) == [(1,), (7,), (2,), (7,)]


# ---------------------------------------------------------------------------------------------- tracing again


def test_a_group_that_is_destroyed_and_declared_again_is_traced_again(pair):
    iteration, traced = training(pair)
    step = col.step(iteration)
    expected = [5.0, 5.0]
    assert [step(0.0), step(0.0)] == [expected] * 2
    col.destroy_collective_group()
    assert step(0.0) == expected, "on a group that is derived"
    col.declare_collective_group(pair[:1])
    with pytest.raises(errors.NotAMemberError):
        step(0.0)
    col.destroy_collective_group()
    col.declare_collective_group(pair[::-1])
    assert [step(0.0), step(0.0)] == [expected] * 2
    assert len(traced) == 4


def test_after_a_run_that_failed_the_function_is_traced_again(pair):
    @col.step
    def step(count):
        return pair[0].fail_at.remote(count)

    assert step(5).tolist() == [0, 0]
    with pytest.raises(errors.MethodError) as caught:
        step(1)
    assert (caught.value.op, caught.value.raised) == ("fail_at", "ValueError")
    assert step(9).tolist() == [0, 0]
    assert step.cache_info().misses == 2


# ---------------------------------------------------------------------------------------------- looking, ending


def test_a_closed_step_is_traced_again(pair):
    @col.step
    def step(value):
        return pair[0].note.remote(value)

    assert step(1) == 1
    step.close()
    assert step.cache_info().currsize == 0
    assert wait_until(lambda: ray.get(pair[0].call.remote(captured_here)) == 0)
    assert step(2) == 2


def test_a_step_is_pickled_as_its_function(pair):
    from ray import cloudpickle

    worker = pair[0]
    step = col.step(static=("depth",))(lambda depth: [worker.note.remote(depth)] * depth)
    assert step(2) == [1, 1]
    again = cloudpickle.loads(cloudpickle.dumps(step))
    assert again.cache_info().currsize == 0
    assert again(1) == [2]


# ---------------------------------------------------------------------------------------------- eagerly


@pytest.mark.parametrize("by_environment", [False, True])
def test_eager_steps_give_the_same(pair, monkeypatch, by_environment):
    if by_environment:
        monkeypatch.setenv("RAYCOLLECT_STEP", "eager")
    ran = []

    def function(scale, more):
        ran.append(scale)
        gradients = [one.grow.remote() for one in pair]
        col.allreduce_refs(gradients)
        return {"kept": col.keep(gradients), "value": gradients[0], "loss": [one.loss.remote() for one in pair]}, scale

    step = col.step(function) if by_environment else col.step(eager=True)(function)
    for scale in (1, 2):
        found, given = step(scale, [scale])
        assert given == scale
        assert found["loss"] == [5.0, 5.0]
        assert all(isinstance(one, ray.ObjectRef) for one in found["kept"])
        np.testing.assert_array_equal(found["value"], np.full(scale, 2, np.float32))
        np.testing.assert_array_equal(col.get(found["kept"][1]), found["value"])
    assert ran == [1, 2]
    assert step.start(3, []).wait()[1] == 3


def test_an_eager_step_raises_what_a_method_raised(pair):
    @col.step(eager=True)
    def step():
        pair[0].fail_at.remote(1)

    with pytest.raises(ValueError, match="call 1"):
        step()
    run = step.start()
    assert run.done()
    with pytest.raises(ValueError, match="call 2"):
        run.wait()
