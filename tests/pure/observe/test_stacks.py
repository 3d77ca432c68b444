"""What a process says that it is doing."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycollect.observe import stacks
from raycollect.observe.stacks import Doing, what_runs
from tests.pure.fleet import WAIT_S


def test_the_main_thread_is_told_from_the_users_outermost_call_on() -> None:
    """Asked by a thread of its own, as in a participant."""
    results: list[Doing] = []

    def inner(depth: int) -> None:
        if depth:
            inner(depth - 1)
            return
        asking = threading.Thread(target=lambda: results.append(what_runs()))
        asking.start()
        asking.join(WAIT_S)

    inner(3)
    (doing,) = results
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
    names: dict[str, Any] = {"ask": lambda: results.append(stacks._doing(sys._getframe(1)))}
    results: list[Doing] = []
    calls = ["ask", *(f"call{at}" for at in range(len(files)))]
    for at, file in enumerate(reversed(files)):
        exec(compile(f"def {calls[at + 1]}(): {calls[at]}()", file, "exec"), names)
    thread = threading.Thread(target=names[calls[-1]])
    thread.start()
    thread.join(WAIT_S)
    return results[0]


RAY = "/site/ray/_private/workers/default_worker.py"
THREAD = "/usr/lib/python3.11/threading.py"
LOOP = "/usr/lib/python3.11/asyncio/base_events.py"
SELECTORS = "/usr/lib/python3.11/selectors.py"
SOCKET = "/usr/lib/python3.11/socket.py"
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
        ([THREAD, OURS, SELECTORS], "", 2),
        ([THREAD, OURS, SOCKET], "", 2),
        ([RAY, LOOP, SELECTORS], "", 0),
        ([RAY, OURS, USERS, LOOP, SELECTORS], USERS, 3),
        ([THREAD, LOOP, USERS, SELECTORS], USERS, 2),
    ],
)
def test_what_is_the_users_begins_after_the_way_there(files: list[str], what: str, lines: int) -> None:
    doing = framed(files)
    assert (f"({what}:1)" in doing.what) if what else doing.what == ""
    assert len(doing.stack) == lines
    assert not any(line.startswith(RAY) for line in doing.stack[:1])
    assert not any(line.rstrip().endswith(":") for line in doing.stack), "what has no source ends with its name"


@pytest.mark.parametrize(
    ("lineno", "lasti", "line"), [(9, 2, 9), (None, 0, 3), (None, 2, 5), (None, 6, 5), (None, 8, 7), (None, 10, 7)]
)
def test_where_there_is_no_line_that_before_it_is_told(lineno: int | None, lasti: int, line: int) -> None:
    """From Python 3.11 on the jumps back from a `break` have none; threads take turns right there."""
    lines = [(0, 2, None), (2, 6, 5), (6, 8, None), (8, 10, 7), (10, 12, None)]
    code = SimpleNamespace(co_firstlineno=3, co_lines=lambda: lines)
    frame: Any = SimpleNamespace(f_lineno=lineno, f_lasti=lasti, f_code=code)
    assert stacks._line_of(frame) == line
