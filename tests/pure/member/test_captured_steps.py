"""The captured steps of a participant: the order of their runs and what brings them, in threads and without Ray."""

from __future__ import annotations

import random
import threading
import types
from typing import Any

import pytest

from raycollect.channel.messages import BeginRun, Gone, Joined
from raycollect.core.model import OpKind, Segment
from raycollect.core.protocols import Launch
from raycollect.engine.value_codec import pack_values
from raycollect.errors import CaptureError, GroupBrokenError, PlanAbortedError, ProtocolError
from raycollect.member import captured_steps, lease
from raycollect.member.captured_steps import CapturedSteps, open_doorbell
from tests.pure.local_world import LocalCommunicator, LocalWorld
from tests.pure.member.leases import Backend, backend, join, leased, premises
from tests.pure.member.step_bench import FakePost, MakeBench, bench
from tests.pure.teams import CAPTURE, WAIT_S, Script, Team, full, pinned

__all__ = ["backend", "bench", "premises"]  # fixtures


@pytest.mark.parametrize("rung_first", [True, False])
def test_oversized_arguments_use_the_channel(bench: MakeBench, rung_first: bool) -> None:
    """The bell is rung before the message is sent; the thread may see them in any order."""
    one = bench(post=FakePost())
    assert one.post is not None
    if rung_first:
        number = one.post.ring(1, 0, None)
        one.run(1, 0, "long")
    else:
        with one.post.changed:  # the thread sees both at once
            number = one.post.ring(1, 0, None)
            payload = pack_values(["long"])
            one.captured._arrived.append(BeginRun(capture=CAPTURE, seq=1, predecessor=0, payload=payload, after=b""))
            with one.captured._changed:
                one.captured._changed.notify_all()
    assert one.answered(number) == ("long",)


def test_a_run_that_was_not_rung_for_is_done_all_the_same(bench: MakeBench) -> None:
    one = bench(post=FakePost())
    assert one.post is not None
    assert one.answered(one.post.ring(1, 0, pack_values([1]))) == (1,)
    one.run(2, 1, "by the channel")
    one.heard(2)
    assert one.ran == {2: ("by the channel",)}
    assert one.answered(one.post.ring(3, 2, pack_values([3]))) == (3,)


def test_a_doorbell_out_of_reach_is_none() -> None:
    assert open_doorbell(None, 0, keeps_core=True) is None
    assert open_doorbell(Segment(1 << 22, 3, b"t" * 16, 4096), 0, keeps_core=True) is None


class Fake:
    """A captured step that only notes what is done to it."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.woken: list[int] = []
        self.runner = types.SimpleNamespace(abort=self.woken.append)

    def close(self, reason: str) -> None:
        self.closed.append(reason)

    def exchange(self, seq: int) -> Any:
        return self if seq == 3 else None


def _made(table: CapturedSteps, capture: bytes) -> Any:
    return table.add(capture, Fake)  # type: ignore[arg-type,return-value]


def test_table_finds_live_and_recently_closed_steps() -> None:
    table = CapturedSteps()
    one, other = _made(table, b"1"), _made(table, b"2")
    assert table.find(b"1") is one
    assert table.find(b"3") is None
    table.wake(5)
    assert one.woken == other.woken == [5]
    assert table.exchange(3) in (one, other)
    assert table.exchange(4) is None
    with pytest.raises(CaptureError, match="before"):
        _made(table, b"1")
    table.forget(b"1", "forgotten")
    table.forget(b"1", "again")
    assert one.closed == ["forgotten"]
    assert table.find(b"1") is one, "what is on its way to it"
    with pytest.raises(CaptureError, match="closed while it was captured"):
        _made(table, b"1")
    table.close("over")
    assert other.closed == ["over"]
    with pytest.raises(CaptureError, match="closed"):
        _made(table, b"9")


def test_a_step_that_was_closed_before_it_came_is_not_taken_in() -> None:
    table = CapturedSteps()
    table.forget(b"1", "timed out")
    with pytest.raises(CaptureError):
        _made(table, b"1")
    assert table.find(b"1") is None


def test_few_of_the_closed_are_remembered() -> None:
    table = CapturedSteps()
    made = [_made(table, bytes([at // 256, at % 256])) for at in range(captured_steps.LATE + 10)]
    for at in range(len(made)):
        table.forget(bytes([at // 256, at % 256]), "closed")
    found = [table.find(bytes([at // 256, at % 256])) for at in range(len(made))]
    assert found == [None] * 10 + made[10:]


# ---------------------------------------------------------------------------------------------- failures, the end


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


def test_malformed_arguments_fail_the_run(bench: MakeBench) -> None:
    one = bench()
    one.captured.received(BeginRun(capture=CAPTURE, seq=1, predecessor=0, payload=b"\xc1", after=b""))
    one.heard(1)
    assert isinstance(one.failed[1], ProtocolError)


def test_lost_controller_does_not_stop_runs(bench: MakeBench) -> None:
    one = bench()
    one.lost = True
    one.run(1, 0, 1)
    one.run(2, 1, 2)
    assert one.sequencer.start(3, 2) is None
    one.sequencer.end(3)
    assert one.noted == [1, 2]


def test_end_of_the_lease_wakes_runs_awaiting_a_predecessor(bench: MakeBench) -> None:
    one = bench()
    one.run(2, 1, 1)
    assert one.sequencer.close("the controller is gone") in ((), (2,))
    one.captured.close("the controller is gone")
    one.heard(2)
    assert one.captured.join(WAIT_S)


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
