"""The fake of cupy: what the calls of NCCL do, on ranks that are threads here."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fake_cupy.ranks import SUM, Rank, ranks

# --------------------------------------------------------------------------------------------- collectives


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
