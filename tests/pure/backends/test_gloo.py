"""Rules of gloo alone, and peers that die or stop in a kernel of gloo, also of torch's."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from raycollect.backends.gloo import communicator as gloo
from raycollect.backends.meshed import ANSWER_S, MESH_UP_TO_NBYTES
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Joining
from raycollect.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    GroupBrokenError,
    InvalidGroupError,
    PlanAbortedError,
)
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar, ProcessTeam, Worker, Workers
from tests.pure.conformance import body_arrive, check_allreduce, is_absent
from tests.pure.mixed import body_staged
from tests.support.waiting import stopped

library = pytest.importorskip("raycollect.backends.gloo.library", reason="no gloo is installed", exc_type=ImportError)


@pytest.fixture
def team(workers: Workers) -> Iterator[ProcessTeam]:
    started = ProcessTeam("gloo", 4, workers(4))
    yield started
    started.close()


@pytest.fixture(params=["gloo", "torch:gloo"])
def mortals(request: pytest.FixtureRequest) -> Iterator[ProcessTeam]:
    """Two ranks, of which one may be killed."""
    if absent := is_absent(request.param):
        pytest.skip(absent)
    made_workers = [Worker() for _ in range(2)]
    started = ProcessTeam(request.param, 2, made_workers)
    yield started
    started.close()
    for worker in made_workers:
        worker.close()


# ------------------------------------------------------------------------------- reductions


def body_broadcast(communicator: Communicator, launch: Launch) -> tuple[bool, float]:
    """Whether a large broadcast goes by the library, and what came."""
    array = np.full((MESH_UP_TO_NBYTES[0][1] >> 3) + 1, communicator.rank, np.float64)
    kernel = Kernel(kind=OpKind.BROADCAST, src=array, dst=array, peer=3)
    assert isinstance(communicator, gloo.GlooCommunicator)
    communicator.launch(launch, (kernel,))
    return communicator._is_for_library(launch, kernel), float(array.min())


@pytest.mark.parametrize("hosts", [(), (0, 0, 1, 1), (0, 1, 2, 3)])
def test_a_broadcast_between_hosts_is_not_left_to_the_tree_of_gloo(workers, hosts) -> None:
    """Which sends most ranks their bytes from another host than their own."""
    team = ProcessTeam("gloo", 4, workers(4), hosts=hosts)
    try:
        assert team.must(body_broadcast, team.launch()) == [(not hosts, 3.0)] * 4
    finally:
        team.close()


# ------------------------------------------------------------------------------- failures


def body_kernel(communicator: Communicator, launch: Launch, kind: OpKind = OpKind.ALLREDUCE) -> None:
    """A kernel without the check, as if the peer had died behind it; large enough to be the library's."""
    array = np.ones(MESH_UP_TO_NBYTES[0][1] // 4 + 1, np.float32)
    pieces = kind is OpKind.ALLTOALL
    side = (array, array.copy()) if pieces else array
    communicator.launch(launch, (Kernel(kind=kind, src=side, dst=side, op=ReduceOp.SUM, peer=1, most=array.size),))


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.ALLTOALL, OpKind.RECV])
def test_a_peer_that_dies_in_mid_kernel_breaks_the_group(mortals: ProcessTeam, kind: OpKind) -> None:
    check_allreduce(mortals, ReduceOp.SUM, "int64", 1024, "plain", True)
    mortals.workers[1].process.kill()
    mortals.workers[1].process.join()
    failed = mortals.run(body_kernel, mortals.launch(), kind, ranks=(0,))[0]
    assert isinstance(failed, PlanAbortedError), "an echo: whoever has died is for others to tell"
    assert failed.group_name == "team"
    for body in (body_arrive, body_kernel) if kind is OpKind.ALLREDUCE else (body_arrive,):
        broken = mortals.run(body, mortals.launch(), ranks=(0,))[0]
        assert isinstance(broken, GroupBrokenError)


def body_leave_or_run(communicator: Communicator, launch: Launch, size: int) -> None:
    """Rank 1 leaves before its kernel, in which the others may be."""
    array = np.ones(size, np.float32)
    kernel = Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)
    communicator.agree(launch, b"")
    owed = [kernel]
    try:
        if communicator.rank != 1:
            communicator.launch(launch, owed)
            owed = []
    finally:
        communicator.end(launch, not owed, owed)


@pytest.mark.parametrize("is_large", [False, True])
def test_who_leaves_before_a_kernel_breaks_the_group_only_if_the_library_runs_it(
    team: ProcessTeam, is_large: bool
) -> None:
    results = team.run(body_leave_or_run, team.launch(), MESH_UP_TO_NBYTES[0][1] // 4 + is_large)
    assert all(isinstance(result, PlanAbortedError) for rank, result in enumerate(results) if rank != 1), results
    if is_large:
        assert all(isinstance(result, GroupBrokenError) for result in team.run(body_arrive, team.launch()))
    else:
        check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)


def body_check_and_kernel(communicator: Communicator, launch: Launch) -> None:
    communicator.agree(launch, b"")
    try:
        body_kernel(communicator, launch)
    except BaseException:
        communicator.end(launch, False)
        raise


def body_check(communicator: Communicator, launch: Launch) -> None:
    communicator.agree(launch, b"")


@pytest.mark.parametrize("backend", ["gloo", "torch:gloo"])
def test_a_rank_that_stops_in_a_kernel_of_the_library_is_named_in_time(workers: Workers, backend: str) -> None:
    """The other two are held by the same kernel, and one of them by the GIL, too: the library names nobody."""
    if absent := is_absent(backend):
        pytest.skip(absent)
    team = ProcessTeam(backend, 3, workers(3))
    try:
        launch = team.launch(timeout_s=1.5)
        is_deaf = backend == "gloo" and library.gloo.__name__ == "pygloo"  # its binding takes no limit
        limit_s = 30.0 if is_deaf else launch.timeout_s
        pid = team.workers[1].process.pid
        assert pid is not None
        through = [
            team.start(1, body_check, launch),
            *(team.start(rank, body_check_and_kernel, launch) for rank in (0, 2)),
        ]
        assert through[0].result(20) is None
        began_s = time.monotonic()
        with stopped(pid):
            late = [result.result(limit_s + 20) for result in through[1:]]
            lasted_s = time.monotonic() - began_s
        blamed = [result for result in late if isinstance(result, CollectiveTimeoutError)]
        assert blamed, late
        assert {(result.missing, result.timeout_s) for result in blamed} == {((1,), 1.5)}
        assert {result.within for result in blamed} <= {(1, 2), (0, 1)}
        assert {result.group_name for result in blamed} == {"team"}
        assert all(isinstance(result, CollectiveTimeoutError | PlanAbortedError) for result in late), late
        assert lasted_s < limit_s + ANSWER_S + 3, "the machine may be busy"
        (broken,) = team.run(body_check, team.launch(), ranks=(0,))
        assert isinstance(broken, GroupBrokenError)
    finally:
        team.close()


# ------------------------------------------------------------------------------- which library


def test_members_with_different_libraries_are_told_who_has_which() -> None:
    """pygloo and its fork write addresses differently: one rank crashes, the other hangs."""
    rendezvous = MemoryRendezvous()
    for rank, name in enumerate(("another", "another"), 1):
        rendezvous.put(f"gloo.library.{rank}", gloo._NAME.encode(name))
    spec = GroupSpec(name="g", group_id="1", backend="gloo", world_size=3)
    said = rf"rank 0 has {library.gloo.__name__}; rank 1 has another; rank 2 has another\. Install .* backend='auto'"
    with pytest.raises(BackendUnavailableError, match=said):
        gloo.create(Joining(spec, 0, rendezvous, MemoryExchange(MemoryStar(), 0)))


def in_a_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_library_comes_without_what_is_packaged_with_it() -> None:
    """xoscar's package brings pandas along, and installs tblib, so that all pickled exceptions have tracebacks."""
    code = "import sys; from raycollect.backends.gloo.library import gloo\n"
    said = "print(hasattr(gloo, 'rendezvous'), {'xoscar', 'pandas', 'tblib'} & {*sys.modules})"
    assert in_a_process(code + said) == "True set()"


def test_it_takes_no_options() -> None:
    """It would ignore an order that somebody counts on."""
    spec = GroupSpec(
        name="default", group_id="g", backend="gloo", world_size=1, options=(("deterministic", "rank_order"),)
    )
    with pytest.raises(InvalidGroupError, match="no options, and got deterministic"):
        gloo.create(Joining(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0)))


# ------------------------------------------------------------------------------- tensors of GPUs


def test_one_rank_may_have_its_tensors_on_a_gpu(workers: Workers) -> None:
    team = ProcessTeam("gloo", 2, workers(2))
    try:
        for on_gpu in range(2):
            results = team.must(body_staged, [team.launch() for _ in range(3)], on_gpu)
            assert results == [[[3.0] * 6, [7.0] * 3, [1.0] * 2, [2.0] * 2]] * 2
    finally:
        team.close()
