"""Ranks that share one GPU, by CUDA IPC: the conformance suite bit by bit, memory that comes and goes, what goes wrong.

It needs one GPU and no particular NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import cycle

import pytest

pytest.importorskip("ml_dtypes", reason="raycollect needs ml_dtypes")

import numpy as np

from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError
from tests.pure.communicators import Team, Worker
from tests.pure.conformance import (
    DTYPES,
    KINDS,
    REDUCTIONS,
    Case,
    body_cases,
    check_outcomes,
    checksum_of,
    every_case,
    ranks_of,
    run_launch,
    what_is_wrong,
)
from tests.support.values import replace

from . import devices
from .cases import LIBRARIES, body_device_works, layouts_of, run_once, seen
from .sharing import form

TeamOf = Callable[[int], Team]

WORLDS = (2, 3)

real_only = pytest.mark.skipif(devices.FAKE, reason="the fake has no pools that a process could change")


@pytest.fixture(scope="module")
def team_of(workers: Callable[[int], list[Worker]]) -> Iterator[TeamOf]:
    """Gives the team of so many ranks on one GPU, which lasts."""
    teams: dict[int, Team] = {}

    def team(world_size: int) -> Team:
        if world_size not in teams:
            teams[world_size] = form(world_size, workers)
        return teams[world_size]

    yield team
    for made in teams.values():
        made.close()


@pytest.fixture
def fresh_team(gpus: None) -> Iterator[Team]:
    """Two ranks, in processes of their own, which the test may end."""
    started: list[Worker] = []

    def start(count: int) -> list[Worker]:
        started.extend(Worker() for _ in range(count))
        return started

    team = form(2, start)
    yield team
    team.close()
    for worker in started:
        worker.close()


# ------------------------------------------------------------------------------- the conformance suite


def run_case(communicator: Communicator, launch: Launch, case: Case, library: str) -> tuple[str, int]:
    """Runs one case on one rank, and compares."""
    ran = run_once(communicator, launch, case, library)
    wrong = what_is_wrong(case, ran.given, ran.src, ran.expected, ran.dst, ran.shared, is_bitwise=True)
    return wrong, checksum_of(ran.dst)


def check(team: Team, library: str, cases: Sequence[Case]) -> None:
    """Runs cases on all ranks, compares their results with the left fold and names every case that failed."""
    launches = [team.launch(ranks_of(case, team), 60.0) for case in cases]
    results = team.must(body_cases, launches, list(cases), run_case, library)
    check_outcomes(cases, [case.kind for case in cases], results, f"of {library}, {team.world_size} ranks on one GPU")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_every_kernel(team_of: TeamOf, world: int, dtype: str, library: str) -> None:
    """The layouts take turns; every kind has each of them, in place and not."""
    devices.need(library, dtype)
    turns = {kind: cycle(layouts_of(library)) for kind in KINDS}
    sizes = (105,) if devices.FAKE else (0, 1, 7, 1024, 4099)
    cases = [replace(case, layout=next(turns[case.kind])) for case in every_case(dtype, world, sizes, KINDS)]
    check(team_of(world), library, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_many_elements(team_of: TeamOf, world: int, kind: OpKind) -> None:
    op, peer = (ReduceOp.SUM if kind in REDUCTIONS else None), (0 if kind is OpKind.SEND else -1)
    size = 100_003 if devices.FAKE else 5_000_001
    case = Case(kind=kind, dtype="float32", size=size, op=op, root=world - 1, peer=peer, spread="uneven")
    check(team_of(world), "cupy", [case, replace(case, layout="every other"), replace(case, spread="even")])


# ------------------------------------------------------------------------------- memory that comes and goes


def body_freed(communicator: Communicator, launches: Sequence[Launch]) -> list[float]:
    """Sums of arrays whose memory is given back to the device in between, and may come again at the same address."""
    cupy, found = import_module("cupy"), []
    for at, launch in enumerate(launches):
        array = cupy.full((1 << 20) + at % 2, communicator.rank + at, np.float32)
        kernel = Kernel(kind=OpKind.ALLREDUCE, src=seen(array), dst=seen(array), op=ReduceOp.SUM)
        run_launch(communicator, launch, kernel)
        values = array.get()
        found.append(float(values.min()) if values.min() == values.max() else float("nan"))
        del array, kernel
        cupy.get_default_memory_pool().free_all_blocks()
    return found


@real_only
@pytest.mark.parametrize("world", WORLDS)
def test_memory_that_is_freed_and_comes_again(team_of: TeamOf, world: int) -> None:
    team, times = team_of(world), 20
    expected = [float(sum(rank + at for rank in range(world))) for at in range(times)]
    for found in team.must(body_freed, [team.launch() for _ in range(times)]):
        assert found == expected


def body_pool(communicator: Communicator, launch: Launch) -> float:
    """A sum of an array of a pool of CUDA's own, whose memory has no handle."""
    cupy = import_module("cupy")
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        array = cupy.full(1 << 20, communicator.rank + 1, np.float32)
    kernel = Kernel(kind=OpKind.ALLREDUCE, src=seen(array), dst=seen(array), op=ReduceOp.SUM)
    run_launch(communicator, launch, kernel)
    return float(array.sum())


@real_only
@pytest.mark.parametrize("world", WORLDS)
def test_memory_that_can_not_be_shown_is_copied(team_of: TeamOf, world: int) -> None:
    team = team_of(world)
    assert team.must(body_pool, team.launch()) == [float((1 << 20) * sum(range(1, world + 1)))] * world


# ------------------------------------------------------------------------------- who does not come


def body_alone(communicator: Communicator, launch: Launch) -> str:
    """Enters a kernel that nobody else enters; what ends it."""
    mine = seen(import_module("cupy").ones(1 << 16, np.float32))
    try:
        communicator.launch(launch, (Kernel(kind=OpKind.ALLREDUCE, src=mine, dst=mine, op=ReduceOp.SUM),))
    except (CollectiveTimeoutError, PlanAbortedError) as exc:
        return type(exc).__name__
    finally:
        communicator.end(launch, False)
    return "it ended"


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_does_not_come_and_the_next_call_works(team_of: TeamOf, world: int) -> None:
    team = team_of(world)
    assert team.must(body_alone, team.launch(timeout_s=0.5), ranks=(0,)) == ["CollectiveTimeoutError"]
    check(team, "cupy", [Case(kind=OpKind.ALLREDUCE, dtype="int64", size=1024, op=ReduceOp.MAX)])


@real_only
def test_a_process_that_has_died(fresh_team: Team) -> None:
    """After a collective, so that its memory is open here."""
    check(fresh_team, "cupy", [Case(kind=OpKind.ALLREDUCE, dtype="float32", size=4099, op=ReduceOp.SUM)])
    workers: Sequence[Worker] = getattr(fresh_team, "workers", ())
    workers[1].process.kill()
    workers[1].process.join()
    (found,) = fresh_team.must(body_alone, fresh_team.launch(timeout_s=1.0), ranks=(0,))
    assert found == "CollectiveTimeoutError"
    assert fresh_team.must(body_device_works, ranks=(0,)) == [True]
