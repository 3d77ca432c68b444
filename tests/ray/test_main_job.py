"""The documents' own example, and what follows from it."""

from __future__ import annotations

import numpy as np
import ray

import raycollect as col
from tests.support.actors import Worker


def test_the_documents_own_example(actors):
    a, b = actors(Worker, 2)
    col.declare_collective_group([a, b])
    refs = [a.get_buffer.remote(), b.get_buffer.remote()]
    assert col.allreduce_refs(refs) == refs
    for actor in (a, b):
        np.testing.assert_array_equal(ray.get(actor.read.remote()), np.full(10, 2, np.float32))


def test_plan_of_any_size_sends_one_message_per_participant(actors, submits):
    workers = actors(Worker, 3)
    col.declare_collective_group(workers)

    def many(self):
        return [np.full(n, 1.0) for n in range(1, 40)]

    refs = [worker.make.remote(many) for worker in workers]
    col.allreduce_refs(refs)
    assert len(submits) == len({actor for actor, _ in submits}) == 3
    col.send_ref(refs[0], workers[2])
    assert len(submits) == 5
    np.testing.assert_array_equal(col.get(refs[1])[38], np.full(39, 3))
