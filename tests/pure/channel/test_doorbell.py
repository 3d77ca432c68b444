"""The doorbell: runs and answers in shared memory, over processes and threads."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raycollect.channel import doorbell as doorbell_module
from raycollect.channel.doorbell import IN_FLIGHT, INLINE_NBYTES, Doorbell, DoorbellClient, Entry
from raycollect.core.model import Segment
from tests.pure.placed import Cores
from tests.pure.processes import Process
from tests.pure.watched import WAIT_S


@pytest.fixture
def bell():
    doorbell = Doorbell(3)
    yield doorbell
    doorbell.close()


def answers(doorbell, slots, number, limit_s=20.0):
    """Waits for the answers of all seats, as a run does."""
    until_s = time.monotonic() + limit_s
    while True:
        found = [doorbell.answer(slot, number) for slot in range(slots)]
        if None not in found:
            return found
        assert time.monotonic() < until_s, found
        doorbell.wait(until_s - time.monotonic())


def take(post):
    """The next run, however often `take` returns without one."""
    while (entry := post.take(5.0)) is None:
        pass
    return entry


def serve(post, runs, answer=bytes):
    """Answers runs by what they bring."""
    for _ in range(runs):
        entry = take(post)
        post.answer(entry.number, answer(entry.payload))


def serve_elsewhere(segment: Segment, slot, runs):
    post = DoorbellClient(segment, slot)
    seen = []
    for _ in range(runs):
        entry = take(post)
        seen.append((entry.seq, entry.predecessor))
        post.answer(entry.number, entry.payload[::-1])
    return seen


def test_a_run_and_its_answer(bell):
    post = DoorbellClient(bell.segment, 1)
    number = bell.begin()
    assert bell.ring(1, number, 70, 60, b"arguments")
    assert post.take(1.0) == Entry(1, 70, 60, b"arguments")
    assert bell.answer(1, number) is None
    assert post.answer(number, b"result")
    assert bell.answer(1, number) == b"result"
    assert bell.answer(0, number) is None


def test_a_message_that_does_not_fit_goes_by_the_channel(bell):
    post = DoorbellClient(bell.segment, 0)
    for nbytes, fits in ((INLINE_NBYTES, True), (INLINE_NBYTES + 1, False), (0, True)):
        payload = os.urandom(nbytes)
        number = bell.begin()
        assert bell.ring(0, number, 1, 0, payload) is fits
        assert take(post).payload == (payload if fits else None)
        assert post.answer(number, payload) is fits
        assert bell.answer(0, number) == (payload if fits else None)


def test_numbers_far_beyond_the_ring(bell):
    post = DoorbellClient(bell.segment, 2)
    for seq in range(1, 5 * IN_FLIGHT + 3):
        number = bell.begin()
        bell.ring(2, number, 1 << 38 | seq, seq, seq.to_bytes(4, "little"))
        assert take(post) == Entry(number, 1 << 38 | seq, seq, seq.to_bytes(4, "little"))
        assert bell.answer(2, number) is None  # the one of the last time round is not taken for it
        post.answer(number, b"")
        assert bell.answer(2, number) == b""


def test_several_runs_in_flight_come_in_order(bell):
    numbers = [bell.begin() for _ in range(IN_FLIGHT)]
    for number in numbers:
        bell.ring(0, number, 10 * number, 10 * number - 10, bytes([number]))
    post = DoorbellClient(bell.segment, 0)
    assert [take(post).number for _ in numbers] == numbers
    for number in numbers:
        post.answer(number, bytes([number, number]))
    assert [bell.answer(0, number) for number in numbers] == [bytes([number, number]) for number in numbers]


@pytest.mark.parametrize("seed", range(3))
def test_processes(seed):
    random_ = random.Random(seed)
    slots, runs = 3, 300
    doorbell, processes = Doorbell(slots), [Process() for _ in range(slots)]
    try:
        served = [one.start(serve_elsewhere, doorbell.segment, slot, runs) for slot, one in enumerate(processes)]
        begun = []
        for run in range(1, runs + 1):
            number = doorbell.begin()
            payloads = [random_.randbytes(random_.choice((0, 1, 17, INLINE_NBYTES))) for _ in range(slots)]
            for slot, payload in enumerate(payloads):
                doorbell.ring(slot, number, run, run - 1, payload)
            begun.append((number, payloads))
            while len(begun) > random_.randrange(IN_FLIGHT):
                number, payloads = begun.pop(0)
                assert answers(doorbell, slots, number) == [payload[::-1] for payload in payloads]
        for number, payloads in begun:
            assert answers(doorbell, slots, number) == [payload[::-1] for payload in payloads]
        for one in served:
            assert one.result(20) == [(run, run - 1) for run in range(1, runs + 1)]
    finally:
        doorbell.close()
        for one in processes:
            one.close()


def test_many_threads_wait_for_runs_of_their_own():
    doorbell = Doorbell(2)
    posts = [DoorbellClient(doorbell.segment, slot) for slot in range(2)]
    runs, ending, under_way, begun = 200, threading.Condition(), set(), [0]
    serving = [threading.Thread(target=serve, args=(post, runs)) for post in posts]
    done, failed = [], []

    def drive(count):
        for _ in range(count):
            with ending:  # a thread may be slow to read its answers, and their cells are written again
                ending.wait_for(lambda: begun[-1] + 1 - min(under_way, default=begun[-1]) < IN_FLIGHT)
                number = doorbell.begin()
                begun.append(number)
                under_way.add(number)
                for slot in range(2):
                    doorbell.ring(slot, number, number, 0, b"%d" % number)
            try:
                assert answers(doorbell, 2, number) == [b"%d" % number] * 2
                done.append(number)
                with ending:
                    under_way.remove(number)
                    ending.notify_all()
            except BaseException as exc:
                failed.append(exc)
                raise

    driving = [threading.Thread(target=drive, args=(runs // 4,)) for _ in range(4)]
    start_s = time.monotonic()
    for one in serving + driving:
        one.start()
    for one in serving + driving:
        one.join(30)
    assert not failed
    assert sorted(done) == list(range(1, runs + 1))
    # A ring that is lost costs half a second: there were none to speak of.
    assert time.monotonic() - start_s < 0.5 * runs / 4
    doorbell.close()


class Interrupted:
    """A lock whose next acquisition is interrupted by a signal, once the lock is taken."""

    def __init__(self, lock):
        self.lock, self.armed = lock, True

    def acquire(self, *args, **kwargs):
        taken = self.lock.acquire(*args, **kwargs)
        if taken and self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return taken

    def release(self):
        self.lock.release()


def sleep_at(bell):
    """Waits as one does who was not told of anything since."""
    bell.wait(20.0)  # it sees what was taken
    bell.wait(20.0)


@pytest.mark.parametrize("where", ["lock", "bells"])
def test_a_signal_in_a_wait_holds_up_nobody_for_long(bell, monkeypatch, where):
    monkeypatch.setattr(doorbell_module, "_SLICE_S", 0.05)
    post, number = DoorbellClient(bell.segment, 0), bell.begin()
    monkeypatch.setattr(bell, "_awake_until_s", 0.0)
    bell.ring(0, number, 1, 0, b"")
    with monkeypatch.context() as patch:
        if where == "lock":
            patch.setattr(bell, "_asleep", Interrupted(bell._asleep))
        else:
            patch.setattr(bell._memory.semaphores, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sleep_at(bell)
        if where == "lock":
            monkeypatch.setattr(bell, "_asleep", bell._asleep.lock)
    assert bell._asleep.locked() is (where == "lock")
    for _ in range(2):
        start_s = time.monotonic()
        sleep_at(bell)
        assert time.monotonic() - start_s < 10.0
    assert not bell._asleep.locked()
    waits, wait = [], bell._memory.semaphores.wait
    monkeypatch.setattr(bell._memory.semaphores, "wait", lambda *args: waits.append(args) or wait(*args))
    sleep_at(bell)
    assert waits, "it sleeps again, and does not only look"
    serve(post, 1)
    assert bell.answer(0, number) == b""


def test_a_signal_as_rings_are_taken_holds_up_nobody_for_long(bell, monkeypatch):
    """Now and then a run takes those that nobody waited for."""
    monkeypatch.setattr(doorbell_module, "_SLICE_S", 0.05)
    lock = Interrupted(bell._asleep)
    monkeypatch.setattr(bell, "_asleep", lock)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            bell.begin()
    monkeypatch.setattr(bell, "_awake_until_s", 0.0)
    assert lock.lock.locked()
    sleep_at(bell)
    assert not lock.lock.locked()


def interrupted(*args):
    raise KeyboardInterrupt


def test_wake_ends_a_wait_on_either_side(bell):
    post = DoorbellClient(bell.segment, 0)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(post.take(60.0)))
    thread.start()
    post.wake()
    thread.join(10)
    assert taken == [None]
    waiting = threading.Thread(target=lambda: [bell.wait(60.0) for _ in range(3)])
    waiting.start()
    while waiting.is_alive():
        bell.wake()
        waiting.join(0.01)


def test_a_wake_before_the_wait_counts(bell):
    post = DoorbellClient(bell.segment, 0)
    post.wake()
    assert post.take(60.0) is None
    assert post.take(0.0) is None


def test_a_seat_that_nobody_takes_or_that_was_given_up_is_not_waited_for(bell):
    first, second = DoorbellClient(bell.segment, 0), DoorbellClient(bell.segment, 1)
    number = bell.begin()
    for slot in range(3):
        bell.ring(slot, number, 1, 0, b"")
    take(first), take(second)
    second.close()
    rung = []
    first._memory.semaphores.drain(3)
    first.answer(number, b"")
    rung.append(first._memory.semaphores.wait(3, 0.0))
    assert rung == [True]


def test_the_last_answer_rings(bell):
    posts = [DoorbellClient(bell.segment, slot) for slot in range(3)]
    bells = posts[0]._memory.semaphores
    number = bell.begin()
    for slot in range(3):
        bell.ring(slot, number, 1, 0, b"")
    for post, rings in zip(posts, (False, False, True), strict=True):
        take(post)
        post.answer(number, b"x" * (INLINE_NBYTES + 1))  # one that goes by the channel counts as well
        assert bells.wait(3, 0.0) is rings


def test_only_the_memory_that_was_meant_is_opened(bell):
    with pytest.raises(OSError, match="the memory of another process"):
        DoorbellClient(replace(bell.segment, token=bytes(32)), 0)
    with pytest.raises(ValueError, match="no slot 3 at a doorbell of 3"):
        DoorbellClient(bell.segment, 3)
    bell.close()
    with pytest.raises(OSError):
        DoorbellClient(bell.segment, 0)


@pytest.mark.parametrize("slots", [1, 2, 5, 16, 64, 200])
def test_the_size_tells_the_seats(slots):
    doorbell = Doorbell(slots)
    last = DoorbellClient(doorbell.segment, slots - 1)
    number = doorbell.begin()
    doorbell.ring(slots - 1, number, 1, 0, b"last")
    assert take(last).payload == b"last"
    with pytest.raises(ValueError):
        DoorbellClient(doorbell.segment, slots)
    doorbell.close()


class Seats:
    """Posts of one doorbell, in turn in this thread, on a system of a few cores."""

    def __init__(self, cores, at, monkeypatch, *, keeps_core=True):
        self.system = Cores(set(range(cores))).install(monkeypatch, doorbell_module)
        self.monkeypatch = monkeypatch
        self.system.at = dict(enumerate(at))
        self.bell, self.posts = Doorbell(len(at)), []
        for slot in range(len(at)):
            self.system.who = slot
            self.posts.append(DoorbellClient(self.bell.segment, slot, keeps_core=keeps_core))

    def run(self):
        """All do one run."""
        number = self.bell.begin()
        for slot, post in enumerate(self.posts):
            self.bell.ring(slot, number, number, 0, b"")
            self.system.who = slot
            serve(post, 1)

    def wait(self, slot, awake):
        """One waits for a run that does not come."""
        self.system.who = slot
        with self.monkeypatch.context() as patch:
            if not awake:
                patch.setattr(self.posts[slot], "_awake_until_s", 0.0)
            assert self.posts[slot].take(0.001) is None

    @property
    def masks(self):
        return [self.system.masks.get(slot, self.system.mask) for slot in range(len(self.posts))]


@pytest.fixture
def seats_at(monkeypatch):
    made = []
    monkeypatch.setattr(doorbell_module, "YIELD_S", WAIT_S)
    yield lambda *args, **kwargs: made.append(Seats(*args, monkeypatch, **kwargs)) or made[-1]
    for one in made:
        one.bell.close()


@pytest.mark.parametrize(("cores", "at"), [(2, [1, 0]), (2, [0, 1, 0]), (1, [0, 0]), (4, [3, 1, 0, 2]), (3, [0] * 3)])
def test_where_seats_and_controller_outnumber_the_cores_each_keeps_to_one_while_awake(seats_at, cores, at):
    slots, every = seats_at(cores, at), set(range(cores))
    for slot in range(len(at)):
        slots.wait(slot, awake=True)
    assert slots.masks == [every] * len(at), "no run has come yet, so nobody stays awake for the next"
    slots.run()
    for slot in (*range(len(at)), *range(len(at))):
        slots.wait(slot, awake=True)
    assert slots.masks == [{slots.system.at[slot]} for slot in range(len(at))]
    counts = [list(slots.system.at.values()).count(core) for core in every]
    assert max(counts) - min(counts) <= 1
    slots.run()
    assert all(len(mask) == 1 for mask in slots.masks), "a run does not end it"
    for slot, post in enumerate(slots.posts):
        if slot % 2:
            slots.wait(slot, awake=False)
        else:
            slots.system.who = slot
            post.close()
    assert slots.masks == [every] * len(at)
    moves = len(slots.system.moves)
    for slot, post in enumerate(slots.posts):
        slots.system.who = slot
        post.close()
    assert len(slots.system.moves) == moves


@pytest.mark.parametrize(
    ("cores", "at", "keeps_core"),
    [(3, [0, 0], True), (4, [1, 1, 1], True), (2, [0, 0], False), (2, [0, 0, 0], False)],
)
def test_with_cores_to_spare_or_where_it_must_not_nobody_keeps_to_one(seats_at, cores, at, keeps_core):
    slots = seats_at(cores, at, keeps_core=keeps_core)
    for _ in range(2):
        slots.run()
        for slot in range(len(at)):
            slots.wait(slot, awake=True)
            slots.wait(slot, awake=False)
    for slot, post in enumerate(slots.posts):
        slots.system.who = slot
        post.close()
    assert slots.system.moves == []
    assert list(slots.system.at.values()) == at


def test_who_keeps_to_no_core_unless_asked(seats_at):
    slots = seats_at(2, [0, 0])
    slots.posts = [DoorbellClient(slots.bell.segment, slot) for slot in range(2)]
    slots.run()
    slots.wait(0, awake=True)
    assert slots.system.moves == []


def test_who_sleeps_may_go_anywhere(seats_at, monkeypatch):
    """Before it sleeps, so that it is woken where there is room."""
    slots, asleep = seats_at(2, [0, 0]), []
    slots.run()
    slots.wait(0, awake=True)
    assert slots.masks[0] == {0}
    bells = slots.posts[0]._memory.semaphores
    monkeypatch.setattr(bells, "wait", lambda *args: asleep.append(slots.system.get_mask(0)))
    slots.wait(0, awake=False)
    assert asleep[0] == {0, 1}


def test_a_thread_of_the_real_system_gets_its_mask_back(monkeypatch):
    """As many seats as cores; and what other threads may do is never touched."""
    monkeypatch.setattr(doorbell_module, "YIELD_S", WAIT_S)
    before = os.sched_getaffinity(0)
    bell, seen = Doorbell(max(len(before), 2)), []

    def work():
        post = DoorbellClient(bell.segment, 0, keeps_core=True)
        number = bell.begin()
        bell.ring(0, number, 1, 0, b"")
        serve(post, 1)
        post.take(0.001)
        seen.append(os.sched_getaffinity(0))
        post.close()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    bell.close()
    kept, after = seen
    assert len(kept) == 1
    assert kept <= before
    assert after == before == os.sched_getaffinity(0)


def test_nothing_stays_behind():
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
