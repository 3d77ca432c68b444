"""What a participant makes of a program that came."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from raycollect.channel import Mailbox
from raycollect.channel.mailbox import IN_ORDER, Letters
from raycollect.channel.messages import (
    Abort,
    Bye,
    Collect,
    Collected,
    Done,
    Forget,
    Gone,
    Joined,
    Leave,
    Look,
    Measure,
    Measured,
    Message,
    Order,
    Record,
    Seen,
    Ticked,
    Unused,
)
from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.core.model import Launch, task_key
from raycollect.core.protocols import Joining
from raycollect.errors import (
    CollectiveTimeoutError,
    ConnectionLostError,
    GroupBrokenError,
    MismatchError,
    PlanAbortedError,
    ProtocolError,
    ResourceLimitError,
    Violation,
    from_wire,
    refusal,
    to_wire,
)
from raycollect.group import process_group
from raycollect.member import reporter
from raycollect.member.lease import Lease
from raycollect.member.plan_queue import ReceivedPlan
from raycollect.member.token_lenders import TokenLenders
from raycollect.planner import Ticket, decode_order, encode_order, encode_program
from raycollect.pos import Container, Store, fetch
from raycollect.ray_bridge.call_tokens import LentToken
from tests.pure.driver.tracked_plans import asked, flying, group, key_of
from tests.pure.fleet import contain
from tests.pure.member.leases import WAIT_S, Backend, Heard, backend, join, leased, plan, premises
from tests.support.values import named_member
from tests.support.waiting import wait_until

__all__ = ["backend", "premises"]  # fixtures


@pytest.mark.parametrize("count", [1, reporter.MOST_VIOLATIONS, reporter.MOST_VIOLATIONS + 1, 20_000])
def test_refusal_carries_as_many_violations_as_fit_a_message(count: int) -> None:
    reasons = tuple(
        Violation(kind="mismatch", rank=1, field="shape", found="x" * 400, expected="y" * 400, call=at)
        for at in range(count)
    )
    told = reporter._shortened(refusal("batch", "", reasons))
    assert isinstance(told, MismatchError)
    assert told.violations == reasons[: reporter.MOST_VIOLATIONS]
    assert len(msgpack.packb(to_wire(told))) < MAX_FRAME_NBYTES


# ---------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -1},
        {"rank": 2},
        {"members": []},
        {"members": [named_member("W0")]},
    ],
    ids=str,
)
def test_an_invitation_that_makes_no_sense_is_refused(premises: Any, changes: dict[str, Any]) -> None:
    made, heard = leased(premises)
    with pytest.raises(ProtocolError):
        made.received(join(**changes))
    assert heard.messages == []
    assert premises.runtime.process_groups._process_groups == {}
    made.end("the test is over")


def test_a_group_that_was_left_is_forgotten_and_its_plans_take_their_turn(premises: Any) -> None:
    """Another group may hold the lease for days: what the destroyed ones held must not pile up."""
    here, heard = leased(premises)
    for number in range(3):
        left = group(f"left {number}", (5, 6))
        here.received(join(name=left.spec.name, group_id=left.spec.group_id))
        here.received(Leave(group_id=left.spec.group_id))
        assert not here._groups.by_id
        tracker = flying(asked(left, (0, 1)))
        order = encode_order(Ticket(number + 1, number), [key_of(0)], encode_program(tracker.plan.program(0)))
        assert here.run_program(order, None) is None
        done = [one for one in heard.messages if isinstance(one, Done)][-1]
        error = from_wire(done.error or {})
        assert isinstance(error, GroupBrokenError)
        assert "destroyed" in error.detail
    assert here._sequencer.last == 3
    here.end("the test is over")


# ---------------------------------------------------------------------------------------------- in other threads


@pytest.mark.parametrize("ordered", [(), (True,), (True, False)])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_plans_are_handed_over_where_methods_may_overlap(premises: Any, is_ordered: bool, ordered: Any) -> None:
    """Also those of groups that were destroyed: they come all the same, and no event loop may wait for their turn."""
    premises.methods.is_ordered = is_ordered
    made, _ = leased(premises)
    made._groups.by_id = {
        str(at): cast(Any, SimpleNamespace(ordered=says, controller="me")) for at, says in enumerate(ordered)
    }
    assert (made.hand_over(plan(Ticket(1, 0)), None) is None) == (is_ordered and all(ordered))


def test_plans_for_which_no_thread_can_be_started_fail_and_those_after_them_go_on(
    monkeypatch: pytest.MonkeyPatch, premises: Any
) -> None:
    premises.methods.is_ordered = False
    made, heard = leased(premises)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for ticket in (Ticket(1, 0), Ticket(3, 2)):
            with pytest.raises(ResourceLimitError):
                premises.hand_over(plan(ticket), None)
    told = [(one.seq, from_wire(one.error)) for one in heard.messages if isinstance(one, Done) and one.error]
    assert [seq for seq, _ in told] == [1, 3]
    assert [error.resource for _, error in told if isinstance(error, ResourceLimitError)] == ["threads"] * 2
    assert [made._sequencer.has_ended(seq) for seq in (1, 2, 3)] == [True, False, False], "each in its turn"
    assert premises.hand_over(plan(Ticket(2, 1)), None)
    while heard.next(Done).seq != 2:
        pass
    assert made._sequencer.has_ended(3)


def test_who_awaits_a_plan_hears_of_the_end_of_the_lease(premises: Any) -> None:
    """A coroutine of an async actor does, whose plan waits for the one before it, which never comes."""
    premises.methods.is_ordered = False
    made, _ = leased(premises)
    result = made.plan_queue.add(ReceivedPlan(*decode_order(plan(Ticket(2, 1)))), made.run_ordered)
    made.end("the controller is gone")
    for one in (result, made.plan_queue.add(ReceivedPlan(*decode_order(plan(Ticket(3, 2)))), made.run_ordered)):
        with pytest.raises(PlanAbortedError) as caught:
            one.result(WAIT_S)
        assert caught.value.detail == "the controller is gone"


@pytest.mark.parametrize("how", [Leave(group_id="id of g"), None], ids=["the group", "the lease"])
def test_who_leaves_as_its_controller_ends_the_group_waits_for_no_answer(
    monkeypatch: pytest.MonkeyPatch, premises: Any, how: Leave | None
) -> None:
    """Actors and their driver destroy it at the end, each for itself."""
    monkeypatch.setattr(process_group, "PART_LIMIT_S", 3 * WAIT_S)
    here, heard = leased(premises)
    here.received(join())
    departs = heard.send

    def send(message: Message) -> None:
        departs(message)
        if isinstance(message, Gone):
            here.end("the controller is gone") if how is None else here.received(how)

    joined = premises.runtime.process_groups.find("g")
    joined.member.send = send
    leaving = threading.Thread(target=joined.part, daemon=True)
    leaving.start()
    leaving.join(WAIT_S)
    assert not leaving.is_alive()
    here.end("the test is over")


def test_a_member_that_was_given_up_while_it_connected_has_not_joined(backend: Backend, premises: Any) -> None:
    """It has closed what it made, and its first plan would fail."""
    closed = list[bool]()

    def create(joining: Joining) -> Any:
        premises.runtime.process_groups.by_id["id of g"].plans.refuse("a value of rank 1 is lost")
        return SimpleNamespace(close=lambda: closed.append(True))

    backend.create = create
    here, heard = leased(premises)
    here.received(join())
    assert wait_until(lambda: heard.messages)
    (joined,) = heard.messages
    assert isinstance(joined, Joined)
    assert "a value of rank 1 is lost" in str(from_wire(joined.error or {}))
    assert closed
    here.end("the test is over")


def test_a_member_whose_backend_can_not_connect_has_not_joined(backend: Backend, premises: Any) -> None:
    def create(joining: Joining) -> Any:
        raise CollectiveTimeoutError(missing=(1,))

    backend.create = create
    here, heard = leased(premises)
    here.received(join())
    error = from_wire(heard.next(Joined).error or {})
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (1,)
    here.end("the test is over")


class Scripted:
    """A communicator whose ranks are all here; `at` is called in the agreement, in each launch and in aborts."""

    def __init__(self, at: Callable[[str], None]) -> None:
        self._at = at

    def agree(self, launch: Launch, arrival: bytes, *_: Any) -> Sequence[bytes]:
        self._at("agreement")
        return [arrival] * len(launch.ranks)

    def launch(self, *_: Any) -> None:
        self._at("launch")

    def end(self, launch: Launch, ok: bool, *_: Any) -> tuple[int, ...]:
        return launch.ranks if ok else ()

    def abort(self, seq: int) -> None:
        self._at(f"abort of {seq}")

    def close(self) -> None:
        """There is nothing to release."""


@pytest.fixture
def ordering(backend: Backend, premises: Any) -> Iterator[Callable[..., tuple[Lease, Heard]]]:
    """Gives a member of a group of two, and orders a plan of it, which calls `at`; the changes are of the join."""
    made = list[Lease]()

    def order(
        at: Callable[[str], None], *, in_order: bool = True, hello: Any = None, send: Any = None, **changes: Any
    ) -> Any:
        backend.create = lambda joining: Scripted(at)
        here, heard = leased(premises, **(hello or {}))
        made.append(here)
        here.received(join(group_id=group("g", (5, 6)).spec.group_id, **changes))
        heard.next(Joined)
        premises.store.put(key_of(0), contain(np.ones(3)))
        if send is None:
            here.received(Order(payload=plan(Ticket(1, 0)), in_order=in_order, after=b""))
        else:
            send(plan(Ticket(1, 0)))
        return here, heard

    yield order
    for here in made:
        here.end("the test is over")


@pytest.mark.parametrize(("in_order", "ordered"), [(True, True), (False, True), (False, False)])
def test_no_method_runs_beside_a_plan_where_they_come_one_by_one(
    ordering: Any, premises: Any, in_order: bool, ordered: bool
) -> None:
    seen = list[bool]()
    members = [named_member("W", ordered=ordered)] * 2
    _, heard = ordering(lambda _: seen.append(premises.methods.lock.locked()), in_order=in_order, members=members)
    assert heard.next(Done).error is None
    assert seen == [ordered] * 2


def test_outputs_of_an_actor_task_are_what_it_returns(premises: Any, backend: Backend) -> None:
    backend.create = lambda joining: Scripted(lambda _: None)
    one = group("g", (5, 6))
    here, heard = leased(premises)
    here.received(join(group_id=one.spec.group_id))
    heard.next(Joined)
    premises.store.put(key_of(0), contain(np.ones(3)))
    program = flying(asked(one, (0, 1), inplace=False)).plan.program(0)
    found = premises.run_task(encode_order(Ticket(1, 0), [key_of(0)], encode_program(program)), bytes(24))
    assert found.key == task_key(bytes(24), 1)
    assert heard.next(Done).error is None
    here.end("the test is over")


def test_what_a_controller_lent_is_kept_until_it_has_ended() -> None:
    store, key = Store(), key_of(0)
    lenders = TokenLenders(store)
    store.put(key, contain(np.ones(2)))
    assert not lenders.note(b"owner", key)
    lenders.open(b"owner")
    assert lenders.note(b"owner", key)
    lenders.close(b"owner", lambda: False)
    assert wait_until(lambda: not store.statistics().held)
    assert not lenders.note(b"owner", key)


def test_messages_under_way_at_the_end_of_a_lease_leave_the_connection_to_the_values(premises: Any) -> None:
    """A thread of the controller may close a captured step while another ends the lease."""
    _, heard = leased(premises, owner=b"owner")
    key = key_of(0)
    premises.keep(key, contain(np.ones(2)), LentToken(token=None, owner=b"owner", packed=cast(Any, None)))
    for message in (Bye(), Forget(capture=b"step"), Leave(group_id="id of g"), Unused(keys=[key])):
        premises.received(heard, message)
    assert premises.store.statistics().held == 0
    premises.closed(heard, ConnectionLostError(detail="the test is over"))
    with pytest.raises(ProtocolError):
        premises.received(heard, Forget(capture=b"step"))


def test_a_result_that_came_after_the_end_of_a_connection_is_not_freed_with_its_lent_token(premises: Any) -> None:
    _, heard = leased(premises, owner=b"owner")
    lent = LentToken(token=None, owner=b"owner", packed=cast(Any, None))
    before, after = key_of(0), key_of(1)
    premises.keep(before, contain(np.ones(2)), lent)
    assert fetch.free(premises.address, [before, after], actor="W0", owner=b"owner") == 1
    premises.closed(heard, ConnectionLostError(detail="it broke"))
    premises.keep(after, contain(np.ones(2)), lent)
    assert fetch.free(premises.address, [after], actor="W0", owner=b"owner") == 0
    assert isinstance(premises.store.look(after), Container)
    assert fetch.free(premises.address, [after], actor="W0") == 1


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_controller_hears_whether_its_recording_begins(premises: Any, is_taken: bool) -> None:
    here, heard = leased(premises)
    if is_taken:
        premises.runtime.tracer.begin("another")
    here.received(Record(request=1, limit=10))
    assert bool(heard.next(Ticked).refusal) == is_taken
    here.received(Collect(request=2, ends=True, after=-1))
    assert bool(heard.next(Collected).payload) != is_taken
    here.end("the test is over")


def test_how_far_a_plan_is_can_be_asked_at_any_time(ordering: Any) -> None:
    came, go = threading.Event(), threading.Event()

    def at(_: str) -> None:
        came.set()
        assert go.wait(WAIT_S)

    here, heard = ordering(at)
    assert came.wait(WAIT_S)
    found = []
    for seq in (1, 2):
        here.received(Measure(request=seq, seq=seq))
        found.append(heard.next(Measured))
    here.received(Look(request=7))
    seen = heard.next(Seen)
    assert (seen.request, list(seen.running), seen.ended) == (7, [1], 0)
    go.set()
    heard.next(Done)
    here.received(Measure(request=3, seq=1))
    found.append(heard.next(Measured))
    assert [(one.has_begun, one.has_ended) for one in found] == [(True, False), (False, False), (True, True)]


@pytest.mark.parametrize("reason", [None, "cancelled", ""])
def test_the_last_rank_marks_its_letter_for_all_unless_it_was_told_to_abort(ordering: Any, reason: str | None) -> None:
    """Who has aborted waits for the answer of each; without a reason the plan goes on."""
    aborted = reason is not None
    lent, mailbox, seen = SimpleQueue[Lease](), Mailbox(), list[str]()
    letters = Letters(mailbox, lambda: None)
    slot = mailbox.take_slot()
    assert slot is not None

    def send(payload: bytes) -> None:
        assert slot.write(letters, b"", payload, IN_ORDER)

    def at(what: str) -> None:
        seen.append(what)
        if what == "launch" and reason is not None:
            lent.get(timeout=WAIT_S).received(Abort(seq=1, reason=reason))

    here, heard = ordering(at, hello={"mailbox": (mailbox.segment, slot.at)}, send=send)
    lent.put(here)
    if aborted:
        assert heard.next(Done).error is None
    assert wait_until(lambda: letters.have_ended != aborted)
    assert aborted == any(isinstance(one, Done) for one in heard.messages)
    assert seen == ["agreement", "launch", *(["abort of 1"] * bool(reason))], "what is under way is woken"
    if not aborted:
        here.received(Abort(seq=1, reason=""))
        assert heard.next(Done).error is None, "also a good end is told to who asks"
    mailbox.close()
