"""Waits for what nobody tells: what Ray, the system or another process gets done in its own time; and interrupts."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> bool:
    """Asks again and again until a condition holds; returns whether it came to hold in time."""
    begun_s, pause = time.monotonic(), threading.Event()
    while not condition():
        waited_s = time.monotonic() - begun_s
        if waited_s > timeout_s:
            return False
        pause.wait(min(max(waited_s / 10, 0.001), 0.05))
    return True


def has_ended(pid: int) -> bool:
    """Whether a process is gone, and its parent has collected it; Ray may call an actor dead a while before."""
    return not Path(f"/proc/{pid}").exists()


def stop(pid: int) -> None:
    """Stops a process; none of its threads goes on any more when this returns."""
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: _states(pid) == {"T"})


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process for the length of a block."""
    try:
        stop(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> set[str]:
    """The states of a process's threads, as proc(5) has them; empty if there is no such process."""
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.add(path.read_text().rpartition(")")[2].split()[0])
        except OSError:  # it ended meanwhile
            continue
    return found


def is_in(function: Callable[..., object], thread: int) -> bool:
    """Whether a thread, by its identifier, is in a function now.

    ``frame.f_back`` of a running thread may crash CPython 3.11 (python/cpython#99110); `faulthandler` walks all frames
    at once.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = file.read().split("\n\n")
    code = function.__code__
    begin, end = f'  File "{code.co_filename}", line ', f" in {code.co_name}"
    here = next((stack for stack in stacks if f"hread 0x{thread:016x} " in stack), "")
    return any(line.startswith(begin) and line.endswith(end) for line in here.splitlines())


def interrupt_in(*functions: Callable[..., object]) -> threading.Thread:
    """Sends this process a SIGINT, as Ctrl-C does, once this thread is in functions; gives the thread that does so."""
    target = threading.get_ident()

    def watch() -> None:
        assert wait_until(lambda: all(is_in(function, target) for function in functions))
        signal.pthread_kill(target, signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def at_step(number: int, do: Callable[[], object], call: Callable[[], object]) -> int:
    """Makes a call, and does something at the n-th place where Python looks for signals; returns how many there are.

    These are the beginnings of functions, and the ends of those in C.
    """
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_return")
        if count == number and event in ("call", "c_return"):
            do()

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count
