"""The processes of the benchmarks of kernels: what operands hold, and who says what went wrong."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

pytest.importorskip("rich", reason="the benchmarks need what `make bench` installs")

from benchmarks import names
from benchmarks.interleave import interleave
from benchmarks.kernels.operands import MOST_RUNS, OPS, Operands
from benchmarks.kernels.ours import RaycollectPlayer
from benchmarks.kernels.player import Place
from benchmarks.kernels.team import Team, TeamFailed
from benchmarks.kernels.worker import serve
from benchmarks.report import Skipped
from benchmarks.suite import close, entry, gather
from benchmarks.suites.kernel import BURSTS


def _operate(op, parts):
    """One operation on the operands of all ranks, in this process."""
    if op == "allreduce":
        total = sum(part.src for part in parts)
        for part in parts:
            part.dst[...] = total
    elif op in ("broadcast", "send"):
        for part in parts[1:]:
            part.dst[...] = parts[0].src
    else:
        for part in parts:
            for other, piece in zip(parts, part.pieces(part.dst), strict=True):
                piece[...] = other.src if op == "allgather" else other.pieces(other.src)[part.rank]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_operands_hold_what_the_operation_means_and_nothing_else(op, ranks):
    parts = [Operands.make(op, rank, ranks, 4096, lambda count: np.empty(count, np.float32)) for rank in range(ranks)]
    for part in parts:
        part.fill()
    with pytest.raises(AssertionError):
        for part in parts:
            part.check(1)
    for _ in range(MOST_RUNS):
        _operate(op, parts)
    for part in parts:
        part.check(MOST_RUNS)
    parts[1].dst[-1] *= 1.001
    with pytest.raises(AssertionError, match=op):
        parts[1].check(MOST_RUNS)


def test_a_burst_and_its_lead_in_stay_within_float32():
    assert max(count for _, count in BURSTS) < MOST_RUNS


def test_two_teams_of_processes_take_turns_and_their_results_are_right():
    teams, skipped = gather("kernel", [entry(name, Team, 2) for name in (names.SHM, names.LIMIT)])
    assert not skipped
    try:
        for nbytes in (4, 4096):
            times = interleave(teams, nbytes=nbytes, runs=6, warmup=1, burst=3)
            assert {name: len(spent) for name, spent in times.items()} == {names.SHM: 6, names.LIMIT: 6}
            assert all(spent_ms > 0 for spent in times.values() for spent_ms in spent)
        teams[0].op = "alltoall"
        assert len(interleave(teams[:1], nbytes=64, runs=2, warmup=0, burst=2)[names.SHM]) == 2
    finally:
        close(teams)


def test_a_backend_that_is_not_there_is_skipped(tmp_path):
    with pytest.raises(Skipped, match="no backend 'abacus'"):
        RaycollectPlayer(Place(0, 1, tmp_path), backend="abacus")


def test_a_worker_tells_why_it_can_not_play_and_what_went_wrong():
    ours, theirs = multiprocessing.Pipe()

    class Reluctant:
        def join(self):
            raise Skipped("there is no mpiexec")

        def run(self, count):
            raise ValueError(f"not {count} times")

        def close(self):
            return None

    for command in [("join", ()), ("run", (3,)), ("close", ())]:
        ours.send(command)
    serve(theirs, Reluctant())
    assert ours.recv() == ("skipped", "there is no mpiexec")
    kind, said = ours.recv()
    assert kind == "failed"
    assert "ValueError: not 3 times" in said
    assert ours.recv() == ("done", None)


def test_a_team_that_fails_says_what_its_rank_said():
    team = Team(names.SHM, 2)
    try:
        with pytest.raises(TeamFailed, match="KeyError: 'reduce'"):
            team.op = "reduce"
            team.prepare(4)
    finally:
        team.close()
