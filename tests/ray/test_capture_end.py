"""Captured steps that end: what they held is given back everywhere."""

from __future__ import annotations

import gc

import pytest

import raycollect as col
from raycollect import errors
from raycollect.driver.controller import Controller
from tests.support.actors import spread
from tests.support.checks import nothing_sent
from tests.support.steps import Learner, held_by
from tests.support.waiting import wait_until


def test_close_releases_everything(learners, submits):
    group = col.declare_collective_group(learners, group_name="other")

    def held():
        return [member.store.held for member in col.Group.statistics(group).members]

    before = held()
    refs = spread(learners)
    with col.capture() as step:
        made = col.allreduce_refs(refs, inplace=False)
        step.returns(made[0])
    assert step.run().tolist() == [3]
    assert held_by(learners) == [1] * 3
    del refs, made
    gc.collect()
    assert [now - then for now, then in zip(held(), before, strict=True)] == [1] * 3
    for _ in range(2):
        step.close()
    assert wait_until(lambda: held_by(learners) == [0] * 3)
    assert wait_until(lambda: held() == before)
    assert not Controller.current().groups.held.ids
    with nothing_sent(submits):
        for use in (step.run, step.plan):
            with pytest.raises(errors.CaptureError, match="closed"):
                use()
    assert "closed" in repr(step)


def test_unreferenced_step_is_closed(actors):
    learners = [actors(Learner, 1, seed)[0] for seed in range(3)]
    col.declare_collective_group(learners, group_name="other")
    refs = spread(learners)
    with col.capture() as step:
        col.allreduce_refs(refs, op="max")
    work = step.run(async_op=True)
    del step
    gc.collect()
    work.wait()
    col.barrier("other")
    assert held_by(learners) == [1] * 3, "a run that somebody has keeps its step"
    del work
    gc.collect()
    col.barrier("other")
    assert wait_until(lambda: held_by(learners) == [0] * 3)
    col.allreduce_refs(refs[:2])
    assert not Controller.current().groups.held.ids
