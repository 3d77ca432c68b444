"""Operations of ranks with several GPUs each, on a fake of cupy: the whole way, ranks are threads of one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import raycollect as col
from tests.pure.member.gpu_ranks import host, ranks

__all__ = ["ranks"]  # a fixture


every_seed = pytest.mark.parametrize(
    "ranks", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))], indirect=True
)
LAYOUTS = {"home first": [0, 1, 2], "home last": [3, 1, 0], "home absent": [2, 3], "home only": [0], "one absent": [1]}
every_layout = pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS.keys())


def values(rank, at, shape, dtype="float32"):
    """Whole numbers that tell whose they are; sums of them are exact."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + 1 + 2 * rank + 3 * at).astype(dtype)


@every_seed
@every_layout
def test_allreduce(ranks, devices):
    name = ranks.group(2)

    def body(rank, shape, op):
        mine = [ranks.put(one, values(rank, at, shape)) for at, one in enumerate(devices)]
        col.allreduce_multigpu(mine, name, op)
        return host(mine)

    for shape, op, rule in [
        ((5,), "SUM", np.sum),
        ((1001,), "SUM", np.sum),
        ((3, 1), "MAX", np.max),
        ((), "PRODUCT", np.prod),
        ((7,), "MIN", np.min),
        ((4,), "AVG", np.mean),
        ((0,), "SUM", np.sum),
    ]:
        everyone = [values(rank, at, shape) for rank in range(2) for at in range(len(devices))]
        expected = rule(np.stack(everyone), axis=0)
        for got in ranks.must(2, body, shape, op):
            for one in got:
                np.testing.assert_allclose(one, expected, rtol=1e-6)


@every_seed
@every_layout
def test_reduce(ranks, devices):
    name = ranks.group(3)
    shape = (13,)

    def body(rank, root, chosen):
        mine = [ranks.put_strided(one, values(rank, at, shape)) for at, one in enumerate(devices)]
        col.reduce_multigpu(mine, root, chosen, name)
        return host(mine)

    total = sum(values(rank, at, shape) for rank in range(3) for at in range(len(devices)))
    for root, chosen in [(0, len(devices) - 1), (2, 0)]:
        for rank, got in enumerate(ranks.must(3, body, root, chosen)):
            for at, one in enumerate(got):
                whole = (rank, at) == (root, chosen)
                np.testing.assert_array_equal(one, total if whole else values(rank, at, shape))


@every_seed
@every_layout
def test_broadcast(ranks, devices):
    name = ranks.group(2)
    shape = (2, 7)

    def body(rank, root, chosen):
        make = [ranks.put, ranks.put_strided][rank]
        mine = [make(one, values(rank, at, shape)) for at, one in enumerate(devices)]
        col.broadcast_multigpu(mine, root, chosen, name)
        return host(mine)

    for root, chosen in itertools.product(range(2), range(len(devices))):
        for got in ranks.must(2, body, root, chosen):
            for one in got:
                np.testing.assert_array_equal(one, values(root, chosen, shape))


@every_seed
@every_layout
def test_allgather(ranks, devices):
    name = ranks.group(2)
    shape, count = (3, 5), len(devices)

    def body(rank):
        given = [ranks.put_strided(one, values(rank, at, shape)) for at, one in enumerate(devices)]
        make = [ranks.put, ranks.put_strided][rank]
        taken = [[make(one, np.zeros(shape, np.float32)) for _ in range(2 * count)] for one in devices]
        col.allgather_multigpu(taken, given, name)
        return [host(one) for one in taken], host(given)

    for rank, (taken, given) in enumerate(ranks.must(2, body)):
        for row in taken:
            for place, one in enumerate(row):
                np.testing.assert_array_equal(one, values(*divmod(place, count), shape))
        for at, one in enumerate(given):
            np.testing.assert_array_equal(one, values(rank, at, shape))


@every_seed
@every_layout
def test_reducescatter(ranks, devices):
    name = ranks.group(2)
    shape, count = (11,), len(devices)

    def given_by(rank, at):
        return [values(rank, at, shape) * (place + 1) for place in range(2 * count)]

    def body(rank, op):
        make = [ranks.put, ranks.put_strided][rank]
        given = [[make(one, item) for item in given_by(rank, at)] for at, one in enumerate(devices)]
        taken = [make(one, np.zeros(shape, np.float32)) for one in devices]
        col.reducescatter_multigpu(taken, given, name, op)
        return host(taken), [host(one) for one in given]

    everyone = [given_by(rank, at) for rank in range(2) for at in range(count)]
    for op, rule in [("SUM", np.sum), ("AVG", np.mean)]:
        total = rule(np.stack([np.stack(one) for one in everyone]), axis=0)
        for rank, (taken, given) in enumerate(ranks.must(2, body, op)):
            for at, one in enumerate(taken):
                np.testing.assert_allclose(one, total[rank * count + at], rtol=1e-6)
            for at, row in enumerate(given):
                np.testing.assert_array_equal(row, given_by(rank, at))


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
