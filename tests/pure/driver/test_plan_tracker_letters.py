"""A plan whose letters somebody looks at ends by their marks when all went well, and else as any other."""

from __future__ import annotations

import threading

import pytest

from raycollect.channel import Mailbox, MailboxClient
from raycollect.channel.mailbox import CELLS, Letters, Slot
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import KernelError
from tests.pure.driver.tracked_plans import tracked

WAIT_S = 20.0
WORLD = 3


class Sent:
    """A plan that was sent by letters, and their takers."""

    def __init__(self, mailbox: Mailbox) -> None:
        slots = [mailbox.take_slot() for _ in range(WORLD)]
        self.slots: list[Slot] = [slot for slot in slots if slot is not None]
        self.clients = [MailboxClient(mailbox.segment, slot.at) for slot in self.slots]
        self.tracker: PlanTracker = tracked(WORLD)
        self.tracker.letters = letters = Letters(mailbox, self.tracker.look)
        assert all(slot.write(letters, b"", b"a plan") for slot in self.slots)
        assert all(client.take(WAIT_S) for client in self.clients)


@pytest.fixture
def sent(mailbox: Mailbox) -> Sent:
    return Sent(mailbox)


def test_one_mark_ends_it_everywhere(sent: Sent) -> None:
    tracker = sent.tracker
    assert not tracker.wait(0)
    sent.clients[1].ended(1)
    assert tracker.wait(WAIT_S)
    assert tracker.has_ended
    assert tracker.error is None
    assert not tracker.refs


def test_whoever_asks_sees_the_mark(sent: Sent) -> None:
    """As another thread does that ends the group: nobody waits."""
    sent.clients[2].ended(1)
    assert sent.tracker.resolved
    assert sent.tracker.error is None


def test_a_failure_wakes_the_caller(sent: Sent) -> None:
    failing = threading.Timer(0.01, sent.tracker.done, (1, KernelError(detail="broken"), ()))
    failing.start()
    assert sent.tracker.wait(WAIT_S)
    failing.join()
    assert isinstance(sent.tracker.error, KernelError)


def test_who_dies_after_the_mark_has_not_failed(sent: Sent) -> None:
    sent.clients[1].ended(1)
    lost = threading.Thread(target=sent.tracker.lost, args=(1, "killed"))  # as the hub's does, before the caller looks
    lost.start()
    lost.join(WAIT_S)
    assert sent.tracker.resolved
    assert sent.tracker.error is None


@pytest.mark.parametrize("fails", [True, False])
def test_a_plan_that_has_ended_frees_its_cells(mailbox: Mailbox, sent: Sent, fails: bool) -> None:
    """Also one that nobody has asked for since."""
    slot, client = sent.slots[0], sent.clients[0]
    if fails:
        sent.tracker.fail(KernelError(detail="broken"))
    else:
        client.ended(1)
    for _ in range(2 * CELLS):
        assert slot.write(Letters(mailbox), b"", b"another")
        assert client.take(0.0)
