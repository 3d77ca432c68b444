"""What is told of waits: those that last, on the main thread, and their end."""

from __future__ import annotations

import threading

from raycollect.member.wait_monitor import WaitMonitor


def test_long_wait_is_reported_twice_and_its_end_once():
    told, events = threading.Event(), []

    def tell(is_long):
        events.append("again" if is_long else "told")
        if is_long:
            told.set()

    watch = WaitMonitor(0.01)
    for _ in range(2):
        told.clear()
        with watch.waiting(tell, lambda: events.append("over")):
            assert told.wait(10)
    assert events == ["told", "again", "over"] * 2


def test_short_wait_is_not_reported():
    events = []
    watch = WaitMonitor(60)
    for _ in range(100):
        with watch.waiting(lambda _: events.append("told"), lambda: events.append("over")):
            pass
    assert events == []


def test_other_threads_may_wait_as_long_as_they_like():
    events, main_told = [], threading.Event()
    watch = WaitMonitor(0.01)

    def elsewhere():
        with watch.waiting(lambda _: events.append("told"), lambda: events.append("over")):
            # As long as it takes to tell of the main thread's wait, which began later.
            assert main_told.wait(10)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with watch.waiting(lambda _: main_told.set(), lambda: None):
        thread.join()
    assert events == []
