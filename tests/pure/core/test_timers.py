"""Calls at a later time: in their order, in one thread, not when they were cancelled."""

from __future__ import annotations

import math
import os
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from raycollect.core import threads, timers
from raycollect.core.timers import TimerQueue, Watcher
from tests.pure.processes import Process

WAIT_S = 20.0


def test_calls_come_when_they_are_due_in_one_thread() -> None:
    calls = SimpleQueue[tuple[int, str]]()

    def call(number: int) -> None:
        calls.put((number, threading.current_thread().name))

    cancelled = timers.later(0.01, lambda: call(0))
    timers.later(0.04, lambda: call(2))
    timers.later(0.02, lambda: call(1))  # earlier than what the thread sleeps for
    cancelled.cancel()
    assert [calls.get(timeout=WAIT_S) for _ in range(2)] == [(1, "raycollect-timer"), (2, "raycollect-timer")]
    last = timers.later(300.0, lambda: call(3))
    for number in range(10, 30):  # most of which find the thread asleep until the last one is due
        timers.later(0.0, lambda number=number: call(number))  # type: ignore[misc]
        assert calls.get(timeout=WAIT_S)[0] == number
    last.cancel()
    timers.later(0.0, lambda: call(4))  # now it need not sleep for so long
    assert calls.get(timeout=WAIT_S)[0] == 4


def test_a_queue_gives_what_is_due() -> None:
    queue = TimerQueue()
    assert queue.left_s() is None
    first, second = (queue.add(delay_s, lambda: None) for delay_s in (0.0, 60.0))
    assert queue.left_s() == 0
    first.cancel()
    assert queue.pop() is None
    assert 0 < (queue.left_s() or 0) <= 60
    second.cancel()
    assert queue.left_s() is None
    assert queue.all == []


def test_where_no_thread_can_be_started_it_is_said_or_the_call_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    here = timers._TimerThread()
    monkeypatch.setattr(threads, "start", start)
    monkeypatch.setattr(timers, "later", here.later)
    called = []
    with pytest.raises(RuntimeError, match="new thread"):
        timers.later(0.0, lambda: called.append("late"))
    timers.soon_or_now(60.0, lambda: called.append("at once"))
    assert called == ["at once"]


def fork_while_a_call_is_due() -> str:
    """Forks, has both processes make a call; gives the process that makes the parent's first one."""
    reader, writer = os.pipe()
    timers.later(0.1, lambda: os.write(writer, f"{os.getpid()} ".encode()))
    child, come = os.fork(), threading.Event()
    timers.later(0.15, come.set)
    assert come.wait(WAIT_S)
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return "the parent" if os.read(reader, 100) == f"{os.getpid()} ".encode() else "the child, too"


def test_a_forked_child_makes_no_call_of_its_parents() -> None:
    process = Process()
    try:
        assert process.call(fork_while_a_call_is_due) == "the parent"
    finally:
        process.close()


class Watching(Watcher):
    """Looks as often as it is told."""

    def __init__(self, *left_s: float) -> None:
        super().__init__()
        self.left = list(left_s)
        self.looks = SimpleQueue[int]()

    def look(self) -> float:
        self.looks.put(len(self.left))
        return self.left.pop(0) if self.left else math.inf


def test_a_watcher_looks_as_long_as_there_is_something() -> None:
    watcher = Watching(0.01, math.inf)
    watcher.look_after(60.0)
    watcher.look_after(0.0)  # sooner
    assert [watcher.looks.get(timeout=WAIT_S) for _ in range(2)] == [2, 1]
    watcher.look_after(0.0)
    assert watcher.looks.get(timeout=WAIT_S) == 0
    assert watcher.looks.empty()


def test_a_watcher_that_is_stopped_looks_no_more() -> None:
    watcher, other = Watching(), Watching()
    watcher.look_after(0.02)
    watcher.stop()
    watcher.look_after(0.01)
    other.look_after(0.04)
    assert other.looks.get(timeout=WAIT_S) == 0
    assert watcher.looks.empty()
