"""Kernels that come again, as CUDA graphs, on real GPUs: what they compute, behind whom they run, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("ml_dtypes", reason="raycollect needs ml_dtypes")

import numpy as np

from raycollect.backends.nccl.group import GRAPHS_FROM
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.errors import CollectiveTimeoutError, GroupBrokenError, PlanAbortedError
from tests.pure.communicators import Team
from tests.pure.conformance import KINDS, REDUCTIONS, Case
from tests.support.values import replace

from . import devices
from .again import again, body_again
from .cases import LIBRARIES, placed, seen, to_host
from .work import WORK, Busy, must_be_busy

TeamOf = Callable[[int], Team]

WORLDS = (1, 2, 3)
RUNS = 6
"""Plain, plain and recorded, then graphs."""
SIZE = 1 << 16


@pytest.fixture(autouse=True)
def recording() -> None:
    if devices.nccl_version() < GRAPHS_FROM:
        pytest.skip(f"NCCL {devices.nccl_version()} can't be recorded")


def _check(team: Team, case: Case, ranks: tuple[int, ...], library: str) -> None:
    launches = [team.launch(ranks, 60.0) for _ in range(RUNS)]
    found = team.must(body_again, launches, case, library, ranks=ranks)
    assert [wrong for wrong, _ in found] == [[""] * RUNS] * len(ranks)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_kind(team_of: TeamOf, world: int, kind: OpKind, inplace: bool, library: str) -> None:
    """With other numbers in each run."""
    if kind is OpKind.SEND and (world == 1 or inplace):
        pytest.skip("a send needs two ranks, and has nothing in place")
    team = team_of(world)
    if why := devices.why_not(library):
        pytest.skip(why)
    op = ReduceOp.SUM if kind in REDUCTIONS else None
    peer = 0 if kind is OpKind.SEND else -1
    case = Case(kind=kind, dtype="int32", size=60 * world, op=op, root=world - 1, peer=peer, inplace=inplace)
    ranks = (0, world - 1) if kind is OpKind.SEND else team.everyone
    _check(team, case, ranks, library)
    _check(team, replace(case, layout="every other"), ranks, library)


class Sums:
    """One rank's array, summed in place again and again.

    Args:
        rank: Its number.
        size: How many float32.
    """

    def __init__(self, rank: int, size: int = SIZE) -> None:
        self.cupy = import_module("cupy")
        self.array = placed(np.zeros(size, np.float32), "plain", "cupy")
        self.value = float(rank + 1)
        mine = seen(self.array)
        self.kernel = Kernel(kind=OpKind.ALLREDUCE, src=mine, dst=mine, op=ReduceOp.SUM)
        self.cupy.cuda.get_current_stream().synchronize()  # it is used on other streams

    def run(self, communicator: Any, launch: Launch) -> None:
        """Fills it on the current stream, and sums at once."""
        self.array.fill(self.value)
        again(communicator, launch, self.kernel)

    def is_right(self, world: int) -> bool:
        """Whether all elements are the sum, read on another stream."""
        with self.cupy.cuda.Stream(non_blocking=True):
            return bool((to_host(self.array, np.dtype(np.float32)) == world * (world + 1) / 2).all())


def body_graphs(communicator: Any, launches: list[Launch]) -> tuple[bool, int, int]:
    """Sums on a stream that is still busy: whether all was right, and how often a graph was launched."""
    work = WORK["cupy"]()
    mine, one, busy = work.stream(), Sums(communicator.rank), Busy(work)
    right = True
    before = communicator.graphs
    with work.on(mine):
        for launch in launches:
            busy.start()
            must_be_busy(work, mine)
            one.run(communicator, launch)
            right = right and one.is_right(communicator.world_size)
    after = communicator.graphs
    return right, after.recorded - before.recorded, after.launched - before.launched


@pytest.mark.parametrize("world", WORLDS)
def test_a_graph_runs_behind_what_its_caller_has_enqueued(team_of: TeamOf, world: int) -> None:
    team = team_of(world)
    found = team.must(body_graphs, [team.launch(timeout_s=60.0) for _ in range(RUNS)])
    assert found == [(True, 1, RUNS - 2)] * world


def body_alone(communicator: Any, launches: list[Launch], last: Launch, abort: bool) -> tuple[str, str, bool, int]:
    """Graphs, and one more that rank 0 alone launches: what ends it, what the group says, and the device."""
    one, said = Sums(communicator.rank), []
    for launch in launches:
        one.run(communicator, launch)
    communicator.agree(last, b"", one.kernel, (b"",) * len(last.ranks))
    if communicator.rank:
        communicator.end(last, False)
        return "", "", True, 0
    for _ in range(2):
        try:
            communicator.enqueue(last, (one.kernel,))
            if abort:
                communicator.abort(last.seq)
            communicator.finish(last, one.kernel)
            said.append("it ended")
        except (CollectiveTimeoutError, PlanAbortedError, GroupBrokenError) as exc:
            said.append(type(exc).__name__)
    communicator.end(last, False)
    works = bool((one.cupy.arange(1000).get() == np.arange(1000)).all())
    return said[0], said[1], works, communicator.graphs.current


@pytest.mark.parametrize(("abort", "error"), [(False, "CollectiveTimeoutError"), (True, "PlanAbortedError")])
def test_a_graph_that_one_rank_launches_alone_is_ended(fresh_team_of: TeamOf, abort: bool, error: str) -> None:
    """NCCL waits for the end of all graphs when a communicator ends: they have to go first."""
    team = fresh_team_of(2)
    launches = [team.launch(timeout_s=60.0) for _ in range(3)]
    last = team.launch(timeout_s=30.0 if abort else 1.0)
    found = team.must(body_alone, launches, last, abort)[0]
    assert found[0] == error
    assert found[1] in ("GroupBrokenError", error)
    assert found[2], "the device does not go on"
    assert found[3] == 0
