"""Actors go on from test to test: each that did not would cost a second. What a test leaves behind ends them."""

from __future__ import annotations

import os

import pytest
import ray

from tests.support import actor_pool
from tests.support.actors import Gate, Worker
from tests.support.waiting import wait_until

TIMEOUT_S = 40.0
"""How long it may take here, where one that is late is no good news: a busy machine is no reason."""


def _started():
    started = actor_pool.start(Worker, 2, ())
    yield started
    for worker in started:
        ray.kill(worker)


@pytest.fixture
def workers(cluster):
    yield from _started()


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
