"""Aborts, stragglers and closing, on the backends whose ranks can share a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from raycollect.core.model import Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import FaultError, GroupBrokenError, PlanAbortedError
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import (
    KINDS,
    Case,
    body_arrive,
    body_cases,
    body_sum_of_ones,
    check_allreduce,
    check_cases,
    run_case,
    run_launch,
    sum_of,
)


@pytest.fixture(params=["local", "shm", "tcp"])
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    started = ThreadTeam(request.param, 3)
    yield started
    started.close()


ONE_WAY = (OpKind.BROADCAST, OpKind.GATHER, OpKind.SCATTER)
"""Of these a rank of `tcp` may have sent and got all of its part, whatever another one does."""


def is_ended(team: ThreadTeam, kind: OpKind, result: object) -> bool:
    """Whether a kernel that a rank takes no part in ended as it has to on another: by an error, or right."""
    if team.backend == "tcp" and kind in ONE_WAY and isinstance(result, list):
        return all(not wrong for wrong, _ in result)
    return isinstance(result, PlanAbortedError)


def test_an_abort_of_a_later_launch_is_remembered(team: ThreadTeam) -> None:
    now, later = team.launch(), team.launch()
    for communicator in team.communicators:
        communicator.abort(later.seq)
    team.must(body_arrive, now)
    assert all(isinstance(result, PlanAbortedError) for result in team.run(body_arrive, later))
    check_allreduce(team, ReduceOp.SUM, "int64", 7, "plain", True)


def body_leave_in_the_middle(communicator: Communicator, launch: Launch, quitter: int, array: np.ndarray) -> None:
    communicator.agree(launch, b"")
    if communicator.rank == quitter:
        communicator.end(launch, False)
        return
    try:
        communicator.launch(launch, (sum_of(array),))
    finally:
        communicator.end(launch, False)


@pytest.mark.parametrize("quitter", [0, 1, 2])
def test_a_rank_that_leaves_after_the_check_is_named_and_nothing_is_written(team: ThreadTeam, quitter: int) -> None:
    arrays = [np.full(1000, rank, np.int32) for rank in team.everyone]
    launch = team.launch()
    futures = [team.start(rank, body_leave_in_the_middle, launch, quitter, arrays[rank]) for rank in team.everyone]
    for rank, future in enumerate(futures):
        result = future.result(5)
        if rank != quitter:
            assert isinstance(result, PlanAbortedError)
            assert (arrays[rank] == rank).all()
    check_allreduce(team, ReduceOp.SUM, "int64", 300_001, "plain", True)


def body_without_one(communicator: Communicator, launch: Launch, case: Case, quitter: int) -> object:
    """One rank leaves after the check."""
    if communicator.rank != quitter:
        return body_cases(communicator, [launch], [case], run_case, True, False)
    communicator.agree(launch, b"")
    communicator.end(launch, False)
    return None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not OpKind.SEND])
@pytest.mark.parametrize("quitter", [0, 1])
def test_every_kernel_ends_when_a_rank_leaves_and_works_the_next_time(
    team: ThreadTeam, kind: OpKind, quitter: int
) -> None:
    op = ReduceOp.SUM if kind in (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCESCATTER) else None
    case = Case(kind=kind, op=op, dtype="float64", size=600_001, root=1)
    launch = team.launch(timeout_s=60)
    for rank, result in enumerate(team.run(body_without_one, launch, case, quitter)):
        assert rank == quitter or is_ended(team, kind, result), result
    check_cases(team, [case])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not OpKind.SEND])
def test_an_abort_wakes_every_kernel(team: ThreadTeam, kind: OpKind) -> None:
    op = ReduceOp.SUM if kind in (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCESCATTER) else None
    case = Case(kind=kind, op=op, dtype="float64", size=600_001, root=1)
    launch = team.launch(timeout_s=60)
    futures = [team.start(rank, body_cases, [launch], [case], run_case, True, False) for rank in (0, 1)]
    team.start(2, lambda communicator: communicator.agree(launch, b"")).result(5)  # and does not go on
    for rank in (0, 1):
        team.communicators[rank].abort(launch.seq)
    for future in futures:
        assert is_ended(team, kind, future.result(5))
    team.communicators[2].end(launch, False)
    check_cases(team, [case])


@pytest.mark.parametrize("size", [1, 600, 100_000])
def test_a_latecomer_finds_that_the_others_have_left(team: ThreadTeam, size: int) -> None:
    """Also where what they gave has come before they left."""
    launch = team.launch(timeout_s=0.1)
    for result in team.run(body_sum_of_ones, launch, size, ranks=(0, 1)):
        assert isinstance(result, FaultError)
    late = team.run(body_sum_of_ones, launch, size, ranks=(2,))[0]
    assert isinstance(late, PlanAbortedError)
    assert late.rank in (0, 1)
    check_allreduce(team, ReduceOp.SUM, "int64", 300_001, "plain", True)


def test_end_without_the_check_lets_the_others_go_at_once(team: ThreadTeam) -> None:
    launch = team.launch(timeout_s=60)
    waiting = [team.start(rank, body_arrive, launch) for rank in (0, 1)]
    team.communicators[2].end(launch, False)
    for future in waiting:
        result = future.result(5)
        assert isinstance(result, PlanAbortedError)
    check_allreduce(team, ReduceOp.SUM, "int64", 7, "plain", True)


def test_a_slow_reader_keeps_its_peers_from_overwriting_what_it_reads(team: ThreadTeam) -> None:
    """Rank 0 has not closed the first launch when rank 1 begins the next."""
    first, second = team.launch(), team.launch(timeout_s=0.2)
    for future in [team.start(rank, lambda c: c.agree(first, b"first")) for rank in team.everyone]:
        future.result(5)
    for rank in (1, 2):
        team.communicators[rank].end(first, True)
    for result in team.run(body_arrive, second, ranks=(1, 2)):
        assert isinstance(result, FaultError)
    team.communicators[0].end(first, True)
    check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)


def test_close_wakes_waiters_and_refuses_later_calls(team: ThreadTeam) -> None:
    launch = team.launch(timeout_s=60)
    entered = threading.Event()

    def body(communicator: Communicator) -> None:
        entered.set()
        run_launch(communicator, launch)

    waiting = team.start(0, body)
    entered.wait(5)
    team.communicators[0].close()
    team.communicators[0].close()
    assert isinstance(waiting.result(5), PlanAbortedError | GroupBrokenError)
    with pytest.raises(GroupBrokenError):
        team.communicators[0].agree(team.launch(), b"")
    team.communicators[0].abort(launch.seq)
    team.communicators[0].end(launch, False)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_random_aborts_and_absences_never_hang_or_mix_launches(team: ThreadTeam, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(60):
        launch = team.launch(timeout_s=0.05)
        present = [rank for rank in team.everyone if rng.random() > 0.15]
        aborted = [rank for rank in team.everyone if rng.random() < 0.15]
        for rank in aborted:
            team.communicators[rank].abort(launch.seq)
        arrays = {rank: np.full(1000, rank + 1, np.int64) for rank in present}
        futures = {
            rank: team.start(rank, lambda c, way, a: run_launch(c, way, sum_of(a)), launch, arrays[rank])
            for rank in present
        }
        for rank, future in futures.items():
            result = future.result(10)
            assert isinstance(result, list | FaultError), result
            if isinstance(result, list):
                assert (arrays[rank] == 6).all()
    check_allreduce(team, ReduceOp.SUM, "int64", 300_001, "plain", True)
