"""Captured steps: what is recorded once gives in each run what it gives call by call; one that ends holds nothing."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.channel.doorbell import IN_FLIGHT, INLINE_NBYTES
from raycollect.channel.messages import BeginRun
from raycollect.driver.controller import Controller
from raycollect.driver.participant_link import ParticipantLink
from tests.support.actors import Worker, found, hold, spread
from tests.support.checks import nothing_sent
from tests.support.steps import Learner, held_by
from tests.support.waiting import wait_until


@pytest.fixture
def mailed(monkeypatch):
    """The runs that are sent over the channel."""
    sent, send = [], ParticipantLink.send

    def counted(self, message):
        if isinstance(message, BeginRun):
            sent.append(message)
        return send(self, message)

    monkeypatch.setattr(ParticipantLink, "send", counted)
    return sent


# ---------------------------------------------------------------------------------------------- results


def test_outputs_of_collectives_are_operands_of_later_plans(learners):
    refs = spread(learners, lambda rank: [rank, 10 * rank])
    with col.capture() as step:
        lists = col.allgather_refs(None, refs)
        first = step.call(learners[0].echo, lists[0])
        sums = col.allreduce_refs([first, lists[1], lists[2]], inplace=False)
        back = col.send_ref(sums[0], learners[1])
        count = step.call(learners[1].note, back, 7, name=back)
        lone = step.call(learners[2].echo, sums[2])
        step.returns({"count": count, "lists": (lone, [refs[1]]), "back": back})
    expected = [[3 * rank, 30 * rank] for rank in range(3)]
    for run in (1, 2):
        values = step.run()
        assert values["count"] == run
        assert [one.tolist() for one in values["back"]] == expected
        assert [one.tolist() for one in values["lists"][0]] == expected
        assert values["lists"][1][0].tolist() == [1, 10]
    ((args, kwargs), _) = ray.get(learners[1].noted.remote())
    assert args[1] == 7
    assert [one.tolist() for one in kwargs["name"]] == expected


def test_a_batch_in_a_step_joins_it(learners):
    refs = spread(learners)
    with col.capture() as step:
        with col.batch() as batch:
            made = col.allgather_refs(None, refs)
            with pytest.raises(errors.CaptureError, match="inside a batch"):
                step.call(learners[0].loss)
        with pytest.raises(ZeroDivisionError), col.batch():
            gone = col.allreduce_refs(made, inplace=False)
            raise ZeroDivisionError
        sums = col.allreduce_refs(made, inplace=False)
        with pytest.raises(errors.CaptureError):
            col.allreduce_refs(gone)
        step.returns(sums[1])
    assert len(step.plan().stages) == 1
    with pytest.raises(errors.CaptureError, match="results"):
        batch.wait()
    assert [one.tolist() for one in step.run()] == [[0], [3], [6]]


def test_methods_only_and_actors_of_no_group(actors):
    workers = [actors(Learner, 1, seed)[0] for seed in range(2)]
    with col.capture() as step:
        args = 1.5, "text", [None, (2, b"x")]
        step.returns([step.call(worker.note, *args, key=rank) for rank, worker in enumerate(workers)])
    assert [step.run() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert ray.get(workers[1].noted.remote())[2] == ((1.5, "text", [None, (2, b"x")]), {"key": 1})
    col.allreduce_refs([worker.get_buffer.remote() for worker in workers])
    assert step.run() == [4, 4]


# ---------------------------------------------------------------------------------------------- arguments


def test_arguments_and_their_defaults(learners):
    with col.capture() as step:
        rate, text = step.argument("rate"), step.argument("text", default=None)
        step.call(learners[0].note, rate, other=text)
        step.call(learners[1].note, text)
        step.call(learners[2].note)
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    step.run(rate=1)
    step.run(rate=array.T, text=(1, "x"))
    first, second = ray.get(learners[0].noted.remote())
    assert first == ((1,), {"other": None})
    np.testing.assert_array_equal(second[0][0], array.T)
    assert second[1] == {"other": (1, "x")}
    assert ray.get(learners[1].noted.remote()) == [((None,), {}), (((1, "x"),), {})]
    assert ray.get(learners[2].noted.remote()) == [((), {})] * 2


def test_refs_as_arguments(learners):
    own, put = hold(learners[0], [1, 2]), ray.put({"a": 1})
    plain, others = learners[1].loss.remote(), spread(learners[1:], lambda rank: [0, 0])
    with col.capture() as step:
        step.call(learners[0].note, own, put, plain)
        same = step.call(learners[0].echo, own)
        col.broadcast_refs([same, *others], 0)
        step.returns([own, put])
    value, given = step.run()
    assert (value.tolist(), given) == ([1, 2], {"a": 1})
    ((args, _),) = ray.get(learners[0].noted.remote())
    assert (args[0].tolist(), args[1], args[2]) == ([1, 2], {"a": 1}, 5.0)
    del own, put, plain
    gc.collect()
    assert step.run()[0].tolist() == [1, 2], "the step keeps its refs"


@pytest.mark.parametrize("carrier", ["doorbell", "channel"])
def test_arguments_and_results_of_every_length(learners, mailed, request, carrier):
    if carrier == "channel":
        request.getfixturevalue("by_channel")
    with col.capture() as step:
        value = step.argument("value")
        step.returns([step.call(worker.echo, value) for worker in learners])
    step.run(value=0)  # through the actors' queues: nothing is known yet of what was called there before
    for count in (0, INLINE_NBYTES // 8 - 10, INLINE_NBYTES // 8 + 10, 50_000):
        mailed.clear()
        values = [np.arange(count) + run for run in range(3)]
        works = [step.run(value=one, async_op=True) for one in values]
        for work, value in zip(works, values, strict=True):
            for one in work.wait():
                np.testing.assert_array_equal(one, value)
        is_inline = carrier == "doorbell" and 8 * count < INLINE_NBYTES
        assert len(mailed) == (0 if is_inline else 9)


# ---------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("carrier", ["doorbell", "channel"])
def test_several_runs_are_under_way_in_order(learners, request, carrier):
    if carrier == "channel":
        request.getfixturevalue("by_channel")
    refs = spread(learners, lambda rank: [1])
    with col.capture() as step:
        number = step.argument("number")
        col.allreduce_refs(refs, op="max")
        step.returns([step.call(worker.note, number) for worker in learners])
    works = [step.run(number=number, async_op=True) for number in range(3 * IN_FLIGHT)]
    assert len([one for one in Controller.current().plans.trackers() if not one.resolved]) <= IN_FLIGHT
    assert works[-1].wait() == [3 * IN_FLIGHT] * 3
    assert [work.wait() for work in works] == [[number + 1] * 3 for number in range(3 * IN_FLIGHT)]
    assert all(work.done() for work in works)
    assert "done" in repr(works[0])
    assert ray.get(learners[1].noted.remote()) == [((number,), {}) for number in range(3 * IN_FLIGHT)]
    assert list(Controller.current().plans.trackers()) == []

    async def main():
        return await asyncio.gather(*[step.run(number=number, async_op=True) for number in range(4)])

    assert asyncio.run(main()) == [[3 * IN_FLIGHT + 1 + number] * 3 for number in range(4)]


def test_unawaited_runs_complete_and_are_visible(learners):
    refs = spread(learners, lambda rank: [1])
    with col.capture() as step:
        col.allreduce_refs(refs)
    for _ in range(4):
        step.run(async_op=True)
    assert found(refs) == [[81]] * 3, "get waits for what writes the tensor"
    step.run(async_op=True)
    step.run(async_op=True)
    del step
    gc.collect()
    assert col.free(refs[0]) == 1, "free waits for what reads it"
    assert found(refs[1:]) == [[729]] * 2


def test_a_run_comes_after_methods_whose_end_is_not_noted(learners):
    with col.capture() as step:
        step.returns([step.call(worker.loss) for worker in learners])
    assert step.run() == [5.0] * 3
    for worker in learners:
        for _ in range(20):
            worker.apply.remote(np.ones(5, np.float32), 1.0)
        worker.__ray_call__.remote(lambda self: None)
    assert step.run() == [-95.0] * 3
    for worker in learners:
        worker.apply.options(num_returns=0).remote(np.ones(5, np.float32), -1.0)
    works = [step.run(async_op=True), step.run(async_op=True)]
    assert [work.wait() for work in works] == [[-90.0] * 3] * 2


# ---------------------------------------------------------------------------------------------- groups, operands


def test_derived_groups_are_kept(actors):
    workers = actors(Worker, 5)
    refs = spread(workers, lambda rank: [1])
    with col.capture() as step:
        col.allreduce_refs(refs[:2])
    for a in range(5):
        for b in range(5):
            if a != b:
                col.broadcast_refs([refs[a], refs[b]])
    step.run()
    assert found(refs[:2]) == [[2]] * 2


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
    assert not Controller.current().groups.held
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
    assert not Controller.current().groups.held
