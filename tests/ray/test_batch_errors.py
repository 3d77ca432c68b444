"""Batches that can't be: refused by name with nothing sent, or ended with the first cause for all of their calls."""

from __future__ import annotations

import contextlib
import contextvars
import pickle
import threading

import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver import batch as batches
from raycollect.driver.controller import Controller
from tests.faults import inject
from tests.support.actors import Gate, Worker, found, spread
from tests.support.checks import nothing_sent
from tests.support.waiting import wait_until

WAIT_S = 60


# ---------------------------------------------------------------------------------------------- refused


def test_a_placeholder_before_the_end_of_its_block(trio):
    refs = spread(trio)
    with col.batch() as batch:
        made = col.allgather_refs(None, refs)
        uses = {
            "get": lambda: col.get(made),
            "free": lambda: col.free(made[0]),
            "ref": lambda: made[0].ref,
            "refs": lambda: batch.refs,
            "wait": batch.wait,
            "done": batch.done,
        }
        for use in uses.values():
            with pytest.raises(errors.BatchError, match="not ended"):
                use()
        for use in (lambda: pickle.dumps(made[0]), lambda: trio[0].call.remote(len, made[0])):
            with pytest.raises(errors.BatchError, match="pass its `ref`"):
                use()
        with pytest.raises(errors.BatchError, match="entered once"), batch:
            pass
    assert made[0].ref.hex() in repr(made[0])
    with pytest.raises(errors.BatchError, match="entered once"), batch:
        pass


def test_a_placeholder_in_another_batch(trio, submits):
    refs = spread(trio)
    seen = []

    def other(made):
        try:
            with col.batch():
                col.allreduce_refs(made)
        except errors.BatchError as exc:
            seen.append(exc)

    with col.batch():
        made = col.allgather_refs(None, refs)
        thread = threading.Thread(target=other, args=(made,))
        thread.start()
        thread.join(WAIT_S)
    assert "not ended" in str(seen[0])
    with col.batch() as later:
        col.allreduce_refs(made)
    assert later.refs == [[one.ref for one in made]]
    assert found(made) == [[[0], [3], [6]]] * 3


def test_async_op_is_the_batchs(trio, submits):
    refs = spread(trio)
    with nothing_sent(submits):
        with pytest.raises(errors.InvalidArgumentError, match=r"batch\(async_op=True\)"), col.batch():
            col.allreduce_refs(refs, async_op=True)
        with pytest.raises(errors.InvalidArgumentError, match=r"batch\(async_op=True\)"), col.batch():
            col.send_ref(refs[0], refs[1], async_op=True)


def test_a_group_destroyed_in_the_block(actors, submits):
    workers = actors(Worker, 3)
    col.declare_collective_group(workers[:2], group_name="short")
    col.declare_collective_group(workers[1:], group_name="other")
    refs = spread(workers)
    with nothing_sent(submits), pytest.raises(errors.UnknownGroupError, match="short"), col.batch():
        col.allreduce_refs(refs[1:], "other")
        col.allreduce_refs(refs[:2], "short")
        col.destroy_collective_group("short")
    assert found(refs) == [[0], [1], [2]]
    with nothing_sent(submits), pytest.raises(errors.UnknownGroupError), col.batch():
        col.allreduce_refs(refs[:2], "short")


def _block(refs, seen):
    """A batch whose block is left by whoever goes on with the generator."""
    with col.batch() as batch:
        seen += [batch, col.allreduce_refs(refs, inplace=False)[0]]
        yield


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_block_that_is_left_in_another_context_sends_nothing(actors, submits, is_nested):
    refs, seen = spread(actors(Worker, 3)), []
    ray.get(refs)
    block, context = _block(refs, seen), contextvars.copy_context()
    with contextlib.ExitStack() as around:
        outer = None
        if is_nested:
            outer = context.run(col.batch().__enter__)
            around.callback(context.run, outer.__exit__, None, None, None)
        context.run(next, block)
        batch, made = seen
        assert context.run(batches.current) is batch
        with nothing_sent(submits):
            with pytest.raises(errors.BatchError, match="another context"):
                next(block)
            with pytest.raises(errors.BatchError, match="failed"):
                made.ref  # noqa: B018
        assert context.run(batches.current) is outer, "what it has left behind is no block"
        assert len(set(Controller.current().groups.held)) == is_nested
    for use in (lambda: batch.refs, batch.wait, batch.done, lambda: batch.work):
        with pytest.raises(errors.BatchError, match="failed"):
            use()
    assert not Controller.current().groups.held, "its derived group is not held any more"
    submits.clear()
    context.run(col.allreduce_refs, refs)
    assert len(submits) == 3
    assert found(refs) == [[3]] * 3


# ---------------------------------------------------------------------------------------------- faults


def test_a_member_that_is_gone_before_the_block_ends(actors, submits):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers)
    refs = spread(workers)
    ray.get(refs)
    with nothing_sent(submits), pytest.raises(errors.GroupBrokenError, match="died"), col.batch():
        col.allreduce_refs(refs)
        ray.kill(workers[2])
        assert wait_until(lambda: group.status().state == "broken")


@pytest.mark.parametrize("point", ["before_check", "before_kernel"])
def test_a_participant_that_dies_in_a_batch(actors, point):
    workers = actors(Worker, 4)
    col.declare_collective_group(workers[:3], group_name="first")
    whole = col.declare_collective_group(workers[2:], group_name="second")
    free = col.declare_collective_group(workers[:2], group_name="unharmed")
    refs = spread(workers)
    ray.get(refs)
    ray.get(workers[3].call.remote(inject.put, point, "die"))
    with pytest.raises(errors.ParticipantDiedError) as caught, col.batch(timeout_s=30):
        col.allreduce_refs(refs[:3], "first")
        col.broadcast_refs(refs[2:], 0, "second")
        col.allreduce_refs(refs[:2], "unharmed")
    assert (caught.value.rank, caught.value.group_name) == (1, "second")
    assert "Buffers(" in caught.value.actor
    assert whole.status().state == "broken"
    assert free.status().state == "alive"
    fresh = spread(workers[:3], lambda rank: [rank + 1])
    with col.batch():
        col.allreduce_refs(fresh, "first")
        col.allreduce_refs(fresh[:2], "unharmed")
    assert found(fresh) == [[12], [12], [6]]


def test_a_batch_is_cancelled_as_a_whole(actors):
    workers, gate = actors(Worker, 3), actors(Gate, 1, max_concurrency=8)[0]
    for name, members in (("ab", (0, 1)), ("bc", (1, 2))):
        col.declare_collective_group([workers[at] for at in members], group_name=name)
    refs = spread(workers)
    busy = workers[2].call.remote(lambda self: ray.get(gate.wait.remote()))
    with col.batch(async_op=True) as batch:
        col.allreduce_refs(refs[:2], "ab")
        made = col.allgather_refs(None, refs[1:], "bc")
    assert not batch.done()
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        batch.wait(0.05)
    assert batch.work.cancel()
    with pytest.raises(errors.PlanAbortedError, match="cancelled"):
        batch.wait()
    ray.get([worker.read.remote() for worker in workers[:2]])  # behind the batch, which they have given up by then
    ray.get([gate.open.remote(), busy])
    for one in made:
        with pytest.raises(errors.PlanAbortedError):
            col.get(one)
    with col.batch():
        col.allreduce_refs(refs[:2], "ab")
        col.allreduce_refs(refs[1:], "bc")
    assert found(refs) == [[1], [3], [3]]
