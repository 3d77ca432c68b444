"""A driver that is interrupted, or ends, or is busy elsewhere: the actors live, and their groups can be used."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import ray

import raycollect as col
from raycollect import errors
from tests.support.actors import Worker, filled
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


def assert_hold(refs, values):
    for found, value in zip(col.get(refs), values, strict=True):
        np.testing.assert_array_equal(found, np.full(7, value))


DRIVER = """
import sys, os
import numpy as np, ray
import raycollect as col
from tests.support.actors import Buffers

ray.init(address=sys.argv[1], namespace="apart", log_to_driver=False)
options = dict(num_cpus=0, lifetime="detached")
workers = [ray.remote(Buffers).options(name=f"lasting-{rank}", **options).remote() for rank in range(2)]
col.declare_collective_group(workers)
refs = [worker.get_buffer.remote() for worker in workers]
col.allreduce_refs(refs)
work = col.allreduce_refs(refs, async_op=True)
print("under way", flush=True)
sys.stdin.read()
"""


def test_actors_that_outlive_their_driver_are_driven_by_the_next_one(actors):
    """The first driver is killed in the middle of things; the second one finds the actors by their names."""
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert any("under way" in line for line in driver.stdout)
        driver.send_signal(signal.SIGKILL)
    finally:
        driver.communicate()
    workers = [ray.get_actor(f"lasting-{rank}", namespace="apart") for rank in range(2)]
    try:

        def declare():
            try:
                return col.declare_collective_group(workers)
            except errors.ControllerConflictError:
                return None

        assert wait_until(declare)
        refs = filled(workers, (5, 6))
        col.allreduce_refs(refs)
        assert_hold(refs, (11, 11))
    finally:
        for worker in workers:
            ray.kill(worker)


def hold_the_lock(self, seconds):
    """A call of C code that lets no other thread of the process run Python."""
    ctypes.PyDLL(None).sleep(seconds)


def test_a_call_that_holds_the_interpreters_lock_is_unresponsive_not_dead(actors):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)
    refs = filled(workers, (1, 2))
    busy = workers[1].call.remote(hold_the_lock, 4)
    work = col.allreduce_refs(refs, async_op=True)
    assert wait_until(lambda: [member.answers for member in group.status(0.2).members] == [True, False])
    assert group.status(0).state == "alive"
    ray.get(busy)
    work.wait()
    assert_hold(refs, (3, 3))
    assert group.status().members[1].answers
