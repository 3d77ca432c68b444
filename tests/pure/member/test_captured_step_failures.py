"""Captured steps of a participant that fail, and their end."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import pytest

from raycollect.channel.messages import BeginRun, Gone, Joined
from raycollect.core.model import OpKind
from raycollect.core.protocols import Launch
from raycollect.engine.value_codec import pack_values
from raycollect.errors import (
    CaptureError,
    GroupBrokenError,
    InternalError,
    MethodError,
    PlanAbortedError,
    ProtocolError,
)
from raycollect.member import captured_steps, lease
from raycollect.member.methods import Methods
from tests.pure.local_world import LocalCommunicator, LocalWorld
from tests.pure.member.leases import Backend, backend, join, leased, premises
from tests.pure.member.step_bench import Bench, FakePost, MakeBench, bench
from tests.pure.teams import CAPTURE, WAIT_S, Gate, Script, Team, full, pinned

__all__ = ["backend", "bench", "premises"]  # fixtures


@pytest.mark.parametrize("by_bell", [True, False])
def test_after_a_failure_all_later_runs_are_refused_and_ended(bench: MakeBench, by_bell: bool) -> None:
    def note(value: int) -> int:
        if value == 2:
            raise ValueError("bad")
        return value

    one = bench(post=FakePost() if by_bell else None, note=note)
    for seq in range(1, 6):
        if one.post is not None:
            one.post.ring(seq, seq - 1, pack_values([seq]))
        else:
            one.run(seq, seq - 1, seq)
    one.heard(2, 3, 4, 5)
    assert isinstance(one.failed[2], MethodError)
    for seq in (3, 4, 5):
        error = one.failed[seq]
        assert isinstance(error, PlanAbortedError)
        assert error.detail == "run 2 of this captured step failed before"
    assert one.noted == [1, 2]
    if one.post is not None:
        assert set(one.post.answers) == {1}
    assert one.sequencer.start(6, 5) is None, "what comes after goes on"
    one.sequencer.end(6)


def test_a_run_that_waits_for_the_turn_ends_as_the_step_is_closed(bench: MakeBench) -> None:
    turn = Methods()
    one = bench(turn=turn)
    with turn.lock:
        one.run(1, 0, 1)
        one.captured.close("closed")
        one.heard(1)
        assert one.failed[1].detail == "closed"  # type: ignore[attr-defined]
        assert one.captured.join(WAIT_S)


def test_an_abort_reaches_the_run_under_way(bench: MakeBench) -> None:
    gate, script = Gate(), Script(0)
    script.call("hold")
    script.call("after")
    one = bench(script, hold=gate, after=int)
    one.run(1, 0)
    assert gate.came.wait(WAIT_S)
    one.captured.runner.abort(7)
    assert not one.sequencer.abort(1, "timed out")
    one.captured.runner.abort(1)
    gate.go.set()
    one.heard(1)
    assert one.failed[1].detail in ("timed out", "the run was aborted")  # type: ignore[attr-defined]
    assert [name for name, _, _ in one.actor.calls] == ["hold"]


class Stuck(LocalCommunicator):
    """A communicator whose ranks never come, and that does not see who dies."""

    def __init__(self) -> None:
        super().__init__(LocalWorld(2, "g"), 0)
        self.came, self.aborted, self.closed = threading.Event(), threading.Event(), threading.Event()

    def agree(self, launch: Launch, *others: Any) -> tuple[bytes, ...]:
        self.came.set()
        assert self.aborted.wait(WAIT_S), "it would last until its own time limit"
        raise GroupBrokenError(group_name="g", detail=f"launch {launch.seq} was ended")

    def abort(self, seq: int) -> None:
        if seq:  # 0: a rank of the group is gone, whatever is under way
            self.aborted.set()

    def close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize("other", [False, True])
def test_a_death_that_the_backend_can_not_see_ends_the_run_that_uses_the_group(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, backend: Backend, premises: Any, other: bool
) -> None:
    """Also where the controller aborts nothing, as it has heard that the dead had done their part.

    Not a run that uses another group.
    """
    monkeypatch.setattr(lease, "LAST_S", 0.0)
    communicator = Stuck()
    backend.create = lambda joining: communicator
    here, heard = leased(premises)
    team = Team(2, [Script(rank, [pinned(full(rank))]) for rank in range(2)], group_id="id of g")
    team.collective(OpKind.ALLREDUCE, {0: 0, 1: 0})
    one = bench(team.scripts[0], sequencer=here._sequencer, communicators=here._groups.communicator)
    here._captures.add(CAPTURE, lambda: one.captured)
    for name in ("g", "h")[: 1 + other]:
        here.received(join(name=name, group_id=f"id of {name}"))
        assert heard.next(Joined).error is None
    one.run(1, 0)
    assert communicator.came.wait(WAIT_S)
    here.received(Gone(group_id="id of h" if other else "id of g", rank=1, died=True, detail="killed"))
    if other:
        assert communicator.closed.wait(WAIT_S)
        assert not communicator.aborted.is_set()
        assert here._sequencer.running() == (1,)
    else:
        one.heard(1)
        assert isinstance(one.failed[1], PlanAbortedError)
        assert one.failed[1].detail == "rank 1 (W1) died: killed"
    here.end("the test is over")


def test_unexpected_failure_becomes_internal_error(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench()
    monkeypatch.setattr(one.runner, "run", lambda *args, **kwargs: 1 / 0)
    one.run(1, 0, 1)
    one.heard(1)
    assert isinstance(one.failed[1], InternalError)
    assert "ZeroDivisionError" in str(one.failed[1])


def test_malformed_arguments_fail_the_run(bench: MakeBench) -> None:
    one = bench()
    one.captured.received(BeginRun(capture=CAPTURE, seq=1, predecessor=0, payload=b"\xc1", after=b""))
    one.heard(1)
    assert isinstance(one.failed[1], ProtocolError)


def test_results_too_long_for_a_message_fail_the_run(bench: MakeBench) -> None:
    one = bench(post=FakePost(), note=lambda value: bytes(value))
    one.run(1, 0, captured_steps.MOST_NBYTES - 10)
    one.heard(1)
    assert len(one.ran[1][0]) == captured_steps.MOST_NBYTES - 10
    one.run(2, 1, captured_steps.MOST_NBYTES)
    one.heard(2)
    assert isinstance(one.failed[2], CaptureError)
    assert "refs" in str(one.failed[2])


def test_lost_controller_does_not_stop_runs(bench: MakeBench) -> None:
    one = bench()
    one.lost = True
    one.run(1, 0, 1)
    one.run(2, 1, 2)
    assert one.sequencer.start(3, 2) is None
    one.sequencer.end(3)
    assert one.noted == [1, 2]


def _ended(one: Bench) -> None:
    assert one.captured.join(WAIT_S)
    assert one.runner.slots == [None] * len(one.runner.slots)
    if one.post is not None:
        assert one.post.closed


@pytest.mark.parametrize("by_bell", [True, False])
def test_closing_while_it_is_idle(bench: MakeBench, by_bell: bool) -> None:
    one = bench(post=FakePost() if by_bell else None)
    one.captured.close("closed")
    one.captured.close("again")
    _ended(one)
    message = BeginRun(capture=CAPTURE, seq=1, predecessor=0, payload=b"", after=b"")
    assert not one.captured.received(message), "nobody would do it"
    one.captured.run_now(2, 0, b"")
    assert one.failed[2].detail == "closed"  # type: ignore[attr-defined]


def test_end_of_the_lease_wakes_runs_awaiting_a_predecessor(bench: MakeBench) -> None:
    one = bench()
    one.run(2, 1, 1)
    assert one.sequencer.close("the controller is gone") in ((), (2,))
    one.captured.close("the controller is gone")
    one.heard(2)
    _ended(one)


def test_values_are_released(bench: MakeBench) -> None:
    array = full(1)
    alive = weakref.ref(array)
    script = Script(0, [pinned(array)])
    script.call("note", 0)
    one = bench(script, note=lambda value: None)
    one.run(1, 0)
    one.heard(1)
    del array, script
    one.actor.calls.clear()
    gc.collect()
    assert alive() is not None
    (infos, _) = one.captured.runner.look()
    assert [info.shape for info in infos] == [(5,)]
    one.captured.close("closed")
    _ended(one)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("seed", range(4))
def test_closing_at_any_moment_ends_all_runs(bench: MakeBench, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        one = bench(post=FakePost() if rng.random() < 0.5 else None)
        count, at = rng.randrange(1, 8), rng.randrange(8)
        for seq in range(1, count + 1):
            if seq == at + 1:
                break
            long = rng.random() < 0.3
            if one.post is not None:
                one.post.ring(seq, seq - 1, None if long else pack_values([seq]))
            if one.post is None or (long and rng.random() < 0.7):  # else the run waits for its message
                one.run(seq, seq - 1, seq)
        last = min(count, at)
        one.captured.close("closed")
        assert one.captured.join(WAIT_S)
        assert one.sequencer.start(last + 1, last) is None
        one.sequencer.end(last + 1)
        answered = set() if one.post is None else set(one.post.answers)
        assert {*one.ran, *one.failed, *answered} == set(range(1, last + 1))
