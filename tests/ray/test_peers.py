"""What Compiled Graphs and Ray Direct Transport get wrong, done right here.

The defects of `ray.util.collective` itself have their tests in test_imperative.py and tests/pure/test_adopted.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.controller import Controller
from tests.ray.test_store import AsyncActor
from tests.ray.workers import Worker


def made(worker, *args):
    """A ref to an array of these numbers, kept in the worker."""
    return worker.make.remote(lambda self: np.array(args, np.float32))


# ------------------------------------------------------------------------------- Compiled Graphs' CPU communicator


@pytest.mark.parametrize(("op", "expected"), [("MAX", [3, 5]), ("MIN", [1, 2])])
def test_max_and_min_on_the_cpu(actors, op, expected):
    workers = actors(Worker, 2)
    refs = [made(workers[0], 1, 5), made(workers[1], 3, 2)]

    col.allreduce_refs(refs, op=op)

    for found in col.get(refs):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_groups_of_equal_ranks_do_not_meet(actors, backend):
    """There, all groups of one size share one barrier actor."""
    pairs = [actors(Worker, 2) for _ in range(3)]
    for i, pair in enumerate(pairs):
        col.declare_collective_group(pair, backend=backend, group_name=f"pair {i}")
    refs = [[made(worker, 10 * i + 1) for worker in pair] for i, pair in enumerate(pairs)]

    works = [col.allreduce_refs(pair, f"pair {i}", async_op=True) for i, pair in reversed(list(enumerate(refs)))]
    for work in works:
        work.wait()

    for i, pair in enumerate(refs):
        for found in col.get(pair):
            np.testing.assert_array_equal(found, [20 * i + 2])


# ------------------------------------------------------------------------------- Ray Direct Transport


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_transfer_that_fails_leaves_both_actors_alive(actors, backend):
    a, b = actors(Worker, 2)
    group = col.declare_collective_group([a, b], backend=backend)
    pids = [member.pid for member in group.status().members]
    source, short, right = made(a, 1, 2, 3, 4), made(b, 0, 0), made(b, 0, 0, 0, 0)

    with pytest.raises(col.errors.MismatchError, match="shape"):
        col.send_ref(source, short)

    np.testing.assert_array_equal(col.get(short), [0, 0])
    np.testing.assert_array_equal(col.get(col.send_ref(source, right)), [1, 2, 3, 4])
    assert ray.get([w.call.remote(lambda self: __import__("os").getpid()) for w in (a, b)]) == pids


def test_one_tensor_to_many_actors_is_one_plan(actors):
    workers = actors(Worker, 4)
    refs = [made(worker, rank) for rank, worker in enumerate(workers)]
    col.broadcast_refs(refs, src_rank=2)  # forms the group
    before = next(Controller.current()._seq)

    col.broadcast_refs(refs, src_rank=3)

    assert next(Controller.current()._seq) == before + 2, "more than one plan"
    assert all(found == [2] for found in col.get(refs))


@pytest.mark.parametrize("view", [slice(1, 3), slice(None, None, -1), slice(0, 4)])
def test_a_view_is_the_same_storage_whatever_its_id(actors, view):
    """There, aliasing is tracked by `id()`, and views slip through."""
    a, b = actors(Worker, 2)
    a.call.remote(lambda self: setattr(self, "buffer", np.arange(4, dtype=np.float32)))
    lists = [
        a.make.remote(lambda self, view: [self.buffer[view], np.zeros_like(self.buffer[view])], view),
        b.make.remote(lambda self, view: [np.zeros(4, np.float32)[view].copy() for _ in range(2)], view),
    ]
    tensors = [
        a.make.remote(lambda self, view: self.buffer[::-1][view], view),
        b.make.remote(lambda self, view: np.ones(4, np.float32)[view], view),
    ]

    with pytest.raises(col.errors.AliasError) as caught:
        col.allgather_refs(lists, tensors)

    assert [violation.rank for violation in caught.value.violations] == [0]
    np.testing.assert_array_equal(ray.get(a.call.remote(lambda self: self.buffer.copy())), [0, 1, 2, 3])


def test_async_and_threaded_actors_take_part(actors):
    threaded = actors(Worker, 1, max_concurrency=4)
    waiting = actors(AsyncActor, 1)
    ref = waiting[0].get_buffer.remote()
    zeros = np.zeros_like(col.get(ref))
    refs = [threaded[0].make.remote(lambda self, zeros: zeros + 3, zeros), ref]
    expected = col.get(ref) + 3

    col.allreduce_refs(refs)

    for found in col.get(refs):
        np.testing.assert_array_equal(found, expected)


def test_an_actor_is_in_several_groups(actors):
    a, b, c = actors(Worker, 3)
    col.declare_collective_group([a, b], group_name="left")
    col.declare_collective_group([c, b], group_name="right")
    refs = [made(a, 1), made(b, 2), made(c, 4)]

    col.allreduce_refs(refs[:2], "left")
    col.allreduce_refs([refs[2], refs[1]], "right")

    assert [found.tolist() for found in col.get(refs)] == [[3], [7], [7]]
