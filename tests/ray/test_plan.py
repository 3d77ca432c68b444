"""`plan`: what a call would do, told by the refs themselves, without doing it."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.errors import (
    BatchError,
    CollectiveTimeoutError,
    UnknownGroupError,
)
from tests.support.actors import Worker

pytestmark = pytest.mark.usefixtures("tidy")


def made(worker, shape, dtype="float32", count=0):
    """A ref of a new array of ones, or of a list of them."""

    def build(self):
        arrays = [np.ones(shape, dtype) for _ in range(max(count, 1))]
        return arrays if count else arrays[0]

    return worker.make.remote(build)


@pytest.fixture
def pair(actors):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    return workers


def unchanged(refs):
    return all(np.all(array == 1) for array in col.get(refs))


def test_an_operation_is_explained_and_not_run(pair):
    refs = [made(worker, 1000) for worker in pair]

    found = col.plan(col.allreduce_refs, refs, op="max")

    (row,) = found.rows
    assert (row.op, row.group, row.backend, row.ranks) == ("allreduce max", "default", "shm", (0, 1))
    assert (row.tensors, row.dtypes, row.nbytes) == (1, ("float32",), 4000)
    assert (found.participants, found.launches, found.agreement) == (2, 1, "default")
    assert "allreduce max" in found.explain()
    assert unchanged(refs)
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[0]), np.full(1000, 2, np.float32))


def test_a_function_is_explained_as_one_batch(pair):
    refs = [made(worker, 10) for worker in pair]
    others = [made(worker, 20) for worker in pair]

    def step():
        pieces = col.allgather_refs(None, refs)
        col.allreduce_refs(pieces)
        for each in (refs, others):
            col.broadcast_refs(each, src_rank=1)
        return "anything"

    found = col.plan(step)

    assert [row.op for row in found.rows] == [
        "allgather",
        "allreduce sum",
        "broadcast from rank 1",
        "broadcast from rank 1",
    ]
    assert [row.made_nbytes for row in found.rows] == [80, 0, 0, 0]
    assert found.rows[1].tensors == 2
    assert found.rows[1].after == (0,)
    assert found.rows[2].bundle == found.rows[3].bundle
    assert found.rows[2].packed == (2, 2, 1)
    assert unchanged([*refs, *others])


# ---------------------------------------------------------------------------------------------- refusals


def test_an_unknown_group_is_an_error(pair):
    with pytest.raises(UnknownGroupError):
        col.plan(col.allreduce_refs, [made(worker, 4) for worker in pair], group_name="nobody")


def test_a_function_without_calls_is_an_error(pair):
    with pytest.raises(BatchError, match="'len' called no operation"):
        col.plan(len, "")


def test_a_method_that_does_not_return_in_time_is_named(pair, tmp_path):
    gate = tmp_path / "gate"

    def waits(self):
        import time

        until = time.monotonic() + 30
        while not gate.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return np.ones(4, np.float32)

    refs = [made(pair[0], 4), pair[1].make.remote(waits)]
    ray.wait(refs[:1])  # that one is not late
    with pytest.raises(CollectiveTimeoutError) as late:
        col.plan(col.allreduce_refs, refs, timeout_s=3)  # in which the other is asked
    gate.touch()
    assert late.value.missing == (1,)
    assert col.plan(col.allreduce_refs, refs).rows[0].nbytes == 16


def test_a_plan_inside_a_batch_adds_nothing_to_it(pair):
    refs = [made(worker, 4) for worker in pair]
    with col.batch() as b:
        found = col.plan(col.allreduce_refs, refs)
    assert len(found.rows) == 1
    assert b.refs == []
    assert unchanged(refs)
