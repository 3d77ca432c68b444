"""What is submitted to several actors at once: no call of another thread comes between, and nobody waits for ever."""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray._private.state import state

from raycollect.ray_bridge import ray_cluster
from raycollect.ray_bridge.submitted_calls import AllHeld, SubmittedCalls

WAIT_S = 30.0


def test_all_locks_are_held_and_given_back():
    calls = [SubmittedCalls() for _ in range(3)]
    with ThreadPoolExecutor(1) as other:

        def are_free():
            found = [one.lock.acquire(blocking=False) for one in calls]
            for one in [one for one, is_free in zip(calls, found, strict=True) if is_free]:
                one.lock.release()
            return found

        with AllHeld(calls):
            assert other.submit(are_free).result(WAIT_S) == [False] * 3
        assert other.submit(are_free).result(WAIT_S) == [True] * 3
        with pytest.raises(ValueError, match="within"), AllHeld(calls):
            raise ValueError("within")
        assert other.submit(are_free).result(WAIT_S) == [True] * 3
        with AllHeld(()):
            pass


def test_who_holds_the_last_lock_and_wants_the_first_gets_it():
    """As a finalizer that calls another actor while Ray pickles arguments."""
    first, last = SubmittedCalls(), SubmittedCalls()
    holds, waited = threading.Event(), []
    acquire = first.lock.acquire

    def call():
        with last.lock:
            holds.set()
            begun.wait(WAIT_S)  # the other thread has the first
            waited.append(acquire(timeout=WAIT_S))
            first.lock.release()

    begun = threading.Event()

    class Telling:
        """The first lock, which tells that it was taken."""

        def acquire(self, *args, **given):
            taken = acquire(*args, **given)
            begun.set()
            return taken

        def release(self):
            first.lock.release()

    shown = SubmittedCalls()
    shown.lock = Telling()
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(call)
        assert holds.wait(WAIT_S)
        with AllHeld([shown, last]):
            asked.result(WAIT_S)
    assert waited == [True]


@pytest.fixture
def often_switched():
    """Threads take turns a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_want_the_same_locks_in_other_orders_all_get_them(often_switched, seed):
    """None keeps a lock for another that the other keeps for it, turn after turn."""
    calls, holders = [SubmittedCalls() for _ in range(4)], [0] * 4

    def take(seed):
        chance = random.Random(seed)
        for _ in range(1000):
            some = chance.sample(range(4), chance.randint(2, 4))
            with AllHeld([calls[at] for at in some]):
                for at in some:
                    holders[at] += 1
                assert all(holders[at] == 1 for at in some)
                for at in some:
                    holders[at] -= 1

    with ThreadPoolExecutor(4) as threads:
        for taken in [threads.submit(take, 10 * seed + at) for at in range(4)]:
            taken.result(WAIT_S)


def test_a_control_store_without_an_answer_counts_as_a_restart(monkeypatch):
    """Ray's own request has no time limit, and a lease waited for it as long as the store was away."""
    answer = threading.Event()
    monkeypatch.setattr(state, "actor_table", lambda actor_id: answer.wait(60) and {})
    assert ray_cluster.has_restarted("00" * 16)
    answer.set()
    assert not ray_cluster.has_restarted("00" * 16)
