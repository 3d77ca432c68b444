"""Runs of captured steps as their controller sees them: tickets, answers by doorbell and channel, failures, waits."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raycollect.captured.captured_run import CapturedRun
from raycollect.captured.run_tracker import RunTracker
from raycollect.captured.runs import StepRuns
from raycollect.captured.step_plan import Stage, StepPlan
from raycollect.channel.doorbell import IN_FLIGHT
from raycollect.channel.messages import Abort, Arrivals, Arrive, Done, Forget, Ran, Run, Stuck
from raycollect.core.model import Key
from raycollect.driver.controller import Controller
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    CaptureBrokenError,
    CaptureError,
    CollectiveTimeoutError,
    DispatchError,
    GroupBrokenError,
    KernelError,
    MethodError,
    MismatchError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
    UnknownGroupError,
    Violation,
    refusal,
    to_wire,
)
from raycollect.planner import plan
from tests.pure.driver.test_controller import lease, said
from tests.pure.driver.test_plan_tracker_batches import asked, group, key

CAPTURE = bytes(range(16))
WAIT_S = 20.0
SHORT = 100
"""The longest message of the fake doorbell."""


class Bell:
    """A doorbell within a process: what is rung is kept, answers are given by tests."""

    def __init__(self) -> None:
        self.number = 0
        self.rung: dict[tuple[int, int], tuple[int, int, bytes]] = {}
        self.answers: dict[tuple[int, int], bytes] = {}
        self.rings = threading.Semaphore(0)
        self.is_closed = False

    def begin(self) -> int:
        self.number += 1
        return self.number

    def ring(self, slot: int, number: int, seq: int, predecessor: int, payload: bytes) -> bool:
        self.rung[slot, number] = seq, predecessor, payload
        return len(payload) <= SHORT

    def answer(self, slot: int, number: int) -> bytes | None:
        return self.answers.get((slot, number))

    def give(self, slot: int, number: int, payload: bytes = b"") -> None:
        self.answers[slot, number] = payload
        self.rings.release()

    def wait(self, timeout_s: float) -> None:
        self.rings.acquire(timeout=timeout_s)

    def wake(self) -> None:
        self.rings.release()

    def close(self) -> None:
        self.is_closed = True


class Fleet:
    """A controller that has leased actors 5, 6, 7 in the group "left", and 8, 7 in "right", and runs on them.

    The first stage is an allreduce of "left", the second a plan over both groups, whose door the controller keeps.
    """

    def __init__(
        self, controller: Controller, slots: tuple[int, ...] = (0, 1, 2, 3), beside: Fleet | None = None
    ) -> None:
        self.controller = controller
        groups = (beside.left, beside.right) if beside else (group("left", (5, 6, 7)), group("right", (8, 7)))
        left, right = self.left, self.right = groups
        found = lease(controller, left, right)
        for membership in (left, right):
            controller.groups.add(membership)
            for member in membership.members:
                found[member.actor].group_ids.add(membership.spec.group_id)
        first = plan([asked(left, (0, 1, 2)).request()], [left.roster])
        pairs = [(right, asked(right, (4, 3))), (left, asked(left, (0, 1, 2)))]
        second = plan([one.request() for _, one in pairs], [one.roster for _, one in pairs])
        assert second.door is None
        participants = (*first.participants, right.members[0].actor_id)
        places = {one: at for at, one in enumerate(participants)}
        self.stages = [
            Stage(made, at, offset, tuple(places[one] for one in made.participants))
            for made, at, offset in ((first, 0, 0), (second, 1, first.width))
        ]
        homes = [(left, member) for member in left.members] + [(right, right.members[0])]
        self.step_plan = StepPlan.of(self.stages, participants, homes, frozenset([key(9)]))
        self.peers = [controller.participants.leased(one, groups) for one in participants]
        self.bell = Bell()
        keys = [key(at) for at in range(5)]
        self.runs = StepRuns(
            controller,
            CAPTURE,
            self.step_plan,
            [left, right, left],
            keys,
            dict.fromkeys(keys),
            doorbell=self.bell,  # type: ignore[arg-type]
            slots=slots,
            peers=self.peers,
        )

    def begin(self, *payloads: bytes, **options: Any) -> RunTracker:
        return self.runs.begin(payloads or (b"",) * 4, **options)

    def tell(self, at: int, message: Any) -> None:
        self.controller.messages.received(self.peers[at], message)

    def fail(self, at: int, tracker: RunTracker, error: Any) -> None:
        self.tell(at, Done(seq=tracker.seq, ranks=[], error=to_wire(error), story=["door"]))

    def land(self, tracker: RunTracker) -> None:
        """Those who were told to abort say that they have ended."""
        for at in sorted(tracker._pending):
            self.fail(at, tracker, PlanAbortedError(detail="aborted"))
        assert tracker.has_ended
        assert tracker.seq not in [one.seq for one in self.controller.trackers()]


@pytest.fixture
def controller() -> Any:
    made = Controller(object())
    yield made
    made.close()


@pytest.fixture
def fleet(controller: Controller) -> Fleet:
    return Fleet(controller)


# ---------------------------------------------------------------------------------------------- tickets and answers


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
    assert [peer.last_seq for peer in fleet.peers] == [second.seq] * 4
    assert first.has(first.seq + width - 1)
    assert not first.has(second.seq)


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
        assert list(fleet.controller.trackers()) == []
    assert [said(peer) for peer in fleet.peers] == [[]] * 4


def test_oversized_runs_use_the_channel(controller: Controller) -> None:
    fleet = Fleet(controller, slots=(0, -1, 1, -1))
    long = bytes(SHORT + 1)
    tracker = fleet.begin(b"a", b"b", long, long)
    assert [[type(one) for one in said(peer)] for peer in fleet.peers] == [[], [Run], [Run], [Run]]
    assert sorted(fleet.bell.rung) == [(0, 1), (1, 1)]
    fenceless = fleet.begin(b"a", b"b", b"c", b"d")
    sent = [said(peer) for peer in fleet.peers]
    assert sent[3] == [Run(capture=CAPTURE, seq=fenceless.seq, predecessor=tracker.seq, payload=b"d")]
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
    from tests.pure.driver.test_controller import renumbered
    from tests.pure.driver.test_plan_tracker_batches import flying

    other = flying((fleet.left, asked(fleet.left, (0, 1, 2))))
    taken = fleet.controller.register(lambda seq: renumbered(other, seq), other.plan.width)
    with pytest.raises(ProtocolError, match="no run"):
        fleet.tell(0, Ran(seq=taken.seq, payload=b""))
    taken.fail(PlanAbortedError(detail="the end"))
    tracker.abort(PlanAbortedError(detail="the end"))


def test_run_reports_the_tensors_it_writes(fleet: Fleet) -> None:
    tracker = fleet.begin()
    assert [tracker.writes.get(key(at)) for at in (0, 3, 4, 9, 7)] == [True, True, True, True, None]
    assert tracker.refs == dict.fromkeys(map(key, range(5)))
    tracker.abort(PlanAbortedError(detail="the end"))


# ---------------------------------------------------------------------------------------------- doors


def test_the_doors_of_a_run_are_those_of_its_plans(fleet: Fleet) -> None:
    """At the controller's door ranks are places in the plan that is there, not among all participants."""
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
    fleet.tell(0, Stuck(group_id="", lane="", call=0, seq=seq, op="allreduce", ranks=[], begun=seq))
    tracker.abort(PlanAbortedError(detail="the end"))


# ---------------------------------------------------------------------------------------------- failures


def test_failure_breaks_the_step_and_ends_later_runs(fleet: Fleet) -> None:
    before, tracker, *behind = [fleet.begin() for _ in range(4)]
    error = MethodError(op="step", call=2, raised="ValueError", detail="x", trace="t")
    fleet.fail(2, tracker, error)
    found = tracker.error
    assert isinstance(found, MethodError)
    assert (found.op, found.rank, found.actor, found.group_name) == ("step", 2, "Worker(7)", "left")
    assert found.story == ("door",)
    for other in behind:
        assert isinstance(other.error, PlanAbortedError)
        assert "failed before (MethodError)" in other.error.detail
    assert not before.resolved, "it goes on"
    told = [said(peer) for peer in fleet.peers]
    assert all(type(one) is Abort for mine in told for one in mine)
    assert [len(mine) for mine in told] == [3, 3, 2, 3], "who has failed knows"
    with pytest.raises(CaptureBrokenError, match="ValueError: x"):
        fleet.begin()
    for at in range(4):
        fleet.bell.give(at, before.number)
    assert before.resolved
    assert before.error is None
    for one in (tracker, *behind):
        fleet.land(one)


def test_completion_before_the_news_of_a_failure_counts(fleet: Fleet) -> None:
    """Nobody waits for its answer, and yet it counts."""
    tracker = fleet.begin()
    fleet.fail(1, tracker, KernelError(detail="broke"))
    for at in (0, 2, 3):
        assert [one.seq for one in fleet.controller.trackers()] == [tracker.seq]
        fleet.bell.give(at, tracker.number)
    assert list(fleet.controller.trackers()) == []
    assert isinstance(tracker.error, KernelError)


def test_an_echo_waits_for_its_cause(fleet: Fleet) -> None:
    tracker = fleet.begin()
    fleet.fail(0, tracker, PlanAbortedError(detail="rank 1 has left"))
    assert not tracker.resolved
    assert [len(said(peer)) for peer in fleet.peers] == [0, 1, 1, 1], "others may wait elsewhere"
    fleet.bell.give(3, tracker.number)
    fleet.fail(1, tracker, KernelError(detail="broke", group_name="id of left"))
    assert isinstance(tracker.error, KernelError)
    assert (tracker.error.rank, tracker.error.group_name) == (1, "left")
    fleet.land(tracker)


def test_refusal_reaches_participants_of_other_plans(fleet: Fleet) -> None:
    tracker = fleet.begin()
    violation = Violation(kind="mismatch", rank=1, field="shape", found="[2]", expected="[1]", call=0)
    fleet.fail(0, tracker, refusal("allreduce", "", (violation,)))
    error = tracker.error
    assert isinstance(error, MismatchError)
    assert error.violations[0].actor == "Worker(6)"
    assert error.violations[0].ref == key(1).hex()
    assert [len(said(peer)) for peer in fleet.peers] == [0, 0, 0, 1], "the others were at that door"
    for at in (1, 2):
        fleet.fail(at, tracker, refusal("allreduce", "", (violation,)))
    fleet.land(tracker)


def test_answer_before_a_death_counts_as_ended(fleet: Fleet) -> None:
    first, second = fleet.begin(), fleet.begin()
    fleet.bell.give(3, first.number)
    fleet.controller.messages.lost(fleet.peers[3], "killed")
    assert isinstance(second.error, ParticipantDiedError)
    assert second.error.actor == "Worker(8)"
    for at in range(3):
        fleet.bell.give(at, first.number)
    assert first.resolved
    assert first.error is None
    with pytest.raises(CaptureBrokenError):
        fleet.begin()


def test_groups_are_looked_at_before_anything_is_sent(fleet: Fleet) -> None:
    fleet.controller.messages.lost(fleet.peers[3], "killed")
    with pytest.raises(GroupBrokenError, match=r"Worker\(8\) died"):
        fleet.begin()
    fleet.controller.groups.destroy("right")
    with pytest.raises(UnknownGroupError, match="destroyed"):
        fleet.begin()
    assert not fleet.bell.rung
    assert all(type(one) is not Run for peer in fleet.peers if peer.link for one in said(peer))


def test_a_run_that_can_not_be_sent_to_all(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(slot: int, *rest: Any) -> bool:
        if slot == 2:
            raise OSError("no bell")
        return True

    monkeypatch.setattr(fleet.bell, "ring", broken)
    tracker = fleet.begin()
    assert "no bell" in str(tracker.error)
    assert tracker.error.actor == "Worker(7)"  # type: ignore[union-attr]
    assert [len(said(peer)) for peer in fleet.peers] == [1, 1, 0, 0]
    assert [peer.last_seq for peer in fleet.peers] == [tracker.seq, tracker.seq, 0, 0]
    fleet.land(tracker)


def test_run_timeout_names_the_missing_participants(fleet: Fleet) -> None:
    tracker = fleet.begin(timeout_s=0.01)
    fleet.bell.give(0, tracker.number)
    assert tracker.wait(None)
    error = tracker.error
    assert isinstance(error, CollectiveTimeoutError)
    assert "Worker(6), Worker(7), Worker(8)" in error.detail
    assert (error.missing, error.timeout_s) == ((1, 2), 0.01)
    assert [type(said(peer)[0]) for peer in fleet.peers[1:]] == [Abort] * 3
    fleet.land(tracker)


# ---------------------------------------------------------------------------------------------- waiting


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
    last.abort(PlanAbortedError(detail="the end"))
    assert fleet.runs.is_idle


# ---------------------------------------------------------------------------------------------- signals


def interrupting(call: Callable[..., Any], *, after: bool = False, at: int = 0) -> Callable[..., Any]:
    """The function, but its call number `at`, from 0, is interrupted by a signal: as it begins, or as it ends."""
    calls = itertools.count()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        hit = next(calls) == at
        if hit and not after:
            raise KeyboardInterrupt
        found = call(*args, **kwargs)
        if hit:
            raise KeyboardInterrupt
        return found

    return interrupted


def drive(fleet: Fleet, runs: int = IN_FLIGHT + 3) -> None:
    """Begins runs, and answers each."""
    for _ in range(runs):
        tracker = fleet.begin()
        for at in range(4):
            fleet.bell.give(at, tracker.number)
        assert tracker.wait(WAIT_S)
        assert tracker.error is None


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["begin", "register", "ring 0", "ring 2", "ring 3"])
def test_a_signal_as_a_run_begins_breaks_the_step(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, where: str, after: bool
) -> None:
    """Nobody knows who has heard of it, and none of them waits for ever."""
    before = fleet.begin()
    name, _, at = where.partition(" ")
    target: Any = fleet.controller if name == "register" else fleet.bell
    with monkeypatch.context() as patch:
        patch.setattr(target, name, interrupting(getattr(target, name), after=after, at=int(at or 0)))
        with pytest.raises(KeyboardInterrupt):
            fleet.begin()
    with pytest.raises(CaptureBrokenError, match="interrupted"):
        fleet.begin()
    rung = [slot for slot, number in fleet.bell.rung if number == before.number + 1]
    told = [[type(one) for one in said(peer)] for peer in fleet.peers]
    assert all(told[slot] == [Abort] for slot in rung), "who was rung for ends it"
    assert not any(told[max(rung, default=-1) + 2 :])
    for tracker in list(fleet.controller.trackers()):
        if tracker is not before:
            fleet.land(tracker)  # type: ignore[arg-type]
            assert isinstance(tracker.error, DispatchError)
    for slot in range(4):
        fleet.bell.give(slot, before.number)
    assert before.wait(0)
    assert before.error is None
    assert list(fleet.controller.trackers()) == []
    assert fleet.runs.is_idle
    drive(Fleet(fleet.controller, beside=fleet))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["take", "done", "resolve", "let_go", "ended"])
def test_a_signal_after_the_last_answer_costs_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, where: str, after: bool
) -> None:
    """Whoever asks next tells the outcome."""
    target, name = {
        "take": (RunTracker, "_take"),
        "done": (PlanTracker, "done"),
        "resolve": (PlanTracker, "_resolve"),
        "let_go": (PlanTracker, "_let_go"),
        "ended": (StepRuns, "ended"),
    }[where]
    drive(fleet, 2)
    tracker, behind = fleet.begin(), fleet.begin()
    for at in range(4):
        fleet.bell.give(at, tracker.number)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, interrupting(getattr(target, name), after=after, at=0))
        with pytest.raises(KeyboardInterrupt):
            tracker.wait(WAIT_S)
    for at in range(4):
        fleet.bell.give(at, behind.number)
    drive(fleet)
    for one in (tracker, behind):
        assert one.wait(0)
        assert one.has_ended
        assert one.error is None
    assert list(fleet.controller.trackers()) == []
    assert fleet.runs.is_idle


def test_a_signal_after_the_last_failure_keeps_the_error(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = fleet.begin()
    fleet.fail(0, tracker, PlanAbortedError(detail="rank 1 has left"))
    for at in (1, 2, 3):
        fleet.bell.give(at, tracker.number)
    with monkeypatch.context() as patch:
        patch.setattr(PlanTracker, "_resolve", interrupting(PlanTracker._resolve))
        with pytest.raises(KeyboardInterrupt):
            tracker.wait(WAIT_S)
    assert tracker.wait(WAIT_S)
    assert isinstance(tracker.error, PlanAbortedError)
    with pytest.raises(CaptureBrokenError):
        fleet.begin()
    fleet.land(tracker)


def test_a_signal_while_one_waits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = fleet.begin()
    with monkeypatch.context() as patch:
        patch.setattr(fleet.bell, "wait", interrupting(fleet.bell.wait))
        with pytest.raises(KeyboardInterrupt):
            tracker.wait(WAIT_S)
    assert not fleet.runs._waiting
    for at in range(4):
        fleet.bell.give(at, tracker.number)
    assert tracker.wait(WAIT_S)
    drive(fleet)


@pytest.mark.parametrize("unasked", [1, 2, 3])
def test_runs_that_have_ended_unasked_make_room_for_themselves_alone(fleet: Fleet, unasked: int) -> None:
    trackers = [fleet.begin() for _ in range(3)]
    for tracker in trackers[:unasked]:
        for at in range(4):
            fleet.bell.give(at, tracker.number)
    last = fleet.begin()
    under_way = [*trackers[unasked:], last]
    assert list(fleet.runs._under_way) == under_way
    fleet.fail(0, under_way[0], KernelError(detail="broke"))
    assert [one.error is None for one in trackers[:unasked]] == [True] * unasked
    assert all(isinstance(one.error, PlanAbortedError) for one in under_way[1:])
    for one in under_way:
        fleet.land(one)


# ---------------------------------------------------------------------------------------------- behind plans


def test_run_follows_pending_plans_of_its_participants(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is pending there, or a fenced run, may wait for methods; a run by the doorbell does not."""
    fenced: list[int] = []
    monkeypatch.setattr(fleet.runs, "_fence", lambda at: lambda payload: fenced.append(at))
    from tests.pure.driver.test_controller import renumbered
    from tests.pure.driver.test_plan_tracker_batches import flying

    assert not fleet.begin().is_fenced
    assert not fleet.begin().is_fenced, "other runs by the doorbell are no reason"
    made = flying((fleet.left, asked(fleet.left, (0, 1, 2))))
    plan_ = fleet.controller.register(lambda seq: renumbered(made, seq), made.plan.width)
    behind = fleet.begin()
    assert behind.is_fenced
    assert behind.number == 0
    assert fenced == [0, 1, 2, 3]
    for at in range(3):
        fleet.controller.send(plan_, plan_.done(at, None, ()))
    again = fleet.begin()
    assert again.is_fenced, "the fenced run is pending"
    for tracker in (behind, again):
        for at in range(4):
            fleet.tell(at, Ran(seq=tracker.seq, payload=b""))
    assert not fleet.begin().is_fenced
    assert fenced == [0, 1, 2, 3] * 2
    assert len(fleet.bell.rung) == 4 * 3


# ---------------------------------------------------------------------------------------------- the end


def test_close_ends_running_runs(fleet: Fleet) -> None:
    done, *open_ones = [fleet.begin() for _ in range(3)]
    for at in range(4):
        fleet.bell.give(at, done.number)
    for _ in range(2):
        fleet.runs.close()
    assert done.error is None
    assert all("closed" in str(one.error) for one in open_ones)
    for peer in fleet.peers:
        assert [type(one) for one in said(peer)] == [Abort, Abort, Forget]
    assert fleet.bell.is_closed
    assert fleet.runs.refs == {}
    with pytest.raises(CaptureError, match="closed"):
        fleet.begin()
    for one in open_ones:
        fleet.land(one)


def test_unreferenced_idle_step_is_closed_by_the_next_plan(fleet: Fleet) -> None:
    controller = fleet.controller
    other = Fleet(controller, beside=fleet)
    tracker = fleet.begin()
    controller.groups.hold(fleet.left)
    controller.abandon(fleet.runs.let_go_idle, (fleet.left,))
    assert not fleet.runs.is_closed
    assert controller.groups.in_use == {fleet.left.spec.group_id}
    other.begin().abort(PlanAbortedError(detail="the end"))
    assert not fleet.runs.is_closed, "a run is under way"
    for at in range(4):
        fleet.bell.give(at, tracker.number)
    with pytest.raises(CaptureBrokenError):
        other.begin()
    Fleet(controller, beside=fleet).begin().abort(PlanAbortedError(detail="the end"))
    assert fleet.runs.is_closed
    assert tracker.error is None
    assert controller.groups.in_use == set()


def test_a_closed_controller_runs_nothing(fleet: Fleet) -> None:
    tracker = fleet.begin()
    fleet.controller.close()
    assert isinstance(tracker.error, PlanAbortedError)
    with pytest.raises(CaptureError):
        fleet.begin()


def test_keys_name_operands(fleet: Fleet) -> None:
    assert fleet.runs.writes == {Key(key(at)): True for at in (*range(5), 9)}
    assert fleet.step_plan.name == "captured step"
    assert fleet.step_plan.stage_of(-1) is None
    assert [fleet.step_plan.stage_of(at) for at in (0, fleet.stages[1].offset)] == fleet.stages
