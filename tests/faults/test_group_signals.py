"""Ctrl-C while groups are formed, changed and destroyed: there is the group, or there is none; its name is usable."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver import member_discovery
from tests.faults.groups import PATIENT_S, assert_works
from tests.support.actors import Gate, Worker, block, groups_here
from tests.support.waiting import interrupt_in, wait_until

NAME = "interrupted"


def assert_usable(workers):
    """The name can be freed, and declared."""
    try:
        col.destroy_collective_group(NAME)
    except errors.UnknownGroupError:
        pass
    group = col.declare_collective_group(workers, group_name=NAME, timeout_s=PATIENT_S)
    assert_works(workers, NAME)
    group.destroy()
    assert wait_until(lambda: not any(ray.get([one.call.remote(groups_here) for one in workers])))


@pytest.fixture
def busy(actors):
    """An actor in a method, and what ends that."""
    (worker,), (gate,) = actors(Worker, 1), actors(Gate, 1, max_concurrency=8)
    end = block(worker, gate)
    yield worker, lambda: ray.get([gate.open.remote(), end], timeout=PATIENT_S)
    ray.get(gate.open.remote())


def test_a_declaration_that_is_interrupted_leaves_no_group(actors, busy):
    pair, (worker, let_go) = actors(Worker, 2), busy
    thread = interrupt_in(member_discovery.describe)
    with pytest.raises(KeyboardInterrupt):
        col.declare_collective_group([*pair, worker], group_name=NAME, timeout_s=PATIENT_S)
    thread.join()
    with pytest.raises(errors.UnknownGroupError):
        col.destroy_collective_group(NAME)
    let_go()
    assert_usable([*pair, worker])


def test_a_change_of_members_that_is_interrupted_leaves_the_group_as_it_was(actors, busy):
    pair, (worker, let_go) = actors(Worker, 2), busy
    group = col.declare_collective_group(pair, group_name=NAME, timeout_s=PATIENT_S)
    thread = interrupt_in(member_discovery.describe)
    with pytest.raises(KeyboardInterrupt):
        group.add(worker, timeout_s=PATIENT_S)
    thread.join()
    assert_works(pair, NAME)
    let_go()
    group.add(worker, timeout_s=PATIENT_S)
    assert_works(group.actors, NAME)
    group.destroy()
    assert_usable(pair)


class Interrupts:
    """Sends this process SIGINT, as Ctrl-C does, some time after the block has begun, if it has not ended by then."""

    def __init__(self, after_s):
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(after_s,))

    def _send(self, after_s):
        if not self._ended.wait(after_s):
            os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *exc):
        while self._thread.is_alive():
            self._ended.set()
            time.sleep(0)  # where a signal that came in the last moment takes effect


def live(workers):
    """All that can become of a group."""
    group = col.declare_collective_group(workers[:2], group_name=NAME, timeout_s=PATIENT_S)
    group.add(workers[2], timeout_s=PATIENT_S)
    group.remove(0, timeout_s=PATIENT_S)
    group.rebuild(workers, timeout_s=PATIENT_S)
    group.destroy()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_a_name_is_usable_whenever_a_signal_comes(actors, seed):
    workers, draw, count = actors(Worker, 3), random.Random(seed), 0
    began_s = time.monotonic()
    live(workers)
    lasts_s = time.monotonic() - began_s
    for _ in range(12):
        try:
            with Interrupts(draw.uniform(0, lasts_s)):
                live(workers)
        except KeyboardInterrupt:
            count += 1
        assert_usable(workers)
    assert count
