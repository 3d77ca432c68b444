"""Letters in shared memory: they come whole and in order, or are left to the channel; their ends are seen once."""

from __future__ import annotations

import os
import threading

import pytest

from raycollect.channel import Mailbox, MailboxClient
from raycollect.channel.mailbox import AWAITED, CELLS, IN_ORDER, INLINE_NBYTES, SLOTS, Letters, Received, Slot
from tests.support.values import replace

WAIT_S = 20.0


def ends(mailbox: Mailbox) -> tuple[Slot, MailboxClient]:
    """Both ends of a new slot."""
    slot = mailbox.take_slot()
    assert slot is not None
    return slot, MailboxClient(mailbox.segment, slot.at)


def letters(mailbox: Mailbox, *, awaited: bool = False) -> Letters:
    """Those of a plan."""
    return Letters(mailbox, (lambda: None) if awaited else None)


def test_a_letter_comes_as_it_was_written(mailbox: Mailbox) -> None:
    slot, client = ends(mailbox)
    for number, (first, rest, flags, awaited) in enumerate(
        [
            (b"", b"a plan", 0, False),
            (b"", b"", 0, True),
            (b"t" * 24, b"a plan", IN_ORDER, False),
            (b"t" * 24, b"x" * (INLINE_NBYTES - 24), IN_ORDER, True),
        ],
        1,
    ):
        assert slot.write(letters(mailbox, awaited=awaited), first, rest, flags)
        assert client.take(WAIT_S) == Received(number, flags | AWAITED * awaited, first, rest)


def test_what_is_too_long_for_a_cell_is_left_to_the_channel(mailbox: Mailbox) -> None:
    slot, client = ends(mailbox)
    plan = letters(mailbox)
    assert not slot.write(plan, b"", b"x" * (INLINE_NBYTES + 1))
    assert not slot.write(plan, b"t", b"x" * INLINE_NBYTES)
    assert slot.write(plan, b"", b"next")
    assert client.take(WAIT_S) == Received(1, 0, b"", b"next")


def test_a_cell_is_free_when_its_letter_was_taken(mailbox: Mailbox) -> None:
    slot, client = ends(mailbox)
    for turn in range(3):
        sent = [b"%d" % (turn * CELLS + number) for number in range(CELLS)]
        assert all(slot.write(letters(mailbox), b"", letter) for letter in sent)
        assert not slot.write(letters(mailbox), b"", b"one too many")
        taken = [client.take(WAIT_S) for _ in sent]
        assert [letter.rest for letter in taken if letter is not None] == sent
        assert client.take(0.0) is None


def test_a_cell_whose_end_somebody_waits_for_is_free_when_that_is_over(mailbox: Mailbox) -> None:
    slot, client = ends(mailbox)
    looks = list[int]()
    plan = Letters(mailbox, lambda: looks.append(1))
    assert slot.write(plan, b"", b"awaited")
    for _ in range(CELLS - 1):
        assert slot.write(letters(mailbox), b"", b"another")
    while client.take(0.0) is not None:
        pass
    assert not plan.have_ended
    client.ended(1)
    assert plan.have_ended
    assert not slot.write(letters(mailbox), b"", b"next"), "nobody has seen the end"
    assert looks == [1]
    plan.close()
    following = letters(mailbox, awaited=True)
    assert slot.write(following, b"", b"next")
    client.ended(1)
    assert not following.have_ended, "a late mark for the letter before it"


def test_an_end_that_comes_late_costs_no_cell(mailbox: Mailbox) -> None:
    """Its caller has given up, and a later letter was taken from its cell."""
    slot, client = ends(mailbox)
    plan, following = letters(mailbox, awaited=True), letters(mailbox, awaited=True)
    assert slot.write(plan, b"", b"given up")
    plan.close()
    for _ in range(CELLS - 1):
        assert slot.write(letters(mailbox), b"", b"another")
    assert slot.write(following, b"", b"next") is False, "nobody has taken the first"
    while client.take(0.0) is not None:
        pass
    assert slot.write(following, b"", b"next")
    assert client.take(0.0)
    client.ended(1)
    assert not following.have_ended
    client.ended(CELLS + 1)
    assert following.have_ended
    following.close()
    for _ in range(2 * CELLS):
        assert slot.write(letters(mailbox), b"", b"another")
        assert client.take(0.0)


def test_whoever_is_asked_for_a_cell_may_give_it_back(mailbox: Mailbox) -> None:
    slot, client = ends(mailbox)
    plan = Letters(mailbox, lambda: plan.close() if plan.have_ended else None)
    for _ in range(CELLS):
        assert slot.write(plan, b"", b"awaited")
        assert client.take(0.0)
    assert not slot.write(letters(mailbox), b"", b"next")
    client.ended(CELLS)
    assert slot.write(letters(mailbox), b"", b"next")


def test_only_those_who_are_addressed_wake(mailbox: Mailbox) -> None:
    all_ends = [ends(mailbox) for _ in range(4)]
    addressed = {1, 3}
    received: dict[int, list[Received | None]] = {at: [] for at in (0, *addressed)}

    def take(at: int) -> None:
        received[at].append(all_ends[at][1].take(WAIT_S))

    threads = {at: threading.Thread(target=take, args=(at,)) for at in received}
    for thread in threads.values():
        thread.start()
    plan = letters(mailbox)
    for at in addressed:
        assert all_ends[at][0].write(plan, b"", b"%d" % at)
    for at in addressed:
        threads[at].join(WAIT_S)
        assert received[at] == [Received(1, 0, b"", b"%d" % at)]
    assert received[0] == []
    all_ends[0][1].wake()
    threads[0].join(WAIT_S)
    assert received[0] == [None]


def test_threads_of_the_controller_wake_at_an_end_and_when_they_are_told(mailbox: Mailbox) -> None:
    slot, client = ends(mailbox)
    plan = letters(mailbox, awaited=True)
    assert slot.write(plan, b"", b"a plan")
    assert client.take(WAIT_S)
    has_looked, is_told = threading.Event(), threading.Event()

    def wait() -> None:
        while not is_told.is_set():
            seen = mailbox.seen()
            if plan.have_ended:
                has_looked.set()
            mailbox.wait(seen, WAIT_S)

    waiting = [threading.Thread(target=wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    client.ended(1)
    assert has_looked.wait(WAIT_S)
    is_told.set()
    mailbox.wake()
    for thread in waiting:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_change_after_the_look_is_not_slept_through(mailbox: Mailbox) -> None:
    """Whoever changes the word writes what nobody else has written to it."""
    slots = [ends(mailbox) for _ in range(3)]
    seen = {mailbox.seen()}
    for at, (slot, client) in enumerate(slots):
        for _ in range(3):
            assert slot.write(letters(mailbox), b"", b"a plan")
            received = client.take(0.0)
            assert received is not None
            client.ended(received.number)
            seen.add(mailbox.seen())
            mailbox.wake()
            seen.add(mailbox.seen())
        assert len(seen) == 1 + 6 * (at + 1)


def test_a_slot_is_given_again_when_it_was_given_back(mailbox: Mailbox) -> None:
    taken = [mailbox.take_slot() for _ in range(SLOTS)]
    assert all(taken)
    assert mailbox.take_slot() is None
    assert taken[7] is not None
    for _ in range(CELLS):
        assert taken[7].write(letters(mailbox), b"", b"before")
    client = MailboxClient(mailbox.segment, 7)
    for _ in range(3):
        assert client.take(0.0)
    client.close()
    slot, again = ends(mailbox)
    assert slot.at == 7
    assert again.take(0.0) is None, "what was written before is gone"
    assert slot.write(letters(mailbox), b"", b"first")
    assert again.take(0.0) == Received(1, 0, b"", b"first")


def test_a_slot_that_nobody_has_taken_is_given_again(mailbox: Mailbox) -> None:
    slot = mailbox.take_slot()
    assert slot is not None
    mailbox.give_back(slot)
    again = mailbox.take_slot()
    assert again is not None
    assert again.at == slot.at
    mailbox.give_back(slot)
    other = mailbox.take_slot()
    assert other is not None
    assert other.at != again.at, "it was given back before, and is another's now"


def test_other_memory_is_not_mapped(mailbox: Mailbox) -> None:
    segment = mailbox.segment
    with pytest.raises(OSError, match="another process"):
        MailboxClient(replace(segment, token=bytes(len(segment.token))), 0)
    with pytest.raises(ValueError, match="no slot"):
        MailboxClient(replace(segment, nbytes=segment.nbytes // 2), 0)
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match="no slot"):
            MailboxClient(segment, slot)
    mailbox.close()
    with pytest.raises(OSError):
        MailboxClient(segment, 0)
    assert segment.pid == os.getpid()
