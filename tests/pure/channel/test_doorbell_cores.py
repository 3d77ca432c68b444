"""The cores of those who wait at a doorbell: who keeps to one, and for how long."""

from __future__ import annotations

import os
import threading

import pytest

from raycollect.channel import doorbell as doorbell_module
from raycollect.channel.doorbell import Doorbell, DoorbellClient
from tests.pure.channel.bells import serve
from tests.pure.placed import Cores
from tests.pure.watched import WAIT_S


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
            self.bell.runs[slot].write(number, number, 0, b"")
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
    all_seats = []
    monkeypatch.setattr(doorbell_module, "YIELD_S", WAIT_S)
    yield lambda *args, **kwargs: all_seats.append(Seats(*args, monkeypatch, **kwargs)) or all_seats[-1]
    for seats in all_seats:
        seats.bell.close()


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


def test_a_thread_of_the_real_system_gets_its_mask_back(monkeypatch):
    """There are as many seats as cores. The masks of other threads are never touched."""
    monkeypatch.setattr(doorbell_module, "YIELD_S", WAIT_S)
    before = os.sched_getaffinity(0)
    bell, seen = Doorbell(max(len(before), 2)), []

    def work():
        post = DoorbellClient(bell.segment, 0, keeps_core=True)
        number = bell.begin()
        bell.runs[0].write(number, 1, 0, b"")
        serve(post, 1)
        post.take(0.001)
        seen.append(os.sched_getaffinity(0))
        post.close()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    bell.close()
    pinned, after = seen
    assert len(pinned) == 1
    assert pinned <= before
    assert after == before == os.sched_getaffinity(0)
