"""Groups of actors: how their processes are ended, begin again, and are shown to work."""

from __future__ import annotations

import os
import signal

import numpy as np
import ray

import raycollect as col
from tests.support.actors import buffers, filled
from tests.support.waiting import wait_until

BACKENDS = ("shm", "tcp", "gloo")


PATIENT_S = 20.0


def refs_of(workers):
    refs = buffers(workers)
    ray.wait(refs, num_returns=len(refs))
    return refs


def assert_works(workers, *group_name):
    """The next collective is right, of new tensors."""
    refs = [worker.make.remote(lambda self, n: np.full(5, n), rank + 1) for rank, worker in enumerate(workers)]
    col.allreduce_refs(refs, *group_name, timeout_s=PATIENT_S)
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(5, sum(range(len(workers) + 1))))


def assert_sums(group):
    """An allreduce over all members is right, by the driver and by the members themselves."""
    values = range(1, 1 + group.world_size)
    refs = filled(group.actors, values)
    col.allreduce_refs(refs, group.name)
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(7, sum(values)))

    def own(self, name):
        buffer = np.full(5, col.get_rank(name) + 1.0)
        col.allreduce(buffer, name)
        return float(buffer[0]), col.get_collective_group_size(name)

    answers = ray.get([actor.call.remote(own, group.name) for actor in group.actors])
    assert answers == [(sum(values), group.world_size)] * group.world_size


def kill(actor):
    """Kills an actor's process as the out-of-memory killer does."""
    pid = ray.get(actor.call.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)


def restart(worker):
    """Ends the process of an actor, and waits for the one that Ray starts in its place."""
    pid = process_of(worker)
    worker.call.options(max_task_retries=0).remote(die)
    assert wait_until(lambda: process_of(worker) not in (0, pid))


def die(self):
    os._exit(1)


def process_of(worker):
    """The process of an actor; 0 while Ray restarts it."""
    try:
        return ray.get(worker.call.remote(lambda self: os.getpid()))
    except ray.exceptions.RayActorError:
        return 0
