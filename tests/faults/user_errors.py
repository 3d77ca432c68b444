"""Actors of users who make mistakes."""

from __future__ import annotations

import numpy as np
import ray

import raycollect as col
from tests.support.actors import buffers

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
