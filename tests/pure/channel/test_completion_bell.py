"""A plan's caller is woken by the participant that sees all of it end; one caller at a time."""

from __future__ import annotations

import os
import threading

import pytest

from raycollect.channel import CompletionBell, CompletionBellClient
from raycollect.channel.completion_bell import SLOTS
from tests.support.values import replace

WAIT_S = 20.0


def test_it_says_which_plan_has_ended(bell: CompletionBell) -> None:
    slots = bell.take_slot(), bell.take_slot()
    clients = [CompletionBellClient(bell.segment, slot) for slot in slots]
    assert not bell.has_rung(7, slots)
    clients[1].ring(7)
    assert bell.has_rung(7, slots)
    assert not bell.has_rung(7, slots[:1]), "the word of another participant"
    assert not bell.has_rung(8, slots)
    clients[0].ring(8)
    assert bell.has_rung(8, slots)


def test_whoever_waits_is_woken_from_another_thread(bell: CompletionBell) -> None:
    slot = bell.take_slot()
    client = CompletionBellClient(bell.segment, slot)
    assert bell.claim()
    ringing = threading.Timer(0.01, client.ring, (3,))
    ringing.start()
    while not bell.has_rung(3, (slot,)):
        bell.wait(WAIT_S)
    ringing.join()
    bell.release()


def test_one_thread_at_a_time_claims_it(bell: CompletionBell) -> None:
    assert bell.claim()
    assert bell.is_mine
    others: list[tuple[bool, bool]] = []
    other = threading.Thread(target=lambda: others.append((bell.claim(), bell.is_mine)))
    other.start()
    other.join(WAIT_S)
    assert others == [(False, False)]
    assert not bell.claim(), "nor twice by the same thread"
    bell.release()
    assert not bell.is_mine
    assert bell.claim()


def test_a_claim_forgets_posts_for_plans_before(bell: CompletionBell) -> None:
    client = CompletionBellClient(bell.segment, bell.take_slot())
    for seq in range(1, 5):
        client.ring(seq)
    assert bell.claim()
    assert bell._memory.semaphore.take(), "there is none"


def test_no_word_is_given_out_twice(bell: CompletionBell) -> None:
    given = [bell.take_slot() for _ in range(SLOTS + 2)]
    assert given == [*range(SLOTS), -1, -1]
    for slot in (SLOTS, -1):
        with pytest.raises(ValueError, match="no word"):
            CompletionBellClient(bell.segment, slot)
    CompletionBellClient(bell.segment, SLOTS - 1).ring(5)
    assert bell.has_rung(5, (SLOTS - 1,))


def test_other_memory_is_not_mapped(bell: CompletionBell) -> None:
    segment = bell.segment
    with pytest.raises(OSError, match="another process"):
        CompletionBellClient(replace(segment, token=bytes(len(segment.token))), 0)
    with pytest.raises(ValueError, match="no word"):
        CompletionBellClient(replace(segment, nbytes=segment.nbytes // 2), 0)
    bell.close()
    with pytest.raises(OSError):
        CompletionBellClient(segment, 0)
    assert segment.pid == os.getpid()
