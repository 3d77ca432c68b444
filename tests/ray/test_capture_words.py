"""What a captured step says: what is refused at once, how errors name its calls and values, what comes back."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actor_pool import reusable
from tests.support.actors import hold
from tests.support.checks import nothing_sent
from tests.support.steps import Learning


class Odd(Learning):
    """Methods that a step can't call, or whose values it can't give back."""

    def items(self):
        yield np.zeros(1)

    def named(self, first, *, second=2):
        return first, second

    def strange(self):
        return {1, 2}


Odd_ = reusable(ray.remote(Odd))


@pytest.fixture
def pair(actors):
    """Two actors of no declared group."""
    return actors(Odd_, 2)


def refused(kind, match, record):
    """A block is refused."""
    with pytest.raises(kind, match=match) as caught, col.capture() as step:
        record(step)
    return caught.value


# ---------------------------------------------------------------------------------------------- recording


def test_methods_are_checked_when_they_are_recorded(pair, submits):
    one, ref = pair[0], hold(pair[0], [1])
    with nothing_sent(submits):
        for name in ("__ray_call__", "_raycollect_run"):
            error = refused(
                errors.InvalidArgumentError, f"'{name}'", lambda step, name=name: step.call(getattr(one, name))
            )
            assert "Odd(" in str(error)
            assert "named" in error.violations[0].expected
            assert "_raycollect" not in error.violations[0].expected
        refused(errors.UnsupportedError, "a generator", lambda step: step.call(one.items))
        for args, kwargs, match in (
            ((), {}, "missing a required argument: 'first'"),
            ((1, 2), {}, "too many positional"),
            ((1,), {"third": 3}, "unexpected keyword argument 'third'"),
        ):
            error = refused(
                errors.InvalidArgumentError,
                match,
                lambda step, args=args, kwargs=kwargs: step.call(one.named, *args, **kwargs),
            )
            assert error.violations[0].expected == "named(first, *, second=2)"
            assert "the call: list of arguments is not what named of Odd(" in str(error)
        refused(errors.InvalidArgumentError, "called already", lambda step: step.call(ref))


# ---------------------------------------------------------------------------------------------- results


def test_runs_return_arguments_and_constants_too(pair):
    array = np.arange(5.0)
    with col.capture() as step:
        rate = step.argument("rate", 1)
        loss = step.call(pair[0].loss)
        step.returns({"loss": loss, "rate": rate, "name": "a", "none": None, "more": (1, [array, 2j])})
    for given, expected in (({}, 1), ({"rate": [2]}, [2])):
        run = step.run(async_op=True, **given).wait()
        for got in (step.run(**given), run):
            assert (got["loss"], got["rate"], got["name"], got["none"]) == (5.0, expected, "a", None)
            one, (copy, number) = got["more"]
            assert (one, number) == (1, 2j)
            np.testing.assert_array_equal(copy, array)
            assert copy is not array
    with col.capture() as other:
        other.returns(None)
        other.call(pair[0].loss)
    assert other.run() is None


def test_results_that_can_not_travel(pair):
    with col.capture() as step:
        step.returns([step.call(pair[1].loss), step.call(pair[0].strange)])
    with pytest.raises(errors.MethodError, match="returned a value of type set") as caught:
        step.run()
    assert (caught.value.op, caught.value.call, caught.value.raised) == ("strange", 1, "")
    assert "ordinary method" in str(caught.value)
    with pytest.raises(errors.CaptureBrokenError) as broken:
        step.run()
    assert repr(broken.value.__cause__) == repr(caught.value)


# ---------------------------------------------------------------------------------------------- errors


def test_a_failure_names_the_calls_and_values_of_the_step(pair):
    with col.capture() as step:
        step.call(pair[0].loss)
        made = [step.call(pair[0].grow), step.call(pair[1].steady)]
        col.allreduce_refs(made)
    assert "call 1 on" in repr(made[0])
    step.run()
    with pytest.raises(errors.MismatchError) as caught:
        step.run()
    error = caught.value
    assert {one.call for one in error.violations} == {3}
    assert all(one.is_step and not one.ref for one in error.violations)
    named = {one.value.partition(" of ")[0] for one in error.violations}
    assert named <= {"what call 1 (grow)", "what call 2 (steady)"}
    text = str(error)
    assert "call 3 of the step" in text
    assert "derived-" not in text
    assert text.startswith("allreduce of Odd(")
    with pytest.raises(errors.CaptureBrokenError) as broken:
        step.run()
    text = str(broken.value)
    assert repr(broken.value.__cause__) == repr(error)
    assert text.count("What to do") == 1
    assert len(text.splitlines()) == 2
    assert "MismatchError" in text
    assert "call 3 of the step" in text
