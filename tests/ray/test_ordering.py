"""Groups whose collectives are ordered by their operands: they overtake methods, and never run beside one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError

import raycollect as col
from raycollect import errors
from raycollect.driver import dispatch
from raycollect.member.runtime import Runtime
from tests.ray.data_ordered import crew, gate, occupy, opened, wait_in
from tests.ray.workers import Buffers, Plain, Worker, buffers

__all__ = ["crew", "gate", "occupy"]  # fixtures


SEEDS = [0, pytest.param(1, marks=pytest.mark.full)]


# ---------------------------------------------------------------------------------------------- what is promised


@pytest.mark.parametrize(("backend", "count"), [("shm", 2), ("tcp", 3), ("gloo", 2)])
def test_a_call_overtakes_methods_that_wait_in_the_queue(crew, gate, submits, backend, count):
    workers, refs = crew(count, backend=backend)
    queued = [worker.make.remote(opened, gate.wait.remote()) for worker in workers]
    for _ in range(3):
        col.allreduce_refs(refs)  # returns, though no method behind those in the queue can run
    assert not ray.wait(queued, num_returns=count, timeout=0)[0]
    assert submits == []
    ray.get(gate.open.remote())
    for found in col.get(queued):
        np.testing.assert_array_equal(found, np.full(10, count**3))


def test_program_order_call_waits_behind_queued_methods(crew, gate):
    workers, refs = crew(2, ordering="program")
    queued = workers[0].make.remote(opened, gate.wait.remote())
    work = col.allreduce_refs(refs, async_op=True)
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        work.wait(timeout_s=0.5)
    ray.get(gate.open.remote())
    work.wait()
    ray.get(queued)


def test_a_call_waits_for_the_methods_that_return_its_operands(crew, gate):
    workers, refs = crew(3)
    late = workers[1].make.remote(wait_in, gate)
    work = col.allreduce_refs([refs[0], late, refs[2]], async_op=True)
    behind = col.allreduce_refs(refs, async_op=True)
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        behind.wait(timeout_s=0.3)
    assert not work.done()
    ray.get(gate.open.remote())
    work.wait()
    behind.wait()
    np.testing.assert_array_equal(col.get(late), np.full(10, 9))


def test_get_waits_for_the_calls_that_write_a_tensor_and_no_longer_than_it_may(crew, gate):
    workers, refs = crew(2)
    handle = ray.get(refs[0])
    late = workers[1].make.remote(wait_in, gate)
    work = col.allreduce_refs([refs[0], late], async_op=True)
    for given in (refs[0], handle, [handle, refs[0]]):
        with pytest.raises(GetTimeoutError, match="allreduce, which writes the tensor, has not ended in time"):
            col.get(given, timeout_s=0.2)
    ray.get(gate.open.remote())
    for found in col.get([handle, refs[0]], timeout_s=60):
        np.testing.assert_array_equal(found, np.full(10, 2))
    work.wait()


def test_a_call_never_runs_beside_a_method(crew, gate, occupy):
    """The method sees one value, however long it runs; the other rank is in the consistency check meanwhile."""
    workers, refs = crew(2)
    running = occupy(workers[1])
    work = col.allreduce_refs(refs, async_op=True)
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        work.wait(timeout_s=0.5)
    ray.get(gate.open.remote())
    work.wait()
    ray.wait([running])
    np.testing.assert_array_equal(col.get(running), np.full(10, 2))


class TurnSeen:
    """Notes at each point whether the turn is held."""

    def __init__(self):
        self.seen = []

    def at(self, point, seq, rank):
        self.seen.append((point, Runtime.current().method_lock.locked()))


@pytest.mark.parametrize("ordering", ["data", "program"])
def test_the_turn_is_held_while_a_call_runs_and_given_back(crew, ordering):
    workers, refs = crew(2, ordering=ordering)

    def watch(self):
        runtime = Runtime.current()
        runtime.instruments = replace(runtime.instruments, faults=TurnSeen())

    def seen(self):
        return Runtime.current().instruments.faults.seen

    ray.get([worker.call.remote(watch) for worker in workers])
    for _ in range(3):
        col.allreduce_refs(refs)
    for points in ray.get([worker.call.remote(seen) for worker in workers]):
        assert len(points) >= 9
        assert all(was for _, was in points)


def test_methods_and_calls_take_turns(crew):
    """Each method adds one and takes it away again: no call may see that, and none may be lost."""
    workers, refs = crew(2)

    def dance(self):
        for _ in range(50):
            self.buffer += 1
            self.buffer -= 1
        return self.buffer

    ray.get([worker.call.remote(lambda self: self.buffer.fill(1)) for worker in workers])
    methods = [worker.make.remote(dance) for worker in workers for _ in range(100)]
    for _ in range(20):
        col.allreduce_refs(refs, op="max")
    for found in col.get(methods):
        np.testing.assert_array_equal(found, np.ones(10))


# ---------------------------------------------------------------------------------------------- no deadlock


def test_early_rank_does_not_block_a_method_another_rank_needs(crew, gate):
    """Rank 1 waits for a method of its own, which waits for one of rank 0 that stands in the queue there."""
    workers, refs = crew(2)
    made = workers[0].make.remote(opened, gate.wait.remote())
    late = workers[1].make.remote(lambda self, value: self.buffer, made)
    work = col.allreduce_refs([refs[0], late], async_op=True, timeout_s=20)
    ray.get(gate.open.remote())
    work.wait()
    np.testing.assert_array_equal(col.get(late), np.full(10, 2))


def test_early_rank_does_not_block_a_method_an_earlier_plan_needs(crew, gate):
    """The same, by way of a plan in program order that another rank has to end first."""
    workers, refs = crew(3)
    col.declare_collective_group(workers[1:], group_name="pair")
    made = workers[0].make.remote(opened, gate.wait.remote())
    late = workers[1].make.remote(lambda self, value: self.buffer, made)
    before = col.allreduce_refs([late, refs[2]], "pair", async_op=True, timeout_s=20)
    work = col.allreduce_refs(refs, async_op=True, timeout_s=20)
    ray.get(gate.open.remote())
    before.wait()
    work.wait()
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 5))


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_of_both_orders_keep_the_order_of_the_calls(crew, seed):
    rng = random.Random(seed)
    workers, refs = crew(3)
    col.declare_collective_group(workers, group_name="program")
    col.declare_collective_group(workers[:2], group_name="pair", ordering="data")
    expected = [np.full(5, rank + 2.0) for rank in range(3)]
    ray.get([worker.set_buffer.remote(one) for worker, one in zip(workers, expected, strict=True)])
    refs = buffers(workers)
    under_way = []
    for _ in range(25):
        name, size = rng.choice([("default", 3), ("program", 3), ("pair", 2)])
        root = rng.randrange(size)
        if rng.random() < 0.5:
            under_way.append(col.broadcast_refs(refs[:size], root, name, async_op=True))
            expected[:size] = [expected[root].copy() for _ in range(size)]
        else:
            under_way.append(col.reduce_refs(refs[:size], root, name, async_op=True))
            expected[root] = np.sum(expected[:size], axis=0)
        if rng.random() < 0.2:
            under_way.pop().wait()
    for work in under_way:
        work.wait()
    for found, one in zip(col.get(refs), expected, strict=True):
        np.testing.assert_array_equal(found, one)


# ---------------------------------------------------------------------------------------------- what goes otherwise


def test_calls_with_outputs_keep_program_order(crew, submits):
    _, refs = crew(2)
    gathered = col.allgather_refs(None, refs)
    assert len(submits) == 2
    col.allreduce_refs(refs)
    assert len(submits) == 2
    for found in col.get(gathered):
        np.testing.assert_array_equal(found, np.ones((2, 10)))


def test_batch_of_data_ordered_groups_uses_the_channel(crew, submits):
    workers, refs = crew(3)
    col.declare_collective_group(workers[:2], group_name="data", ordering="data")
    col.declare_collective_group(workers[1:], group_name="program")
    for name, count in (("data", 0), ("program", 3)):
        with col.batch():
            col.allreduce_refs(refs)
            col.allreduce_refs(refs[:2] if name == "data" else refs[1:], name)
        assert len(submits) == count
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 15))
    np.testing.assert_array_equal(col.get(refs[2]), np.full(10, 30))


def test_oversized_orders_keep_program_order(crew, submits, monkeypatch):
    _, refs = crew(2)
    monkeypatch.setattr(dispatch, "ORDER_NBYTES", 100)
    col.allreduce_refs(refs)
    assert len(submits) == 2
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 2))


class AsyncBuffers(Buffers):
    """An actor with a coroutine method."""

    async def later(self):
        return self.buffer


def test_async_actors(crew, gate):
    workers, refs = crew(2, cls=ray.remote(AsyncBuffers))
    late = workers[0].make.remote(wait_in, gate)
    work = col.allreduce_refs([late, workers[1].later.remote()], async_op=True)
    ray.get(gate.open.remote())
    work.wait()
    np.testing.assert_array_equal(col.get(late), np.full(10, 2))
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[1]), np.full(10, 4))


def test_a_barrier_of_actors_without_the_mixin(crew, actors):
    workers = actors(Plain, 3)
    col.declare_collective_group(workers, group_name="plain", ordering="data")
    for _ in range(3):
        col.barrier("plain")


# ---------------------------------------------------------------------------------------------- the group


@pytest.mark.parametrize("ordering", ["program", "data"])
def test_a_group_shows_its_ordering(actors, ordering):
    group = col.declare_collective_group(actors(Worker, 2), ordering=ordering)
    assert group.ordering == ordering
    assert f"{ordering} order" in repr(group)


def test_another_ordering_is_refused(actors):
    workers = actors(Worker, 2)
    for ordering in ("chaos", "", "DATA", None, 1, ["data"]):
        with pytest.raises(errors.InvalidGroupError, match=r"ordering is .*'program' or 'data'"):
            col.declare_collective_group(workers, ordering=ordering)
