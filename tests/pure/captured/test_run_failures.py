"""Runs of captured steps that fail or are interrupted by a signal, and the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest

from raycollect.channel.messages import Abort, BeginRun, Forget, Look
from raycollect.core.deadline import Deadline
from raycollect.core.model import Key, OpKind
from raycollect.driver import stall_report
from raycollect.driver.step_plan import Stage, StepPlan
from raycollect.driver.step_runs import RunTracker
from raycollect.errors import (
    CaptureBrokenError,
    CaptureError,
    CollectiveTimeoutError,
    GroupBrokenError,
    KernelError,
    MethodError,
    MismatchError,
    ParticipantDiedError,
    PlanAbortedError,
    ReentrantCallError,
    UnknownGroupError,
    Violation,
    refusal,
)
from raycollect.planner import plan
from tests.pure.captured.run_fleet import WAIT_S, Fleet, controller, drive, fleet
from tests.pure.driver.leased import declared, said
from tests.pure.driver.tracked_plans import asked, group, key_of
from tests.support.waiting import at_step, interrupt_in, wait_until

__all__ = ["controller", "fleet"]  # fixtures


def test_failure_breaks_the_step_and_ends_later_runs(fleet: Fleet) -> None:
    before, tracker, *behind = [fleet.begin() for _ in range(4)]
    error = MethodError(op="step", call=2, raised="ValueError", detail="x", trace="t")
    fleet.fail(2, tracker, error)
    found = tracker.error
    assert isinstance(found, MethodError)
    assert (found.op, found.rank, found.actor, found.group_name) == ("step", 2, "Worker(7)", "left")
    assert found.story == ("check",)
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
    assert error.violations[0].ref == key_of(1).hex()
    assert [len(said(peer)) for peer in fleet.peers] == [0, 0, 0, 1], "the others were in that consistency check"
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
    with pytest.raises(UnknownGroupError, match="'right': it was destroyed"):
        fleet.begin()
    fleet.controller.groups.add(declared(group("right", (9, 7))))
    with pytest.raises(CaptureBrokenError, match=r"(?s)destroyed, or its members have changed.*capture the step again"):
        fleet.begin()
    assert not fleet.bell.rung
    assert all(type(one) is not BeginRun for peer in fleet.peers if peer.link for one in said(peer))


def test_a_run_that_can_not_be_sent_to_all(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*rest: Any) -> bool:
        raise OSError("no bell")

    monkeypatch.setattr(fleet.bell.runs[2], "write", broken)
    tracker = fleet.begin()
    assert "no bell" in str(tracker.error)
    assert tracker.error.actor == "Worker(7)"  # type: ignore[union-attr]
    assert [len(said(peer)) for peer in fleet.peers] == [1, 1, 0, 0]
    assert [peer.last_seq for peer in fleet.peers] == [tracker.seq, tracker.seq, 0, 0]
    fleet.land(tracker)


def test_run_timeout_names_the_missing_participants(fleet: Fleet) -> None:
    tracker = fleet.begin(deadline=Deadline.after(0.01))
    fleet.bell.give(0, tracker.number)
    assert stall_report.wait(fleet.controller, tracker, None)
    error = tracker.error
    assert isinstance(error, CollectiveTimeoutError)
    assert [f"Worker({at})" in error.detail for at in (5, 6, 7, 8)] == [False, True, True, True]
    assert (error.missing, error.timeout_s) == ((1, 2), 0.01)
    assert [[type(one) for one in said(peer)] for peer in fleet.peers[1:]] == [[Look, Abort]] * 3
    fleet.land(tracker)


def answer(fleet: Fleet, *trackers: RunTracker) -> None:
    """All answer these runs, which have gone well."""
    for tracker in trackers:
        for at in range(4):
            fleet.bell.give(at, tracker.number)
        assert tracker.wait(WAIT_S)
        assert tracker.has_ended
        assert tracker.error is None


def interrupted(at: int, call: Callable[[], object]) -> None:
    """Makes a call with a signal at one of its places."""
    with suppress(KeyboardInterrupt):
        at_step(at, lambda: signal.raise_signal(signal.SIGINT), call)


def test_a_signal_at_any_place_of_a_run_leaves_it_whole(fleet: Fleet) -> None:
    """All participants have it, or none; whoever asks next tells the outcome."""
    drive(fleet)
    for at in range(1, at_step(0, int, lambda: drive(fleet, 1)) + 1):
        before = fleet.begin()
        interrupted(at, fleet.begin)
        assert fleet.bell.woken[-1] == (fleet.bell.number, 4)
        trackers = fleet.controller.plans.trackers()
        assert trackers[0] is before
        answer(fleet, *cast("list[RunTracker]", trackers))
        tracker, behind = fleet.begin(), fleet.begin()
        for slot in range(4):
            fleet.bell.give(slot, tracker.number)
        interrupted(at, lambda tracker=tracker: tracker.wait(WAIT_S))  # type: ignore[misc]
        answer(fleet, tracker, behind)
        assert fleet.controller.plans.trackers() == []
        assert fleet.runs.is_idle
    assert [said(peer) for peer in fleet.peers] == [[]] * 4


def test_a_signal_while_one_waits(fleet: Fleet) -> None:
    tracker = fleet.begin()
    interrupting = interrupt_in(fleet.bell.wait)
    with pytest.raises(KeyboardInterrupt):
        tracker.wait(WAIT_S)
    interrupting.join(WAIT_S)
    assert not fleet.runs.waiting
    answer(fleet, tracker)
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


@pytest.mark.parametrize("by_controller", [False, True])
def test_close_ends_running_runs(fleet: Fleet, by_controller: bool) -> None:
    done, *open_ones = [fleet.begin() for _ in range(3)]
    for at in range(4):
        fleet.bell.give(at, done.number)
    if by_controller:
        fleet.controller.close()
    else:
        for _ in range(2):
            fleet.runs.close()
        for peer in fleet.peers:
            assert [type(one) for one in said(peer)] == [Abort, Abort, Forget]
        assert fleet.bell.is_closed
        assert fleet.runs.refs == {}
        for one in open_ones:
            assert "closed" in str(one.error)
            fleet.land(one)
    assert done.error is None
    assert all(isinstance(one.error, PlanAbortedError) for one in open_ones)
    with pytest.raises(CaptureError, match=None if by_controller else "closed"):
        fleet.begin()


def test_unreferenced_step_is_closed_once_it_is_idle(fleet: Fleet) -> None:
    controller = fleet.controller
    tracker = fleet.begin()
    controller.groups.held.append(fleet.left.spec.group_id)
    looked = threading.Event()

    def let_go() -> bool:
        is_closed = fleet.runs.let_go_idle()
        looked.set()
        return is_closed

    controller.abandon(let_go, (fleet.left,))
    assert looked.wait(WAIT_S)
    assert not fleet.runs.is_closed, "a run is under way"
    assert controller.groups.held == [fleet.left.spec.group_id]
    for at in range(4):
        fleet.bell.give(at, tracker.number)
    assert wait_until(lambda: fleet.runs.is_closed)
    assert wait_until(lambda: controller.groups.held == [])
    assert tracker.error is None


def test_a_step_that_is_closed_while_a_run_is_sent_is_closed_after_it(fleet: Fleet) -> None:
    """A finalizer may close it in the thread that sends, and in another one."""
    with fleet.controller.plans.dispatching:
        fleet.runs.close()
        elsewhere = threading.Thread(target=fleet.runs.close)
        elsewhere.start()
        elsewhere.join(WAIT_S)
        assert not elsewhere.is_alive()
        assert not fleet.runs.is_closed
        with pytest.raises(ReentrantCallError):
            fleet.begin()
    assert fleet.runs.is_closed
    with pytest.raises(CaptureError, match="closed"):
        fleet.begin()


def test_a_run_knows_its_operands_and_the_places_of_its_plans(fleet: Fleet) -> None:
    assert fleet.runs.writes == {Key(key_of(at)): True for at in (*range(5), 9)}
    tracker = fleet.begin()
    assert [tracker.writes.get(key_of(at)) for at in (0, 3, 4, 9, 7)] == [True, True, True, True, None]
    assert tracker.refs == dict.fromkeys(map(key_of, range(5)))
    assert fleet.step_plan.name == "captured step"
    assert fleet.step_plan.places_at(-1) == ()
    found = [fleet.step_plan.places_at(at) for at in (0, fleet.stages[1].offset)]
    assert found == [stage.positions for stage in fleet.stages]
    learning = plan([asked(fleet.left, (0, 1, 2), kind=OpKind.ALLGATHER, op=None).request()], [fleet.left])
    one = StepPlan.of([Stage(learning, 0, 0, (0, 1, 2))], learning.participants, [])
    assert [one.rounds_at(at, in_group=True) for at in (-1, 0, 1)] == [0, 2, 0], "shapes are told in the second"
    fleet.runs.plans.fail(tracker, PlanAbortedError(detail="the end"))


def test_a_group_that_another_thread_destroys_as_a_run_begins_fails_it(fleet: Fleet) -> None:
    """Whoever destroys it ends the runs that are under way, and none that begins later: nobody would answer that."""
    begin = fleet.bell.begin

    def begun() -> int:
        for name in ("left", "right"):
            fleet.controller.groups.destroy(name)
        return begin()

    fleet.bell.begin = begun  # type: ignore[method-assign]
    tracker = fleet.begin()
    assert isinstance(tracker.error, UnknownGroupError)
    assert tracker.has_ended
    assert not fleet.controller.plans.trackers()
