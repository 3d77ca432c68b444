"""What the tests of refusals share: calls that must be refused, and actors that must work after it."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import ray

import raycollect as col
from tests.ray.workers import Worker


@contextlib.contextmanager
def refused(error, *texts, actors=()):
    """The call raises `error` with all of `texts` in its message, and no buffer of `actors` changes."""
    before = ray.get([actor.read.remote() for actor in actors])
    with pytest.raises(error) as caught:
        yield caught
    for text in texts:
        assert text in str(caught.value)
    for actor, buffer in zip(actors, before, strict=True):
        np.testing.assert_array_equal(ray.get(actor.read.remote()), buffer)


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
