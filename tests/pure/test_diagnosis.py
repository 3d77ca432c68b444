"""Who is told of a wait that lasts, and what of those who are waited for."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from raycollect import diagnosis
from raycollect.channel.messages import Seen
from raycollect.errors import CollectiveTimeoutError


class Flying:
    """A flight of three participants that takes some waits until its outcome is known."""

    def __init__(self, waits: int) -> None:
        self.waits = waits
        self.waited: list[float | None] = []
        self.seq = 7
        self.group_name = "g"
        members = [SimpleNamespace(rank=rank, actor=f"W({rank})") for rank in range(3)]
        self.groups = (SimpleNamespace(spec=SimpleNamespace(name="g"), members=members),)
        self.plan = SimpleNamespace(name="allreduce", participants=("a", "b", "c"))

    @property
    def resolved(self) -> bool:
        return self.waits == 0

    def wait(self, timeout_s: float | None) -> bool:
        self.waited.append(timeout_s)
        self.waits -= 1
        return self.waits == 0

    def is_pending(self, position: int) -> bool:
        return position != 2

    def member(self, position: int) -> Any:
        return self.groups[0].members[position]


class Asked:
    """A controller of which rank 0 is in the plan, rank 1 in a method, and rank 2 silent."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def look(self, members: Any, timeout_s: float) -> list[Seen | None]:
        assert timeout_s == diagnosis.LOOK_S
        self.asked += [member.rank for member in members]
        answers = {
            0: Seen(request=1, doing="", stack=["x"], running=[7], ended=6, story=["s"]),
            1: Seen(request=2, doing="W.train (t.py:3)", stack=["t.py:3"], running=[], ended=5, story=[]),
        }
        return [answers.get(member.rank) for member in members]


@pytest.fixture
def controller() -> Any:
    return Asked()


@pytest.mark.parametrize(
    ("waits", "timeout_s", "waited", "known"),
    [
        (0, None, [], True),
        (1, None, [10.0], True),
        (2, None, [10.0, None], True),
        (1, 3.0, [3.0], True),
        (2, 3.0, [3.0], False),
        (2, 10.0, [10.0], False),
        (2, 12.5, [10.0, 2.5], True),
        (3, 12.5, [10.0, 2.5], False),
    ],
)
def test_a_wait_is_warned_of_once_and_takes_no_longer(
    controller: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    waits: int,
    timeout_s: float | None,
    waited: list[float | None],
    known: bool,
) -> None:
    monkeypatch.setattr(diagnosis, "QUIET_S", 10.0)
    flight: Any = Flying(waits)
    assert diagnosis.wait(controller, flight, timeout_s) is known
    assert flight.waited == waited
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (len(waited) == 2)
    assert controller.asked == ([0, 1] if warned else []), "who has ended it is not asked"
    for text in warned:
        assert "allreduce on group 'g', plan 7, is still under way after 10 s" in text
        assert text.index("rank 1 (W(1)) has not begun it, and is in W.train (t.py:3)") < text.index("rank 0 (W(0))")


def test_no_warning_where_none_is_wanted(
    controller: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(diagnosis, "QUIET_S", diagnosis.warn_after_s({diagnosis.WARNING_VARIABLE: "0"}))
    flight: Any = Flying(1)
    assert diagnosis.wait(controller, flight, None)
    assert flight.waited == [None]
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "expected"), [("", 10.0), ("2.5", 2.5), ("0", math.inf), ("-1", math.inf), ("x", 10.0)]
)
def test_the_environment_says_when(text: str, expected: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert diagnosis.warn_after_s({diagnosis.WARNING_VARIABLE: text}) == expected
    assert bool(caplog.records) == (text == "x")


@pytest.mark.parametrize(
    ("missing", "group_name", "asked"),
    [((1,), "g", [1]), ((2, 0), "g", [2, 0]), ((), "g", [0, 1]), ((1,), "?", [0, 1])],
)
def test_an_error_says_what_those_do_whom_it_names(
    controller: Any, missing: tuple[int, ...], group_name: str, asked: list[int]
) -> None:
    flight: Any = Flying(0)
    error = CollectiveTimeoutError(op="allreduce", group_name=group_name, missing=missing, timeout_s=1.0)
    diagnosis.explain_delay(controller, flight, error)
    assert controller.asked == asked
    assert sorted(report.rank for report in error.reports) == sorted(asked)
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
    if 0 in by_rank:
        assert by_rank[0].has_begun
    if 2 in by_rank:
        assert not by_rank[2].answers
        assert "rank 2 (W(2)) gives no answer" in str(error)
    diagnosis.explain_delay(controller, flight, error)
    assert controller.asked == asked, "once is enough"
    assert str(error).rstrip(".").endswith(error.cure)
