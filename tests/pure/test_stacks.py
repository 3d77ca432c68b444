"""What a process says that it is doing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycollect import stacks
from raycollect.stacks import Doing, is_on_the_way, what_runs

WAIT_S = 10.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def test_the_main_thread_is_told_from_the_users_outermost_call_on() -> None:
    """Asked by a thread of its own, as in a participant."""
    found: list[Doing] = []

    def inner(depth: int) -> None:
        if depth:
            inner(depth - 1)
            return
        asking = threading.Thread(target=lambda: found.append(what_runs()))
        asking.start()
        asking.join(WAIT_S)

    inner(3)
    (doing,) = found
    assert len(doing.stack) == stacks.LINES, "the test's runner is deep enough"
    mine = [line for line in doing.stack if __file__ in line]
    assert [line.partition(": ")[0].rpartition(" ")[2].rpartition(".")[2] for line in mine] == [
        "test_the_main_thread_is_told_from_the_users_outermost_call_on",
        *["inner"] * 4,
    ]
    assert mine[-1].endswith(("asking.start()", "asking.join(WAIT_S)"))
    assert all(len(line) <= stacks.LINE_LENGTH for line in doing.stack)


def framed(files: list[str]) -> Doing:
    """What would be told of a thread whose frames lie in these files, the outermost first; each calls the next."""
    names: dict[str, Any] = {"ask": lambda: found.append(stacks._told(sys._getframe(1)))}
    found: list[Doing] = []
    calls = ["ask", *(f"call{at}" for at in range(len(files)))]
    for at, file in enumerate(reversed(files)):
        exec(compile(f"def {calls[at + 1]}(): {calls[at]}()", file, "exec"), names)
    thread = threading.Thread(target=names[calls[-1]])
    thread.start()
    thread.join(WAIT_S)
    return found[0]


RAY = "/site/ray/_private/workers/default_worker.py"
OURS = str(Path(stacks.__file__).with_name("participant.py"))
USERS = "/home/me/train.py"


@pytest.mark.parametrize(
    ("files", "what", "lines"),
    [
        ([RAY], "", 0),
        ([RAY, RAY], "", 0),
        ([RAY, OURS, USERS], USERS, 1),
        ([RAY, OURS, USERS, OURS], USERS, 2),
        ([RAY, OURS, USERS, "/site/torch/nn.py", RAY], USERS, 3),
        ([RAY, OURS, OURS], "", 2),
        ([RAY, "/site/ray/util/tracing/helper.py", OURS], "", 1),
        ([RAY, OURS, *[USERS] * 40], USERS, stacks.LINES),
    ],
)
def test_what_is_the_users_begins_after_the_way_there(files: list[str], what: str, lines: int) -> None:
    doing = framed(files)
    assert (f"({what}:1)" in doing.what) if what else doing.what == ""
    assert len(doing.stack) == lines
    assert not any(line.startswith(RAY) for line in doing.stack[:1])


def test_where_the_main_thread_does_nothing_of_the_users_another_one_is_told(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    began = threading.Event()

    def method() -> None:
        began.set()
        gate.wait(WAIT_S)

    thread = threading.Thread(target=method)
    thread.start()
    assert began.wait(WAIT_S)
    frames = sys._current_frames()
    idle = threading.Event()
    names: dict[str, Any] = {"wait": idle.wait}
    exec(compile("def loop(): wait()", RAY, "exec"), names)
    looping = threading.Thread(target=names["loop"])
    looping.start()
    frames = {looping.ident: sys._current_frames()[looping.ident], thread.ident: frames[thread.ident]}
    monkeypatch.setattr(threading, "main_thread", lambda: looping)
    monkeypatch.setattr(sys, "_current_frames", lambda: frames)
    doing = what_runs()
    assert doing.what.startswith("test_where_the_main_thread_does_nothing") or doing.what.startswith("method")
    del frames[thread.ident]
    assert what_runs().what == ""
    monkeypatch.undo()
    idle.set()
    gate.set()
    for one in (thread, looping):
        one.join(WAIT_S)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (stacks.__file__, True),
        ("/usr/lib/python3.11/concurrent/futures/thread.py", True),
        ("/usr/lib/python3.11/asyncio/events.py", True),
        ("/site-packages/ray/util/tracing/tracing_helper.py", True),
        ("/home/me/train.py", False),
        (__file__, False),
    ],
)
def test_what_lies_on_the_way(file: str, expected: bool) -> None:
    assert is_on_the_way(file) is expected
