"""A fault in each thread of a participant, one by one, after which all goes on."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from raycollect.channel import Mailbox, MailboxClient
from raycollect.channel.mailbox import Letters
from raycollect.channel.messages import Collect, Collected, Done, Gone, Joined, Order, Unable
from raycollect.core.model import Key
from raycollect.engine.value_codec import pack_values
from raycollect.errors import from_wire
from raycollect.group.communicator import GroupCommunicator
from raycollect.member import lease, token_lenders
from raycollect.member.lease import Lease
from raycollect.member.methods import Methods
from raycollect.member.participant import Participant
from raycollect.member.plan_queue import PlanQueue
from raycollect.member.sequencer import PlanSequencer
from raycollect.member.token_lenders import TokenLenders
from raycollect.member.wait_monitor import WaitMonitor
from raycollect.observe import Ring
from raycollect.planner import Ticket
from raycollect.pos import Store
from tests.faults.thread_failures import fail_at
from tests.pure.fleet import contain
from tests.pure.member.leases import Backend, Heard, backend, join, plan, premises
from tests.pure.member.leases import leased as lease_of
from tests.pure.member.step_bench import FakePost, bench
from tests.pure.thread_faults import BOOM, WAIT_S, fault_in

__all__ = ["backend", "bench", "premises"]  # fixtures


@pytest.fixture
def leased(premises: Participant) -> tuple[Lease, Heard]:
    return lease_of(premises)


@fault_in("raycollect-helper")
def test_a_join_that_fails_is_told(leased: tuple[Lease, Heard]) -> None:
    here, heard = leased
    with fail_at(GroupCommunicator, "connect", thread="raycollect-helper"):
        here.received(join())
        joined = heard.next(Joined)
    assert str(from_wire(joined.error or {})).startswith(f"joining group 'g' failed: {BOOM}")
    here.received(join(name="h", group_id="id of h"))
    assert heard.next(Joined) == Joined(request=1, error=None)


@fault_in("raycollect-timer")
def test_a_death_is_survived_whose_end_of_the_group_fails(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, leased: tuple[Lease, Heard]
) -> None:
    monkeypatch.setattr(lease, "LAST_S", 0.0)
    backend.create = lambda joining: SimpleNamespace(abort=print, close=int, lost=lambda _: False)
    here, heard = leased
    here.received(join())
    assert heard.next(Joined).error is None
    (group_id,) = here._groups.by_id
    with fail_at(Lease, "_end_group", thread="raycollect-timer") as fault:
        here.received(Gone(group_id=group_id, rank=1, died=True, detail="its connection has ended"))
        assert fault.told.wait(WAIT_S)
    here.received(join(name="h", group_id="id of h"))
    assert heard.next(Joined).error is None


@fault_in("raycollect-helper")
def test_a_timeline_that_can_not_be_read_is_told_so(premises: Participant, leased: tuple[Lease, Heard]) -> None:
    here, heard = leased
    assert premises.runtime.tracer.begin("me", 100) is not None
    with fail_at(Ring, "read", thread="raycollect-helper"):
        here.received(Collect(request=7, ends=False, after=-1))
        unable = heard.next(Unable)
    assert (unable.request, unable.detail.partition(BOOM)[0]) == (
        7,
        "could not look: reading what was recorded failed: ",
    )
    here.received(Collect(request=8, ends=True, after=-1))
    assert heard.next(Collected).payload


@fault_in("raycollect-timer")
def test_the_next_wait_is_told_of_after_a_failure() -> None:
    told, over = threading.Event(), list[str]()
    hub = SimpleNamespace(tell=told.set)
    watch = WaitMonitor(0.01)

    def waiting() -> AbstractContextManager[None]:
        return watch.waiting(lambda _: hub.tell(), lambda: over.append("over"))

    with fail_at(hub, "tell", thread="raycollect-timer") as fault, waiting():
        assert fault.told.wait(WAIT_S)
    with waiting():
        assert told.wait(WAIT_S)
    assert over == ["over"] * 2


@fault_in("raycollect-helper")
def test_an_owner_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_lenders, "LOOK_S", 0.001)
    key, store, freed = Key(bytes(28)), Store(), threading.Event()
    monkeypatch.setattr(store, "free", lambda keys: freed.set())
    owner = SimpleNamespace(is_alive=lambda: not fault.told.is_set())
    lenders = TokenLenders(store)
    lenders.open(b"owner")
    store.put(key, contain(np.ones(2)))
    assert lenders.note(b"owner", key)
    with fail_at(owner, "is_alive", thread="raycollect-helper") as fault:
        lenders.close(b"owner", lambda: owner.is_alive())
        assert freed.wait(WAIT_S)
    assert not lenders.note(b"owner", key)


@fault_in("raycollect-order")
def test_the_next_order_is_carried_out_after_a_failure(premises: Any) -> None:
    done = threading.Event()
    desk = SimpleNamespace(run=lambda came: done.set())
    made = _queue()
    order = Order(payload=plan(Ticket(seq=1, predecessor=0)), in_order=False, after=b"")
    with fail_at(desk, "run", thread="raycollect-order"):
        made.received(order, lambda came: desk.run(came))
    made.received(order, lambda came: desk.run(came))
    assert done.wait(WAIT_S)
    made.close("the test is over")


@fault_in("raycollect-order")
def test_a_mailbox_that_fails_is_looked_at_again(premises: Any) -> None:
    done = threading.Event()
    mailbox = Mailbox()
    slot = mailbox.take_slot()
    assert slot is not None
    client = MailboxClient(mailbox.segment, slot.at)
    made = _queue(client)
    order = Order(payload=plan(Ticket(seq=1, predecessor=0)), in_order=False, after=b"")
    with fail_at(client, "take", thread="raycollect-order"):
        made.received(order, lambda came: done.set())
        assert done.wait(WAIT_S)
    done.clear()
    assert slot.write(Letters(mailbox), b"", order.payload)
    assert done.wait(WAIT_S)
    made.close("the test is over")
    mailbox.close()


def _queue(mailbox: MailboxClient | None = None) -> PlanQueue:
    reporter = cast(Any, SimpleNamespace(tell=lambda message: None))
    return PlanQueue(Store(), PlanSequencer(), reporter, Methods(), mailbox)


@fault_in("raycollect-order")
def test_the_controller_hears_of_an_order_that_fails(leased: tuple[Lease, Heard]) -> None:
    here, heard = leased
    with fail_at(Lease, "_carry_out", thread="raycollect-order"):
        here.received(Order(payload=plan(Ticket(seq=1, predecessor=0)), in_order=False, after=b""))
        done = heard.next(Done)
    assert done.seq == 1
    assert str(from_wire(done.error or {})).startswith(f"carrying out an order failed: {BOOM}")
    assert here._sequencer.has_ended(1), "what comes after it goes on"


@fault_in("raycollect-capture")
def test_a_doorbell_that_fails_is_looked_at_again(bench: Any) -> None:
    post = FakePost()
    post.wake()
    one = bench(post=post)
    with fail_at(post, "take", thread="raycollect-capture"):
        post.wake()
    assert one.answered(post.ring(1, 0, pack_values(["x"]))) == ("x",)
