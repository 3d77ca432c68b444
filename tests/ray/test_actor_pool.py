"""Actors go on from test to test: each that did not would cost a second. What a test leaves behind ends them."""

from __future__ import annotations

import os

import pytest
import ray

import raycollect as col
from raycollect.driver.controller import Controller
from tests.support import actor_pool
from tests.support.actors import Gate, Worker
from tests.support.waiting import wait_until

TIMEOUT_S = 40.0
"""How long it may take here, where one that is late is no good news: a busy machine is no reason."""


def _captured(workers):
    col.declare_collective_group(workers)
    with col.capture() as step:
        col.allreduce_refs([step.call(worker.get_buffer) for worker in workers])
    for _ in range(3):
        step.run()
    step.close()


def _join(self, rank):
    col.init_collective_group(2, rank, "shm", "own")
    col.allreduce(self.buffer, "own")
    col.destroy_collective_group("own")


def _own(workers):
    ray.get([worker.call.remote(_join, rank) for rank, worker in enumerate(workers)])


USES = {"captured": _captured, "a group of their own": _own}


def _started():
    started = actor_pool.start(Worker, 2, ())
    yield started
    for worker in started:
        ray.kill(worker)


@pytest.fixture
def workers(cluster):
    yield from _started()


@pytest.fixture(scope="module")
def used(cluster):
    """Workers that go on from case to case, which is what they have to."""
    yield from _started()


def _end_test():
    Controller.current().close()
    Controller._current = None


@pytest.mark.parametrize("name", USES)
def test_used_actors_are_reusable(used, name):
    for _ in range(2):
        USES[name](used)
        _end_test()
        assert actor_pool.reset(used, (), TIMEOUT_S) == used


def _patch(self):
    from raycollect.planner import wire

    wire.decode_program = None


def _set(self):
    os.environ["LEFT_BEHIND"] = "1"


def test_busy_actor_is_not_reused(cluster):
    gates = actor_pool.start(Gate, 2, (), max_concurrency=2)
    waiting = gates[0].wait.remote()
    assert ray.get(gates[0].__ray_call__.remote(lambda _: wait_until(actor_pool._is_busy)))  # in another thread
    assert actor_pool.reset(gates, (), TIMEOUT_S) == gates[1:]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting)
    ray.kill(gates[1])


@pytest.mark.parametrize("leave", [_patch, pytest.param(_set, marks=pytest.mark.full)])
def test_actor_with_leftovers_is_not_reused(workers, leave):
    ray.get(workers[0].call.remote(leave))
    assert actor_pool.reset(workers, (), TIMEOUT_S) == workers[1:]
