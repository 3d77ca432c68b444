"""The fake of cupy: what the calls of NCCL do, on ranks that are threads here."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fake_cupy.ranks import AVG, CODES, MAX, MIN, SUM, WAIT_S, Rank, numbers, ranks

# --------------------------------------------------------------------------------------------- collectives


@pytest.mark.parametrize(("world", "count"), [(1, 5), (2, 1), (3, 7), (4, 1000), (5, 0)])
@pytest.mark.parametrize("dtype", CODES)
def test_collectives(world, count, dtype):
    code, given = CODES[dtype], numbers(count, world, count, dtype)
    root = world - 1

    def body(rank: Rank) -> list[Any]:
        comm, stream, me = rank.comm, rank.stream.ptr, rank.rank
        mine, pieces = rank.put(given[me]), rank.put(np.tile(given[me], world))
        out = [rank.put(np.zeros(count, given.dtype)) for _ in range(7)]
        wide = rank.put(np.zeros(world * count, given.dtype))
        here = mine.data.ptr
        for op, taken in enumerate(out[:4]):
            comm.allReduce(here, taken.data.ptr, count, code, op, stream)
        comm.reduce(here, out[4].data.ptr if me == root else 0, count, code, MAX, root, stream)
        comm.broadcast(here if me == root else 0, out[5].data.ptr, count, code, root, stream)
        comm.reduceScatter(pieces.data.ptr, out[6].data.ptr, count, code, MIN, stream)
        comm.allGather(here, wide.data.ptr, count, code, stream)
        return [rank.get(one) for one in (*out, wide)]

    with ranks(world, seed=count) as team:
        found = team.run(body)
    total, product = given.astype(float).sum(0).astype(given.dtype), given.astype(float).prod(0)
    wide = given.astype(float)
    for me, (summed, times, most, least, reduced, sent, piece, gathered) in enumerate(found):
        if given.dtype.itemsize > 1 or given.dtype.kind in "iu":
            np.testing.assert_array_equal(summed, total)
        if dtype == "float64":
            np.testing.assert_array_equal(times, product)
        np.testing.assert_array_equal(summed, found[0][0])
        np.testing.assert_array_equal(most.astype(float), wide.max(0))
        np.testing.assert_array_equal(least.astype(float), wide.min(0))
        np.testing.assert_array_equal(reduced.astype(float), wide.max(0) if me == root else np.zeros(count))
        np.testing.assert_array_equal(sent, given[root])
        np.testing.assert_array_equal(piece.astype(float), wide.min(0))
        np.testing.assert_array_equal(gathered, given.reshape(-1))


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint64", "float32", "bfloat16"])
def test_averages_round_towards_zero(dtype):
    given = np.array([[-7, 7, -1], [-1, 2, 0], [0, 1, 0]]).astype(getattr(ml_dtypes, dtype, dtype))
    if dtype == "uint64":
        given = np.abs(given.astype("int64")).astype(dtype)

    def body(rank: Rank) -> Any:
        mine = rank.put(given[rank.rank])
        rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 3, CODES[dtype], AVG, rank.stream.ptr)
        return rank.get(mine)

    with ranks(3) as team:
        found = team.run(body)
    mean = given.astype(float).sum(0) / 3
    expected = np.trunc(mean) if given.dtype.kind in "iu" else mean
    for one in found:
        np.testing.assert_array_equal(one, expected.astype(given.dtype))


def test_sums_have_the_same_bits_on_all_ranks_and_not_those_of_rank_order():
    given = np.random.default_rng(1).random((4, 1000)).astype(np.float32)

    def body(rank: Rank) -> Any:
        mine = rank.put(given[rank.rank])
        rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 1000, 7, SUM, rank.stream.ptr)
        return rank.get(mine).tobytes()

    with ranks(4) as team:
        found = team.run(body)
    assert len(set(found)) == 1
    in_order = ((given[0] + given[1]) + given[2]) + given[3]
    assert found[0] != in_order.tobytes()
    np.testing.assert_allclose(np.frombuffer(found[0], np.float32), in_order, rtol=1e-6)


def test_in_place_as_nccl_has_it():
    def body(rank: Rank) -> Any:
        me, stream = rank.rank, rank.stream.ptr
        gathered, scattered = rank.put(np.zeros(9)), rank.put(np.arange(9.0) + me)
        told = rank.put(np.full(2, float(me)))
        with rank.cupy.cuda.Device(rank.device), rank.stream:
            gathered[3 * me : 3 * me + 3] = float(me)
        rank.comm.allGather(gathered.data.ptr + 24 * me, gathered.data.ptr, 3, 8, stream)
        rank.comm.reduceScatter(scattered.data.ptr, scattered.data.ptr + 24 * me, 3, 8, SUM, stream)
        rank.comm.broadcast(told.data.ptr, told.data.ptr, 2, 8, 1, stream)
        assert rank.get(told).tolist() == [1.0, 1.0]
        return rank.get(gathered).tolist(), rank.get(scattered)[3 * me : 3 * me + 3].tolist()

    with ranks(3) as team:
        for me, (gathered, piece) in enumerate(team.run(body)):
            assert gathered == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
            assert piece == [3.0 * element + 3 for element in range(3 * me, 3 * me + 3)]


@pytest.mark.parametrize("seed", range(8))
def test_a_kernel_follows_its_stream_only(seed):
    def body(rank: Rank) -> float:
        with rank.cupy.cuda.Device(rank.device):
            mine = rank.cupy.zeros(3)
            rank.cupy.cuda.runtime.deviceSynchronize()
            mine += 1
            rank.stream.wait_event(rank.cupy.cuda.Stream.null.record())
            rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 3, 8, SUM, rank.stream.ptr)
            return float(rank.get(mine)[0])

    with ranks(2, seed=seed) as team:
        assert team.run(body) == [2.0, 2.0]


def test_a_kernel_that_waits_for_nothing_reads_what_is_not_there():
    """What writes its elements is held back on one rank."""

    def body(rank: Rank) -> list[float]:
        null = rank.cupy.cuda.Stream.null
        with rank.cupy.cuda.Device(rank.device):
            mine = rank.cupy.zeros(3)
            rank.cupy.cuda.runtime.deviceSynchronize()
            if not rank.rank:
                rank.fake.hold(null)
            mine += 1
            if rank.rank:
                null.synchronize()
            rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 3, 8, SUM, rank.stream.ptr)
            found = float(rank.get(mine)[0])
            rank.fake.release(null)
            return [found, float(mine.get()[0])]

    with ranks(2) as team:
        assert team.run(body) == [[1.0, 2.0], [1.0, 1.0]]


# -------------------------------------------------------------------------------------------- point to point


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_sends_and_recvs_of_a_group_go_on_together(world, seed):
    given = np.random.default_rng(seed).random((world, world, 3))

    def body(rank: Rank) -> Any:
        mine, taken = rank.put(given[rank.rank]), rank.put(np.zeros((world, 3)))
        nccl = rank.cupy.cuda.nccl
        nccl.groupStart()
        nccl.groupStart()
        for peer in range(world):
            rank.comm.send(mine[peer].data.ptr, 3, 8, peer, rank.stream.ptr)
        nccl.groupEnd()
        for peer in reversed(range(world)):
            rank.comm.recv(taken[peer].data.ptr, 3, 8, peer, rank.stream.ptr)
        nccl.groupEnd()
        return rank.get(taken)

    with ranks(world, seed=seed) as team:
        for me, found in enumerate(team.run(body)):
            np.testing.assert_array_equal(found, given[:, me])


def test_two_that_send_first_wait_for_each_other_until_they_are_aborted():
    def body(rank: Rank) -> Any:
        mine, taken = rank.put(np.ones(3)), rank.put(np.zeros(3))
        rank.comm.send(mine.data.ptr, 3, 8, 1 - rank.rank, rank.stream.ptr)
        rank.comm.recv(taken.data.ptr, 3, 8, 1 - rank.rank, rank.stream.ptr)
        rank.fake.drain()
        return mine, taken

    with ranks(2) as team:
        kept = team.run(body)
        first, second = team.all
        assert not first.stream.done
        first.comm.abort()
        first.stream.synchronize()
        first.fake.drain()
        assert not second.stream.done
        second.comm.abort()
        assert second.get(kept[1][1]).tolist() == [0.0] * 3


@pytest.mark.parametrize("seed", range(4))
def test_a_group_may_be_on_several_streams(seed):
    barrier = threading.Barrier(2)

    def body(rank: Rank) -> Any:
        with rank.cupy.cuda.Device(rank.device):
            other, third = (rank.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        mine, taken = rank.put(np.full(3, float(rank.rank))), rank.put(np.zeros(3))
        rank.stream.synchronize()
        rank.fake.hold(other)
        rank.cupy.cuda.nccl.groupStart()
        rank.comm.send(mine.data.ptr, 3, 8, 1 - rank.rank, rank.stream.ptr)
        rank.comm.recv(taken.data.ptr, 3, 8, 1 - rank.rank, other.ptr)
        rank.cupy.cuda.nccl.groupEnd()
        rank.comm.allReduce(taken.data.ptr, taken.data.ptr, 3, 8, SUM, third.ptr)  # after both, without being asked
        barrier.wait(WAIT_S)
        rank.fake.drain()
        barrier.wait(WAIT_S)
        rank.fake.release(other)
        with rank.cupy.cuda.Device(rank.device):
            return taken.get(third).tolist()

    with ranks(2, seed=seed) as team:
        assert team.run(body) == [[1.0] * 3] * 2


def test_sends_are_taken_in_their_order():
    def body(rank: Rank) -> Any:
        arrays = [rank.put(np.full(2, i if rank.rank == 0 else -1)) for i in range(4)]
        for array in arrays:
            call = rank.comm.send if rank.rank == 0 else rank.comm.recv
            call(array.data.ptr, 2, 4, 1 - rank.rank, rank.stream.ptr)
        return [rank.get(array)[0] for array in arrays]

    with ranks(2) as team:
        assert team.run(body) == [[0, 1, 2, 3]] * 2
