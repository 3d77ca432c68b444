"""Plans that overtake each other on their ways, or are behind a call whose end can't be told."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raycollect.channel import Mailbox, MailboxClient
from raycollect.channel.mailbox import Letters
from raycollect.channel.messages import Order
from raycollect.core import threads
from raycollect.core.model import UNKNOWN_TASK
from raycollect.errors import ProtocolError
from raycollect.member import methods, plan_queue
from raycollect.member.methods import Methods
from raycollect.member.plan_queue import PlanQueue, ReceivedPlan
from raycollect.member.sequencer import PlanSequencer
from raycollect.planner import Ticket
from raycollect.pos import Store
from tests.pure.driver.crews import WAIT_S, crew_of
from tests.pure.member.leases import backend, plan, premises
from tests.pure.sites import Method
from tests.pure.watched import WatchedCondition

__all__ = ["backend", "premises"]  # fixtures


class Waited(Methods):
    """Tells that somebody waits for the end of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait_for(self, *args: Any) -> bool:
        self.is_awaited.set()
        return super().wait_for(*args)


class Desk:
    """A plan queue, both ways to it, and what it carries out."""

    def __init__(self) -> None:
        self.sequencer = PlanSequencer()
        self.ran: SimpleQueue[int] = SimpleQueue()
        self.told: SimpleQueue[Any] = SimpleQueue()
        link = SimpleNamespace(close=lambda: self.told.put("closed"))
        reporter = cast(Any, SimpleNamespace(tell=self.told.put, link=link))
        self.mailbox = Mailbox()
        slot = self.mailbox.take_slot()
        assert slot is not None
        self.slot = slot
        client = MailboxClient(self.mailbox.segment, slot.at)
        self.methods = Waited()
        self.queue = PlanQueue(Store(), self.sequencer, reporter, self.methods, client)

    def post(self, message: Order) -> None:
        """Sends a letter."""
        assert self.slot.write(Letters(self.mailbox), message.after, message.payload)

    def received(self, message: Order) -> None:
        self.queue.received(message, self._run)

    def _run(self, plan: ReceivedPlan) -> None:
        assert self.sequencer.start(plan.ticket.seq, plan.ticket.predecessor) is None
        self.sequencer.end(plan.ticket.seq)
        self.ran.put(plan.ticket.seq)

    def close(self) -> None:
        self.queue.close("the test is over")
        self.mailbox.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()


def order(seq: int, predecessor: int) -> Order:
    payload = plan(Ticket(seq=seq, predecessor=predecessor))
    return Order(payload=payload, in_order=False, after=b"")


@pytest.mark.parametrize("seed", range(20))
def test_plans_run_in_their_order_whichever_way_overtakes_the_other(desk: Desk, seed: int) -> None:
    """Each way keeps its own order."""
    chance = random.Random(seed)
    desk.received(order(1, 0))
    ways: tuple[list[Order], list[Order]] = ([], [])
    for seq in range(2, 12):
        ways[chance.randrange(2)].append(order(seq, seq - 1))
    while any(ways):
        at = chance.choice([at for at in (0, 1) if ways[at]])
        if at:
            desk.received(ways[1].pop(0))
        else:
            desk.post(ways[0].pop(0))
    assert [desk.ran.get(timeout=WAIT_S) for _ in range(11)] == [*range(1, 12)]


def test_a_plan_waits_for_what_runs_elsewhere_and_holds_up_none_that_need_not_wait(desk: Desk) -> None:
    desk.sequencer.start(5, 0)  # a run of a captured step
    desk.received(order(6, 5))
    desk.post(order(7, 0))
    assert desk.ran.get(timeout=WAIT_S) == 7
    desk.sequencer.end(5)
    assert desk.ran.get(timeout=WAIT_S) == 6


def test_a_plan_that_could_not_be_taken_in_never_runs(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller has ended it: it would wait for the other participants, and hold up the next ones."""
    real = plan_queue.threads.start

    def start(*_: Any) -> Any:
        monkeypatch.setattr(plan_queue.threads, "start", real)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(plan_queue.threads, "start", start)
    with pytest.raises(RuntimeError):
        desk.received(order(1, 0))
    desk.sequencer.end(1)
    desk.received(order(2, 1))
    assert desk.ran.get(timeout=WAIT_S) == 2


def test_the_connection_ends_where_a_cell_has_no_plan(desk: Desk) -> None:
    desk.received(order(1, 0))
    malformed = Order(payload=b"no plan", in_order=False, after=b"")
    with pytest.raises(ProtocolError):
        desk.received(malformed)
    desk.post(malformed)
    assert desk.told.get(timeout=WAIT_S) == "closed"


def test_two_threads_that_bring_the_first_plans_start_one_thread() -> None:
    """As Ray's do that begin two actor tasks of a threaded actor at once."""
    for _ in range(20):
        desk, begin = Desk(), threading.Barrier(2)

        def start(desk: Desk = desk, begin: threading.Barrier = begin) -> None:
            begin.wait(WAIT_S)
            desk.queue.start(desk._run)

        before = [one for one in threading.enumerate() if one.name == "raycollect-order"]
        for one in [threads.call_in_helper(start) for _ in range(2)]:
            one.result(WAIT_S)
        started = [one for one in threading.enumerate() if one.name == "raycollect-order" and one not in before]
        assert len(started) == 1
        desk.close()
        started[0].join(WAIT_S)


def test_plans_behind_one_call_ask_once_whether_it_is_over() -> None:
    """Ray may still pickle what it returned."""
    with crew_of() as crew:
        before = crew.sites[0].fences
        crew.sites[0].call(Method(buffer=0, factor=2, summand=1, takes_back=False, end="unsure"))
        for _ in range(3):
            tracker = crew.sum()
            assert tracker.wait(WAIT_S)
            assert tracker.error is None
        assert crew.sites[0].fences == before + 1


def test_a_run_behind_an_unknown_call_waits_for_the_actor_task_and_asks_nobody(desk: Desk) -> None:
    desk.queue._methods._changed = watched = WatchedCondition()  # type: ignore[assignment]
    for seq in (3, 4):  # to know one tells nothing of the next
        waits = threads.call_in_helper(desk.queue.wait_for_call, UNKNOWN_TASK, seq)
        assert watched.someone_waits()
        assert not waits.done()
        desk.sequencer.end(seq)
        desk.queue.pass_fence(seq)
        waits.result(WAIT_S)
    assert desk.told.empty()


def test_a_plan_behind_a_method_that_runs_asks_nobody_whether_it_is_over(desk: Desk) -> None:
    with desk.methods.lock:
        waits = threads.call_in_helper(desk.queue.wait_for_call, b"task", 3)
        assert desk.methods.is_awaited.wait(WAIT_S)
        desk.methods.note(b"task", is_over=True)
        waits.result(WAIT_S)
    assert desk.told.empty()


def test_the_end_of_a_call_wakes_who_waits_for_it() -> None:
    made, looks = Methods(), threading.Event()

    def is_over() -> bool:
        looks.set()
        return bool(made.is_over(b"task"))

    waits = threads.call_in_helper(made.wait_for, is_over, None)
    assert looks.wait(WAIT_S)
    made.note(b"task", is_over=True)
    assert waits.result(WAIT_S)


def test_threads_that_note_the_ends_of_calls_do_not_get_in_each_others_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that has ended would raise what comes of it."""
    monkeypatch.setattr(methods, "KEPT", 16)
    made, begin = Methods(), threading.Barrier(3)

    def note(who: int) -> None:
        begin.wait(WAIT_S)
        for number in range(10_000):
            made.note(b"%d of %d" % (number, who), is_over=True)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for one in [threads.call_in_helper(note, who) for who in range(3)]:
            one.result(WAIT_S)
    finally:
        sys.setswitchinterval(interval_s)
    assert len(made._ended) == 16
