"""Ranks that share a GPU with an old NCCL, on the fake of cupy: what goes wrong is told, nobody hangs.

And no rank's memory is its own again before the others have done with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raycollect.backends.nccl import ipc_group
from raycollect.backends.nccl.ipc_group import IpcCommunicator
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    GroupBrokenError,
    KernelError,
    PlanAbortedError,
    UnsupportedError,
)
from tests.fake_cupy import Fake
from tests.pure.backends.streams import WAIT_S, patient, sums
from tests.pure.on_gpu import Caller, gpus, pending, read_elsewhere
from tests.pure.on_one_gpu import OLD, SharingTeam, sharing
from tests.support.waiting import wait_until


@pytest.fixture
def three() -> Iterator[tuple[Fake, SharingTeam]]:
    with sharing(3) as sharing_team:
        yield sharing_team


def body_sum(communicator: Communicator, launch: Launch, layout: str = "plain") -> Any:
    """A sum; what is in the array behind it."""
    src = pending(np.full(50, communicator.rank + 1, np.int32), layout)
    ok = False
    try:
        communicator.agree(patient(launch), b"")
        communicator.launch(launch, (sums(src),))
        ok = True
    finally:
        communicator.end(launch, ok)
    return read_elsewhere(src, Caller().other).tolist()


def body_arrive(communicator: Communicator, launch: Launch) -> None:
    communicator.agree(patient(launch), b"")


def body_leave(communicator: Communicator, launch: Launch) -> None:
    try:
        communicator.agree(launch, b"")
    finally:
        communicator.end(launch, False)


def stream_of(team: SharingTeam, rank: int) -> Any:
    return team.of(rank)._stream.stream


def check_works(team: SharingTeam) -> None:
    """The group is as good as before."""
    assert team.must(body_sum, team.launch()) == [[6] * 50] * 3


# ------------------------------------------------------------------------------- how they come together


def test_processes_that_can_not_open_each_others_memory_are_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that don't share their IPC namespace; all ranks hear it at once."""
    with gpus(1, nccl_version=OLD) as fake:

        def refuse(handle: bytes, flags: int = 1) -> int:
            raise fake.cupy.cuda.runtime.CUDARuntimeError(400)

        monkeypatch.setattr(fake.cupy.cuda.runtime, "ipcOpenMemHandle", refuse)
        with pytest.raises(BackendUnavailableError, match="can't work with the others in the memory") as caught:
            SharingTeam(fake, 2)
        assert "one IPC namespace" in str(caught.value)


def test_a_sum_that_comes_out_wrong_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is another than the one that was shown."""
    with gpus(1, nccl_version=OLD) as fake:
        elsewhere = fake.cupy.zeros(1 << 20, np.uint8)
        monkeypatch.setattr(fake.cupy.cuda.runtime, "ipcOpenMemHandle", lambda handle, flags=1: elsewhere.data.ptr)
        monkeypatch.setattr(fake.cupy.cuda.runtime, "ipcCloseMemHandle", lambda ptr: None)
        with pytest.raises(BackendUnavailableError, match=r"a sum of 1 to 2 gave|has left launch"):
            SharingTeam(fake, 2)
        fake.violations.clear()  # it is of another process


# ------------------------------------------------------------------------------- who does not come


def test_a_rank_that_does_not_come_to_the_kernel(three: tuple[Fake, SharingTeam]) -> None:
    _, team = three
    launch = team.launch(timeout_s=0.2)
    running = [team.start(rank, body_sum, launch) for rank in (0, 2)]
    team.must(body_arrive, launch, ranks=(1,))
    for future in running:
        result = future.result(WAIT_S)
        assert isinstance(result, CollectiveTimeoutError | PlanAbortedError), repr(result)
    assert any(
        isinstance(future.result(), CollectiveTimeoutError) and future.result().missing == (1,) for future in running
    )
    check_works(team)


# ------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("held", [False, True])
def test_an_abort(three: tuple[Fake, SharingTeam], held: bool) -> None:
    """While ranks wait for each other, and while one waits for its GPU."""
    fake, team = three
    launch = team.launch(timeout_s=WAIT_S)
    stream = stream_of(team, 0)
    if held:
        fake.hold(stream)
    running = [team.start(rank, body_sum, launch) for rank in (0, 2)]
    team.must(body_arrive, launch, ranks=(1,))
    if held:
        assert wait_until(lambda: fake.pending(stream) > 0)
    for communicator in team.communicators:
        communicator.abort(launch.seq)
    if held:
        assert isinstance(running[1].result(WAIT_S), PlanAbortedError)
        fake.release(stream)
    for future in running:
        result = future.result(WAIT_S)
        assert isinstance(result, PlanAbortedError), repr(result)
    check_works(team)


# ------------------------------------------------------------------------------- whose memory it is


def held_behind_the_listing(fake: Fake, team: SharingTeam, slow: int) -> threading.Event:
    """Stops a rank's stream once, when all have told what they show and nobody works; set: it is stopped."""
    met, stopped = threading.Barrier(team.world_size), threading.Event()

    def stopping(communicator: IpcCommunicator) -> Any:
        listing = communicator._listed

        def listed(*arguments: Any) -> Any:
            communicator._listed = listing  # type: ignore[method-assign]
            result = listing(*arguments)
            if communicator.rank == slow:
                fake.hold(communicator._stream.stream)
                stopped.set()
            met.wait(WAIT_S)
            return result

        return listed

    for rank in team.everyone:
        team.of(rank)._listed = stopping(team.of(rank))  # type: ignore[method-assign]
    return stopped


def test_what_was_shown_is_kept_until_the_others_have_left(three: tuple[Fake, SharingTeam]) -> None:
    """A launch that is aborted here while another rank's kernel still reads and writes this rank's array."""
    fake, team = three
    launch, listed = team.launch(timeout_s=WAIT_S), held_behind_the_listing(fake, team, 1)
    stream = stream_of(team, 1)
    running = [team.start(rank, body_sum, launch, "every other") for rank in team.everyone]
    assert listed.wait(WAIT_S)
    assert wait_until(lambda: fake.pending(stream) > 0)
    for rank in (0, 2):
        team.communicators[rank].abort(launch.seq)
        result = running[rank].result(WAIT_S)
        assert isinstance(result, PlanAbortedError), repr(result)
        assert team.of(rank)._loans.lent
    fake.release(stream)
    assert isinstance(running[1].result(WAIT_S), PlanAbortedError)
    check_works(team)
    assert not any(team.of(rank)._loans.lent for rank in (0, 2))


def test_a_rank_that_stands_still_in_mid_kernel_is_not_taken_to_have_left(
    three: tuple[Fake, SharingTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel may go on at any time, and write into what the others have shown; also when its group is closed."""
    monkeypatch.setattr(ipc_group, "_DRAIN_S", 0.05)
    fake, team = three
    listed, stream = held_behind_the_listing(fake, team, 1), stream_of(team, 1)
    results = team.run(body_sum, team.launch(timeout_s=0.4))
    assert listed.is_set()
    # Who comes late, on a busy machine, hears that another has given up
    assert {CollectiveTimeoutError} <= {*map(type, results)} <= {CollectiveTimeoutError, PlanAbortedError}
    team.close_one(1)
    assert fake.opened
    for rank in (0, 2):
        (error,) = team.run(body_leave, team.launch((rank,), timeout_s=0.1), ranks=(rank,))
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (1,)
        assert team.of(rank)._loans.lent
    fake.release(stream)
    assert wait_until(lambda: not fake.pending(stream))
    team.close_one(1)
    assert not fake.opened
    for rank in (0, 2):
        assert team.run(body_sum, team.launch((rank,)), ranks=(rank,)) == [[rank + 1] * 50]
        assert not team.of(rank)._loans.lent


# ------------------------------------------------------------------------------- what fails


def test_an_error_of_the_device(three: tuple[Fake, SharingTeam], monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is broken where it happened; the others go on without."""
    fake, team = three
    with team.as_process(1):
        communicator, launch = team.of(1), team.launch(timeout_s=WAIT_S)
        src = pending(np.ones(3))
        monkeypatch.setattr(fake.cupy.cuda.runtime, "eventQuery", lambda _: 700)
        with pytest.raises(KernelError, match="cudaError700") as caught:
            communicator.launch(launch, (sums(src),))
        monkeypatch.undo()
        communicator.end(launch, False)
        assert caught.value.rank == 1
        with pytest.raises(GroupBrokenError, match=f"allreduce of launch {launch.seq} failed in mid-kernel"):
            communicator.launch(team.launch(), (sums(src),))


def test_a_handle_that_can_not_be_opened(three: tuple[Fake, SharingTeam], monkeypatch: pytest.MonkeyPatch) -> None:
    fake, team = three
    runtime = fake.cupy.cuda.runtime
    real, opened = runtime.ipcOpenMemHandle, []

    def sometimes(handle: bytes, flags: int = 1) -> int:
        start = int(real(handle, flags))
        if fake._machine.thread.process != 2:  # of rank 1
            return start
        if opened:  # that of one rank, and not of the other
            runtime.ipcCloseMemHandle(start)
            raise runtime.CUDARuntimeError(2)
        opened.append(start)
        return start

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", sometimes)
    results = team.run(body_sum, team.launch(timeout_s=WAIT_S))
    assert isinstance(results[1], KernelError)
    assert "cudaErrorMemoryAllocation" in str(results[1])
    assert [type(results[rank]) for rank in (0, 2)] == [PlanAbortedError] * 2
    assert opened
    assert not fake.opened


def test_what_is_refused_before_the_check(three: tuple[Fake, SharingTeam]) -> None:
    _, team = three
    with team.as_process(0):
        communicator, launch = team.of(0), team.launch()
        here, host = pending(np.ones(4, np.float32)), np.ones(4, np.float32)
        for src, dst in [(host, here), (here, host)]:
            with pytest.raises(UnsupportedError, match="device is cpu, expected cuda:0"):
                communicator.agree(launch, b"", Kernel(kind=OpKind.ALLREDUCE, src=src, dst=dst, op=ReduceOp.SUM))
        with pytest.raises(UnsupportedError, match=r"reduce op is BOR of float32, expected another one: .* bits"):
            communicator.agree(launch, b"", Kernel(kind=OpKind.ALLREDUCE, src=here, dst=here, op=ReduceOp.BOR))
        communicator.end(launch, False)
    check_works(team)


# ------------------------------------------------------------------------------- who leaves


def test_closing_while_a_rank_waits(three: tuple[Fake, SharingTeam]) -> None:
    fake, team = three
    stream = stream_of(team, 0)
    fake.hold(stream)
    running = team.start(0, body_sum_at_once, team.launch(timeout_s=WAIT_S))
    assert wait_until(lambda: fake.pending(stream) > 0)
    team.close_one(0)
    fake.release(stream)
    result = running.result(WAIT_S)
    assert isinstance(result, GroupBrokenError), repr(result)
    assert "the communicator was closed" in str(result)
    for _ in range(2):
        team.close_one(0)
    with pytest.raises(GroupBrokenError, match="the communicator was closed"):
        team.communicators[0].agree(team.launch(), b"")


def body_sum_at_once(communicator: Communicator, launch: Launch) -> None:
    """No consistency check: the others are not there."""
    communicator.launch(launch, (sums(pending(np.ones(3))),))
