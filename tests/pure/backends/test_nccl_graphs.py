"""Kernels of `nccl` that come again on the same memory, as CUDA graphs: on the fake of cupy."""

from __future__ import annotations

import gc
import logging
from concurrent.futures import Future
from itertools import product
from typing import Any

import numpy as np
import pytest

from raycollect.backends.nccl import communicator as nccl
from raycollect.backends.nccl import graphs as _nccl_again
from raycollect.backends.nccl.graphs import GraphCounts
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.errors import GroupBrokenError, KernelError, PlanAbortedError
from tests.fake_cupy import installed
from tests.gpu.again import body_again
from tests.pure.backends.graph_crews import RUNS, Crew, MakeCrew, crew
from tests.pure.backends.streams import WAIT_S, stream_of
from tests.pure.conformance import KINDS, REDUCTIONS, Case
from tests.pure.on_gpu import GpuTeam, gpus, team_on_gpus
from tests.pure.teams import Script, Team, pinned
from tests.support.waiting import wait_until

__all__ = ["crew"]  # a fixture


# ---------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_run_again_becomes_a_graph_and_sums_the_same(crew: MakeCrew, world: int, seed: int) -> None:
    """Each time behind what the caller's stream does, and before whoever comes next."""
    graphs_crew = crew(world, seed=seed)
    for _ in range(RUNS):
        graphs_crew.sum()
    assert graphs_crew.graphs == [GraphCounts(current=1, recorded=1, launched=RUNS - 2)] * world
    assert graphs_crew.fake.counts["graphLaunch"] == world * (RUNS - 2)
    assert graphs_crew.fake.counts["nccl.allReduce"] == world * (
        1 + 2 + 1
    )  # that of the join, two plain ones, the recording


PLAIN_IN_PLACE = (OpKind.ALLTOALL, OpKind.ALLGATHER)
"""What is received beside the array that it overwrites; here, pieces that don't lie one behind the other."""


@pytest.mark.parametrize("how", ["plain", "every other"])
@pytest.mark.parametrize(
    ("kind", "inplace"), [counted for counted in product(KINDS, (False, True)) if counted != (OpKind.SEND, True)]
)
def test_every_kind(kind: OpKind, inplace: bool, how: str) -> None:
    peer = 0 if kind is OpKind.SEND else -1
    op = ReduceOp.SUM if kind in REDUCTIONS else None
    case = Case(kind=kind, dtype="int32", size=60, op=op, root=2, peer=peer, inplace=inplace, layout=how)
    ranks = (0, 2) if kind is OpKind.SEND else (0, 1, 2)
    with team_on_gpus(3) as (fake, team):
        launches = [team.launch(ranks) for _ in range(RUNS)]
        results = team.must(body_again, launches, case, ranks=ranks)
        assert [wrong for wrong, _ in results] == [[""] * RUNS] * len(ranks)
        counts = [counted for _, counted in results]
        may = how == "plain" and not (inplace and kind in PLAIN_IN_PLACE)
        assert counts == [GraphCounts(current=may, recorded=may, launched=may * (RUNS - 2))] * len(ranks)
        assert not fake.graphs, "a graph goes with its kernel"


@pytest.mark.parametrize("dtype", ["int16", "complex64"])
def test_what_cupy_folds_is_no_graph(dtype: str) -> None:
    case = Case(kind=OpKind.ALLREDUCE, dtype=dtype, size=60, op=ReduceOp.PRODUCT)
    with team_on_gpus(2) as (fake, team):
        results = team.must(body_again, [team.launch() for _ in range(RUNS)], case)
        assert results == [([""] * RUNS, GraphCounts())] * 2
        assert not fake.counts["graphLaunch"]


def test_a_kernel_that_is_run_again_is_written_once(crew: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Kernel] = []
    write = nccl.write
    graphs_crew = crew(2, version=20800)  # which can't be recorded
    monkeypatch.setattr(nccl, "write", lambda kernel, *rest: (written.append(kernel), write(kernel, *rest))[1])
    for _ in range(RUNS):
        graphs_crew.sum()
    assert len(written) == 2
    assert graphs_crew.graphs == [GraphCounts()] * 2


# ---------------------------------------------------------------------------------------------- agreement


def test_a_rank_that_comes_the_long_way_is_met_plain_and_the_graphs_are_kept(crew: MakeCrew) -> None:
    graphs_crew = crew(2)
    for _ in range(4):
        graphs_crew.sum()
    assert graphs_crew.launched == [2, 2]
    graphs_crew.sum(long_way=(0,))
    graphs_crew.sum(long_way=(1,))
    assert graphs_crew.launched == [2, 2]
    graphs_crew.sum()
    assert graphs_crew.graphs == [GraphCounts(current=1, recorded=1, launched=3)] * 2


def test_a_rank_with_another_kernel_lets_all_record_anew(crew: MakeCrew) -> None:
    graphs_crew = crew(2)
    for _ in range(4):
        graphs_crew.sum()
    graphs_crew.renew(1)
    gc.collect()
    assert graphs_crew.fake.graphs == 1, "that of the rank whose kernel is gone went with it"
    graphs_crew.sum()
    assert graphs_crew.fake.graphs == 0, "nobody can launch the other's"
    for _ in range(3):
        graphs_crew.sum()
    assert [(each.current, each.recorded) for each in graphs_crew.graphs] == [(1, 2)] * 2
    assert graphs_crew.launched == [2 + 2] * 2


@pytest.mark.parametrize("who", [(0,), (0, 1, 2)])
def test_a_recording_that_fails_leaves_all_plain(
    crew: MakeCrew, who: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    graphs_crew = crew(3)
    for rank in who:
        graphs_crew.fake.spoil_captures(1, rank)
    with caplog.at_level(logging.DEBUG, "raycollect"):
        for _ in range(RUNS):
            graphs_crew.sum()
    said = sorted(record.getMessage().partition(":")[0] for record in caplog.records)
    assert said == [
        *["allreduce of group 'team' could not become a CUDA graph"] * len(who),
        *["allreduce of group 'team' is a CUDA graph from now on"] * (3 - len(who)),
    ]
    assert "cudaErrorStreamCaptureInvalidated" in caplog.text
    for rank, counts in enumerate(graphs_crew.graphs):
        failed = rank in who
        assert counts == GraphCounts(recorded=not failed, failed=failed)
    assert not graphs_crew.fake.graphs


def test_no_more_graphs_than_are_kept(crew: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nccl_again, "GRAPHS", 2)
    graphs_crew = crew(2)
    kernels, arrays = [], []
    for _ in range(3):
        for rank in graphs_crew.team.everyone:
            graphs_crew.renew(rank)
        kernels.append(list(graphs_crew.kernels))
        arrays.append(list(graphs_crew.arrays))
        for _ in range(4):
            graphs_crew.sum()
    assert [each.current for each in graphs_crew.graphs] == [2, 2]
    assert graphs_crew.fake.graphs == 4
    kernels[0] = arrays[0] = []
    gc.collect()
    assert [each.current for each in graphs_crew.graphs] == [1, 1]
    graphs_crew.sum()  # now the third is recorded
    graphs_crew.sum()
    assert [each.current for each in graphs_crew.graphs] == [2, 2]


# ---------------------------------------------------------------------------------------------- options


def test_graphs_can_be_switched_off() -> None:
    with gpus(2) as fake:
        team = GpuTeam(2, graphs=False)
        try:
            crew = Crew(fake, team)
            for _ in range(RUNS):
                crew.sum()
            assert crew.graphs == [GraphCounts()] * 2
        finally:
            team.close()


# ---------------------------------------------------------------------------------------------- failures


def _under_graph(crew: Crew, timeout_s: float = WAIT_S) -> tuple[Launch, list[Future[Any]]]:
    """A launch of graphs that waits, since rank 1's stream is stopped."""
    for _ in range(3):
        crew.sum()
    launch = crew.team.launch(timeout_s=timeout_s)
    before = crew.fake.counts["graphLaunch"]
    crew.fake.hold(stream_of(crew.team.communicators[1]))
    running = [crew.team.start(rank, crew.body, launch) for rank in crew.team.everyone]
    assert wait_until(lambda: crew.fake.counts["graphLaunch"] == before + 2)
    return launch, running


def test_an_abort_while_graphs_run(crew: MakeCrew) -> None:
    """They go first: NCCL would wait for them."""
    graphs_crew = crew(2)
    launch, running = _under_graph(graphs_crew)
    for communicator in graphs_crew.team.communicators:
        communicator.abort(launch.seq)
    graphs_crew.fake.release(stream_of(graphs_crew.team.communicators[1]))
    for future in running:
        assert isinstance(future.result(WAIT_S), PlanAbortedError)
    assert not graphs_crew.fake.graphs
    for communicator in graphs_crew.team.communicators:
        with pytest.raises(GroupBrokenError):
            communicator.agree(graphs_crew.team.launch(), b"")


def test_a_graph_that_can_not_be_launched_ends_the_group(crew: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_crew = crew(2)
    for _ in range(3):
        graphs_crew.sum()

    def refuse(self: Any, stream: Any = None) -> None:
        raise graphs_crew.fake.cupy.cuda.runtime.CUDARuntimeError(1)

    monkeypatch.setattr(graphs_crew.fake.cupy.cuda.Graph, "launch", refuse)
    errors = graphs_crew.team.run(graphs_crew.body, graphs_crew.team.launch())
    assert all(isinstance(error, KernelError) and "cudaErrorInvalidValue" in str(error) for error in errors), errors
    assert not graphs_crew.fake.graphs


def test_nothing_of_a_kernel_is_left_when_it_is_gone(crew: MakeCrew) -> None:
    graphs_crew = crew(2)
    for _ in range(4):
        graphs_crew.sum()
    before = graphs_crew.fake.allocated(0)
    nbytes = graphs_crew.arrays[0].nbytes
    graphs_crew.arrays[0] = graphs_crew.kernels[0] = None
    gc.collect()
    assert graphs_crew.fake.allocated(0) == before - nbytes
    assert graphs_crew.fake.graphs == 1
    assert [each.current for each in graphs_crew.graphs] == [0, 1]


# ---------------------------------------------------------------------------------------------- calls and steps


@pytest.mark.parametrize("seed", range(2))
def test_a_captured_step_runs_as_graphs(seed: int) -> None:
    """All of it: the step, its runs and the backend, with a tensor that moves in between."""
    with installed(2, nccl_version=23000, seed=seed) as fake:
        cupy = fake.cupy
        values = []
        for rank in range(2):
            with cupy.cuda.Device(rank):
                values.append([cupy.zeros(50, np.int32)])
        group = GpuTeam(2)
        team = Team(2, [Script(rank, [pinned(value)]) for rank, value in enumerate(values)])
        team.communicators = list(group.communicators)
        team.collective(OpKind.ALLREDUCE, dict.fromkeys(range(2), 0))
        try:
            for turn in range(1, 9):
                for rank, (value,) in enumerate(values):
                    with cupy.cuda.Device(rank):
                        value.fill(turn * 10**rank)
                        cupy.cuda.get_current_stream().synchronize()
                assert team.fail() == [None] * 2
                for (value,) in values:
                    assert set(value.get().tolist()) == {turn * 11}
            counts = [communicator.graphs for communicator in group.communicators]  # type: ignore[attr-defined]
            assert counts == [GraphCounts(current=1, recorded=1, launched=sum(team.repeated(0)) - 2)] * 2
            assert counts[0].launched >= 3
        finally:
            for replay in team.replays:
                replay.close()
            team.close()
            group.close()
        gc.collect()
        assert not fake.graphs
