"""The doorbell: runs and answers in shared memory, over processes and threads."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from raycollect.channel import doorbell as doorbell_module
from raycollect.channel.doorbell import INLINE_NBYTES, Doorbell, DoorbellClient, Entry
from raycollect.core.model import TASK_NBYTES
from raycollect.core.semaphores import Semaphore
from raycollect.core.signals import Deferred, deliver
from tests.pure.channel.bells import take
from tests.support.values import replace
from tests.support.waiting import interrupt_in


@pytest.fixture
def bell():
    doorbell = Doorbell(3)
    yield doorbell
    doorbell.close()


def answer(doorbell, slot, number):
    (payload,) = doorbell.answers(number, [slot])
    return payload


def test_a_message_that_does_not_fit_goes_by_the_channel(bell):
    post = DoorbellClient(bell.segment, 0)
    for nbytes, fits in ((INLINE_NBYTES, True), (INLINE_NBYTES + 1, False), (0, True)):
        payload = os.urandom(nbytes)
        number = bell.begin()
        after = os.urandom(TASK_NBYTES) if nbytes % 2 else b""
        assert bell.runs[0].write(number, 1, 0, payload, after) is fits
        assert take(post) == Entry(number, 1, 0, payload if fits else None, after)
        assert post.answer(number, payload) is fits
        assert answer(bell, 0, number) == (payload if fits else None)


def test_a_message_that_does_not_fit_leaves_the_next_cell_as_it_is(bell):
    post, first, second = DoorbellClient(bell.segment, 0), bell.begin(), bell.begin()
    bell.runs[0].write(second, 1, 0, b"next")
    bell.runs[0].write(first, 1, 0, bytes(INLINE_NBYTES + 1))
    assert [take(post).payload for _ in range(2)] == [None, b"next"]


def test_both_ends_stay_awake_for_a_while_before_they_sleep(monkeypatch):
    """After a run was begun, and after it was answered: the other end is heard of while they yield."""
    bell, steps = Doorbell(1), []
    post = DoorbellClient(bell.segment, 0)
    for sleeps in (bell._semaphore, post._futex):
        monkeypatch.setattr(sleeps, "wait", lambda *_: pytest.fail("it sleeps"))
    monkeypatch.setattr(doorbell_module, "YIELD_S", 20.0)
    bell._awake_s = 20.0  # however few cores there are
    monkeypatch.setattr(os, "sched_yield", lambda: steps.pop()())
    number = bell.begin()
    bell.runs[0].write(number, 1, 0, b"")
    take(post)
    steps += [lambda: post.answer(number, b"answer"), lambda: None]
    bell.wait(20.0, number, [0])
    assert answer(bell, 0, number) == b"answer"
    steps += [lambda: bell.runs[0].write(number + 1, 1, 0, b"run"), lambda: None]
    assert post.take(20.0).payload == b"run"
    bell.close()


def test_a_signal_ends_a_sleep_and_leaves_nothing_locked(bell, monkeypatch):
    monkeypatch.setattr(bell, "_awake_until_s", 0.0)
    interrupting = interrupt_in(Semaphore.wait)
    with pytest.raises(KeyboardInterrupt), Deferred():
        for _ in range(100):
            bell.wait(20.0)
            deliver()
    interrupting.join(20)
    assert not bell._asleep.locked()
    waits, wait = [], bell._semaphore.wait
    monkeypatch.setattr(bell._semaphore, "wait", lambda *args: waits.append(args) or wait(*args))
    bell.wake()
    for _ in range(2):
        bell.wait(20.0)
    assert waits, "it sleeps again, and does not only look"


def test_all_who_sleep_are_woken_at_once(bell, monkeypatch):
    """A run that is written wakes nobody: who is woken may take the waker's core before it has written the next."""
    monkeypatch.setattr(doorbell_module, "_SLICE_S", 60.0)
    posts, asleep, taken = [DoorbellClient(bell.segment, slot) for slot in range(3)], threading.Barrier(4), []
    for post in posts:
        post._futex.wait = lambda *args, wait=post._futex.wait: (asleep.wait(20), wait(*args))[1]
    threads = [threading.Thread(target=lambda post=post: taken.append(post.take(60.0))) for post in posts]
    for thread in threads:
        thread.start()
    asleep.wait(20)
    number = bell.begin()
    for ring in bell.runs:
        ring.write(number, 1, 0, b"")
    threads[0].join(0.05)
    assert not taken
    bell.ring(number)
    for thread in threads:
        thread.join(20)
    assert taken == [Entry(number, 1, 0, b"")] * 3


def test_who_has_slept_yields_once_it_has_answered(bell, monkeypatch):
    """Others on its core may not have begun."""
    post, yields = DoorbellClient(bell.segment, 0), []

    def wait(*args):
        bell.runs[0].write(number, 1, 0, b"")

    monkeypatch.setattr(post._futex, "wait", wait)
    number = bell.begin()
    take(post)
    monkeypatch.setattr(doorbell_module.os, "sched_yield", lambda: yields.append(answer(bell, 0, number)))
    post.answer(number, b"")
    assert yields == [b""], "after the answer"
    number = bell.begin()
    bell.runs[0].write(number, 1, 0, b"")
    take(post)
    post.answer(number, b"")
    assert len(yields) == 1


def test_a_wake_before_the_wait_counts_once(bell):
    post = DoorbellClient(bell.segment, 0)
    post.wake()
    assert post.take(60.0) is None
    number = bell.begin()
    bell.runs[0].write(number, 1, 0, b"")
    assert post.take(60.0) == Entry(number, 1, 0, b"")
    post.wake()
    assert post.take(60.0) is None
    assert not post._woken


def test_a_seat_that_nobody_takes_or_that_was_given_up_is_not_waited_for(bell):
    first, second = DoorbellClient(bell.segment, 0), DoorbellClient(bell.segment, 1)
    number = bell.begin()
    for slot in range(3):
        bell.runs[slot].write(number, 1, 0, b"")
    take(first), take(second)
    second.close()
    rung = []
    first._memory.controller.drain()
    first.answer(number, b"")
    rung.append(first._memory.controller.wait(0.0))
    assert rung == [True]


def test_the_last_answer_rings(bell):
    posts = [DoorbellClient(bell.segment, slot) for slot in range(3)]
    rung = posts[0]._memory.controller
    number = bell.begin()
    for slot in range(3):
        bell.runs[slot].write(number, 1, 0, b"")
    for post, rings in zip(posts, (False, False, True), strict=True):
        take(post)
        post.answer(number, b"x" * (INLINE_NBYTES + 1))  # one that goes by the channel counts as well
        assert rung.wait(0.0) is rings


@pytest.mark.parametrize("nbytes", [0, INLINE_NBYTES + 1])
def test_who_waits_sleeps_only_if_no_answer_is_to_be_taken(bell, monkeypatch, nbytes):
    """Its post may have been taken with that of another run. An answer that goes by the channel is waited for."""
    post, number, waits = DoorbellClient(bell.segment, 0), bell.begin(), []
    bell.runs[0].write(number, 1, 0, b"")
    take(post)
    post.answer(number, b"x" * nbytes)
    monkeypatch.setattr(bell, "_awake_until_s", 0.0)
    monkeypatch.setattr(bell._semaphore, "wait", waits.append)
    for _ in range(2):  # the first sees what was taken
        bell.wait(20.0, number, [0])
    assert bool(waits) is (nbytes > 0)


def test_only_the_memory_that_was_meant_is_opened(bell):
    with pytest.raises(OSError, match="the memory of another process"):
        DoorbellClient(replace(bell.segment, token=bytes(32)), 0)
    with pytest.raises(ValueError, match="no slot 3 at a doorbell of 3"):
        DoorbellClient(bell.segment, 3)
    bell.close()
    with pytest.raises(OSError):
        DoorbellClient(bell.segment, 0)


def test_nothing_stays_behind():
    gc.collect()  # what tests before it have left would go in the middle
    maps = Path("/proc/self/maps")
    before, mapped = set(os.listdir("/proc/self/fd")), maps.read_text().count("raycollect-doorbell")  # noqa: PTH208
    doorbell = Doorbell(2)
    post = DoorbellClient(doorbell.segment, 0)
    assert maps.read_text().count("raycollect-doorbell") == mapped + 2
    del post
    doorbell.close()
    doorbell.close()
    del doorbell
    assert maps.read_text().count("raycollect-doorbell") == mapped
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
