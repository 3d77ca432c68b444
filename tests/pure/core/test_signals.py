"""Signals that come at any place of a block that defers them: each reaches its handler, and no block is split."""

from __future__ import annotations

import dis
import faulthandler
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from types import FrameType
from typing import Any

import pytest

from raycollect.core import signals
from raycollect.core.signals import Allowed, Deferred, deliver, waiting
from raycollect.driver import batch as batch_module
from raycollect.driver.batch import batch, current
from tests.support.waiting import wait_until

FILES = (signals.__file__, __file__)
CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")  # the bytecodes after which Python looks for signals
INT, ALRM, USR1 = signal.SIGINT, signal.SIGALRM, signal.SIGUSR1


class Interrupted(Exception):
    """What the handler of `raising` raises."""


class Handlers:
    """Handlers that note their calls; `raising` are the signals whose handlers raise."""

    def __init__(self, *raising: int) -> None:
        self.raising = raising
        self.calls: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        assert isinstance(frame, FrameType)
        self.calls.append(number)
        if number in self.raising:
            raise Interrupted(number)


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (INT, ALRM, USR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def set_all(handlers: Handlers, *numbers: int) -> None:
    for number in numbers or (INT, ALRM):
        signal.signal(number, handlers)


def at_opcodes(
    events: dict[int, int], call: Callable[[], object], files: Container[str] = FILES, only: tuple[str, ...] = ()
) -> int:
    """Makes a call, and sends this process signals before the bytecodes with these counts; returns how many ran.

    `only`: the names with which those begin that count, beside the beginning of a function; empty: all count.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]] if event == "opcode" else ""
        if name.startswith(only) if only and name else event == ("call" if only else "opcode"):
            count += 1
            if count in events:
                signal.raise_signal(events[count])
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def nested(done: list[str]) -> None:
    with Deferred():
        with Deferred():
            done.append("first")
        with Deferred():
            done.append("second")


def with_waits(done: list[str]) -> None:
    with Deferred():
        done.append("first")
        done.append("second")
        with Allowed():
            pass
        deliver()
        waiting(lambda _: True)


def count_of(call: Callable[[list[str]], None]) -> int:
    set_all(Handlers())
    call([])  # as the later ones: what is looked up once is known
    return at_opcodes({}, lambda: call([]))


@pytest.mark.parametrize("call", [nested, with_waits])
@pytest.mark.parametrize("raising", [(), (INT,)])
def test_a_signal_before_any_bytecode_splits_no_block(
    call: Callable[[list[str]], None], raising: tuple[int, ...]
) -> None:
    for at in range(1, count_of(call) + 1):
        handlers, done = Handlers(*raising), list[str]()
        set_all(handlers)
        raises = pytest.raises(Interrupted) if raising else nullcontext()
        with raises:
            at_opcodes({at: INT}, lambda done=done: call(done))
        assert handlers.calls == [INT], f"bytecode {at}"
        assert done in ([], ["first", "second"]), f"bytecode {at}"
        assert done or raising
        with Deferred():
            pass
        assert {signal.getsignal(INT), signal.getsignal(ALRM)} == {handlers}, f"bytecode {at}"


@pytest.mark.parametrize("seed", range(4))
def test_of_two_signals_none_is_lost(seed: int) -> None:
    draw, count = random.Random(seed), count_of(with_waits)
    for _ in range(300):
        first, second = sorted(draw.sample(range(1, count + 1), 2))
        sent = {first: draw.choice([INT, ALRM]), second: draw.choice([INT, ALRM])}
        handlers, done = Handlers(), list[str]()
        set_all(handlers)
        ran = at_opcodes(sent, lambda done=done: with_waits(done))
        assert set(handlers.calls) == {number for at, number in sent.items() if at <= ran}
        assert {signal.getsignal(INT), signal.getsignal(ALRM)} == {handlers}, sent
        assert done == ["first", "second"]


def test_the_handlers_of_all_signals_run_though_one_raises() -> None:
    handlers = Handlers(INT)
    set_all(handlers)
    with pytest.raises(Interrupted), Deferred():
        signal.raise_signal(INT)
        signal.raise_signal(ALRM)
        signal.raise_signal(INT)  # as for Python itself, a signal that has not been handled comes once
        assert handlers.calls == []
    assert handlers.calls == [INT, ALRM]


def test_a_wait_inside_a_block_runs_the_handlers() -> None:
    """They run while nothing is held, and what has come is never lost."""
    handlers, main, lock = Handlers(USR1), threading.get_ident(), threading.Lock()
    set_all(handlers, USR1)
    lock.acquire()
    killer = threading.Timer(0.1, signal.pthread_kill, (main, USR1))
    killer.start()
    with pytest.raises(Interrupted), Deferred():
        waiting(lambda s: lock.acquire(timeout=s), 60)
    killer.join()
    assert handlers.calls == [USR1]
    lock.release()
    with Deferred():
        assert waiting(lambda s: lock.acquire(timeout=s))
        assert not waiting(lambda s: lock.acquire(timeout=s), 0.01)
    assert not waiting(lambda s: lock.acquire(timeout=s), 0.01)


def test_a_handler_that_runs_in_a_wait_may_use_blocks_of_its_own() -> None:
    seen: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        with Deferred():
            signal.raise_signal(ALRM)
            seen.append("in its own block")
        seen.append("after it")

    signal.signal(INT, handler)
    signal.signal(ALRM, lambda *_: seen.append("alarm"))
    with Deferred():
        signal.raise_signal(INT)
        deliver()
        assert seen == ["in its own block", "alarm", "after it"]
        signal.raise_signal(ALRM)
        assert len(seen) == 3
    assert len(seen) == 4
    assert signal.getsignal(INT) is handler


def test_a_handler_that_is_set_inside_of_a_block_stays() -> None:
    first, second = Handlers(), Handlers()
    set_all(first)
    with Deferred():
        signal.signal(INT, second)
        signal.raise_signal(INT)
        signal.signal(ALRM, signal.SIG_DFL)
    assert (first.calls, second.calls) == ([], [INT])
    assert signal.getsignal(INT) is second
    assert signal.getsignal(ALRM) is signal.SIG_DFL
    with Deferred():
        signal.raise_signal(INT)
        assert second.calls == [INT]
    assert second.calls == [INT, INT]


def test_what_a_library_has_set_below_python_stays(tmp_path: Any) -> None:
    """Python still names its handler, which no signal reaches: to set it anew would replace the library's."""
    handlers = Handlers()
    set_all(handlers, USR1)
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(USR1, file, all_threads=False)
        try:
            with Deferred():
                signal.raise_signal(USR1)
            signal.raise_signal(USR1)
        finally:
            faulthandler.unregister(USR1)
    assert (tmp_path / "stacks").read_text().count("most recent call first") == 2
    assert handlers.calls == []


def in_batch() -> None:
    with batch():
        pass


def test_a_signal_leaves_no_batch_open() -> None:
    """Calls that come later would be recorded in it, and never be made."""
    files = signals.__file__, batch_module.__file__
    set_all(Handlers())
    count = at_opcodes({}, in_batch, files, CHECKS)
    assert count > 50
    for at in range(1, count + 1):
        handlers = Handlers(INT)
        set_all(handlers)
        with suppress(Interrupted):
            at_opcodes({at: INT}, in_batch, files, CHECKS)
        assert current() is None, f"check {at}"
        assert handlers.calls == [INT], f"check {at}"
        assert {signal.getsignal(INT), signal.getsignal(ALRM)} == {handlers}, f"check {at}"


def test_other_threads_change_nothing() -> None:
    handlers = Handlers()
    set_all(handlers)
    inside, go_on = threading.Event(), threading.Event()

    def run() -> None:
        with Deferred():
            assert waiting(lambda s: True)
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    assert signal.getsignal(INT) is handlers
    signal.raise_signal(INT)
    assert handlers.calls == [INT]
    go_on.set()
    thread.join()


def test_a_fork_in_another_thread_gives_the_handlers_back_to_the_new_process() -> None:
    handlers = Handlers()
    set_all(handlers)
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            signal.raise_signal(INT)
            os._exit(10 * (signal.getsignal(INT) is handlers) + len(handlers.calls))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with Deferred():
        thread = threading.Thread(target=fork)
        thread.start()
        wait_until(lambda: not thread.is_alive())
        thread.join()
    assert codes == [11]


CELL = """
import os, signal, threading
from raycollect.core.signals import Deferred, waiting
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
with Deferred():
    waiting(threading.Event().wait, 60)
"""


@pytest.mark.skipif(find_spec("IPython") is None, reason="needs IPython")
def test_a_cell_that_is_interrupted_shows_its_own_lines():
    program = f"from IPython.core.interactiveshell import InteractiveShell\nInteractiveShell().run_cell({CELL!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    files = [line for line in done.stdout.splitlines() if "signals.py" in line]
    assert "KeyboardInterrupt" in done.stdout
    assert len(files) == 1  # IPython always shows the last frame
