"""What is gloo's own: a dead peer in mid-kernel, and members that never come."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends import gloo
from raycollect.errors import CollectiveTimeoutError, GroupBrokenError, KernelError
from raycollect.model import Communicator, GroupSpec, Kernel, Launch, OpKind, ReduceOp

from .communicators import MemoryExchange, MemoryRendezvous, MemoryStar, ProcessTeam, Worker
from .test_backends import body_arrive, check_allreduce

pytestmark = pytest.mark.skipif(not backends.is_available("gloo"), reason="no gloo library is installed")


@pytest.fixture
def team() -> Iterator[ProcessTeam]:
    workers = [Worker() for _ in range(2)]
    made = ProcessTeam("gloo", 2, workers)
    yield made
    made.close()
    for worker in workers:
        worker.close()


def body_kernel(communicator: Communicator, launch: Launch) -> None:
    """A kernel without the door, as if the peer had died behind it."""
    array = np.ones(1000, np.float32)
    communicator.launch(launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))


def test_a_peer_that_dies_in_mid_kernel_breaks_the_group(team: ProcessTeam) -> None:
    check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)
    team.workers[1].process.kill()
    team.workers[1].process.join()
    failed = team.run(body_kernel, team.launch(), ranks=(0,))[0]
    assert isinstance(failed, KernelError)
    assert (failed.op, failed.group_name, failed.rank) == ("allreduce", "team", 0)
    for body in (body_arrive, body_kernel):
        broken = team.run(body, team.launch(), ranks=(0,))[0]
        assert isinstance(broken, GroupBrokenError)


def test_nobody_connects_before_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "JOIN_TIMEOUT_S", 0.1)
    spec = GroupSpec(name="g", group_id="1", backend="gloo", world_size=2)
    with pytest.raises(CollectiveTimeoutError, match=r"gloo\.ready\.1"):
        gloo.create(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0))
