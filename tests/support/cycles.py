"""What only the cyclic garbage collector would free: it may come late, or never where somebody has switched it off."""

from __future__ import annotations

import gc
import mmap
import socket
import threading
import types
from collections.abc import Callable, Iterator
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
    """The cycles that have been left meanwhile, of those that hold what is ours or what matters."""
    before = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sorted(_told(gc.garbage))
    finally:
        gc.set_debug(before)
        gc.garbage.clear()
        gc.enable()
        gc.collect()


def _told(garbage: list[Any]) -> Iterator[str]:
    known = {id(one): one for one in garbage}
    edges = {id(one): [id(to) for to in gc.get_referents(one) if id(to) in known] for one in garbage}
    for one in garbage:  # arrays and refs can't be in cycles themselves, and are no garbage of their own
        for to in gc.get_referents(one):
            if not gc.is_tracked(to) and _matters(to):
                known[id(to)] = to
                edges[id(to)] = []
                edges[id(one)].append(id(to))
    for cycle in _cycles(edges):
        held = sorted({_name(known[one]) for one in _reach(edges, cycle) if _matters(known[one])})
        if held:
            yield f"{', '.join(sorted({_name(known[one]) for one in cycle}))} HOLDS {', '.join(held)}"


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


_Edges = dict[int, list[int]]


def _reach(edges: _Edges, start: list[int]) -> set[int]:
    seen, left = set(start), list(start)
    while left:
        new = [to for to in edges[left.pop()] if to not in seen]
        seen.update(new)
        left += new
    return seen


def _cycles(edges: _Edges) -> Iterator[list[int]]:
    """The strongly connected parts, by Tarjan's algorithm."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    work: list[tuple[int, Iterator[int]]] = []

    def enter(node: int) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        work.append((node, iter(edges[node])))

    for root in edges:
        if root not in index:
            enter(root)
        while work:
            node, rest = work[-1]
            to = next(rest, None)
            if to is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    part = stack[at:]
                    del stack[at:]
                    low.update(dict.fromkeys(part, len(edges)))  # of no cycle that is still looked at
                    if len(part) > 1 or node in edges[node]:
                        yield part
            elif to not in index:
                enter(to)
            else:
                low[node] = min(low[node], low[to])


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
