"""What only the cyclic garbage collector would free: it may come late, or never where somebody has switched it off."""

from __future__ import annotations

import gc
import mmap
import socket
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import raycollect
from tests.support.waiting import wait_until

HELD = (np.ndarray, mmap.mmap, memoryview, socket.socket, threading.Thread)
"""What matters besides what is ours, and Ray's handles and refs."""

RAYS = frozenset({"ObjectRef", "ActorHandle", "ActorMethod"})

HOME = str(Path(raycollect.__file__).parent)


def left(life: Callable[[], object]) -> list[str]:
    """Lives a life without the collector, and tells what it leaves to it."""
    begin()
    try:
        life()
    finally:
        found = end()
    return found


def begin() -> None:
    """From here on this process has no collector."""
    gc.collect()
    gc.disable()


def end() -> list[str]:
    """What was left meanwhile to the collector of what is ours or what matters, and what it was left with."""
    before = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        garbage = list(gc.garbage)
        # Arrays and refs can't be in cycles themselves, and are no garbage of their own
        garbage += [to for one in garbage for to in gc.get_referents(one) if not gc.is_tracked(to)]
        held = {_name(one) for one in garbage if _matters(one)}
        others = {_name(one) for one in garbage} - held
        return [f"{one} WITH {', '.join(sorted(others))}" for one in sorted(held)]
    finally:
        gc.set_debug(before)
        gc.garbage.clear()
        gc.enable()
        gc.collect()


def _matters(one: Any) -> bool:
    """Whether it is ours, or something that somebody waits for; classes are in cycles all of them."""
    if isinstance(one, types.FrameType):
        return one.f_code.co_filename.startswith(HOME)
    kind = type(one)
    if isinstance(one, type) or str(kind.__module__).startswith("_ctypes"):
        return False
    return isinstance(one, HELD) or kind.__name__ in RAYS or str(kind.__module__).startswith("raycollect.")


def _name(one: Any) -> str:
    if isinstance(one, types.FrameType):
        return f"frame of {getattr(one.f_code, 'co_qualname', one.f_code.co_name)}:{one.f_lineno}"
    if isinstance(one, (types.FunctionType, types.MethodType)):
        return f"function {one.__qualname__}"
    return f"{type(one).__module__}.{type(one).__qualname__}"


def fails(kinds: Any, call: Callable[..., object], *args: Any, **options: Any) -> None:
    """It raises one of these; nothing of the exception is kept."""
    try:
        call(*args, **options)
    except kinds:
        return
    raise AssertionError(f"none of {kinds} was raised")


# ---------------------------------------------------------------------------------------------- without cycles


def holding() -> dict[str, int]:
    """What this process has of the system for us: threads, sockets, and shared memory.

    The timer's thread, one per process, does not count: it goes on for a while once nothing is due.
    """
    files = [target_of(one) for one in Path("/proc/self/fd").iterdir()]
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": sum(
            one.name.startswith("raycollect") and one.name != "raycollect-timer" for one in threading.enumerate()
        ),
        "sockets": sum(one.startswith("socket:") for one in files),
        "memory": sum("memfd:raycollect" in one for one in files) + maps.count("memfd:raycollect"),
    }


def more(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What has grown; less there may be, where something older was still ending."""
    return {name: now - before[name] for name, now in after.items() if now > before[name]}


def settled(before: dict[str, int], timeout_s: float = 10.0) -> dict[str, int]:
    """The same once it is no more than before, or after a while."""
    wait_until(lambda: not more(holding(), before), timeout_s)
    return holding()


def target_of(link: Path) -> str:
    """What an open file is of."""
    try:
        return str(link.readlink())
    except FileNotFoundError:  # the very file by which the directory was read
        return ""
