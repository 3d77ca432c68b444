"""The documents' own example, and what follows from it."""

from __future__ import annotations

import numpy as np
import ray

import raycollect as col
from tests.ray.workers import Worker


def test_the_documents_own_example(actors):
    a, b = actors(Worker, 2)
    col.declare_collective_group([a, b])
    refs = [a.get_buffer.remote(), b.get_buffer.remote()]
    assert col.allreduce_refs(refs) == refs
    for actor in (a, b):
        np.testing.assert_array_equal(ray.get(actor.read.remote()), np.full(10, 2, np.float32))


def test_a_group_is_derived_from_the_refs(actors):
    a, b = actors(Worker, 2)
    col.allreduce_refs([a.get_buffer.remote(), b.get_buffer.remote()])
    np.testing.assert_array_equal(col.get(b.get_buffer.remote()), np.full(10, 2, np.float32))
