"""Captured steps that can't be recorded, or whose runs fail: refused by name, with no group held."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver.controller import Controller
from tests.support.actor_pool import reusable
from tests.support.actors import Plain, Worker, found, hold, spread
from tests.support.checks import nothing_sent
from tests.support.steps import Learning, captured_here, is_broken, works_on
from tests.support.waiting import wait_until


def refused(kind, match, record, *, holds=False):
    """A block is refused, and holds no group, unless another one does."""
    with pytest.raises(kind, match=match) as caught, col.capture() as step:
        record(step)
    assert bool(Controller.current().groups.held) is holds
    with pytest.raises(errors.CaptureError, match="can't run"):
        step.run()
    return caught.value


def test_refused_arguments(learners, submits):
    own = hold(learners[0], [1])
    ray.get(own)

    def wrong(*args, method=learners[0].note, **kwargs):
        return lambda step: step.call(method, *args, **kwargs)

    with nothing_sent(submits):
        refused(errors.InvalidArgumentError, "other", wrong(1, other=[object()]))
        for method in ("a", learners[0], 3):
            refused(errors.InvalidArgumentError, "a method of a participant", wrong(method=method))
        refused(errors.NotAMemberError, "by send_ref", wrong(own, method=learners[1].note))
        refused(
            errors.NotAMemberError,
            "by send_ref",
            lambda step: step.call(learners[1].note, step.call(learners[0].loss)),
        )
        refused(errors.RefusedError, "argument 0", wrong([own]))


def test_refused_names_of_arguments(learners):
    for name in ("async_op", "timeout_s", "not a name", "2x", "", 3, None):
        refused(errors.InvalidArgumentError, "name", lambda step, name=name: step.argument(name))
    refused(errors.InvalidArgumentError, "declared once", lambda step: (step.argument("a"), step.argument("a")))
    with col.capture() as step:
        rate = step.argument("rate")
        step.call(learners[0].note, rate)
    with pytest.raises(errors.InvalidArgumentError) as caught:
        step.run(speed=1, turn=2)
    assert [(one.field, one.found) for one in caught.value.violations] == [
        ("speed", "given"),
        ("turn", "given"),
        ("rate", "missing"),
    ]
    for given, match in (
        ({}, "missing"),
        ({"rate": 1, "other": 2}, "one of rate"),
        ({"rate": {1}}, "type set.*before the run"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=match):
            step.run(**given)
    with pytest.raises(errors.InvalidArgumentError, match=r"rate 1\d{6}\).*at most"):
        step.run(rate=np.zeros(1 << 20, np.uint8))
    step.run(rate=2)
    assert ray.get(learners[0].noted.remote()) == [((2,), {})], "no refused run was begun"
    with col.capture() as other:
        other.call(learners[0].loss)
    with pytest.raises(
        errors.InvalidArgumentError, match="rate is given, expected no arguments: the step declares none"
    ):
        other.run(rate=1)


def test_results_that_are_too_long(learners):
    with col.capture() as step:
        step.returns([step.call(learners[0].note), step.call(learners[1].grow_to, step.argument("size"))])
    assert step.run(size=10)[1].shape == (10,)
    with pytest.raises(errors.CaptureError, match="let methods return refs instead"):
        step.run(size=1 << 20)
    assert is_broken(step, size=1)
    assert works_on(learners)


def test_refused_returns(learners):
    ref = hold(learners[0], [1])
    refused(
        errors.InvalidArgumentError,
        r"the value\['a'\]\[0\] is used by no call of the step, .*read it with raycollect.get\(ref\)",
        lambda step: (step.call(learners[0].loss), step.returns({"a": (ref,)})),
    )
    refused(errors.CaptureError, "before", lambda step: (step.returns([]), step.returns([])))
    refused(errors.CaptureError, "nothing was recorded", lambda step: None)


def test_actors_that_can_not_take_part(actors, learners):
    plain, dead = actors(Plain, 1)[0], actors(Worker, 1)[0]
    ray.get(dead.read.remote())
    ray.kill(dead)

    def is_dead():
        try:
            ray.get(dead.read.remote())
        except ray.exceptions.RayActorError:
            return True

    assert wait_until(is_dead)  # it may go on for a while
    refused(errors.NotAParticipantError, "Plain", lambda step: step.call(plain.get_buffer))
    refused(errors.ActorGoneError, "dead", lambda step: step.call(dead.get_buffer))
    assert works_on(learners)


def test_refs_of_failed_methods_are_refused(learners):
    def fail(self):
        raise ValueError("no tensor today")

    bad = learners[0].make.remote(fail)
    error = refused(errors.ProducerFailedError, "no tensor today", lambda step: step.call(learners[0].note, bad))
    assert error.violations[0].ref == bad.hex()
    refused(errors.ProducerFailedError, "no tensor today", lambda step: step.call(learners[1].note, bad))
    freed = hold(learners[0], [1])
    col.free(freed)
    refused(errors.TensorFreedError, "freed", lambda step: step.call(learners[0].note, freed))
    assert wait_until(lambda: ray.get([worker.call.remote(captured_here) for worker in learners]) == [0] * 3)
    assert works_on(learners)


def test_placeholders_outside_of_their_block(learners):
    refs = spread(learners)
    with col.capture() as step:
        rate = step.argument("rate", 1)
        made = col.allreduce_refs(refs, inplace=False)
        loss = step.call(learners[0].note, made[0], rate)
        with pytest.raises(errors.CaptureError, match="can't be explained before its block has ended"):
            step.explain()
        with pytest.raises(errors.CaptureError, match=r"step.explain\(\) describes it"):
            col.plan(col.allreduce_refs, made)
        for use in (
            lambda: made[0].ref,
            lambda: col.get(made[0]),
            lambda: col.free(loss),
            lambda: col.plan(col.barrier) and loss.ref,
        ):
            with pytest.raises(errors.CaptureError, match=r"only while (the step|that one) runs"):
                use()
    for use in (
        lambda: made[0].ref,
        lambda: col.get(made),
        lambda: col.free(loss),
        lambda: col.allreduce_refs(made),
        lambda: pickle.loads(pickle.dumps(loss)),
        lambda: pickle.loads(pickle.dumps(rate)),
    ):
        with pytest.raises(errors.CaptureError, match=r"only while (the step|that one) runs"):
            use()
    for use in (
        lambda other: other.call(learners[0].note, made[0]),
        lambda other: other.call(learners[0].note, rate),
        lambda other: col.allreduce_refs(made),
        lambda other: other.returns(made),
    ):
        refused(errors.CaptureError, "to another captured step", use, holds=True)
    with pytest.raises(errors.CaptureError, match=r"only while (the step|that one) runs"), col.batch():
        col.broadcast_refs(made)
    step.run()


def test_blocks_in_blocks(learners, submits):
    refs = spread(learners)
    with col.capture() as step:
        col.allreduce_refs(refs)
        for use in (step.run, lambda: col.capture().__enter__(), step.__enter__):
            with pytest.raises(errors.CaptureError):
                use()
    with col.batch():
        with pytest.raises(errors.CaptureError, match="inside a batch"):
            step.run()
        with pytest.raises(errors.CaptureError, match="inside a batch"), col.capture():
            pass
    for use in (lambda: step.call(learners[0].loss), lambda: step.argument("a"), lambda: step.returns([])):
        with pytest.raises(errors.CaptureError, match="belongs into the block"):
            use()
    with pytest.raises(errors.CaptureError, match="not entered"):
        col.capture().run()
    with nothing_sent(submits), pytest.raises(ZeroDivisionError), col.capture() as failed:
        col.allreduce_refs(refs)
        raise ZeroDivisionError
    with pytest.raises(errors.CaptureError, match="block failed"):
        failed.run()
    assert "block failed" in repr(failed)
    failed.close()
    for wrong in ({"staging_nbytes": 3}, {"timeout_s": -1}):
        with pytest.raises(errors.InvalidArgumentError):
            col.capture(**wrong)
    step.run()
    assert found(refs) == [[3]] * 3


class Odd(Learning):
    """Methods that a step can't call so."""

    def items(self):
        yield np.zeros(1)

    def named(self, first, *, second=2):
        return first, second


Odd_ = reusable(ray.remote(Odd))


@pytest.fixture
def pair(actors):
    """Two actors of no declared group."""
    return actors(Odd_, 2)


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
