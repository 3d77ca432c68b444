"""Runs of captured steps as their controller sees them: tickets, answers by doorbell and channel, waits."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from raycollect.captured.step import CapturedRun
from raycollect.channel.doorbell import IN_FLIGHT
from raycollect.channel.messages import Arrivals, Arrive, BeginRun, Ran, Stuck
from raycollect.core.model import TASK_NBYTES, UNKNOWN_TASK
from raycollect.driver.controller import Controller
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.step_runs import RunTracker
from raycollect.errors import (
    KernelError,
    PlanAbortedError,
    ProtocolError,
)
from raycollect.ray_bridge.submitted_calls import NOTHING, SubmittedCalls
from tests.pure.captured.run_fleet import CAPTURE, SHORT, WAIT_S, Fleet, controller, fleet
from tests.pure.driver.leased import said
from tests.pure.driver.tracked_plans import asked

__all__ = ["controller", "fleet"]  # fixtures


def test_runs_and_plans_share_one_order(fleet: Fleet) -> None:
    """A run takes as many numbers as it has launches, and names what each participant did before."""
    first = fleet.begin()
    fleet.peers[1].last_seq = first.seq + 100
    second = fleet.begin()
    width = sum(stage.plan.width for stage in fleet.stages)
    assert second.seq == first.seq + width
    assert [fleet.bell.rung[slot, 1] for slot in range(4)] == [(first.seq, 0, b"")] * 4
    before = [first.seq, first.seq + 100, first.seq, first.seq]
    assert [fleet.bell.rung[slot, 2] for slot in range(4)] == [(second.seq, one, b"") for one in before]
    assert fleet.bell.woken == [(1, 4), (2, 4)], "all are woken at once, when all have it"
    assert [peer.last_seq for peer in fleet.peers] == [second.seq] * 4
    assert first.seq + width - 1 in first.launches
    assert second.seq not in first.launches


@pytest.mark.parametrize("seed", range(5))
def test_a_run_has_ended_when_all_have_answered(fleet: Fleet, seed: int) -> None:
    """Each by the doorbell or the channel, in any order."""
    rng = random.Random(seed)
    for _ in range(5):
        tracker = fleet.begin()
        order = rng.sample(range(4), 4)
        for at in order:
            assert not tracker.resolved
            if rng.random() < 0.5:
                fleet.bell.give(at, tracker.number, b"%d" % at)
            else:
                fleet.tell(at, Ran(seq=tracker.seq, payload=b"%d" % at))
                fleet.tell(at, Ran(seq=tracker.seq, payload=b"twice"))
        assert tracker.resolved
        assert tracker.has_ended
        assert tracker.error is None
        assert tracker.results == [b"0", b"1", b"2", b"3"]
        assert list(fleet.controller.plans.trackers()) == []
    assert [said(peer) for peer in fleet.peers] == [[]] * 4


def test_oversized_runs_use_the_channel(controller: Controller) -> None:
    fleet = Fleet(controller, slots=(0, -1, 1, -1))
    long = bytes(SHORT + 1)
    tracker = fleet.begin(b"a", b"b", long, long)
    assert [[type(one) for one in said(peer)] for peer in fleet.peers] == [[], [BeginRun], [BeginRun], [BeginRun]]
    assert sorted(fleet.bell.rung) == [(0, 1), (1, 1)]
    short = fleet.begin(b"a", b"b", b"c", b"d")
    sent = [said(peer) for peer in fleet.peers]
    assert sent[3] == [BeginRun(capture=CAPTURE, seq=short.seq, predecessor=tracker.seq, payload=b"d", after=b"")]
    assert [len(one) for one in sent] == [0, 1, 0, 1]
    for at in (1, 2, 3):
        fleet.tell(at, Ran(seq=tracker.seq, payload=b""))
    assert not tracker.resolved
    fleet.bell.give(0, tracker.number)
    assert tracker.wait(0)


def test_answers_of_others_are_refused_or_ignored(fleet: Fleet) -> None:
    tracker = fleet.begin()
    fleet.tell(0, Ran(seq=tracker.seq + 1000, payload=b""))
    stranger = ParticipantLink(fleet.controller.messages, {"actor_id": "ff", "actor": "X", "participant": True}, None)
    fleet.controller.messages.received(stranger, Ran(seq=tracker.seq, payload=b""))
    assert not tracker.resolved
    assert len(tracker._pending) == 4
    from tests.pure.driver.leased import registered_anew
    from tests.pure.driver.tracked_plans import flying

    other = flying(asked(fleet.left, (0, 1, 2)))
    taken = registered_anew(fleet.controller, other)
    with pytest.raises(ProtocolError, match="no run"):
        fleet.tell(0, Ran(seq=taken.seq, payload=b""))
    taken.fail(PlanAbortedError(detail="the end"))
    fleet.runs.plans.fail(tracker, PlanAbortedError(detail="the end"))


def test_the_checks_of_a_run_are_those_of_its_plans(fleet: Fleet) -> None:
    """At the controller's check ranks are places in the plan that is there, not among all participants."""
    tracker = fleet.begin()
    stage = fleet.stages[1]
    seq, everybody = tracker.seq + stage.offset, list(range(4))
    assert stage.positions != tuple(everybody)
    for rank, at in enumerate(stage.positions):
        message = Arrive(group_id="", seq=seq, round=0, ranks=everybody, rank=rank, blob=b"%d" % rank)
        with pytest.raises(ProtocolError, match="no part"):
            tracker.arrive((at + 1) % 4, message)
        fleet.tell(at, message)
    for peer in fleet.peers:
        assert [type(one) for one in said(peer)] == [Arrivals]
    for bad in (seq + 1000, tracker.seq - 1):
        message = Arrive(group_id="", seq=bad, round=0, ranks=everybody, rank=0, blob=b"")
        with pytest.raises(ProtocolError):
            tracker.arrive(0, message)
    stuck = {"group_id": "", "communicator": "", "call": 0, "op": "allreduce", "ranks": [], "is_long": False}
    fleet.tell(0, Stuck(seq=seq, begun=seq, **stuck))
    fleet.runs.plans.fail(tracker, PlanAbortedError(detail="the end"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_threads_that_wait_for_different_runs(fleet: Fleet, seed: int) -> None:
    """One of them is at the doorbell; each goes on as soon as its own run has ended."""
    rng = random.Random(seed)
    trackers = [fleet.begin() for _ in range(8)]
    ended = [threading.Event() for _ in trackers]

    def wait(number: int) -> bool:
        found = trackers[number].wait(WAIT_S)
        ended[number].set()
        return found

    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(wait, number) for number in rng.sample(range(8), 8)]
        for number, tracker in enumerate(trackers):
            for at in rng.sample(range(4), 4):
                if rng.random() < 0.7:
                    fleet.bell.give(at, tracker.number)
                else:
                    fleet.tell(at, Ran(seq=tracker.seq, payload=b""))
            assert ended[number].wait(WAIT_S)
        assert all(one.result(WAIT_S) for one in waits)


def test_failure_wakes_all_waiters(fleet: Fleet) -> None:
    trackers = [fleet.begin() for _ in range(4)]
    works = [CapturedRun(fleet.controller, None, tracker, lambda one: one.error) for tracker in trackers]
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(work.wait, WAIT_S) for work in works]
        fleet.fail(1, trackers[1], KernelError(detail="broke"))
        assert isinstance(waits[1].result(WAIT_S), KernelError)
        assert isinstance(waits[3].result(WAIT_S), PlanAbortedError)
        assert not waits[0].done()
        assert works[0].cancel()
        assert isinstance(waits[0].result(WAIT_S), PlanAbortedError)
    assert not works[0].cancel()
    assert "KernelError" in repr(works[1])


@pytest.mark.parametrize("is_late", [False, True])
def test_number_of_concurrent_runs_is_bounded(fleet: Fleet, is_late: bool) -> None:
    """The cells of the oldest run are those of the next one, whatever the others do."""
    trackers = [fleet.begin() for _ in range(IN_FLIGHT)]
    with ThreadPoolExecutor(1) as threads:
        if is_late:
            next_one = threads.submit(fleet.begin)
        for tracker in reversed(trackers):
            assert fleet.bell.number == IN_FLIGHT
            for at in range(4):
                fleet.tell(at, Ran(seq=tracker.seq, payload=b""))
        if not is_late:
            next_one = threads.submit(fleet.begin)
        last = next_one.result(WAIT_S)
    assert last.number == IN_FLIGHT + 1
    assert not fleet.runs.is_idle
    fleet.runs.plans.fail(last, PlanAbortedError(detail="the end"))
    assert fleet.runs.is_idle


def end_well(fleet: Fleet, tracker: RunTracker) -> None:
    for at in range(4):
        fleet.bell.give(at, tracker.number)
    assert tracker.wait(WAIT_S)


def test_run_comes_behind_the_last_call_of_each_actor(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fenced: list[int] = []
    monkeypatch.setattr(fleet.peers[3], "fence", fenced.append)
    calls = [SubmittedCalls() for _ in fleet.peers[1:]]
    for peer, one in zip(fleet.peers[1:], calls, strict=True):
        peer.calls = one  # the first has methods without an order
        one.last = bytes([7] * TASK_NBYTES)
    tracker = fleet.begin()
    assert [fleet.bell.after[at, tracker.number] for at in range(4)] == [b"", *[bytes([7] * TASK_NBYTES)] * 3]
    calls[0].last = bytes([8] * TASK_NBYTES)
    end_well(fleet, tracker)
    behind = fleet.begin()
    assert [fleet.bell.after[at, behind.number] for at in range(4)] == [b"", bytes([8] * TASK_NBYTES), b"", b""]
    end_well(fleet, behind)
    calls[2].last = None  # a call whose end nobody notes
    queued = fleet.begin()
    assert fenced == [queued.seq]
    assert [fleet.bell.after[at, queued.number] for at in range(4)] == [b"", b"", b"", UNKNOWN_TASK]
    assert calls[2].last == NOTHING, "what comes later is behind the run"
    end_well(fleet, queued)
    last = fleet.begin()
    assert last.number
    assert [fleet.bell.after[at, last.number] for at in range(4)] == [b""] * 4
    end_well(fleet, last)


def test_calls_after_a_run_wait_for_it_while_it_is_under_way(fleet: Fleet) -> None:
    waiting: list[int] = []
    for at, peer in enumerate(fleet.peers):
        peer.calls = SubmittedCalls()
        peer.calls.last = NOTHING
        peer.fence = lambda seq, at=at: waiting.append(at)  # type: ignore[method-assign,misc]
    tracker = fleet.begin()
    fleet.bell.give(3, tracker.number)
    for peer in fleet.peers:
        peer.calls.submit(None, "method", lambda *rest, **options: None, {})  # type: ignore[union-attr]
    assert waiting == [0, 1, 2], "the last one has ended its part"
    end_well(fleet, tracker)
