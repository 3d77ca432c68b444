"""Python stacks as a person reads them: from the user's own code on, less the way there; and raycollect's own.

What runs notes nothing on its way, so that it costs nothing to be asked: where a plan stands is read from the frames of
the thread that runs it.
"""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["LINES", "Doing", "is_on_the_way", "what_runs", "where_plans_are"]

LINES = 12
"""How many of the innermost frames are told."""
LINE_LENGTH = 200
MOST_CALLS = 6
"""How many calls of a bundle are named."""

_HERE = str(Path(__file__).parent)
_ON_THE_WAY = "/concurrent/futures/", "/asyncio/", "/ray/util/tracing/", "/raycollect/participant.py"
"""Parts of files through which methods are called besides: what waits for coroutines, Ray's hooks in methods, and what
the mixin puts around them, which comes with its class from where the driver has it."""
_BEFORE_THAT = "/ray/_private/", "/threading.py", "/selectors.py", "/socket.py"
"""Those of a process of Ray's in which no method runs; in the last two, event loops and raycollect's own threads wait
for what comes. Where a method calls them, it is told."""


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
    return f"{file}:{line} in {name}{source and ': '}{source}"[:LINE_LENGTH]  # a cell's, or of no file, has no source


# ---------------------------------------------------------------------------------------------- raycollect's own

_Locals = Mapping[str, Any]


def where_plans_are() -> dict[int, str]:
    """At which step each plan, or run of a captured step, is that runs in this process now: its number -> words."""
    found: dict[int, str] = {}
    for frame in sys._current_frames().values():
        with suppress(AttributeError, LookupError, TypeError, ValueError):  # it goes on meanwhile: it is elsewhere
            found |= _where([one for one, _ in traceback.walk_stack(frame)][::-1])
    return found


def _where(frames: Iterable[FrameType]) -> dict[int, str]:
    """Where a thread's plan is, by its frames, the outermost first; nothing where it has none."""
    number, action, place, first = 0, "", "", 0
    for frame in frames:
        at = Path(frame.f_code.co_filename)
        key = at.name, frame.f_code.co_name
        if not frame.f_code.co_filename.startswith(_HERE):
            continue
        if key in _NUMBERS:
            number = number or _NUMBERS[key](frame.f_locals)
        elif not number:  # an imperative call
            continue
        elif key == _ACTION:
            action, first, is_method = _told_action(frame.f_locals["self"])
            if is_method:  # what it does is the user's
                break
        elif key == _BUNDLE:
            place = _told_bundle(frame.f_locals, first, is_named=not action)
        elif key in _PLACES:
            place = _PLACES[key]
    return {number: ", ".join(filter(None, (action, place))) or "begins"} if number else {}


_NUMBERS: dict[tuple[str, str], Callable[[_Locals], int]] = {
    ("lease.py", "run_program"): lambda held: held["ticket"].seq,
    ("captures.py", "_do"): lambda held: held["seq"],
}
"""The frames of what runs plans, and runs: how they know its number."""

_ACTION = "replay.py", "do"
_BUNDLE = "executor.py", "_run"
_PLACES = {
    ("ledger.py", "start"): "waits for the one before it",
    ("captures.py", "_take_turn"): "waits for a method to end",
    ("orders.py", "between_methods"): "waits until all are ready",
    ("executor.py", "_prepare"): "looks at its operands",
    ("store.py", "wait"): "waits for an operand's method",
    ("executor.py", "_agree"): "at the door",
    ("repeat.py", "_met"): "at the door",
    ("repeat.py", "_work"): "in its kernels",
}
"""(file, function) -> where that is; the innermost one counts."""


def _told_action(action: Any) -> tuple[str, int, bool]:
    """An action of a captured step: words, the place of its first call among all of the step, whether it is a method's.

    Args:
        action: What `replay` has made of it.
    """
    replay = action._replay
    one = replay.routine.actions[replay._actions.index(action)]
    if hasattr(one, "method"):
        return f"call {one.step} of the step, method {one.method}", one.step, True
    requests = [task.request for task in action._program.tasks]
    calls = _calls([one.step + request for request in requests])
    return f"{calls} of the step, {action._program.name}", one.step, False


def _told_bundle(held: _Locals, first: int, *, is_named: bool) -> str:
    """A bundle under way: which of how many, and its calls.

    Args:
        held: What `Execution._run` holds.
        first: The number of the plan's first call.
        is_named: Whether to tell of the calls where all are in it.
    """
    program, stretches = held["self"]._program, held["script"].stretches
    at = next((at for at, one in enumerate(stretches) if one is held.get("stretch")), -1)
    if at < 0:
        return "waits for readers of what it writes"
    share = stretches[at].share
    bundles = [one.tasks for one in program.bundles]
    is_planned = [share is program.shares[program.tasks[one[0]].share] for one in bundles]
    tasks = bundles[at] if len(bundles) == len(stretches) and is_planned[at] else (at,)  # else one after the other
    if len(program.tasks) == 1 and is_named and not program.tasks[0].request:
        return f"in its kernels ({share.op})"
    if len(stretches) == 1 and not is_named:
        return "in its kernels"
    which = f"bundle {at + 1} of {len(stretches)}: " if len(stretches) > 1 else ""
    return f"in {which}{share.op} of {_calls([first + program.tasks[one].request for one in tasks])}"


def _calls(numbers: Sequence[int]) -> str:
    """``calls 0, 1, 2``, for a person."""
    some = sorted(numbers)[:MOST_CALLS]
    more = f" and {len(numbers) - len(some)} more" if len(numbers) > len(some) else ""
    return f"call{'s' * (len(numbers) > 1)} {', '.join(map(str, some))}{more}"
