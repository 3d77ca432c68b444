"""The fake of cupy: what NCCL forbids, how its ranks come together, and how they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.fake_cupy import _nccl, installed
from tests.fake_cupy.ranks import MAX, SUM, WAIT_S, Rank, Ranks, error_of, ranks, refused

# ----------------------------------------------------------------------------------------- what is forbidden


@pytest.mark.parametrize(
    "second",
    [
        lambda c, p, s: c.allReduce(p, p, 3, 8, SUM, s),
        lambda c, p, s: c.allReduce(p, p, 2, 7, SUM, s),
        lambda c, p, s: c.allReduce(p, p, 2, 8, MAX, s),
        lambda c, p, s: c.broadcast(p, p, 2, 8, 0, s),
    ],
)
def test_calls_that_do_not_match_are_an_error_of_all_ranks(second):
    def body(rank: Rank) -> Any:
        mine = rank.put(np.ones(4))
        if rank.rank == 1:
            second(rank.comm, mine.data.ptr, rank.stream.ptr)
        else:
            rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 2, 8, SUM, rank.stream.ptr)
        return mine

    with ranks(2) as team:
        kept = team.run(body)
        fake = team.all[0].fake
        fake.drain()
        assert [error_of(rank) for rank in team.all] == [5, 5]
        assert "rank 0 calls allReduce of 2" in fake.violations[0] or "rank 1 calls" in fake.violations[0]
        assert len(fake.violations) == 1
        fake.violations.clear()
        assert [rank.stream.done for rank in team.all] == [False, False]
        assert len(kept) == 2


def test_what_is_refused_at_once():
    with ranks(2) as team:
        rank, other = team.all
        fake, nccl, comm, stream = rank.fake, rank.cupy.cuda.nccl, rank.comm, rank.stream.ptr
        mine = rank.put(np.ones(8))
        rank.stream.synchronize()
        here = mine.data.ptr
        calls: list[tuple[Callable[[], Any], int]] = [
            (lambda: comm.allReduce(here, here, 3, 99, SUM, stream), 4),
            (lambda: comm.allReduce(here, here, 3, 8, 5, stream), 4),
            (lambda: comm.allReduce(0, here, 3, 8, SUM, stream), 4),
            (lambda: comm.allReduce(here, here, 3, 8, SUM, other.stream.ptr), 1),
            (lambda: comm.allReduce(here, here, 3, 8, SUM, 12345), 1),
            (lambda: comm.send(here, 3, 8, 2, stream), 4),
            (lambda: comm.broadcast(here, here, 3, 8, -1, stream), 4),
            (lambda: comm.allReduce(other_ptr, here, 3, 8, SUM, stream), 4),
            (nccl.groupEnd, 5),
        ]
        theirs = other.put(np.ones(8))
        other.stream.synchronize()
        other_ptr = theirs.data.ptr
        for call, status in calls:
            with refused(fake, status):
                call()
        for call in (
            lambda: comm.allReduce(here, here + 8, 3, 8, SUM, stream),
            lambda: (
                comm.allGather(here, here, 3, 8, stream)
                if comm.rank_id()
                else comm.allGather(here + 8, here, 3, 8, stream)
            ),
            lambda: comm.reduceScatter(here, here + 8, 3, 8, SUM, stream),
        ):
            with refused(fake, 4):
                call()
            assert "not in place" in fake.violations.pop()
        assert not fake.violations
        nccl.groupStart()
        with refused(fake, 4):
            comm.send(0, 3, 8, 1, stream)
        comm.send(here, 3, 8, 1, stream)
        with refused(fake, 4):
            nccl.groupEnd()
        nccl.groupStart()
        comm.send(here, 3, 8, 1, stream)
        comm.recv(here + 16, 3, 8, 1, stream)
        with refused(fake, 4):
            nccl.groupEnd()
        assert "of its group touches" in fake.violations.pop()
        assert rank.fake.pending(rank.stream) == 0
        comm.destroy()
        for call in (comm.check_async_error, comm.rank_id, lambda: comm.allReduce(here, here, 3, 8, SUM, stream)):
            with refused(fake, 4):
                call()
        comm.destroy()
        comm.abort()


def test_memory_must_outlast_the_kernels_that_touch_it():
    with ranks(2) as team:
        rank = team.all[0]
        with rank.cupy.cuda.Device(0):
            mine = rank.cupy.ones(3)  # on the default stream, which does not wait for the rank's
        rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 3, 8, SUM, rank.stream.ptr)
        del mine
        assert "freed while work" in rank.fake.violations.pop()
        rank.comm.abort()
        rank.stream.synchronize()


# ------------------------------------------------------------------------------------------ coming together


def test_ranks_may_share_a_device_if_nccl_is_told_so(monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    for version, told, works in ((22803, "1", False), (23000, "0", False), (23000, "1", True)):
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", told)
        with installed(1, nccl_version=version) as fake:
            if works:
                team = Ranks(fake, 2, lambda _: 0)
                assert [(rank.comm.rank_id(), rank.comm.size()) for rank in team.all] == [(0, 2), (1, 2)]
                team.threads.shutdown()
            else:
                with refused(fake, 5):
                    Ranks(fake, 2, lambda _: 0)


def test_a_rank_waits_for_the_others_until_the_fake_ends():
    with installed(2) as fake:
        nccl = fake.cupy.cuda.nccl
        unique = nccl.get_unique_id()
        assert len(unique) == 128
        assert type(unique) is bytes
        assert unique != nccl.get_unique_id()
        errors: list[Any] = []

        def come() -> None:
            try:
                nccl.NcclCommunicator(2, unique, 0)
            except nccl.NcclError as exc:
                errors.append(exc.status)

        thread = threading.Thread(target=come)
        thread.start()
        with refused(fake, 2):
            nccl.NcclCommunicator(1, bytes(128), 0)
        with refused(fake, 4):
            nccl.NcclCommunicator(1, unique, 1)
        assert thread.is_alive()
        assert not errors
    thread.join(WAIT_S)
    assert errors == [2]


# ------------------------------------------------------------------------------------------------- failures


def test_an_abort_ends_what_one_rank_has_enqueued_and_its_stream_goes_on():
    def body(rank: Rank) -> Any:
        mine = rank.put(np.full(3, 1.0))
        for _ in range(2):
            rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 3, 8, SUM, rank.stream.ptr)
        with rank.cupy.cuda.Device(rank.device), rank.stream:
            mine += 1
        return mine

    with ranks(3) as team:
        team.all[2].fake.hold(team.all[2].stream)
        arrays = team.run(body)
        fake = team.all[0].fake
        fake.drain()
        assert [rank.stream.done for rank in team.all] == [False] * 3
        team.all[0].comm.abort()
        assert team.all[0].get(arrays[0]).tolist() == [2.0] * 3
        fake.release(team.all[2].stream)
        fake.drain()
        assert [rank.stream.done for rank in team.all] == [True, False, False]
        for rank in team.all[1:]:
            rank.comm.abort()
            rank.stream.synchronize()


def test_a_communicator_that_is_forgotten_under_way():
    with ranks(2) as team:
        rank = team.all[0]
        mine = rank.put(np.ones(3))
        rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 3, 8, SUM, rank.stream.ptr)
        rank.comm = team.all[1].comm
        assert "forgot its communicator" in rank.fake.violations.pop()
        assert rank.get(mine).tolist() == [1.0] * 3


def test_a_graph_whose_peers_do_not_launch_theirs():
    def body(rank: Rank) -> Any:
        mine = rank.put(np.ones(3))
        rank.stream.synchronize()
        rank.stream.begin_capture()
        call = (mine.data.ptr, mine.data.ptr, 3, 8, SUM, rank.stream.ptr)
        rank.comm.allReduce(*call)
        graph = rank.stream.end_capture()
        if rank.rank:
            rank.comm.allReduce(*call)
        else:
            graph.launch(rank.stream)
        return mine

    with ranks(2) as team:
        kept = team.run(body)
        fake = team.all[0].fake
        fake.drain()
        assert "rank 0 launches a graph with allReduce of 3" in fake.violations[0]
        assert "rank 1 calls allReduce" in fake.violations.pop()
        assert [error_of(rank) for rank in team.all] == [5, 5]
        del kept


def test_a_communicator_does_not_end_before_its_graphs(monkeypatch):
    monkeypatch.setattr(_nccl, "_GRAPH_WAITS", 5)
    graphs = []

    def body(rank: Rank) -> None:
        mine = rank.put(np.ones(3))
        rank.stream.synchronize()
        rank.stream.begin_capture()
        rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 3, 8, SUM, rank.stream.ptr)
        graphs.append(rank.stream.end_capture())

    with ranks(1) as team:
        team.run(body)
        fake = team.all[0].fake
        assert fake.graphs == 1
        team.all[0].comm.abort()
        assert "while there are graphs with its kernels" in fake.violations.pop()
        graphs.clear()
        assert not fake.graphs
