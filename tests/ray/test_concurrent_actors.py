"""Actors whose methods overlap, async, threaded and in concurrency groups, alone and beside plain ones."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actor_pool import reusable
from tests.support.actors import AsyncActor, Buffers, Worker


def test_async_actors_take_part(actors):
    workers = actors(AsyncActor, 2)
    group = col.declare_collective_group(workers)
    assert not any(member.ordered for member in group.status().members)
    for _ in range(3):
        refs = [worker.get_buffer.remote() for worker in workers]
        col.allreduce_refs(refs)  # waits for the producers
    np.testing.assert_array_equal(ray.get(workers[0].read.remote()), np.full(4, 8.0))


def test_plans_that_wait_leave_the_threads_of_a_threaded_actor_to_its_methods(actors, gate):
    workers = actors(Worker, 2, max_concurrency=2)
    col.declare_collective_group(workers)

    def late(self, gate):
        ray.get(gate.wait.remote())
        return self.buffer

    refs = [worker.make.remote(late, gate) for worker in workers]
    works = [col.allreduce_refs(refs, async_op=True) for _ in range(3)]
    for _ in range(3):  # beside `late` each actor has one thread
        ray.get([worker.call.remote(lambda self: None) for worker in workers], timeout=30)
    ray.get(gate.open.remote())
    for work in works:
        work.wait()
    np.testing.assert_array_equal(col.get(refs[1]), np.full(10, 8))


@reusable
@ray.remote
class Late(col.CollectiveParticipant):
    """An async actor with a method that waits for its argument."""

    def __init__(self):
        self.buffer = np.ones(10)

    async def get_buffer(self, after=None):
        return self.buffer


@reusable
@ray.remote
class LateThreaded(col.CollectiveParticipant):
    """The same, in threads."""

    def __init__(self):
        self.buffer = np.ones(10)

    def get_buffer(self, after=None):
        return self.buffer


@pytest.mark.parametrize(
    ("kind", "concurrency"),
    [(Late, 1), (Late, 2), (LateThreaded, 2)],
)
def test_waiting_plans_block_no_method_of_a_concurrent_actor(actors, gate, kind, concurrency):
    """Plans, and the runs of a captured step behind them, wait for methods that Ray begins later."""
    workers = actors(kind, 2, max_concurrency=concurrency)
    col.declare_collective_group(workers)
    buffers = [worker.get_buffer.remote() for worker in workers]
    with col.capture() as step:
        col.allreduce_refs(buffers)
    late = [worker.get_buffer.remote(gate.wait.remote()) for worker in workers]
    works = [col.allreduce_refs(late, async_op=True) for _ in range(3)]
    works += [step.run(async_op=True) for _ in range(3)]
    ray.get(gate.open.remote())
    for work in works:
        work.wait(60)
    step.close()
    np.testing.assert_array_equal(col.get(late[1]), np.full(10, 64))


class Grouped(Buffers):
    """An actor with a concurrency group: some of its methods overlap others."""

    @ray.method(concurrency_group="io")
    def ping(self):
        return "pong"


def test_status_says_who_keeps_program_order(actors):
    (plain,) = actors(Worker, 1)
    (grouped,) = actors(ray.remote(concurrency_groups={"io": 1})(Grouped), 1)
    (loose,) = actors(Worker, 1, allow_out_of_order_execution=True, max_concurrency=1)
    group = col.declare_collective_group([plain, grouped, loose])
    assert [member.ordered for member in group.status().members] == [True, False, False]
    refs = [actor.get_buffer.remote() for actor in group.actors]
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[2]), np.full(10, 3))


class Meeting(Buffers):
    """Its methods name no concurrency group: only calls do, by their options."""

    def begin(self):
        self.meeting = threading.Barrier(2)

    def meet(self):
        self.meeting.wait(30)

    def fill_at(self, gate, value):
        """Fills the buffer once the gate is open, and returns it."""
        ray.get(gate.wait.remote())
        self.buffer[:] = value
        return self.buffer


def test_methods_in_a_concurrency_group_that_a_call_names_overlap(actors, gate):
    workers = actors(ray.remote(concurrency_groups={"io": 2})(Meeting), 2)
    col.declare_collective_group(workers)
    ray.get([worker.begin.remote() for worker in workers])
    ray.get([worker.meet.options(concurrency_group="io").remote() for worker in workers for _ in range(2)], timeout=30)

    late = [worker.fill_at.options(concurrency_group="io").remote(gate, 3) for worker in workers]
    work = col.allreduce_refs(late, async_op=True)
    ray.get([worker.call.remote(lambda self: None) for worker in workers], timeout=30)
    assert not work.done()
    ray.get(gate.open.remote())
    work.wait()
    np.testing.assert_array_equal(ray.get(workers[1].read.remote()), np.full(10, 6))


def test_concurrency_group_that_an_ordered_actor_did_not_tell_is_refused(actors):
    """With tensor transport, Ray does not tell of concurrency groups that no method of the class names."""
    cls = ray.remote(concurrency_groups={"io": 1}, enable_tensor_transport=True)(Meeting)
    (worker,) = actors(cls, 1)
    group = col.declare_collective_group([worker])
    assert group.status().members[0].ordered
    with pytest.raises(errors.UnsupportedError) as caught:
        ray.get(worker.get_buffer.options(concurrency_group="io").remote())
    (violation,) = caught.value.violations
    assert violation.field == "method"
    assert violation.actor.startswith("Meeting(")
    ref = worker.get_buffer.remote()
    with pytest.raises(errors.ProducerFailedError):
        col.allreduce_refs([worker.get_buffer.options(concurrency_group="io").remote()])
    col.allreduce_refs([ref])


@reusable
@ray.remote
class Threads(col.CollectiveParticipant):
    """An async actor whose calls wait in the default pool of its event loop."""

    def __init__(self):
        self.buffer = np.arange(3.0)
        self.opened = threading.Event()

    async def get_buffer(self):
        return self.buffer

    async def wait(self):
        await asyncio.to_thread(self.opened.wait)

    async def open(self, array=None):
        self.opened.set()
        return None if array is None else array.sum()

    async def items(self, array):
        self.opened.set()
        yield array.sum()


@pytest.mark.parametrize("given", ["nothing", "its own tensor", "another's tensor"])
@pytest.mark.parametrize("method", ["open", "items"])
def test_full_default_pool_of_an_event_loop_keeps_no_coroutine_from_running(actors, method, given):
    worker, other = actors(Threads, 2)
    args = [] if given == "nothing" else [(worker if given == "its own tensor" else other).get_buffer.remote()]
    if method == "items" and not args:
        args = [np.arange(3.0)]
    waiting = [worker.wait.remote() for _ in range(40)]  # more than the pool has threads
    if method == "items":
        assert [ray.get(item, timeout=30) for item in worker.items.remote(*args)] == [3.0]
    else:
        assert ray.get(worker.open.remote(*args), timeout=30) == (3.0 if args else None)
    ray.get(waiting, timeout=30)
