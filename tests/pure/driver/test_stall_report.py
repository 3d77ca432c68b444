"""A wait of the driver that lasts: who is told of it, and what of those who are waited for."""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future
from typing import Any, cast

import pytest

from raycollect.channel.messages import Seen
from raycollect.driver import stall_report
from raycollect.driver.plan_timeouts import Overdue
from raycollect.driver.step_plan import StepPlan
from raycollect.errors import CollectiveTimeoutError
from raycollect.group import watchdog
from tests.pure.driver.flights import Clock, Flying, watch_by


def seen(**said: Any) -> Seen:
    """What a participant says: nothing but this."""
    nothing = {"doing": "", "stack": [], "running": [], "steps": [], "checks": [], "checks_ms": [], "ended": 0}
    return Seen(request=1, story=[], **{**nothing, **said})


class Asked:
    """A controller of which rank 0 is in the plan, for 2.5 seconds, rank 1 in a method, and rank 2 silent."""

    def __init__(self, clock: Clock) -> None:
        self.asked: list[int] = []
        self.clock = clock
        self.participants = self.plans = self

    def fail(self, tracker: Any, error: Any) -> None:
        """Ends a plan here; nobody is told."""
        tracker.fail(error)

    def look(self, members: Any, timeout_s: float) -> list[Seen | None]:
        assert timeout_s == stall_report.LOOK_S
        self.asked += [member.rank for member in members]
        self.clock.now_s += 0.25  # they take their time
        answers = {
            0: seen(
                stack=["x"],
                running=[7],
                steps=["in the consistency check"],
                checks=[6, 7],
                checks_ms=[9000, 2500],
                ended=6,
            ),
            1: seen(doing="W.train (t.py:3)", stack=["t.py:3"], ended=5),
        }
        return [answers.get(member.rank) for member in members]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    watch_by(made, monkeypatch)
    return made


@pytest.fixture
def controller(clock: Clock) -> Any:
    return Asked(clock)


@pytest.mark.parametrize(
    ("ends_s", "timeout_s", "takes_s", "known", "warns"),
    [
        (0, None, 0, True, False),
        (0.5, None, 0.5, True, False),
        (9, None, 9, True, False),
        (50, None, 50, True, True),
        (9, 3, 3, False, False),
        (50, 10, 10, False, False),
        (12, 12.5, 12, True, True),
        (50, 12.5, 12.5, False, True),
        (50, 0, 0, False, False),
    ],
)
def test_long_wait_is_logged_once_without_delay(
    controller: Any,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ends_s: float,
    timeout_s: float | None,
    takes_s: float,
    known: bool,
    warns: bool,
) -> None:
    monkeypatch.setattr(stall_report, "QUIET_S", 10.0)
    began_s, tracker = clock.now_s, Flying(ends_s, clock=clock)
    assert stall_report.wait(controller, cast(Any, tracker), timeout_s) is known
    assert clock.now_s - began_s == takes_s
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == warns
    assert sorted(controller.asked) == ([0, 1, 2] if warned else []), "all: who waits knows since when"
    for text in warned:
        assert "allreduce on group 'g', plan 7, is still under way after 10 s" in text
        assert "W.train (t.py:3); the last that it has ended is 5; awaited for 2.5 s\n" in text
        first, second = (
            "rank 1 (W(1)) has not begun it, and is in",
            "rank 0 (W(0)) is in it (in the consistency check); the last",
        )
        assert 0 < text.index(first) < text.index(second)
        assert "rank 2" not in text, "it has ended it"


DONE, INSIDE, BUSY = (seen(ended=7), seen(ended=6, running=[7], steps=["in a kernel"]), seen(ended=6))


@pytest.mark.parametrize(
    ("answers", "missing"),
    [
        ([(DONE, INSIDE, DONE)] * 2, (1,)),
        ([(None, DONE, DONE)] * 2, (0,)),
        ([(None, None, None)], ()),  # has anybody ended it?
        ([(INSIDE, INSIDE, INSIDE)], ()),  # they wait for each other, with limits of their own
        ([(INSIDE, BUSY, INSIDE)], ()),
        ([(DONE, INSIDE, DONE), (DONE, DONE, DONE)], ()),  # it has come after all
        ([(INSIDE, DONE, DONE), (DONE, INSIDE, DONE), (DONE, DONE, DONE)], ()),  # another one: they go on
        ([(INSIDE, INSIDE, INSIDE), (INSIDE, INSIDE, DONE), (DONE, INSIDE, DONE)], (1,)),
    ],
)
def test_wait_for_a_rank_stuck_after_the_others_ends(
    controller: Any,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[tuple[Seen | None, ...]],
    missing: tuple[int, ...],
) -> None:
    """Nobody waits for it in a collective, so that no limit of a collective ends the wait."""
    monkeypatch.setattr(stall_report, "QUIET_S", math.inf)
    began_s, tracker = clock.now_s, Flying(1000, clock=clock)
    tracker.pending = {0, 1, 2}
    told = iter(answers)
    last = list(answers[-1])

    def look(members: Any, timeout_s: float) -> list[Seen | None]:
        return list(next(told, last))

    controller.look = look
    assert stall_report.wait(controller, cast(Any, tracker), None)
    if not missing:
        assert tracker.error is None
        assert clock.now_s - began_s == 1000
        return
    assert isinstance(tracker.error, CollectiveTimeoutError)
    assert tracker.error.missing == missing
    assert f"have not ended what others have: rank {missing[0]} (W({missing[0]}))" in tracker.error.detail
    assert clock.now_s - began_s == len(answers) * 60


@pytest.mark.parametrize(
    ("text", "expected"), [("", 10.0), ("2.5", 2.5), ("0", math.inf), ("-1", math.inf), ("x", 10.0)]
)
def test_environment_sets_the_warning_delay(text: str, expected: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert watchdog.warn_after_s({watchdog.WARNING_VARIABLE: text}) == expected
    assert bool(caplog.records) == (text == "x")


@pytest.mark.parametrize(
    ("missing", "group_name", "told"),
    [((1,), "g", [1]), ((2, 0), "g", [2, 0]), ((), "g", [0, 1]), ((1,), "?", [0, 1])],
)
def test_timeout_error_reports_the_ranks_it_names(
    controller: Any, missing: tuple[int, ...], group_name: str, told: list[int]
) -> None:
    tracker: Any = Flying(0)
    error = CollectiveTimeoutError(op="allreduce", group_name=group_name, missing=missing, timeout_s=1.0)
    stall_report.explain_delay(controller, tracker, error)
    assert sorted(controller.asked) == [0, 1, 2]
    assert sorted(report.rank for report in error.reports) == sorted(told)
    by_rank = {report.rank: report for report in error.reports}
    if 1 in by_rank:
        one = by_rank[1]
        assert (one.answers, one.has_begun, one.doing, one.stack, one.ended) == (
            True,
            False,
            "W.train (t.py:3)",
            ("t.py:3",),
            5,
        )
        assert str(one) in str(error)
        assert one.awaited_s == 2.5
    if 0 in by_rank:
        assert by_rank[0].has_begun
        assert (by_rank[0].step, by_rank[0].awaited_s) == ("in the consistency check", 0)
    if 2 in by_rank:
        assert not by_rank[2].answers
        assert "rank 2 (W(2)) gives no answer" in str(error)
        assert by_rank[2].awaited_s == 2.5, "nobody knows better"
    stall_report.explain_delay(controller, tracker, error)
    assert len(controller.asked) == 3, "once is enough"
    assert str(error).rstrip(".").endswith(error.cure)


@pytest.mark.parametrize(
    ("stuck", "missing"), [((1,), (1,)), ((0, 1), (0, 1)), ((), ()), ((0, 1, 2), ()), (None, ())], ids=str
)
@pytest.mark.parametrize("gone", [(), (2,)])
def test_where_all_are_in_a_kernel_those_are_named_that_do_not_leave_it_at_the_abort(
    controller: Any, gone: tuple[int, ...], stuck: tuple[int, ...] | None, missing: tuple[int, ...]
) -> None:
    """Not who had left by the time it was asked, nor who had not: all but one only wait for that one."""
    tracker: Any = Flying(0)
    left: Future[tuple[int, ...]] = Future()
    if stuck is not None:
        left.set_result(stuck)
    members = tracker.groups[0].members
    looks: dict[str, Any] = {one.actor_id: Future() for one in members}
    for one in members:
        looks[one.actor_id].set_result(DONE if one.rank in gone else INSIDE)
    tracker.overdue = Overdue(tuple(members), looks, left)
    tracker.error = error = CollectiveTimeoutError(op="allreduce", group_name="g", missing=(0, 1, 2), timeout_s=1.0)
    stall_report.explain_delay(controller, tracker, error, 0.01)
    assert error.missing == missing
    assert tuple(report.rank for report in error.reports) == (missing or tuple({0, 1, 2} - {*gone}))
    assert all(f"rank {rank} (W({rank}))" in error.detail for rank in missing)


# ---------------------------------------------------------------------------------------------- since when


class Stages(StepPlan):
    """Three plans of a captured step, of widths 2, 1 and 2; the second is of ranks 0 and 2 alone."""

    def __init__(self) -> None:
        pass

    positions = {"a": 0, "b": 1, "c": 2}  # type: ignore[assignment]  # noqa: RUF012

    def places_at(self, launch: int) -> tuple[int, ...]:
        return (0, 2) if launch == 2 else (0, 1, 2)


def awaited(tracker: Any, **said: Seen | None) -> list[float]:
    return [stall_report.awaited_s(tracker, actor_id, said) for actor_id in "abc"]


def at(*checks: int, ms: tuple[int, ...], ended: int = 0, running: tuple[int, ...] = (7,)) -> Seen:
    return seen(
        checks=list(checks), checks_ms=list(ms), ended=ended, running=list(running), steps=["" for _ in running]
    )


@pytest.mark.parametrize("plan", [None, Stages()])
def test_wait_times_count_from_the_first_arrival(plan: Any) -> None:
    tracker: Any = Flying(plan=plan)
    first, second, nobody = at(7, ms=(3000,)), at(7, ms=(1000,)), seen(ended=6)
    assert awaited(tracker, a=first, b=second, c=nobody) == [0, 0, 3], "from the first arrival on"
    assert awaited(tracker, a=first, b=None, c=nobody) == [0, 3, 3]
    assert awaited(tracker, a=nobody, b=nobody, c=nobody) == [0, 0, 0], "nobody waits"
    after = at(7, ms=(3000,), ended=7, running=())
    assert awaited(tracker, a=after, b=after, c=nobody) == [0, 0, 3], "the others have given up"
    assert awaited(tracker, a=first, b=second, c=at(ms=())) == [0, 0, 3], "it has begun, and looks at its operands"


def test_captured_step_awaits_a_rank_in_its_own_stages() -> None:
    tracker: Any = Flying(plan=Stages())
    far, middle = at(7, 9, 10, ms=(9000, 5000, 4000)), at(7, 9, ms=(9000, 6000))
    assert awaited(tracker, a=far, b=at(7, ms=(8000,)), c=middle) == [0, 4, 4], "the second plan is none of rank 1's"
    assert awaited(tracker, a=middle, b=at(7, ms=(8000,)), c=at(7, ms=(8000,))) == [0, 0, 6]
    assert awaited(tracker, a=middle, b=None, c=None) == [0, 9, 9]
