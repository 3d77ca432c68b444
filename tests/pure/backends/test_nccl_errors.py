"""What `nccl` says when it goes wrong in mid-kernel, on the fake of cupy: nobody hangs, nothing stays on the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from raycollect.backends.nccl import communicator as nccl
from raycollect.backends.nccl.communicator import NcclCommunicator
from raycollect.core.model import Launch
from raycollect.core.protocols import Communicator
from raycollect.errors import CollectiveTimeoutError, GroupBrokenError, KernelError, PlanAbortedError
from tests.fake_cupy import Fake
from tests.pure.backends.streams import WAIT_S, patient, stream_of, sums
from tests.pure.on_gpu import Caller, GpuTeam, pending, read_elsewhere, team_on_gpus
from tests.pure.thread_faults import helper_threads
from tests.support.waiting import wait_until


@pytest.fixture
def three() -> Iterator[tuple[Fake, GpuTeam]]:
    with team_on_gpus(3) as team:
        yield team


def body_sum(communicator: Communicator, launch: Launch) -> Any:
    """A sum, and what is left of the stream when it has failed."""
    src = pending(np.full(50, communicator.rank + 1, np.int32), "every other")
    communicator.agree(patient(launch), b"")
    ok = False
    try:
        communicator.launch(launch, (sums(src),))
        ok = True
    finally:
        communicator.end(launch, ok)
    return read_elsewhere(src, Caller().other).tolist()


def is_waiting(fake: Fake, communicator: Communicator) -> Any:
    before = fake.counts["nccl.check_async_error"]
    return lambda: fake.pending(stream_of(communicator)) and fake.counts["nccl.check_async_error"] > before


def check_broken(fake: Fake, team: GpuTeam, ranks: tuple[int, ...], reason: str) -> None:
    """Nothing is under way on these ranks, and they do nothing more."""
    for rank in ranks:
        communicator = team.communicators[rank]
        assert not fake.pending(stream_of(communicator))
        assert isinstance(communicator, NcclCommunicator)
        assert communicator._workspace is None
        for attempt in (communicator.agree, body_sum):
            arguments = (team.launch(), b"") if attempt == communicator.agree else (communicator, team.launch())
            with pytest.raises(GroupBrokenError, match=reason):
                attempt(*arguments)  # type: ignore[operator]


# ------------------------------------------------------------------------------- deadlines


def test_a_deadline_while_another_rank_does_not_get_there(
    three: tuple[Fake, GpuTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_DRAIN_S", 0.05)
    fake, team = three
    stuck = stream_of(team.communicators[1])
    fake.hold(stuck)
    results = team.run(body_sum, team.launch(timeout_s=0.2))
    for rank, result in enumerate(results):
        assert isinstance(result, CollectiveTimeoutError)
        assert result.group_name == "team"
        assert result.timeout_s == 0.2
        assert f"did not end on the GPU of rank {rank} within 0.2 s" in str(result)
        assert "NCCL_DEBUG=INFO" in str(result)
    check_broken(fake, team, (0, 2), "allreduce of launch .* failed in mid-kernel")
    communicator = team.communicators[1]
    assert isinstance(communicator, NcclCommunicator)
    assert communicator._workspace is not None, "its GPU may still use that memory"
    fake.release(stuck)
    assert wait_until(lambda: not fake.pending(stuck))


# ------------------------------------------------------------------------------- aborts


def test_an_abort_while_ranks_wait(three: tuple[Fake, GpuTeam]) -> None:
    fake, team = three
    launch = team.launch()

    def body_arrive(communicator: Communicator, launch: Launch) -> None:
        communicator.agree(launch, b"")

    waits = [is_waiting(fake, team.communicators[rank]) for rank in (0, 2)]
    running = [team.start(rank, body_sum, launch) for rank in (0, 2)]
    team.must(body_arrive, launch, ranks=(1,))
    assert wait_until(lambda: all(item() for item in waits))
    for rank in team.everyone:
        team.communicators[rank].abort(launch.seq)
    for item in running:
        error = item.result(WAIT_S)
        assert isinstance(error, PlanAbortedError)
        assert error.group_name == "team"
    check_broken(fake, team, (0, 2), f"allreduce of launch {launch.seq} failed in mid-kernel")


class Blocking:
    """NCCL's communicator whose calls block until it is aborted, as a real one's do while it connects."""

    def __init__(self, real: Any, error: BaseException) -> None:
        self._real = real
        self._error = error
        self.entered, self._aborted = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def allReduce(self, *_: int) -> None:
        self.entered.set()
        assert self._aborted.wait(WAIT_S)
        raise self._error

    def abort(self) -> None:
        self._real.abort()
        self._aborted.set()


@pytest.fixture
def blocked(three: tuple[Fake, GpuTeam]) -> tuple[Fake, GpuTeam, Blocking]:
    """Rank 0 blocks while it enqueues."""
    fake, team = three
    communicator: Any = team.communicators[0]
    communicator._nccl = Blocking(communicator._nccl, fake.cupy.cuda.nccl.NcclError(4))
    return fake, team, communicator._nccl


def test_an_abort_while_a_rank_blocks_in_a_call_of_nccl(blocked: tuple[Fake, GpuTeam, Blocking]) -> None:
    fake, team, nccl_ = blocked
    launch = team.launch()
    waits = [
        is_waiting(fake, team.communicators[rank]) for rank in (1, 2)
    ]  # in the consistency check it breaks nothing
    running: list[Future[Any]] = [team.start(rank, body_sum, launch) for rank in team.everyone]
    assert nccl_.entered.wait(WAIT_S)
    assert wait_until(lambda: all(item() for item in waits))
    for communicator in team.communicators:
        communicator.abort(launch.seq)
    assert [type(item.result(WAIT_S)) for item in running] == [PlanAbortedError] * 3
    check_broken(fake, team, team.everyone, f"launch {launch.seq}")


def test_a_deadline_while_a_rank_blocks_in_a_call_of_nccl(
    blocked: tuple[Fake, GpuTeam, Blocking], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "GUARD_S", 0.02)
    fake, team, nccl_ = blocked
    results = team.run(body_sum, team.launch(timeout_s=0.5))
    assert nccl_.entered.is_set()
    assert [type(error) for error in results] == [CollectiveTimeoutError] * 3
    assert "did not get to the GPU of rank 0 within 0.5 s" in str(results[0])
    check_broken(fake, team, team.everyone, "failed in mid-kernel")


# ------------------------------------------------------------------------------- what NCCL finds


@pytest.mark.parametrize(
    ("status", "reason"),
    [(1, "UNHANDLED_CUDA_ERROR"), (2, "SYSTEM_ERROR"), (7, "NCCL status 7: an operation is still in progress")],
)
@pytest.mark.parametrize("at_call", [False, True])
def test_an_error_of_nccl_is_told_with_all_that_is_known(
    three: tuple[Fake, GpuTeam], status: int, reason: str, at_call: bool
) -> None:
    fake, team = three
    failing: Any = team.communicators[1]
    fake.fail_next(failing._nccl, status, at_call=at_call)
    launch = team.launch(timeout_s=WAIT_S)
    waits = [is_waiting(fake, team.communicators[rank]) for rank in (0, 2)]
    running = [team.start(rank, body_sum, launch) for rank in team.everyone]
    error = running[1].result(WAIT_S)
    assert isinstance(error, KernelError)
    assert (error.op, error.group_name, error.rank) == ("allreduce", "team", 1)
    assert reason in str(error)
    assert "NCCL_DEBUG=INFO" in str(error)
    assert isinstance(error.__cause__, KeyError if status == 7 else RuntimeError)
    assert wait_until(lambda: all(item() for item in waits))
    for rank in (0, 2):  # as the executor does it when a rank has failed
        team.communicators[rank].abort(launch.seq)
        assert isinstance(running[rank].result(WAIT_S), PlanAbortedError)
    check_broken(fake, team, team.everyone, f"allreduce of launch {launch.seq} failed in mid-kernel")


def test_an_error_of_the_device_ends_the_wait_at_once(
    three: tuple[Fake, GpuTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event of a device that has failed is never done; the query says why."""
    fake, team = three
    runtime = fake.cupy.cuda.runtime
    with team.device_of(0):
        communicator, launch = team.communicators[0], team.launch(timeout_s=WAIT_S)
        kernel = sums(pending(np.ones(3)))
        communicator.enqueue(launch, (kernel,))  # type: ignore[attr-defined]
        monkeypatch.setattr(runtime, "eventQuery", lambda _: 700)
        with pytest.raises(KernelError, match="cudaError700") as caught:
            communicator.finish(launch, kernel)  # type: ignore[attr-defined]
        monkeypatch.undo()
    assert caught.value.rank == 0
    assert wait_until(lambda: not fake.pending(stream_of(communicator)))


def test_no_memory_for_a_copy(three: tuple[Fake, GpuTeam]) -> None:
    fake, team = three
    launch = team.launch(timeout_s=WAIT_S)

    def body(communicator: Communicator, launch: Launch) -> list[int]:
        src = pending(np.full(50, 1, np.int32), "every other")
        if communicator.rank == 1:
            fake.limit(fake.allocated(1), 1)
        communicator.agree(launch, b"")
        communicator.launch(launch, (sums(src),))
        return read_elsewhere(src, Caller().other).tolist()

    running = [team.start(rank, body, launch) for rank in team.everyone]
    error = running[1].result(WAIT_S)
    assert isinstance(error, KernelError)
    assert "Out of memory" in str(error)
    for rank in (0, 2):
        team.communicators[rank].abort(launch.seq)
        assert isinstance(running[rank].result(WAIT_S), PlanAbortedError)


# ------------------------------------------------------------------------------- how it is closed


class Unending:
    """NCCL's communicator whose destruction waits for the other ranks of its host."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.begun, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def destroy(self) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self._real.destroy()


def _ended(fake: Fake) -> tuple[int, int]:
    return fake.counts["nccl.destroy"], fake.counts["nccl.abort"]


def test_a_whole_group_is_destroyed_so_that_nothing_sent_is_lost(three: tuple[Fake, GpuTeam]) -> None:
    fake, team = three
    for communicator in team.communicators[:2]:
        communicator.abort(team.launch().seq)  # of a launch that nobody begins
    assert team.must(body_sum, team.launch()) == [[6] * 50] * 3
    for communicator in team.communicators:
        communicator.close()
    assert _ended(fake) == (3, 0)


def test_a_rank_that_closes_before_the_others_does_not_wait_for_them(
    three: tuple[Fake, GpuTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_ABORT_S", 0.05)
    (fake, team), before = three, helper_threads()
    communicator: Any = team.communicators[0]
    communicator._nccl = unending = Unending(communicator._nccl)
    communicator.close()
    assert unending.begun.is_set()
    assert _ended(fake) == (0, 0)
    unending.go.set()
    assert wait_until(lambda: not helper_threads(before))
    assert _ended(fake) == (1, 0)


@pytest.mark.parametrize("why", ["a launch failed", "a rank died", "a kernel is under way"])
def test_what_is_not_whole_is_aborted(three: tuple[Fake, GpuTeam], why: str) -> None:
    """Its kernels, and other ranks, may never come to an end."""
    fake, team = three
    assert team.must(body_sum, team.launch()) == [[6] * 50] * 3
    communicator, launch = team.communicators[0], team.launch()
    if why == "a launch failed":
        communicator.end(launch, False)
    elif why == "a rank died":
        communicator.abort(0)
        communicator.end(launch, True)
    else:
        waits, running = is_waiting(fake, communicator), team.start(0, body_sum, launch)
        for rank in (1, 2):
            team.start(rank, lambda other, launch: other.agree(launch, b""), launch)
        assert wait_until(waits)
    communicator.close()
    if why == "a kernel is under way":
        assert isinstance(running.result(WAIT_S), GroupBrokenError)
    assert _ended(fake) == (0, 1)
