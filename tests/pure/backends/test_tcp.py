"""What is tcp's own: ends in mid-kernel."""

from __future__ import annotations

import numpy as np
import pytest

from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError
from tests.pure.backends.tcp_teams import team
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import (
    check_allreduce,
    run_launch,
)
from tests.support.values import replace
from tests.support.waiting import wait_until

__all__ = ["team"]  # a fixture


# ------------------------------------------------------------------------------- in mid-kernel


def one_side(kind: OpKind, peer: int, nbytes: int) -> Kernel:
    array = np.zeros(nbytes, np.uint8)
    return Kernel(kind=kind, src=array, dst=array, peer=peer)


@pytest.mark.parametrize("kind", [OpKind.SEND, OpKind.RECV])
@pytest.mark.parametrize("aborted", [True, False])
def test_the_group_works_on_after_an_end_in_mid_kernel(team: ThreadTeam, kind: OpKind, aborted: bool) -> None:
    """Rank 0 leaves a kernel that rank 1 has not begun; a send is then in the middle of a frame."""
    launch = Launch(seq=team.launch().seq, ranks=(0, 1), timeout_s=60 if aborted else 0.5)
    waiting = team.start(0, run_launch, launch, one_side(kind, 1, 64 << 20))
    team.communicators[1].agree(launch, b"")
    link = team.communicators[0]._tcp_mesh
    assert wait_until(lambda: link._peers[1].is_blocked or link._peers[1].owes(link._step) or waiting.done())
    if aborted:
        team.communicators[0].abort(launch.seq)
    failed = waiting.result(10)
    assert isinstance(failed, PlanAbortedError if aborted else CollectiveTimeoutError)
    assert aborted or failed.missing == (1,)
    opposite = one_side(OpKind.RECV if kind is OpKind.SEND else OpKind.SEND, 0, 64 << 20)
    together = team.launch()

    def go_on(communicator: Communicator) -> None:
        """Rank 1 comes late, and hears at once or when rank 0 goes on that it has left; then all meet."""
        if communicator.rank == 1:
            late = replace(launch, timeout_s=20)
            with pytest.raises(PlanAbortedError, match="rank 0 has left"):
                communicator.launch(late, (opposite,))
            communicator.end(late, False)
        array = np.full(300_001, communicator.rank)
        run_launch(communicator, together, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))
        assert (array == 3).all()

    team.must(go_on)


_IN_KERNEL = 2  # the step after the agreement


def test_both_ends_may_leave_in_the_middle_of_frames(team: ThreadTeam) -> None:
    launch = team.launch(timeout_s=30)
    arrays = [np.full(8_000_000, rank, np.int64) for rank in team.everyone]

    def body(communicator: Communicator) -> None:
        array = arrays[communicator.rank]
        run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))

    running = [team.start(rank, body) for rank in team.everyone]
    links = [communicator._tcp_mesh for communicator in team.communicators]
    assert wait_until(lambda: all(link._step == _IN_KERNEL for link in links))
    for communicator in team.communicators:
        communicator.abort(launch.seq)
    assert all(isinstance(future.result(10), PlanAbortedError) for future in running)
    for _ in range(3):
        check_allreduce(team, ReduceOp.SUM, "int64", 300_001, "plain", True)
