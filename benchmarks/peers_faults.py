"""What goes wrong in a collective of `ray.util.collective` over gloo, and in the same one of `raycollect`.

``python -m benchmarks.peers_faults`` tries each case with both, in actors of its own, and writes what came of it into
`tests/faults/results.md`. The calls are the very same: those that both have inside of actors, with the same time limit.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from benchmarks import machine
from tests.faults.report import write_section

LIBRARIES = {"ray.util.collective": "gloo", "raycollect": "auto"}
"""Whose calls are made, and on which backend."""

LIMIT_S = 40.0
"""After how long a rank that still waits is given up."""
TIMEOUT_S = 10.0
"""The limit that the group is given, as `gloo_timeout`."""
START_S = 60.0
ATTEMPTS = 3
AT_ONCE = 3
"""How many cases are tried at once: most of them wait."""

LINE_LENGTH = 180
LARGE = 16_000_000
"""Elements of float32 that are under way long enough to be killed in."""
KILL_AFTER_S = 0.01


_PATH = re.compile(r"(?<=\[)/\S*/(?=[^/\]]+\])")
"""Where a library was built, before the name of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What one rank does.

    Attributes:
        operation: The call; ``"join"`` the group, or ``"nothing"``.
        count: The elements of its array, each rank + 1.
        dtype: Their type.
        options: The call's other arguments.
        dies: ``"before"`` the call or ``"in"`` it; empty: it does not.
    """

    operation: str
    count: int = 4
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()
    dies: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What goes wrong.

    Attributes:
        name: What to call it.
        acts: What each rank does.
        has_joined: Whether the ranks are a group before that, in which an allreduce went well.
    """

    name: str
    acts: tuple[Act, ...]
    has_joined: bool = True


def _root(rank: int) -> tuple[tuple[str, Any], ...]:
    return (("src_rank", rank),)


SUM, BROADCAST = Act(operation="allreduce"), Act(operation="broadcast", options=_root(0))
LARGE_SUM = Act(operation="allreduce", count=LARGE)

CASES = (
    Case(name="killed before an allreduce", acts=(SUM, Act(operation="allreduce", dies="before"), SUM)),
    Case(
        name="killed in an allreduce of 64 MB",
        acts=(LARGE_SUM, Act(operation="allreduce", count=LARGE, dies="in"), LARGE_SUM),
    ),
    Case(name="allreduce of 4 against 8 elements", acts=(SUM, Act(operation="allreduce", count=8))),
    Case(
        name="broadcast of 4 to 8 elements",
        acts=(BROADCAST, Act(operation="broadcast", count=8, options=_root(0))),
    ),
    Case(name="float32 against int32", acts=(SUM, Act(operation="allreduce", dtype="int32"))),
    Case(name="SUM against MAX", acts=(SUM, Act(operation="allreduce", options=(("op", "MAX"),)))),
    Case(
        name="broadcast from rank 0 against from rank 1", acts=(BROADCAST, Act(operation="broadcast", options=_root(1)))
    ),
    Case(name="allreduce against broadcast", acts=(SUM, BROADCAST)),
    Case(
        name="send of 4, recv of 8 elements",
        acts=(
            Act(operation="send", options=(("dst_rank", 1),)),
            Act(operation="recv", count=8, options=(("src_rank", 0),)),
        ),
    ),
    Case(name="a rank never comes to the allreduce", acts=(SUM, Act(operation="nothing"))),
    Case(name="a rank never joins the group", acts=(Act(operation="join"), Act(operation="nothing")), has_joined=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of one rank.

    Attributes:
        what: In words, without the time.
        seconds: After how long; 0: it still waited.
        is_silent: Whether the call returned as if all were well.
        is_alive: Whether its process lived afterwards.
    """

    what: str
    seconds: float = 0.0
    is_silent: bool = False
    is_alive: bool = field(default=True)


# ---------------------------------------------------------------------------------------------- in the actors


class Rank:
    """One rank, in a process of its own."""

    def __init__(self, library: str, rank: int) -> None:
        self.library = importlib.import_module(library)
        self.types = importlib.import_module(f"{library}.types")
        self.backend = LIBRARIES[library]
        self.rank = rank

    def pid(self) -> int:
        return os.getpid()

    def join(self, ranks: int, group: str) -> None:
        self.library.init_collective_group(ranks, self.rank, self.backend, group, gloo_timeout=int(1000 * TIMEOUT_S))

    def warm_up(self, ranks: int, group: str) -> None:
        array = np.full(4, self.rank + 1.0, np.float32)
        self.library.allreduce(array, group)
        assert (array == ranks * (ranks + 1) / 2).all()

    def act(self, act: Act, ranks: int, group: str) -> tuple[str, float]:
        """Does it; gives the error, or what the array holds afterwards, and how long it took in seconds."""
        if act.operation == "nothing":
            return "", 0.0
        array = np.full(act.count, self.rank + 1, act.dtype)
        options = {name: getattr(self.types.ReduceOp, one) if name == "op" else one for name, one in act.options}
        if act.dies == "before":
            os._exit(1)
        if act.count == LARGE:  # all are here now
            self.warm_up(ranks, group)
        if act.dies == "in":
            threading.Timer(KILL_AFTER_S, os._exit, (1,)).start()
        start_s = time.monotonic()
        try:
            if act.operation == "join":
                self.join(ranks, group)
            else:
                getattr(self.library, act.operation)(array, group_name=group, **options)
        except Exception as exc:  # noqa: BLE001 - whatever it is
            return f"!{type(exc).__name__}: {_headline(str(exc))}", time.monotonic() - start_s
        return " ".join(f"{one:g}" for one in array[:8]), time.monotonic() - start_s


def _headline(text: str) -> str:
    """The first line of an error, and the one that it announces."""
    lines = [*text.splitlines(), ""]
    return f"{lines[0]} {lines[1].strip(' -')}" if lines[0].endswith(":") else lines[0]


# ---------------------------------------------------------------------------------------------- on the driver


def try_case(library: str, case: Case, group: str) -> list[Fate]:
    """Tries a case; gives what became of each rank."""
    for attempt in range(ATTEMPTS):
        try:
            return _try(library, case, f"{group}.{attempt}")
        except RayError as exc:  # of the beginning, when all is well: the machine was busy for too long
            print(f"{case.name} with {library} begins anew: {_headline(str(exc))}", file=sys.stderr)
    raise RuntimeError(f"{case.name} with {library} did not begin in {ATTEMPTS} attempts")


def _try(library: str, case: Case, group: str) -> list[Fate]:
    ranks = len(case.acts)
    cls = ray.remote(num_cpus=0)(Rank)
    actors = [cls.remote(library, rank) for rank in range(ranks)]
    try:
        pids = ray.get([actor.pid.remote() for actor in actors], timeout=START_S)
        if case.has_joined:
            for method in ("join", "warm_up"):
                ray.get([getattr(actor, method).remote(ranks, group) for actor in actors], timeout=START_S)
        start_s = time.monotonic()
        refs: list[Any] = [None] * ranks
        order = sorted(range(ranks), key=lambda rank: case.acts[rank].dies != "before")
        for rank in order:
            refs[rank] = actors[rank].act.remote(case.acts[rank], ranks, group)
            if case.acts[rank].dies == "before":
                ray.wait([refs[rank]], timeout=LIMIT_S)
                start_s = time.monotonic()
        with ThreadPoolExecutor(ranks) as threads:
            told = list(threads.map(lambda ref: _fate(ref, start_s), refs))
        return [
            Fate(what=one.what, seconds=one.seconds, is_silent=one.is_silent, is_alive=_is_alive(pid))
            for one, pid in zip(told, pids, strict=True)
        ]
    finally:
        for actor in actors:
            ray.kill(actor)


def _fate(ref: Any, start_s: float) -> Fate:
    try:
        text, seconds = ray.get(ref, timeout=max(start_s + LIMIT_S - time.monotonic(), 0.1))
    except GetTimeoutError:
        return Fate(what=f"still waits after {LIMIT_S:g} s")
    except RayActorError:
        return Fate(what="its process dies", seconds=time.monotonic() - start_s)
    if not seconds:
        return Fate(what="")
    if text.startswith("!"):
        return Fate(what=f"`{_shortened(text[1:])}`", seconds=seconds)
    return Fate(what=f"returns, its array is {text}", seconds=seconds, is_silent=True)


def _shortened(text: str) -> str:
    plain = _PATH.sub("", text).replace("|", "/").replace("`", "'")
    return plain if len(plain) <= LINE_LENGTH else plain[: LINE_LENGTH - 1] + "…"


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# ---------------------------------------------------------------------------------------------- what is written


def cell(case: Case, fates: Sequence[Fate]) -> str:
    """What became of the ranks, in one cell of a table."""
    concerned = [rank for rank, act in enumerate(case.acts) if act.operation != "nothing" and not act.dies]
    by_text: dict[str, list[int]] = {}
    for rank in concerned:
        by_text.setdefault(fates[rank].what, []).append(rank)
    lines = [f"{_named(ranks)}: {text}{_after([fates[rank] for rank in ranks])}" for text, ranks in by_text.items()]
    if all(fates[rank].is_silent for rank in concerned):
        lines.append("**no error**")
    dead = [rank for rank in concerned if not fates[rank].is_alive]
    if dead:
        lines.append(f"**{_named(dead)} dead**")
    return "<br>".join(lines)


def _after(fates: Sequence[Fate]) -> str:
    """After how long, of ranks that fared alike; nothing where there was no error."""
    times = sorted(f"{fate.seconds:.2f}" for fate in fates if fate.seconds and not fate.is_silent)
    return f" after {' to '.join(dict.fromkeys((times[0], times[-1])))} s" if times else ""


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def page(found: dict[tuple[str, str], list[Fate]]) -> str:
    """The section, as Markdown."""
    known = machine.describe()
    versions = ", ".join(f"{name} {known[name]}" for name in ("ray", "torch", "numpy", "raycollect") if name in known)
    first, second = LIBRARIES
    given = f"a limit of {TIMEOUT_S:g} s as `gloo_timeout`; whoever waited for {LIMIT_S:g} s was given up"
    shown = "of an error the beginning is shown; who is not called dead lives on"
    lines = [
        f"Actors on one machine of {known['cores']} cores that did other things, too; {versions}. Each group was given",
        f"{given}. The rank that dies, or does not come, is rank 1; {shown}.",
        "",
        f"| what is wrong | `{first}`, gloo | `{second}` |",
        "|---|---|---|",
    ]
    for case in CASES:
        cells = (case.name, *(cell(case, found[library, case.name]) for library in LIBRARIES))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(write: Callable[[str, str], None] = write_section) -> None:
    """Tries all cases, and writes the section."""
    start_s = time.monotonic()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    jobs = [(library, case, f"fault {number}") for number, case in enumerate(CASES) for library in LIBRARIES]
    try:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            fates = list(threads.map(lambda job: try_case(*job), jobs))
    finally:
        ray.shutdown()
    text = page({(library, case.name): fate for (library, case, _), fate in zip(jobs, fates, strict=True)})
    write("peers", text)
    print(text)
    print(f"\ntook {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
