"""Operations of ranks with several GPUs each, on a fake of cupy: the whole way; ranks are threads of one process.

What is refused is refused on each rank, with no tensor touched, and the group works on.
"""

from __future__ import annotations

import itertools
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
from tests.fake_cupy import installed
from tests.pure.member.gpu_ranks import DEVICES, Ranks, host, ranks

__all__ = ["ranks"]  # a fixture

# ---------------------------------------------------------------------------------------------- what comes out

every_seed = pytest.mark.parametrize(
    "ranks", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))], indirect=True
)
LAYOUTS = {"home first": [0, 1, 2], "home last": [3, 1, 0], "home absent": [2, 3], "home only": [0], "one absent": [1]}
RULES = {"SUM": np.sum, "MAX": np.max, "PRODUCT": np.prod, "MIN": np.min, "AVG": np.mean}


def values(rank, at, shape=(13,)):
    """Whole numbers that tell whose they are; sums of them are exact."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + 1 + 2 * rank + 3 * at).astype(np.float32)


every_layout = pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS.keys())


def made(ranks, devices, rank, of=values):
    """A tensor on each device; those of rank 1 have gaps."""
    put = [ranks.put, ranks.put_strided][rank]
    return [put(one, of(rank, at)) for at, one in enumerate(devices)]


def rows(ranks, devices, rank, of):
    """A list of tensors on each device, one for each GPU of each rank; `of` takes the place in the list as well."""
    places = range(2 * len(devices))
    columns = [made(ranks, devices, rank, lambda rank, at, to=to: of(rank, at, to)) for to in places]
    return [list(row) for row in zip(*columns, strict=True)]


@every_seed
@every_layout
def test_reductions(ranks, devices):
    name = ranks.group(2)
    places = list(itertools.product(range(2), range(len(devices))))

    def allreduced(rank, op, shape):
        mine = made(ranks, devices, rank, lambda rank, at: values(rank, at, shape))
        col.allreduce_multigpu(mine, name, op)
        return host(mine)

    def reduced(rank, *root):
        mine = made(ranks, devices, rank)
        col.reduce_multigpu(mine, *root, name)
        return host(mine)

    def scattered(rank, op):
        given = rows(ranks, devices, rank, lambda rank, at, to: values(rank, at) * (to + 1))
        taken = made(ranks, devices, rank, lambda rank, at: 0 * values(rank, at))
        col.reducescatter_multigpu(taken, given, name, op)
        return host(taken)

    for op, shape in (("SUM", (5,)), ("SUM", (1001,)), ("MAX", (3, 1)), ("PRODUCT", ()), ("MIN", (7,)), ("AVG", (0,))):
        expected = RULES[op](np.stack([values(*one, shape) for one in places]), axis=0)
        for one in itertools.chain(*ranks.must(2, allreduced, op, shape)):
            np.testing.assert_allclose(one, expected, rtol=1e-6)
    total = sum(values(*one) for one in places)
    for root in places:
        for place, one in zip(places, itertools.chain(*ranks.must(2, reduced, *root)), strict=True):
            np.testing.assert_array_equal(one, total if place == root else values(*place))
    for op, count in (("SUM", 1), ("AVG", len(places))):
        found = list(itertools.chain(*ranks.must(2, scattered, op)))
        np.testing.assert_allclose(found, [total / count * (to + 1) for to in range(len(places))], rtol=1e-6)


@every_seed
@every_layout
def test_broadcast_and_allgather(ranks, devices):
    name = ranks.group(2)
    places = list(itertools.product(range(2), range(len(devices))))

    def sent_to_all(rank, *root):
        mine = made(ranks, devices, rank)
        col.broadcast_multigpu(mine, *root, name)
        return host(mine)

    def gathered(rank):
        given, taken = made(ranks, devices, rank), rows(ranks, devices, rank, lambda *_: values(0, 0) * 0)
        col.allgather_multigpu(taken, given, name)
        return [host(one) for one in taken], host(given)

    for root in places:
        for one in itertools.chain(*ranks.must(2, sent_to_all, *root)):
            np.testing.assert_array_equal(one, values(*root))
    for rank, (taken, given) in enumerate(ranks.must(2, gathered)):
        np.testing.assert_array_equal(taken, [[values(*one) for one in places]] * len(devices))
        np.testing.assert_array_equal(given, [values(rank, at) for at in range(len(devices))])


@every_seed
@pytest.mark.parametrize(("source", "target"), [(0, 0), (0, 2), (3, 0), (1, 2)])
@pytest.mark.parametrize("n_elements", [0, 4])
def test_send_and_recv(ranks, source, target, n_elements):
    name = ranks.group(2)

    def body(rank):
        if rank == 1:
            col.send_multigpu(ranks.put(source, values(1, 0, (9,))), 0, target, name, n_elements)
            return None
        mine = ranks.put(target, np.zeros(9, np.float32))
        col.recv_multigpu(mine, 1, source, name, n_elements)
        return mine.get()

    got, _ = ranks.must(2, body)
    expected = values(1, 0, (9,))
    expected[n_elements or 9 :] = 0
    np.testing.assert_array_equal(got, expected)


@every_seed
def test_multigpu_call_is_ordered_with_the_callers_streams(ranks):
    """No stream is waited for by the test itself: the tensors are written, reduced and read on streams of their own."""
    name = ranks.group(2)
    cuda = ranks.cupy.cuda

    def body(rank):
        mine, writers = [], []
        for at in range(3):
            with cuda.Device(at):
                writers.append(cuda.Stream(non_blocking=True))
                writers[at].use()
                mine.append(ranks.cupy.zeros(501, np.float32))
                for _ in range(20):
                    mine[at] += rank + at + 1
        col.allreduce_multigpu(mine, name)
        seen = []
        for at in range(3):
            with cuda.Device(at), cuda.Stream(non_blocking=True):
                seen.append((mine[at] * 2).get())
        for at in range(3):
            with cuda.Device(at):
                cuda.Stream.null.use()
        return seen

    expected = 2 * 20 * sum(rank + at + 1 for rank in range(2) for at in range(3))
    for got in ranks.must(2, body):
        for one in got:
            np.testing.assert_array_equal(one, np.full(501, expected, np.float32))


def test_the_gpu_of_the_group_may_be_another_one(ranks):
    name = ranks.group(2, device=2)

    def body(rank):
        mine = [ranks.put(one, np.full(6, rank + 1.0)) for one in (0, 2)]
        col.allreduce_multigpu(mine, name)
        return host(mine)

    for got in ranks.must(2, body):
        np.testing.assert_array_equal(got, np.full((2, 6), 6.0))


def test_synchronize_waits_for_a_gpu(ranks):
    with ranks.cupy.cuda.Device(1):
        stream = ranks.cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = ranks.cupy.zeros(100)
            x += 1
    col.synchronize(1)
    assert ranks.fake.pending(stream) == 0


# ---------------------------------------------------------------------------------------------- refusals


class Calls:
    """A rank's calls; some differ on rank 1. What it gives holds ones, and has to afterwards."""

    def __init__(self, ranks, name, rank):
        self.ranks, self.name, self.rank = ranks, name, rank
        self.given = []

    def put(self, device, dtype="float64", count=4):
        return self.ranks.put(device, np.ones(count, dtype))

    def allreduce(self, change=None, op="SUM", dtype="float64"):
        self.given = [self.put(at, dtype) for at in range(2)]
        mine = self.given if change is None or not self.rank else change(self.given)
        col.allreduce_multigpu(mine, self.name, op)

    def rooted(self, operation, *indexes):
        self.given = [self.put(at) for at in range(2)]
        operation(self.given, 0, indexes[self.rank], self.name)

    def allgather(self, change):
        self.given = [self.put(at) for at in range(2)]
        taken = [[self.ranks.put(at, np.zeros(4)) for _ in range(4)] for at in range(2)]
        col.allgather_multigpu(change(taken), self.given, self.name)

    def send(self, target, source, n_elements=0, into=Ranks.put):
        if self.rank == 0:
            col.send_multigpu(self.put(0), 1, target, self.name, n_elements)
        else:
            col.recv_multigpu(into(self.ranks, 1, np.zeros(4)), 0, source, self.name, n_elements)

    def plain(self):
        self.allreduce() if self.rank == 0 else col.allreduce(self.put(0), self.name)

    def repeated(self, device):
        with self.ranks.cupy.cuda.Device(device):
            one = self.ranks.cupy.full(1, 1.0)
            return self.ranks.cupy.ndarray((4,), one.dtype, memptr=one.data, strides=(0,))


INVALID = InvalidArgumentError
REFUSED = {
    "more GPUs": (lambda one: one.allreduce(lambda mine: [*mine, one.put(2)]), MismatchError),
    "two on one GPU": (lambda one: one.allreduce(lambda mine: [mine[0], mine[0]]), INVALID),
    "no list": (lambda one: one.allreduce(lambda mine: mine[0]), INVALID),
    "an empty list": (lambda one: one.allreduce(lambda mine: []), INVALID),
    "no tensors": (lambda one: one.allreduce(lambda mine: ["a", "b"]), NotATensorError),
    "on the host": (lambda one: one.allreduce(lambda mine: [np.ones(4), np.ones(4)]), UnsupportedError),
    "two shapes": (lambda one: one.allreduce(lambda mine: [mine[0], mine[1][:3]]), MismatchError),
    "two dtypes": (lambda one: one.allreduce(lambda mine: [mine[0], one.put(1, "int32")]), MismatchError),
    "self-overlapping": (lambda one: one.allreduce(lambda mine: [mine[0], one.repeated(1)]), AliasError),
    **{
        f"{op} of {np.dtype(dtype).name}": (
            lambda one, op=op, dtype=dtype: one.allreduce(None, op, dtype),
            UnsupportedError,
        )
        for dtype, op in (("int32", "AVG"), ("float32", "BAND"), ("complex64", "MAX"), (ml_dtypes.bfloat16, "SUM"))
    },
    "no such root": (lambda one: one.rooted(col.reduce_multigpu, 2, 2), INVALID),
    "other roots": (lambda one: one.rooted(col.reduce_multigpu, 0, 1), MismatchError),
    "no such source": (lambda one: one.rooted(col.broadcast_multigpu, 2, 2), INVALID),
    "other sources": (lambda one: one.rooted(col.broadcast_multigpu, 0, 1), MismatchError),
    "too few lists": (lambda one: one.allgather(lambda taken: taken[:1]), INVALID),
    "too short a list": (lambda one: one.allgather(lambda taken: [taken[0], taken[1][:3]]), INVALID),
    "a list twice": (lambda one: one.allgather(lambda taken: [taken[0], taken[0]]), INVALID),
    "an item twice": (lambda one: one.allgather(lambda taken: [taken[0], [*taken[1][:3], taken[1][0]]]), AliasError),
    "a short item": (
        lambda one: one.allgather(lambda taken: [[*taken[0][:3], taken[0][3][:2]], taken[1]]),
        MismatchError,
    ),
    "another target": (lambda one: one.send(2, 0), MismatchError),
    "another source": (lambda one: one.send(1, 3), MismatchError),
    "no such target": (lambda one: one.send(DEVICES, 0), INVALID),
    "too many elements": (lambda one: one.send(1, 0, 5), INVALID),
    "fewer than none": (lambda one: one.send(1, 0, -1), INVALID),
    "the first elements of a tensor with gaps": (lambda one: one.send(1, 0, 2, Ranks.put_strided), INVALID),
    "a plain call": (Calls.plain, MismatchError),
}


@pytest.mark.parametrize(("call", "error"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_is_refused_on_all_ranks(ranks, call, error):
    name = ranks.group(2)

    def body(rank):
        one = Calls(ranks, name, rank)
        try:
            call(one)
        finally:
            assert all((given.get() == 1).all() for given in one.given)

    assert [type(one) for one in ranks.run(2, body)] == [error] * 2
    ranks.must(2, lambda rank: Calls(ranks, name, rank).allreduce())


def test_another_backend_is_refused(ranks):
    name = ranks.group(2, "tcp")
    assert [type(one) for one in ranks.run(2, lambda rank: Calls(ranks, name, rank).allreduce())] == [
        UnsupportedError
    ] * 2


def test_allocation_failure_is_raised_on_all_ranks(ranks):
    name = ranks.group(2)
    works = lambda rank: Calls(ranks, name, rank).allreduce()  # noqa: E731
    ranks.must(2, works)

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
    assert [type(one) for one in ranks.run(2, body)] == [AllocationError] * 2
    ranks.must(2, works)


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
