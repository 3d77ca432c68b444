"""What is submitted to several actors at once: no call of another thread comes between, and nobody waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from raycollect.core.submitted_calls import AllHeld, SubmittedCalls

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
