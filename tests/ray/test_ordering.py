"""Collectives among the methods of plain and threaded actors, and what keeps them apart."""

from __future__ import annotations

import random

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError

import raycollect as col
from raycollect import errors
from raycollect.driver import dispatch
from raycollect.member.runtime import Runtime
from tests.ray.gates import assert_works, crew, gate, opened, wait_in
from tests.ray.workers import Worker, buffers
from tests.support.values import replace

__all__ = ["crew", "gate"]  # fixtures


SEEDS = [0, pytest.param(1, marks=pytest.mark.full)]


def test_program_order_call_waits_behind_queued_methods(crew, gate):
    workers, refs = crew(2)
    queued = workers[0].make.remote(opened, gate.wait.remote())
    work = col.allreduce_refs(refs, async_op=True)
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        work.wait(timeout_s=0.5)
    ray.get(gate.open.remote())
    work.wait()
    ray.get(queued)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_call_waits_for_the_methods_that_return_its_operands(crew, gate, threads):
    workers, refs = crew(3, threads)
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


@pytest.mark.parametrize("threads", [1, 4])
def test_get_waits_for_the_calls_that_write_a_tensor_and_no_longer_than_it_may(crew, gate, threads):
    workers, refs = crew(2, threads)
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


class TurnSeen:
    """Notes at each point whether the turn is held."""

    def __init__(self):
        self.seen = []

    def at(self, point, seq, rank):
        self.seen.append((point, Runtime.current().method_lock.locked()))


def test_the_turn_is_held_while_a_call_runs_and_given_back(crew):
    workers, refs = crew(2)

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


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_of_plain_and_threaded_actors_keep_the_order_of_the_calls(actors, seed):
    rng = random.Random(seed)
    workers = [*actors(Worker, 2), *actors(Worker, 1, max_concurrency=4)]
    col.declare_collective_group(workers)
    col.declare_collective_group(workers[:2], group_name="plain")
    col.declare_collective_group(workers[1:], group_name="both")
    expected = [np.full(5, rank + 2.0) for rank in range(3)]
    ray.get([worker.set_buffer.remote(one) for worker, one in zip(workers, expected, strict=True)])
    refs = buffers(workers)
    under_way = []
    for _ in range(25):
        name, ranks = rng.choice([("default", slice(3)), ("plain", slice(2)), ("both", slice(1, 3))])
        mine = refs[ranks]
        root = rng.randrange(len(mine))
        if rng.random() < 0.5:
            under_way.append(col.broadcast_refs(mine, root, name, async_op=True))
            expected[ranks] = [expected[ranks][root].copy() for _ in mine]
        else:
            under_way.append(col.reduce_refs(mine, root, name, async_op=True))
            expected[(ranks.start or 0) + root] = np.sum(expected[ranks], axis=0)
        if rng.random() < 0.2:
            under_way.pop().wait()
    for work in under_way:
        work.wait()
    for found, one in zip(col.get(refs), expected, strict=True):
        np.testing.assert_array_equal(found, one)


def test_failed_send_of_an_order_aborts_the_call(crew, monkeypatch):
    """The order reaches rank 0 only: it is aborted there, and no tensor is touched."""
    workers, refs = crew(3)
    order, told = dispatch.ParticipantLink.order, []

    def second_fails(self, message):
        told.append(self.info["actor"])
        if len(told) == 2:
            raise errors.ConnectionLostError(detail="cut")
        order(self, message)

    with monkeypatch.context() as patch, pytest.raises(errors.ParticipantDiedError, match="no order") as caught:
        patch.setattr(dispatch.ParticipantLink, "order", second_fails)
        col.allreduce_refs(refs)
    assert caught.value.rank == 1
    assert len(told) == 2
    for found in ray.get([worker.read.remote() for worker in workers]):
        np.testing.assert_array_equal(found, np.ones(10))
    assert_works(refs, workers)
