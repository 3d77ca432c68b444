"""A plan whose letters somebody looks at ends by their marks when all went well, and else as any other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

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
        letters = [slot.write(b"", b"a plan", 0, answers=True) for slot in self.slots]
        self.tracker.letters = Letters(mailbox, [letter for letter in letters if letter is not None])
        assert all(client.take(WAIT_S) for client in self.clients)


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


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


def test_a_plan_that_has_failed_frees_its_cells(sent: Sent) -> None:
    slot, client = sent.slots[0], sent.clients[0]
    sent.tracker.fail(KernelError(detail="broken"))
    for _ in range(2 * CELLS):
        assert slot.write(b"", b"another", 0)
        assert client.take(0.0)
