"""What a step's function can't do while it is traced: each is an error that says what, and where."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.steps import Learner


@pytest.fixture
def worker(actors):
    return actors(Learner, 1)[0]


USES = {
    "bool()": lambda one: 1 if one else 2,
    "<": lambda one: one < 3,
    ">": lambda one: one > 3,
    "==": lambda one: one == 3,
    "in": lambda one: 3 in one,
    "+": lambda one: one + 1,
    "-": lambda one: -one,
    "*": lambda one: 2 * one,
    "[]": lambda one: one[0],
    "len()": len,
    "iter()": list,
    "index()": range,
    "int()": int,
    "float()": float,
    "round()": round,
    "str()": print,
    "format()": lambda one: f"{one:.3f}",
    "array()": np.asarray,
    "call()": lambda one: one(),
    "the attribute 'shape'": lambda one: one.shape,
    "ray.get()": lambda one: ray.get([one]),
    "ray.wait()": lambda one: ray.wait([one]),
    "ray.put()": lambda one: ray.put(one),
    "pickle": lambda one: ray.put({"in": [one]}),
}


def traced(worker, use, of):
    """Traces a function that uses its argument, or the value of a method, so; gives the error."""

    def step(rate):
        one = rate if of == "argument" else worker.loss.remote()
        use(one)

    with pytest.raises(errors.TracedValueError) as caught:
        col.step(step)(0.5)
    return caught.value


def test_python_that_uses_an_argument_or_a_recorded_value_is_refused(worker):
    for name, use in USES.items():
        error = traced(worker, use, "argument")
        assert (error.use, error.parameter) == (name, "rate")
        assert "'rate'" in error.value
        assert 'static=("rate",)' in str(error)
        assert error.where.startswith(f"{__file__}:")
        error = traced(worker, use, "value")
        assert (error.use, error.parameter) == (name, "")
        assert "loss of Learn" in error.value
        assert f"{__file__}:" in error.value
        assert "static" not in str(error)
    assert ray.get(worker.noted.remote()) == []


def test_the_argument_is_named_by_its_place(worker):
    @col.step
    def step(config, *rest):
        return config["sizes"][1] * 2

    with pytest.raises(errors.TracedValueError) as caught:
        step({"sizes": [1, 2]})
    assert (caught.value.value, caught.value.parameter) == ("the argument \"config['sizes'][1]\"", "config")


def test_an_argument_is_no_key_and_has_its_type(worker):
    @col.step
    def looks_up(rate):
        return {0.5: 1}.get(rate, 2)

    with pytest.raises(errors.TracedValueError) as caught:
        looks_up(0.5)
    assert caught.value.use == "hash()"

    @col.step
    def asks(value):
        kinds = [kind.__name__ for kind in (int, float, str, np.ndarray) if isinstance(value, kind)]
        return worker.echo.remote(kinds)

    assert [asks(1), asks(0.5), asks("a"), asks(np.zeros(1))] == [["int"], ["float"], ["str"], ["ndarray"]]


@pytest.mark.parametrize("options", [{"num_returns": 2}, {"name": "x"}, {"max_task_retries": 3}, {"num_returns": 0}])
def test_options_of_a_task_are_refused_by_name(worker, options):
    @col.step
    def step():
        return worker.loss.options(**options).remote()

    with pytest.raises(errors.InvalidArgumentError) as caught:
        step()
    assert [one.field for one in caught.value.violations] == list(options)
    assert [one.found for one in caught.value.violations] == list(map(repr, options.values()))


@ray.remote
def a_task():
    return 1


@ray.remote(num_cpus=0)
class Plain:
    def method(self):
        return 1


def test_tasks_and_new_actors_are_refused(worker):
    for call, words in ((lambda: a_task.remote(), "a_task"), (lambda: Plain.options(name="x").remote(), "Plain")):

        @col.step
        def step(call=call):
            worker.note.remote()
            call()

        with pytest.raises(errors.UnrecordableCallError) as caught:
            step()
        assert words in caught.value.call
        assert caught.value.where.startswith(f"{__file__}:")
    assert ray.get(worker.noted.remote()) == []
    assert ray.get(a_task.remote()) == 1


def test_actors_without_the_mixin_are_refused(worker, actors):
    plain = actors(Plain, 1)[0]
    with pytest.raises(errors.NotAParticipantError):
        col.step(plain.method.remote)()
    assert ray.get(plain.method.remote()) == 1


def test_a_value_that_has_left_its_step_is_refused(worker):
    left = []
    col.step(lambda: left.append(worker.loss.remote()))()
    for use in (bool, ray.get, worker.echo.remote, col.get):
        with pytest.raises(errors.TracedValueError):
            use(left[0])
    with pytest.raises(errors.CaptureError):
        col.step(lambda: worker.echo.remote(left[0]))()


def test_recorded_values_compare_as_refs_do(worker):
    @col.step
    def step():
        refs = [worker.loss.remote(), worker.loss.remote()]
        assert refs[1] in refs
        assert refs.index(refs[1]) == 1
        assert refs[0] != refs[1]
        return {ref: at for at, ref in enumerate(refs)}[refs[1]]

    assert step() == 1


def test_an_argument_is_no_operand_and_names_no_group(worker):
    for call in (lambda value: col.allreduce_refs([value]), lambda value: col.barrier(value)):
        with pytest.raises(errors.TracedValueError) as caught:
            col.step(call)("group")
        assert caught.value.parameter == "value"


def test_a_method_in_a_batch_comes_before_it(worker):
    refs = [worker.steady.remote()]

    @col.step
    def before():
        with col.batch():
            made = worker.steady.remote()
            col.allreduce_refs([made])
        return made

    @col.step
    def behind():
        with col.batch():
            col.allreduce_refs(refs)
            worker.note.remote()

    assert before().tolist() == [1]
    with pytest.raises(errors.CaptureError):
        behind()


def test_steps_do_not_run_in_batches(worker):
    step = col.step(lambda: worker.note.remote())
    for _ in range(2):
        with pytest.raises(errors.CaptureError), col.batch():
            step()
        assert step() > 0


def test_runs_do_not_start_in_a_step(worker):
    inner = col.step(lambda: worker.note.remote())
    with pytest.raises(errors.CaptureError):
        col.step(lambda: inner.start())()


def test_what_is_kept_is_for_return_alone(worker):
    with pytest.raises(errors.CaptureError):
        col.step(lambda: col.allreduce_refs([col.keep(worker.steady.remote())]))()
    with pytest.raises(errors.CaptureError), col.capture():
        col.keep(worker.steady.remote())
    value = [object()]
    assert col.keep(value) is value


async def coroutine():
    pass


def generator():
    yield


@pytest.mark.parametrize("function", [coroutine, generator, 3, dict])
def test_only_plain_functions_are_steps(function):
    with pytest.raises(errors.InvalidArgumentError) as caught:
        col.step(function)
    assert caught.value.violations[0].field == "function"


@pytest.mark.parametrize(
    "options", [{"static": ("depth",)}, {"eager": "yes"}, {"timeout_s": -1}, {"staging_nbytes": 1.5}]
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(errors.InvalidArgumentError):
        col.step(**options)(lambda rate: None)


def test_a_call_that_does_not_fit_the_function_is_refused_as_by_python(worker):
    step = col.step(lambda rate: worker.echo.remote(rate))
    with pytest.raises(TypeError, match="rate"):
        step()
    with pytest.raises(TypeError, match="other"):
        step(1, other=2)
