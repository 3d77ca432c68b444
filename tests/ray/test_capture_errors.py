"""Captured steps whose runs fail: a typed error, no hang, and others go on."""

from __future__ import annotations

import numpy as np
import pytest

import raycollect as col
from raycollect import errors
from raycollect.driver.controller import Controller
from tests.support.actors import found, spread
from tests.support.steps import held_by, is_broken, works_on
from tests.support.waiting import wait_until


def all_landed():
    """Whether no run is under way any more, now or soon."""
    trackers = Controller.current().plans.trackers
    landed = wait_until(lambda: not trackers())
    assert landed, [(tracker.seq, tracker._pending, tracker.error) for tracker in trackers()]
    return True


def let_go_once_they_have_left(work, let_go):
    """Lets rank 0 come to the consistency check when the others are no longer there to agree with it."""
    (first,) = (one for one in Controller.current().plans.trackers() if one.seq == work._tracker.seq)
    assert wait_until(lambda: not any(map(first.is_pending, (1, 2)))), "they have left the consistency check"
    let_go()


@pytest.mark.parametrize("carrier", ["doorbell", "channel"])
def test_a_method_that_raises_breaks_the_step_and_nothing_else(learners, request, pipe, carrier):
    if carrier == "channel":
        request.getfixturevalue("by_channel")
    path, let_go = pipe
    refs = spread(learners, lambda rank: [1])
    with col.capture() as step:
        col.allreduce_refs(refs)
        step.call(learners[1].stall, path)
        made = [
            step.call(learners[1].fail_at, 3),
            *(step.call(learners[at].echo, np.zeros(2, np.float32)) for at in (0, 2)),
        ]
        col.allreduce_refs(made)
    let_go(2)
    step.run()
    step.run()
    behind = [step.run(async_op=True) for _ in range(4)]
    let_go()  # not before all have begun: once the first has failed, others are refused
    with pytest.raises(errors.MethodError, match="call 3 of them") as caught:
        behind[0].wait()
    error = caught.value
    assert (error.op, error.call, error.raised, error.rank) == ("fail_at", 2, "ValueError", 1)
    assert error.actor.startswith("Learning(")
    assert "fail_at" in error.trace
    for work in behind[1:]:
        with pytest.raises(errors.PlanAbortedError, match="failed before"):
            work.wait()
    assert is_broken(step, "MethodError: call 2 of the step, fail_at of Learning")
    assert all_landed()
    assert col.get(refs[1])[0] == 27, "what came before the method is done on its actor"
    step.close()
    assert works_on(learners)


@pytest.mark.parametrize("end", ["cancelled", "closed"])
def test_runs_under_way_end_with_the_step(learners, pipe, end):
    path, let_go = pipe
    refs = spread(learners, lambda rank: [1])
    with col.capture() as step:
        step.call(learners[0].stall, path)
        col.allreduce_refs(refs)
    works = [step.run(async_op=True) for _ in range(3)]
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        works[0].wait(0.05)
    assert not works[0].done()
    assert "under way" in repr(works[0])
    if end == "cancelled":
        assert works[0].cancel()
        assert is_broken(step, "cancelled")
    else:
        step.close()
    assert not works[0].cancel()
    for work in works:
        assert work.done()
        with pytest.raises(errors.PlanAbortedError):
            work.wait()
    let_go_once_they_have_left(works[0], let_go)
    assert all_landed()
    step.close()
    col.allreduce_refs(refs)
    assert found(refs) == [[3]] * 3, "plans after it do not wait for runs that never come"
    assert wait_until(lambda: held_by(learners) == [0] * 3)


def test_unawaited_failure_is_logged(learners, caplog):
    with col.capture() as step:
        step.call(learners[0].fail_at, 1)
    step.run(async_op=True)
    assert wait_until(lambda: "nobody waited for it" in caplog.text)
    assert "ValueError" in caplog.text
    assert is_broken(step)
