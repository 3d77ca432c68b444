"""Locks of actors: held while a version is copied, and given up in time."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from types import SimpleNamespace

import pytest

from raycollect.errors import CollectiveTimeoutError, InvalidArgumentError, UnsupportedError, VersionError
from raycollect.weights.exclusion import Exclusion
from tests.support.waiting import wait_until

SHORT_S, LONG_S = 0.05, 30.0


@pytest.fixture
def loop():
    """An event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=["threading", "a method", "asyncio", "an async method"])
def locked(request, loop):
    """A lock of each kind: the actor, what acquires and releases it, and whether it is held."""
    if "async" not in request.param:
        lock = threading.Lock()

        @contextmanager
        def paused():
            with lock:
                yield

        held = lock if request.param == "threading" else paused
        return SimpleNamespace(lock=held), lock.acquire, lock.release, lock.locked
    lock = asyncio.Lock()

    @asynccontextmanager
    async def paused_async():
        async with lock:
            yield

    def acquire():
        asyncio.run_coroutine_threadsafe(lock.acquire(), loop).result()

    held = lock if request.param == "asyncio" else paused_async
    return SimpleNamespace(lock=held), acquire, lambda: loop.call_soon_threadsafe(lock.release), lock.locked


def test_the_lock_is_held_for_as_long_as_the_call_lasts(locked, loop):
    actor, _, _, is_held = locked
    exclusion = Exclusion("publish", 0, actor, "lock", loop=loop)
    assert exclusion.run(is_held, LONG_S)
    assert not is_held()
    with pytest.raises(ZeroDivisionError):
        exclusion.run(lambda: 1 / 0, LONG_S)
    assert not is_held()


def test_a_call_that_waits_too_long_is_never_made(locked, loop):
    actor, acquire, release, is_held = locked
    exclusion, made = Exclusion("publish", 0, actor, "lock", loop=loop), []
    acquire()
    with pytest.raises(CollectiveTimeoutError):
        exclusion.run(lambda: made.append(1), SHORT_S)
    release()
    assert wait_until(lambda: not is_held(), LONG_S)
    exclusion.run(lambda: made.append(2), LONG_S)
    assert made == [2]


def test_exceptions_of_a_lock_are_typed_and_those_of_the_call_are_not_lost():
    @contextmanager
    def broken():
        raise OSError
        yield

    @contextmanager
    def breaks():
        yield
        raise OSError

    for lock in (broken, breaks):
        with pytest.raises(VersionError) as raised:
            Exclusion("publish", 0, None, lock).run(int, LONG_S)
        assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(ZeroDivisionError):
        Exclusion("publish", 0, None, suppress(ZeroDivisionError)).run(lambda: 1 / 0, LONG_S)


def test_a_lock_does_not_see_exceptions_of_the_call():
    events = []

    @contextmanager
    def paused():
        events.append("paused")
        yield
        events.append("resumed")

    with pytest.raises(ZeroDivisionError):
        Exclusion("publish", 0, None, paused).run(lambda: 1 / 0, LONG_S)
    assert events == ["paused", "resumed"]


@pytest.fixture(params=[KeyboardInterrupt, TimeoutError])
def interrupt(request):
    """Interrupts the main thread, and returns when the handler of the signal has begun to raise."""
    began = threading.Event()

    def handler(*_):
        began.set()
        raise request.param

    def send():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert began.wait(LONG_S)

    before = signal.signal(signal.SIGUSR1, handler)
    yield send
    signal.signal(signal.SIGUSR1, before)


def test_after_an_interrupted_wait_the_call_is_not_made(interrupt):
    made, is_raised, is_released = [], threading.Event(), threading.Event()

    @contextmanager
    def busy():
        interrupt()
        assert is_raised.wait(LONG_S)
        yield
        is_released.set()

    with pytest.raises((KeyboardInterrupt, TimeoutError)):
        Exclusion("publish", 0, None, busy).run(lambda: made.append(1), LONG_S)
    is_raised.set()
    assert is_released.wait(LONG_S)
    assert not made


def test_an_interrupt_waits_for_a_call_that_has_begun(interrupt):
    made = []

    def call():
        interrupt()
        made.append(1)

    with pytest.raises((KeyboardInterrupt, TimeoutError)):
        Exclusion("publish", 0, None, threading.Lock()).run(call, LONG_S)
    assert made


def test_the_time_limit_holds_if_the_event_loop_does_not_run():
    loop, made = asyncio.new_event_loop(), []
    with pytest.raises(CollectiveTimeoutError):
        Exclusion("publish", 0, None, asyncio.Lock(), loop=loop).run(lambda: made.append(1), SHORT_S)

    async def others():
        return asyncio.all_tasks() - {asyncio.current_task()}

    while loop.run_until_complete(others()):
        pass
    loop.close()
    assert not made


def test_a_lock_is_held_until_the_call_ends_also_if_its_task_is_cancelled(loop):
    lock = asyncio.Lock()

    async def cancel():
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        return lock.locked()

    def call():
        return asyncio.run_coroutine_threadsafe(cancel(), loop).result()

    assert Exclusion("publish", 0, None, lock, loop=loop).run(call, LONG_S)
    assert not lock.locked()


def test_what_can_not_be_a_lock_is_refused(loop):
    async def coroutine():
        """No context manager."""

    for lock in ("none", 3):
        with pytest.raises(InvalidArgumentError):
            Exclusion("publish", 0, SimpleNamespace(), lock)
    for lock in (coroutine, int):
        with pytest.raises(InvalidArgumentError):
            Exclusion("publish", 0, None, lock).run(int, LONG_S)
    with pytest.raises(UnsupportedError):
        Exclusion("publish", 0, None, asyncio.Lock()).run(int, LONG_S)

    async def in_the_loop():
        Exclusion("publish", 0, None, asyncio.Lock(), loop=loop).run(int, LONG_S)

    with pytest.raises(UnsupportedError):
        asyncio.run_coroutine_threadsafe(in_the_loop(), loop).result()
