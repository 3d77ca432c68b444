"""A call that a loop repeats is compiled once, and found by its arguments and actors while they mean the same group."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.driver.compiled_call import CompiledCall
from tests.support.actor_pool import reusable
from tests.support.actors import Buffers

pytestmark = pytest.mark.timeout(120)

BufferActor = reusable(ray.remote(num_cpus=0)(Buffers))

TENS = 1, 10, 100


def fresh(workers, values=TENS):
    """Refs of arrays that were not there before."""
    pairs = zip(workers, values, strict=False)
    return [worker.make.remote(lambda _, value: np.full(2, float(value)), value) for worker, value in pairs]


def first(refs):
    return [float(value[0]) for value in col.get(list(refs))]


def compiled(name):
    """How many compiled calls of a group there are."""
    return sum(type(one) is CompiledCall and one.request.group.spec.name == name for one in gc.get_objects())


def test_a_compiled_call_ends_with_its_group(actors):
    workers = actors(BufferActor, 2)
    group = col.declare_collective_group(workers, group_name="ends")
    for _ in range(3):
        col.allreduce_refs(fresh(workers), group_name="ends")
    assert compiled("ends") == 1
    group.destroy()
    assert compiled("ends") == 0


def test_arguments_tell_calls_apart(actors):
    workers = actors(BufferActor, 2)
    col.declare_collective_group(workers, group_name="apart")
    for _ in range(2):
        assert first(col.allreduce_refs(fresh(workers), "apart")) == [11.0] * 2
        assert first(col.allreduce_refs(fresh(workers), "apart", op="max")) == [10.0] * 2
        assert first(col.allreduce_refs(fresh(workers), "apart", snapshot=True)) == [11.0] * 2
        assert first(col.broadcast_refs(fresh(workers), 0, "apart")) == [1.0] * 2
        assert first(col.broadcast_refs(fresh(workers), 1, "apart")) == [10.0] * 2
        assert first(col.allreduce_refs(fresh(workers), "apart", async_op=True).wait()) == [11.0] * 2
        assert first(col.allreduce_refs(given := fresh(workers), "apart", inplace=False)) == [11.0] * 2
        assert first(given) == [1.0, 10.0]
        refs = fresh(workers)
        assert first([col.send_ref(refs[0], workers[1], "apart"), refs[1]]) == [1.0, 10.0], "it is made there"
        assert first([col.send_ref(*refs, "apart")]) == [1.0], "it is overwritten"
        assert first(refs) == [1.0, 1.0]
        with col.batch() as batch:
            col.allreduce_refs(fresh(workers), "apart")
            col.allreduce_refs(fresh(workers), "apart")
        assert [first(one) for one in batch.refs] == [[11.0] * 2] * 2
        assert col.barrier("apart") is None
    assert compiled("apart") == 10, "with and without waiting is the same call"
    col.destroy_collective_group("apart")


def test_an_output_that_is_an_input_is_not_taken_for_another(actors):
    """Nor the other way round, alone and in a batch."""
    workers = actors(BufferActor, 2)
    col.declare_collective_group(workers, group_name="both")

    def lists(values):
        made = zip(workers, values, strict=True)
        return [worker.make.remote(lambda _, one: [np.full(2, float(v)) for v in one], one) for worker, one in made]

    def held(refs):
        return [[float(one[0]) for one in value] for value in col.get(list(refs))]

    for is_one in (True, False, True, False):
        given = lists([(1, 2), (3, 4)])
        taken = given if is_one else lists([(0, 0), (0, 0)])
        assert held(col.alltoall_refs(taken, given, "both")) == [[1.0, 3.0], [2.0, 4.0]]
        assert held(given) == ([[1.0, 3.0], [2.0, 4.0]] if is_one else [[1.0, 2.0], [3.0, 4.0]])
        with col.batch():
            col.alltoall_refs(taken, given, "both")
        assert held(taken) == ([[1.0, 2.0], [3.0, 4.0]] if is_one else [[1.0, 3.0], [2.0, 4.0]])
    col.destroy_collective_group("both")


def test_a_group_of_the_same_name_is_another_one(actors):
    workers = actors(BufferActor, 3)
    for members in (workers, workers[::-1], workers):
        col.declare_collective_group(members, group_name="named anew")
        for _ in range(2):
            refs = fresh(workers)
            expected = refs if members is workers else refs[::-1]
            assert col.allreduce_refs(refs, group_name="named anew") == expected
        assert compiled("named anew") == 1
        col.destroy_collective_group("named anew")


def test_a_derived_group_gives_way_to_a_declared_one(actors):
    workers = actors(BufferActor, 2)
    for _ in range(2):
        col.broadcast_refs(fresh(workers), 0)
    col.declare_collective_group(workers[::-1], group_name="default")
    assert first(col.broadcast_refs(fresh(workers), 0)) == [10.0] * 2, "rank 0 is the second actor"
    col.destroy_collective_group("default")
    assert first(col.broadcast_refs(fresh(workers), 0)) == [1.0] * 2
