"""What a rank did before its process ended counts, and nobody waits for what it did not do: backends that see that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import PlanAbortedError
from tests.pure.communicators import ThreadTeam
from tests.pure.watched import WAIT_S

DEAD = 2
LIVING = (0, 1)


@pytest.fixture(params=["shm", "tcp"])
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    started = ThreadTeam(request.param, 3)
    yield started
    started.close()


def die(team: ThreadTeam) -> None:
    """What the others see of the end of a process, and what they are told of it."""
    dead: Any = team.communicators[DEAD]
    if team.backend == "tcp":
        dead.close()  # the system ends the connections, and what was sent comes before
    for rank in LIVING:
        assert team.communicators[rank].lost(DEAD), "it sees for itself"


def kernel_of(kind: OpKind, array: np.ndarray) -> Kernel:
    op = ReduceOp.SUM if kind is OpKind.ALLREDUCE else None
    return Kernel(kind=kind, src=array, dst=array, op=op, peer=DEAD if op is None else -1)


def body(communicator: Communicator, launch: Launch, kernel: Kernel | None, go: threading.Event) -> None:
    """Goes through the consistency check, waits, and runs a kernel, or does not."""
    ok = False
    try:
        has_root = kernel is not None and kernel.kind is OpKind.BROADCAST
        communicator.agree(launch, b"", kernel if has_root else None)  # so that the root has no more to do
        assert go.wait(WAIT_S)
        if kernel is not None:
            communicator.launch(launch, (kernel,))
            ok = True
    finally:
        communicator.end(launch, ok)


@pytest.mark.parametrize("size", [1, 50_000])
def test_a_kernel_for_which_the_dead_did_their_part_ends_well(team: ThreadTeam, size: int) -> None:
    """The root has given its array to all and is gone before the others look."""
    arrays = [np.full(size, rank, np.float64) for rank in team.everyone]
    launch, now, later = team.launch(), threading.Event(), threading.Event()
    now.set()
    running = {
        rank: team.start(rank, body, launch, kernel_of(OpKind.BROADCAST, arrays[rank]), now if rank == DEAD else later)
        for rank in team.everyone
    }
    assert running[DEAD].result(WAIT_S) is None
    die(team)
    later.set()
    assert [running[rank].result(WAIT_S) for rank in LIVING] == [None, None]
    assert all((arrays[rank] == DEAD).all() for rank in LIVING)


def test_a_kernel_for_which_the_dead_did_nothing_ends_at_once_and_names_them(team: ThreadTeam) -> None:
    arrays = [np.full(1000, rank, np.float64) for rank in team.everyone]
    launch, go, never = team.launch(timeout_s=WAIT_S), threading.Event(), threading.Event()
    running = [
        team.start(rank, body, launch, kernel_of(OpKind.ALLREDUCE, arrays[rank]), never if rank == DEAD else go)
        for rank in team.everyone
    ]
    go.set()
    died_s = time.monotonic()
    for rank in LIVING:
        team.communicators[rank].lost(DEAD)
    results = [running[rank].result(WAIT_S) for rank in LIVING]
    assert time.monotonic() - died_s < WAIT_S / 2, "not the end of the launch's time"
    assert [type(error) for error in results] == [PlanAbortedError] * 2, results
    assert DEAD in {error.rank for error in results}
    never.set()


def test_who_waits_at_the_check_for_the_dead_is_woken(team: ThreadTeam) -> None:
    launch, go = team.launch(timeout_s=WAIT_S), threading.Event()
    running = [team.start(rank, body, launch, None, go) for rank in LIVING]
    died_s = time.monotonic()
    die(team)
    results = [future.result(WAIT_S) for future in running]
    assert time.monotonic() - died_s < WAIT_S / 2, "not the end of the launch's time"
    assert [type(future) for future in results] == [PlanAbortedError] * 2, results


def test_those_who_have_nothing_to_do_with_the_dead_go_on(team: ThreadTeam) -> None:
    """Also where the dead never left the launch before, and so could still have read of it."""
    first, go = team.launch(), threading.Event()
    go.set()
    running = [team.start(rank, body, first, None, go) for rank in LIVING]
    team.communicators[DEAD].agree(first, b"")
    assert [future.result(WAIT_S) for future in running] == [None, None]
    die(team)
    for _ in range(3):
        arrays = [np.full(300_001, rank + 1.0) for rank in LIVING]
        launch = team.launch(LIVING)
        kernels = [kernel_of(OpKind.ALLREDUCE, array) for array in arrays]
        again = [team.start(rank, body, launch, kernels[rank], go) for rank in LIVING]
        assert [future.result(WAIT_S) for future in again] == [None, None]
        assert all((array == 3).all() for array in arrays)
