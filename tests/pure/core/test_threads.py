"""How threads begin, and what the log hears of what is raised in them."""

from __future__ import annotations

import asyncio
import functools
import gc
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raycollect.channel import loop
from raycollect.channel.loop import Loop
from raycollect.core import threads, timers
from raycollect.member.wait_monitor import WaitMonitor
from tests.pure.group.watchdog_desk import Desk

WAIT_S = 20.0


class Clocked:
    """`time`, as `threads` knows it: sleeping lets time go by."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    clocked = Clocked()
    monkeypatch.setattr(threads, "time", clocked)
    return clocked


def boom() -> None:
    raise ValueError("the cause")


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_what_fails_again_and_again_is_told_once_a_minute(clock: Clocked, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        assert not threads.survives(boom)
    assert logged(caplog) == ["MainThread: boom failed; the thread goes on"]
    assert "ValueError: the cause" in caplog.text
    assert "in boom" in caplog.text, "the traceback"
    clock.now_s += threads.EVERY_S
    threads.survives(functools.partial(boom))
    assert logged(caplog)[1:] == ["MainThread: boom failed (99 times more since the last entry); the thread goes on"]


def test_a_step_that_fails_at_once_each_time_takes_no_core_and_no_log(
    clock: Clocked, caplog: pytest.LogCaptureFixture
) -> None:
    left = iter(range(200))

    def step() -> bool:
        if next(left, None) is None:
            return False
        raise ValueError("the cause")

    threads.repeat(step)
    assert clock.slept[:6] == [0.001, 0.004, 0.016, 0.064, 0.256, 1.0]
    assert set(clock.slept[6:]) == {1.0}
    assert 3 <= len(logged(caplog)) <= 4, "some 194 s have gone by"


def test_a_step_that_goes_well_ends_the_rest(clock: Clocked) -> None:
    plan = iter([False, False, True, False, True])

    def step() -> bool:
        goes_well = next(plan, None)
        if goes_well is None:
            return False
        if not goes_well:
            raise ValueError
        return True

    threads.repeat(step)
    assert clock.slept == [0.001, 0.004, 0.001]


def test_the_error_for_whoever_waits_has_the_cause() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert threads.failed("it", ValueError("x" * 10_000)).detail == f"it failed: ValueError: {'x' * 2000}"
    assert threads.failed("it", KeyError()).detail == "it failed: KeyError"
    assert threads.failed("it", Odd()).detail == "it failed: Odd: (its message can't be made: RuntimeError)"


def test_threads_of_many_connections_are_forgotten(clock: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MOST_PLACES", 8)
    for number in range(100):
        threads.survives(boom, place=f"connection {number}")
    assert len(threads._log_entries) <= 8


def test_a_socket_whose_callback_fails_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays ready, so that looking at it at once would take a core; the loop does other things meanwhile."""
    monkeypatch.setattr(loop, "_REST_S", 0.05)
    started, (ours, theirs) = Loop("raycollect-test"), socket.socketpair()
    calls, done, enough = list[int](), threading.Event(), threading.Event()

    def ready(events: int) -> None:
        calls.append(events)
        if len(calls) == 3:
            enough.set()
            ours.recv(10)
            return
        raise ValueError("the cause")

    try:
        started.call_soon(lambda: started.watch(ours, loop.selectors.EVENT_READ, ready))
        theirs.send(b"x")
        assert enough.wait(WAIT_S)
        started.call_soon(done.set)
        assert done.wait(WAIT_S)
        assert len(calls) == 3
        assert len(logged(caplog)) == 1
    finally:
        started.close()
        ours.close()
        theirs.close()


def test_a_socket_that_was_closed_meanwhile_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_REST_S", 0.0)
    started, (ours, theirs) = Loop("raycollect-test"), socket.socketpair()
    failed, later = threading.Event(), threading.Event()

    def ready(events: int) -> None:
        ours.close()
        failed.set()
        raise ValueError("the cause")

    started.call_soon(lambda: started.watch(ours, loop.selectors.EVENT_READ, ready))
    theirs.send(b"x")
    assert failed.wait(WAIT_S)
    started.call_soon(lambda: started.call_later(0.01, later.set) and None)
    assert later.wait(WAIT_S)
    started.close()
    theirs.close()


def test_a_loop_that_does_not_end_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Loop("raycollect-test").close()
    assert logged(caplog) == []
    monkeypatch.setattr(loop, "_JOIN_TIMEOUT_S", 0.05)
    started, go_on = Loop("raycollect-test"), threading.Event()
    started.call_soon(lambda: go_on.wait(WAIT_S) and None)
    started.close()
    assert logged(caplog) == ["raycollect-test does not end: one of its callbacks blocks"]
    go_on.set()
    started.close()


# ---------------------------------------------------------------------------------------------- diagnostics


class Given:
    """What a call is given."""

    def fail(self) -> None:
        raise ValueError("the cause")


@pytest.mark.parametrize("is_good", [True, False])
def test_call_whose_await_is_cancelled_is_made_all_the_same(is_good: bool, caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on, callers = threading.Event(), threading.Event(), list[threading.Thread]()

    def call() -> int:
        callers.append(threading.current_thread())
        begun.set()
        assert go_on.wait(WAIT_S)
        return 5 if is_good else boom()  # type: ignore[func-returns-value]

    async def main() -> None:
        cancelled, waited_for = threads.awaitable(call), threads.awaitable(call)
        await asyncio.to_thread(begun.wait)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        go_on.set()
        if is_good:
            assert await waited_for == 5
        else:
            with pytest.raises(ValueError, match="the cause"):
                await waited_for

    asyncio.run(main())
    assert len(callers) == 2
    for caller in callers:
        caller.join(WAIT_S)
    assert logged(caplog) == []


def test_what_a_failed_call_apart_was_given_goes_with_its_future() -> None:
    gc.collect()
    gc.disable()
    try:
        given = Given()
        reference, future = weakref.ref(given), threads.call_in_helper(Given.fail, given, name="a test")
        del given
        with pytest.raises(ValueError, match="the cause"):
            future.result(WAIT_S)
        for thread in threading.enumerate():
            if thread.name == "a test":
                thread.join(WAIT_S)
        del future
        assert reference() is None
    finally:
        gc.enable()


def test_without_a_thread_that_looks_calls_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process may have no more threads to give."""

    def later(*_: Any) -> timers.Timer:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(timers, "later", later)
    with WaitMonitor().waiting(boom, boom):
        pass
    Desk().watchdog.begun()
    assert len(logged(caplog)) == 2


def test_what_several_threads_ask_for_is_made_once() -> None:
    memo: dict[Any, Any] = {}
    made, may_end = threading.Event(), threading.Event()

    def make() -> str:
        made.set()
        may_end.wait(WAIT_S)
        return "made"

    with ThreadPoolExecutor(2) as workers:
        first = workers.submit(threads.once, memo, "key", make)
        assert made.wait(WAIT_S)
        other = workers.submit(threads.once, memo, "key", lambda: "again")
        may_end.set()
        assert (first.result(WAIT_S), other.result(WAIT_S)) == ("made", "made")


def test_what_fails_is_made_again() -> None:
    memo: dict[Any, Any] = {}
    with pytest.raises(ZeroDivisionError):
        threads.once(memo, "key", lambda: 1 // 0)
    assert threads.once(memo, "key", lambda: 1) == 1
