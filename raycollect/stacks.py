"""Python stacks as a person reads them: from the user's own code on, less the way there."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

__all__ = ["LINES", "Doing", "is_on_the_way", "what_runs"]

LINES = 12
"""How many of the innermost frames are told."""
LINE_LENGTH = 200

_HERE = str(Path(__file__).parent)
_ON_THE_WAY = "/concurrent/futures/", "/asyncio/", "/ray/util/tracing/"
"""Parts of files through which methods are called besides: what waits for coroutines, and Ray's hooks in methods."""
_BEFORE_THAT = "/ray/_private/", "/threading.py"
"""Those of a process of Ray's in which no method runs."""


class Doing(NamedTuple):
    """What a process is doing.

    Attributes:
        what: The outermost call that is the user's: its name, file and line; empty where none is under way.
        stack: From there on a line per frame, the innermost last; where nothing is the user's, raycollect's own.
    """

    what: str
    stack: tuple[str, ...]


def is_on_the_way(file: str) -> bool:
    """Whether a file is raycollect's own, or lies between it and a method of an actor."""
    return file.startswith(_HERE) or any(part in file for part in _ON_THE_WAY)


def what_runs() -> Doing:
    """What this process is doing, by its main thread; if that does nothing of the user's, by another one that does."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    found = [_told(frames[ident]) for ident in sorted(frames, key=lambda one: one != main)]
    return next((one for one in found if one.what), _told(frames[main]) if main in frames else Doing("", ()))


def _told(frame: FrameType) -> Doing:
    stack = [(one.f_code, line) for one, line in traceback.walk_stack(frame)][::-1]
    files = [code.co_filename for code, _ in stack]
    is_way = [is_on_the_way(file) or any(part in file for part in _BEFORE_THAT) for file in files]
    first = next((at for at, way in enumerate(is_way) if not way), -1)
    shown = first if first >= 0 else next((at for at, file in enumerate(files) if file.startswith(_HERE)), len(stack))
    lines = [_line(code.co_filename, line, _name(code)) for code, line in stack[shown:]]
    what = "" if first < 0 else f"{_name(stack[first][0])} ({files[first]}:{stack[first][1]})"
    return Doing(what, tuple(lines[-LINES:]))


def _name(code: object) -> str:
    return getattr(code, "co_qualname", None) or str(getattr(code, "co_name", "?"))  # the first from Python 3.11 on


def _line(file: str, line: int, name: str) -> str:
    source = linecache.getline(file, line).strip()
    return f"{file}:{line} in {name}: {source}"[:LINE_LENGTH]
