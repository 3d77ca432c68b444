"""Batches: many calls as one plan with one message per participant, with the results of one call after the other."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actors import Plain, Worker, found, spread
from tests.support.checks import nothing_sent
from tests.support.waiting import wait_until

WAIT_S = 60


# ---------------------------------------------------------------------------------------------- results


def test_plan_of_any_size_sends_one_message_per_participant(actors, submits):
    workers = actors(Worker, 3)
    col.declare_collective_group(workers)

    def many(self):
        return [np.full(n, 1.0) for n in range(1, 40)]

    refs = [worker.make.remote(many) for worker in workers]
    col.allreduce_refs(refs)
    assert len(submits) == len({actor for actor, _ in submits}) == 3
    col.send_ref(refs[0], workers[2])
    assert len(submits) == 5
    np.testing.assert_array_equal(col.get(refs[1])[38], np.full(39, 3))


def test_outputs_of_a_batched_call_are_operands_of_later_ones(trio, submits):
    given = spread(trio, lambda rank: [rank, 10 * rank])
    submits.clear()
    with col.batch() as batch:
        lists = col.allgather_refs(None, given)
        sums = col.allreduce_refs(lists, inplace=False)
        assert col.allreduce_refs(sums, op="min") == sums
        back = col.send_ref(sums[0], trio[1])
        scattered = col.scatter_refs(None, lists[2], 2)
    assert len(submits) == 3
    expected = [[3 * rank, 30 * rank] for rank in range(3)]
    assert found(sums) == [expected] * 3
    assert found([back]) == [expected]
    assert found(lists) == [[[rank, 10 * rank] for rank in range(3)]] * 3
    assert found(scattered) == [[rank, 10 * rank] for rank in range(3)]
    assert batch.refs[2] == batch.refs[1]


def test_groups_are_derived_in_the_block(actors):
    workers = actors(Worker, 4)
    refs = spread(workers)
    with col.batch():
        col.allreduce_refs(refs[:2])
        col.allreduce_refs(refs[1:3])
        made = col.send_ref(refs[2], workers[3])
    assert found(refs) == [[1], [3], [3], [3]]
    assert found([made]) == [[3]]


def test_the_results_may_be_waited_for_later(trio):
    refs = spread(trio)
    with col.batch(async_op=True, timeout_s=30) as batch:
        out = col.allreduce_refs(refs, inplace=False)
        col.broadcast_refs(refs, 1)
    assert found(batch.refs[0]) == [[3]] * 3, "refs can be used at once"
    assert batch.wait() == [batch.refs[0], refs]
    assert batch.done()
    assert found(out) == [[3]] * 3
    assert batch.work.refs == batch.refs
    assert "batch" in repr(batch.work)

    async def main():
        with col.batch(async_op=True) as batch:
            col.allreduce_refs(refs)
        return await batch.work

    assert asyncio.run(main()) == [refs]
    assert found(refs) == [[3]] * 3


def test_actors_without_the_mixin_take_part_in_barriers(actors):
    workers, plain = actors(Worker, 2), actors(Plain, 1)
    col.declare_collective_group([*workers, *plain], group_name="mixed")
    col.declare_collective_group(workers, group_name="pair")
    refs = spread(workers)
    with col.batch() as batch:
        col.allreduce_refs(refs, "pair")
        col.barrier("mixed")
    assert batch.refs == [refs, None]
    assert found(refs) == [[1]] * 2


def test_threads_and_tasks_that_a_block_starts_are_outside_of_it(trio, submits):
    refs = spread(trio)
    submits.clear()

    async def main():
        async def other():
            col.allreduce_refs(refs)

        with col.batch() as batch:
            await asyncio.gather(other(), asyncio.to_thread(col.allreduce_refs, refs))
            assert len(submits) == 6
            await asyncio.sleep(0)
            col.broadcast_refs(refs)
        assert len(submits) == 9
        assert batch.refs == [refs]

    asyncio.run(main())
    assert found(refs) == [[9]] * 3


def test_operands_do_not_live_as_long_as_a_batch_and_its_work(trio):
    def held():
        return [member.store.held for member in col.Group.statistics(group).members]

    group = col.declare_collective_group(trio, group_name="other")
    before = held()
    refs, others = spread(trio), spread(trio, lambda rank: [10 * rank])
    with col.batch(async_op=True) as batch:
        made = col.allreduce_refs(refs, inplace=False)
        col.broadcast_refs(others, 1)
    work = batch.work
    batch.wait()
    ray.wait(batch.refs[0], num_returns=3)  # the last rank tells the end for all; others may yet have to keep theirs
    assert [now - then for now, then in zip(held(), before, strict=True)] == [3, 3, 3], "two operands and an output"
    del refs
    assert wait_until(lambda: [now - then for now, then in zip(held(), before, strict=True)] == [2, 2, 2])
    assert found(made) == [[3]] * 3
    assert batch.refs == work.refs
    assert batch.refs[1] == others
    assert "2 calls" in repr(batch)
    with pytest.raises(errors.BatchError, match="entered once"), batch:
        pass


# ---------------------------------------------------------------------------------------------- blocks


def test_an_empty_batch_does_nothing(submits):
    with nothing_sent(submits), col.batch() as batch:
        pass
    assert batch.refs == batch.wait() == []
    assert batch.done()
    assert batch.work is None


def test_an_exception_in_the_block_sends_nothing(trio, submits):
    refs = spread(trio)
    with nothing_sent(submits):
        with pytest.raises(ZeroDivisionError), col.batch() as batch:
            made = col.allgather_refs(None, refs)
            raise ZeroDivisionError
        for use in (lambda: batch.refs, batch.wait, batch.done, lambda: batch.work):
            with pytest.raises(errors.BatchError, match="failed"):
                use()
        uses = (lambda: made[0].ref, lambda: col.get(made), lambda: col.free(made), lambda: col.allreduce_refs(made))
        for use in uses:
            with pytest.raises(errors.BatchError, match="failed"):
                use()
    col.allreduce_refs(refs)
    assert found(refs) == [[3]] * 3


def test_a_block_in_a_block_joins_it(trio, submits):
    refs = spread(trio)
    submits.clear()
    with col.batch() as outer:
        col.allreduce_refs(refs)
        with col.batch(async_op=True) as inner:
            made = col.allgather_refs(None, refs)
        with pytest.raises(errors.BatchError, match="not ended"):
            inner.wait()
        with pytest.raises(errors.BatchError, match="not ended"):
            inner.refs  # noqa: B018
        with pytest.raises(ZeroDivisionError), col.batch() as dropped:
            gone = col.allreduce_refs(made, inplace=False)
            col.broadcast_refs(made, 2)
            raise ZeroDivisionError
        with pytest.raises(errors.BatchError, match="failed"):
            col.allreduce_refs(gone)
        col.allreduce_refs(made)
    assert len(submits) == 3
    assert found(made) == [[[9], [9], [9]]] * 3
    assert outer.refs == [refs, inner.refs[0], inner.refs[0]]
    assert inner.done()
    assert inner.work is outer.work
    with pytest.raises(errors.BatchError, match="failed"):
        dropped.refs  # noqa: B018
