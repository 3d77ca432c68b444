"""What a member asks of the others where its own call is late, and what it answers: without processes."""

from __future__ import annotations

import math
import threading
import time

import pytest

from raycollect.channel.messages import Answer, Ask, Message
from raycollect.errors import ConnectionLostError
from raycollect.group import watchdog
from raycollect.group.coordinator_client import RankPosition
from raycollect.group.watchdog import Watchdog
from tests.pure.group.watchdog_desk import HERE, Desk
from tests.pure.watched import WAIT_S


@pytest.fixture(autouse=True)
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the process that answers: here the test does."""
    monkeypatch.setattr(Watchdog, "look_after", lambda self, delay_s: None)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LATE_ANSWER_S", WAIT_S)


def answer(rank: int, position: RankPosition, what: str = "W.train (t.py:3)") -> Answer:
    place, seq = position
    stack = ["t.py:3 in W.train: go()"]
    return Answer(group_id="id", communicator="all", rank=rank, place=place, seq=seq, doing=what, stack=stack)


@pytest.mark.usefixtures("patient")
def test_late_ranks_are_queried_and_reported() -> None:
    """One has not come; another one has, and stays in it. The end of the wait is the last answer."""
    desk = Desk()

    def all_answer(question: Ask) -> None:
        assert question == Ask(group_id="id", communicator="all", ranks=[1, 2])
        for one in (answer(2, HERE, ""), answer(1, RankPosition("generation", 3))):
            threading.Thread(target=desk.watchdog.received, args=(one,)).start()

    desk.on_send = all_answer
    began_s = time.monotonic()
    first, second = desk.ask([1, 2])
    assert time.monotonic() - began_s < WAIT_S, "nobody waited for the limit"
    assert (first.rank, first.actor, first.answers, first.has_begun) == (1, "W(1)", True, False)
    assert (first.doing, first.stack) == ("W.train (t.py:3)", ("t.py:3 in W.train: go()",))
    assert 2.5 <= first.awaited_s < WAIT_S
    assert (second.rank, second.answers, second.has_begun, second.doing) == (2, True, True, "")
    assert len(desk.sent) == 1


def test_rank_without_an_answer_is_reported_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LATE_ANSWER_S", 0.01)
    desk = Desk()
    desk.on_send = lambda question: desk.watchdog.received(answer(1, HERE)) and None
    one, other = desk.ask([1, 2])
    assert (one.answers, other.answers, other.has_begun, other.stack) == (True, False, False, ())
    desk.watchdog.received(answer(2, HERE))  # too late, and of no harm
    desk.on_send = lambda question: None
    assert [report.answers for report in desk.ask([1, 2])] == [False, False], "each call asks anew"


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("case", ["nobody", "itself", "strangers", "joining"])
def test_no_query_is_sent_without_a_queryable_rank(case: str) -> None:
    desk = Desk()
    if case == "joining":
        desk.member.members = ()
    late = {"nobody": [], "itself": [0], "strangers": [3, -1], "joining": [1]}[case]
    assert desk.ask(late) == ()
    assert desk.sent == []


def test_where_the_coordinator_is_gone_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LATE_ANSWER_S", math.inf)  # a wait would raise

    def gone(message: Message) -> None:
        raise ConnectionLostError(detail="gone")

    desk = Desk()
    desk.on_send = gone
    (report,) = desk.ask([1])
    assert not report.answers
