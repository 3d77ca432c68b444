"""Python stacks for reports: from the user's own code inwards, without the frames that lead there."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from raycollect.core import threads
from raycollect.errors import COULD_NOT_LOOK

LINES = 12
"""How many of the innermost frames are shown."""
LINE_LENGTH = 200

_HERE = str(Path(__file__).parents[1])
_ON_THE_WAY = "/concurrent/futures/", "/asyncio/", "/ray/util/tracing/", "/raycollect/member/mixin.py"
"""Parts of paths of files that call methods: event loops and futures, Ray's hooks, and the mixin's wrappers of methods
(the mixin's class is pickled by the driver, with the driver's path)."""
_THREADING = "/threading.py"
_BEFORE_THAT = "/ray/_private/", _THREADING, "/selectors.py", "/socket.py"
"""Files of a Ray process in which no method runs; event loops and raycollect's own threads wait in the last two. Frames
in these files are shown if a method calls them."""


class Doing(NamedTuple):
    """The current call of a process."""

    what: str  # the outermost call of user code: its name, file and line; empty for none
    # One line per frame from that call on, the innermost last; without user code, raycollect's own frames
    stack: tuple[str, ...]


def is_on_the_way(file: str) -> bool:
    """Returns whether a file is raycollect's own, or lies between it and a method of an actor."""
    return file.startswith(_HERE) or any(part in file for part in _ON_THE_WAY)


def what_runs() -> Doing:
    """Returns the current call of the main thread, or, if no user code runs there, of another thread with a method.

    A thread that the user started counts only while it is in a call of raycollect. So an idle actor is reported as idle
    even if its own threads run.

    Never raises, as a diagnostic must not harm the process. If the inspection fails, the result says why.
    """
    try:
        return _what_runs()
    except Exception as exc:  # noqa: BLE001 - see above
        threads.failed("looking at what runs", exc)
        return Doing(f"{COULD_NOT_LOOK}{threads.cause_of(exc)}", ())


def _what_runs() -> Doing:
    frames = sys._current_frames()
    main = threading.main_thread().ident
    try:
        threads = [ident for ident in sorted(frames, key=lambda ident: ident != main) if not _is_of_user(frames[ident])]
        results = [_doing(frames[ident]) for ident in threads]
        return next(
            (doing for doing in results if doing.what), _doing(frames[main]) if main in frames else Doing("", ())
        )
    finally:
        del frames  # it contains this frame


def _is_of_user(frame: FrameType) -> bool:
    """Returns whether the user has started a thread, and it is in no call of raycollect."""
    files = [caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame)][::-1]
    begins = next((file for file in files if not file.endswith(_THREADING)), _HERE)
    is_way = is_on_the_way(begins) or any(part in begins for part in _BEFORE_THAT)
    return files[0].endswith(_THREADING) and not is_way and not any(file.startswith(_HERE) for file in files)


def _doing(frame: FrameType) -> Doing:
    stack = [(caller.f_code, _line_of(caller)) for caller, _ in traceback.walk_stack(frame)][::-1]
    files = [code.co_filename for code, _ in stack]
    is_way = [is_on_the_way(file) or any(part in file for part in _BEFORE_THAT) for file in files]
    first = next((at for at, way in enumerate(is_way) if not way), -1)
    shown = first if first >= 0 else next((at for at, file in enumerate(files) if file.startswith(_HERE)), len(stack))
    lines = [_line(code.co_filename, line, _name(code)) for code, line in stack[shown:]]
    what = "" if first < 0 else f"{_name(stack[first][0])} ({files[first]}:{stack[first][1]})"
    return Doing(what, tuple(lines[-LINES:]))


def _line_of(frame: FrameType) -> int:
    """Returns the line of a frame. From Python 3.11 on some jumps have no line: then the line before."""
    line: int | None = frame.f_lineno
    if line is not None:
        return line
    code, at = frame.f_code, frame.f_lasti
    before = [number for begin, _, number in code.co_lines() if begin <= at and number is not None]
    return before[-1] if before else code.co_firstlineno


def _name(code: object) -> str:
    return getattr(code, "co_qualname", None) or str(getattr(code, "co_name", "?"))  # the first from Python 3.11 on


def _line(file: str, line: int, name: str) -> str:
    source = linecache.getline(file, line).strip()
    return f"{file}:{line} in {name}{source and ': '}{source}"[:LINE_LENGTH]  # a cell's, or of no file, has no source
