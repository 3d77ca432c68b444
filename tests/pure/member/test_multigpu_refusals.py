"""Calls for several GPUs that are refused: on each rank, with no tensor touched, and the group works on."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import raycollect as col
from raycollect.errors import (
    AliasError,
    AllocationError,
    InvalidArgumentError,
    MismatchError,
    NotATensorError,
    RefusedError,
    UnsupportedError,
)
from raycollect.member import operations as imperative
from tests.fake_cupy import installed
from tests.pure.member.gpu_ranks import DEVICES, host, ranks

__all__ = ["ranks"]  # a fixture


def _kinds(found, kind):
    assert [type(one) for one in found] == [kind] * len(found), found
    return str(found[0])


def _reduce(ranks, name, devices_of, change=lambda rank, mine: mine):
    def body(rank):
        mine = change(rank, [ranks.put(one, np.full(4, rank + 1.0)) for one in devices_of[rank]])
        try:
            col.allreduce_multigpu(mine, name)
        finally:
            arrays = [one for one in mine if hasattr(one, "get")] if isinstance(mine, list) else []
            untouched = all((one.get() == rank + 1).all() for one in arrays)
            assert untouched or len(set(map(len, devices_of))) == 1

    return body


def test_all_ranks_give_as_many(ranks):
    name = ranks.group(2)
    message = _kinds(ranks.run(2, _reduce(ranks, name, [[0, 1], [0, 1, 2]])), MismatchError)
    assert "2 GPUs" in message
    assert "3 GPUs" in message
    ranks.must(2, _reduce(ranks, name, [[0, 1], [2, 3]]))  # the group works on


BAD = {
    "two on one GPU": (lambda ranks, mine: [mine[0], mine[0]], InvalidArgumentError),
    "no list": (lambda ranks, mine: mine[0], InvalidArgumentError),
    "an empty list": (lambda ranks, mine: [], InvalidArgumentError),
    "no tensors": (lambda ranks, mine: ["a", "b"], NotATensorError),
    "on the host": (lambda ranks, mine: [np.ones(4), np.ones(4)], UnsupportedError),
    "two shapes": (lambda ranks, mine: [mine[0], mine[1][:3]], MismatchError),
    "two dtypes": (lambda ranks, mine: [mine[0], ranks.put(1, np.ones(4, np.int32))], MismatchError),
    "self-overlapping": (lambda ranks, mine: [mine[0], _repeated(ranks, 1)], AliasError),
}


def _repeated(ranks, device):
    with ranks.cupy.cuda.Device(device):
        one = ranks.cupy.full(1, 1.0)
        return ranks.cupy.ndarray((4,), one.dtype, memptr=one.data, strides=(0,))


@pytest.mark.parametrize(("change", "error"), BAD.values(), ids=BAD.keys())
def test_violation_on_one_rank_is_raised_on_all(ranks, change, error):
    name = ranks.group(2)

    def body(rank):
        mine = [ranks.put(at, np.full(4, 1.0)) for at in range(2)]
        given = change(ranks, mine) if rank == 1 else mine
        try:
            col.allreduce_multigpu(given, name)
        finally:
            assert (np.array(host(mine)) == 1).all()

    assert "rank 1" in _kinds(ranks.run(2, body), error)
    ranks.must(2, _reduce(ranks, name, [[0, 1], [0, 1]]))


def test_another_backend_is_refused(ranks):
    name = ranks.group(2, "tcp")
    message = _kinds(ranks.run(2, _reduce(ranks, name, [[0, 1], [0, 1]])), UnsupportedError)
    assert "nccl" in message


def test_roots_and_indexes_have_to_be_there_and_the_same(ranks):
    name = ranks.group(2)

    def call(operation, *indexes):
        def body(rank):
            operation([ranks.put(at, np.ones(3)) for at in range(2)], 0, indexes[rank], name)

        return ranks.run(2, body)

    for operation in (col.reduce_multigpu, col.broadcast_multigpu):
        _kinds(call(operation, 2, 2), InvalidArgumentError)
        _kinds(call(operation, 0, 1), MismatchError)
        assert call(operation, 1, 1) == [None, None]


def test_both_ends_name_the_same_gpus(ranks):
    name = ranks.group(2)

    def body(rank, target, source, n_elements=0):
        if rank == 0:
            col.send_multigpu(ranks.put(0, np.ones(4)), 1, target, name, n_elements)
        else:
            col.recv_multigpu(ranks.put(1, np.zeros(4)), 0, source, name, n_elements)

    assert "to GPU 1" in _kinds(ranks.run(2, body, 2, 0), MismatchError)
    _kinds(ranks.run(2, body, 1, 3), MismatchError)
    _kinds(ranks.run(2, body, DEVICES, 0), InvalidArgumentError)
    _kinds(ranks.run(2, body, 1, 0, 5), InvalidArgumentError)
    _kinds(ranks.run(2, body, 1, 0, -1), InvalidArgumentError)
    ranks.must(2, body, 1, 0)


def test_the_first_elements_of_a_tensor_with_gaps_are_refused(ranks):
    name = ranks.group(2)

    def body(rank):
        if rank == 0:
            col.send_multigpu(ranks.put(0, np.ones(4)), 1, 0, name, 2)
        else:
            col.recv_multigpu(ranks.put_strided(0, np.zeros(4)), 0, 0, name, 2)

    _kinds(ranks.run(2, body), InvalidArgumentError)


def test_lists_of_lists_have_to_fit(ranks):
    name = ranks.group(2)

    def body(rank, change):
        given = [ranks.put(at, np.ones(3)) for at in range(2)]
        taken = [[ranks.put(at, np.zeros(3)) for _ in range(4)] for at in range(2)]
        col.allgather_multigpu(change(taken), given, name)

    for change, error in [
        (lambda taken: taken[:1], InvalidArgumentError),
        (lambda taken: [taken[0], taken[1][:3]], InvalidArgumentError),
        (lambda taken: [taken[0], taken[0]], InvalidArgumentError),
        (lambda taken: [taken[0], taken[1][:3] + taken[1][:1]], AliasError),
        (lambda taken: [[*taken[0][:3], taken[0][3][:2]], taken[1]], MismatchError),
    ]:
        _kinds(ranks.run(2, body, change), error)
    ranks.must(2, body, lambda taken: taken)


def test_allocation_failure_is_raised_on_all_ranks(ranks):
    name = ranks.group(2)
    ranks.must(2, _reduce(ranks, name, [[0, 1], [0, 1]]))

    def body(rank):
        mine = [ranks.put(at + rank, np.full(1 << 12, 1.0)) for at in range(2)]
        ready.wait(20)
        if rank == 0:
            ranks.fake.limit(ranks.fake.allocated(0) + 1000)
        ready.wait(20)
        try:
            col.allreduce_multigpu(mine, name)
        finally:
            ranks.fake.limit(1 << 40)
            assert (np.array(host(mine)) == 1).all()

    ready = threading.Barrier(2)
    _kinds(ranks.run(2, body), AllocationError)
    ranks.must(2, _reduce(ranks, name, [[0, 1], [0, 1]]))


@pytest.mark.parametrize(
    ("dtype", "op"), [("int32", "AVG"), ("float32", "BAND"), ("complex64", "MAX"), (ml_dtypes.bfloat16, "SUM")]
)
def test_a_reduction_without_a_meaning_is_refused(ranks, dtype, op):
    name = ranks.group(2)

    def body(rank):
        col.allreduce_multigpu([ranks.put(at, np.ones(3, dtype)) for at in range(2)], name, op)

    assert op in _kinds(ranks.run(2, body), UnsupportedError)


def test_a_plain_call_does_not_match_one_of_several_gpus(ranks):
    name = ranks.group(2)

    def body(rank):
        if rank == 0:
            col.allreduce_multigpu([ranks.put(at, np.ones(3)) for at in range(2)], name)
        else:
            imperative.allreduce(ranks.put(0, np.ones(3)), name)

    assert "GPUs" in _kinds(ranks.run(2, body), MismatchError)


def test_without_a_gpu_the_operations_say_so():
    for call in (
        lambda: col.allreduce_multigpu([np.ones(2)]),
        lambda: col.send_multigpu(np.ones(2), 0, 0),
        lambda: col.recv_multigpu(np.ones(2), 0, 0),
        lambda: col.synchronize(0),
    ):
        with installed(0), pytest.raises(UnsupportedError, match="GPU") as raised:
            call()
        assert isinstance(raised.value, RefusedError)
