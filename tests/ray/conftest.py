"""What tests with Ray share beyond the cluster."""

from __future__ import annotations

import os

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.driver.participant_link import ParticipantLink
from tests.support.actors import Worker, buffers
from tests.support.steps import Learner


@pytest.fixture
def submits(monkeypatch):
    """What participants get, by an actor task, the mailbox or the channel: (actor, number of outputs)."""
    sent, submit, order = [], ParticipantLink.submit, ParticipantLink.order

    def counted(self, payload, outputs):
        sent.append((self.info["actor"], outputs))
        return submit(self, payload, outputs)

    def ordered(self, message, letters=None):
        if message.in_order:
            sent.append((self.info["actor"], 0))
        return order(self, message, letters)

    monkeypatch.setattr(ParticipantLink, "submit", counted)
    monkeypatch.setattr(ParticipantLink, "order", ordered)
    return sent


@pytest.fixture
def by_channel(monkeypatch):
    """As on a machine without shared memory for doorbells."""

    def refuse(slots):
        raise OSError("no memory")

    monkeypatch.setattr("raycollect.captured.install.Doorbell", refuse)


@pytest.fixture
def name(request):
    """A name of a publication that no other test has."""
    return f"{request.node.name}/{os.getpid()}"


@pytest.fixture
def make_group(actors):
    """Declares groups of actors, with buffers that are there."""

    def make(count, threads=1, **declared):
        workers = actors(Worker, count, **({"max_concurrency": threads} if threads > 1 else {}))
        make.group = col.declare_collective_group(workers, **declared)
        refs = buffers(workers)
        ray.wait(refs, num_returns=count)
        return workers, refs

    return make


@pytest.fixture(params=["shm", pytest.param("gloo", marks=pytest.mark.full)])
def trio(request, actors):
    """Three actors in a group that must work when the test is over."""
    workers = actors(Worker, 3)
    col.declare_collective_group(workers, backend=request.param)
    yield workers
    ray.get([worker.set_buffer.remote(np.ones(4)) for worker in workers])
    refs = [worker.get_buffer.remote() for worker in workers]
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[0]), np.full(4, 3))


@pytest.fixture
def learners(actors):
    """Three actors in a declared group, and in one of the first two."""
    workers = [actors(Learner, 1, seed)[0] for seed in range(3)]
    col.declare_collective_group(workers)
    col.declare_collective_group(workers[:2], group_name="pair")
    return workers


@pytest.fixture
def pipe(tmp_path):
    """A named pipe; the function ends the stalls of all who read it, now or later, or so many of them."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)  # with both ends here no open waits
    yield str(path), lambda count=100: os.write(fd, bytes(count))
    os.close(fd)
