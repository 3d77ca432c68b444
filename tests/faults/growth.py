"""What processes hold, looked at again and again: what grows, and of which classes.

Before it is looked at, a process gives back what it keeps by rule, and no more of than a stated number: garbage, the
caches that have a size, idle connections, what is remembered of closed steps, free memory of the C library. What is
freed late is waited for.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from raycollect import backends
from raycollect.core.model import task_key
from raycollect.core.weighted_cache import WeightedCache
from raycollect.driver.controller import Controller
from raycollect.member.participant import this_participant
from raycollect.member.wait_monitor import _Wait
from raycollect.pos import fetch
from raycollect.pos.segments import Segments
from raycollect.ray_bridge import call_tokens, ray_session
from tests.support.cycles import target_of

_Cache = type(functools.lru_cache(int))

BACKENDS = tuple(filter(backends.is_available, ("shm", "tcp", "gloo")))
"""What groups of soaks use."""

SETTLE_S = 20.0
"""How long what is freed late may take."""
REMEMBERED = 4096
"""How many freed keys a store remembers."""

Figures = dict[str, int]
"""What a process holds, by the name of the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What may become of a figure between the first look of a phase and its last.

    Attributes:
        figure: Its name; see `figures_of_process` and `figures_of_driver`.
        means: What it is, for a person.
        spread: How much larger the last may be than the first; None where a slope is judged instead.
        per_kill: How much more for each actor that was killed in between.
        slope: How much it may grow per cycle, by a straight line through all looks.
        slope_killed: The same where each cycle kills an actor, of which Ray keeps an account.
        least: How much it may grow in all before the slope is judged: in a short soak that is warming up.
    """

    figure: str
    means: str
    spread: int | None = 0
    per_kill: int = 0
    slope: float = 0.0
    slope_killed: float = 0.0
    least: int = 0


RULES = (
    Rule(figure="threads", means="threads of Python"),
    Rule(figure="native", means="threads of the process", spread=4),  # Ray's own pools come and go by a few
    Rule(figure="files", means="open files but for Ray's own sockets"),
    # As above; and Ray keeps one to each dead process that owned a reference, without raycollect too.
    Rule(figure="sockets", means="sockets", spread=6, per_kill=1),
    Rule(figure="shared", means="memfds of raycollect, open or mapped"),
    Rule(figure="objects", means="living objects of raycollect's classes"),
    Rule(figure="refs", means="references to objects that Ray counts"),
    Rule(figure="held", means="values in the store"),
    Rule(figure="blocks", means="blocks of the arena in use"),
    Rule(figure="groups", means="groups that the controller knows"),
    Rule(figure="peers", means="participants that it has leased"),
    Rule(figure="flights", means="plans under way"),
    Rule(figure="actors", means="living actors"),
    # The arena keeps some for the next tensors
    Rule(figure="common", means="resident shared memory of raycollect", spread=8 << 20),
    Rule(
        figure="private",
        means="resident private memory",
        spread=None,
        slope=8 << 10,
        slope_killed=128 << 10,
        least=1 << 20,
    ),
)


# ---------------------------------------------------------------------------------------------- looking


def give_back() -> None:
    """Lets this process give back what it keeps by rule, and would keep a bounded amount of."""
    gc.unfreeze()  # or nobody sees the caches within what was there when it was frozen
    ours = [vars(module).values() for name, module in list(sys.modules.items()) if name.startswith("raycollect.")]
    within = [one for one in gc.get_objects() if type(one) is _Cache and one.__module__.startswith("raycollect.")]
    for one in (*itertools.chain(*ours), *within):
        if type(one) is _Cache and (one.cache_parameters()["maxsize"] or 0) > 1:
            one.cache_clear()
        if type(one) is WeightedCache:
            one.clear()
    fetch.close_idle()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def classes() -> Counter[str]:
    """The living objects of raycollect's classes, by class."""
    kinds = Counter(map(type, gc.get_objects()))
    return Counter({f"{one.__module__}.{one.__name__}": n for one, n in kinds.items() if _is_ours(one)})


def _is_ours(cls: type) -> bool:
    return str(cls.__module__).startswith("raycollect.") and not issubclass(cls, type)


def figures_of_process() -> Figures:
    """What any process holds."""
    files = [target_of(one) for one in Path("/proc/self/fd").iterdir()]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:raycollect" in line]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sockets = sum(one.startswith("socket:") for one in files)
    found = {
        "threads": threading.active_count(),
        "native": len(list(Path("/proc/self/task").iterdir())),
        "files": len(files) - sockets,
        "sockets": sockets,
        "shared": len(mapped) + sum(one.startswith("/memfd:raycollect") for one in files),
        "objects": sum(classes().values()),
        "blocks": Segments.current().statistics().blocks,
        "private": int(status["RssAnon"].split()[0]) << 10,
        "common": _resident_nbytes("memfd:raycollect"),
    }
    counts = getattr(ray_session.core_worker(), "get_all_reference_counts", None)
    if counts is not None:  # no public API tells
        found["refs"] = len(counts())
    return found


def _resident_nbytes(name: str) -> int:
    """The resident bytes of mappings of this name. ``RssShmem`` counts what Ray maps of its object store as well."""
    found, is_mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            found += is_mine * (int(line.split()[1]) << 10)
        elif "-" in line.partition(" ")[0]:  # a mapping begins
            is_mine = name in line
    return found


def figures_of_actor(actor: Any) -> tuple[Figures, Counter[str]]:
    """What a participant holds; runs inside of it."""
    _await_end_of_waits()
    give_back()
    here = this_participant()
    # Known by the programs that the caches had: one more after each look
    here.runtime.instruments.cache._layouts.clear()
    counters = here.runtime.instruments.counters  # which keep one for each of 256 groups and operations
    counters._tallies.clear()
    counters._by_id.clear()
    if here._lease is not None:
        here._lease._captures._late.clear()
    found = figures_of_process()
    found["held"] = here.store.statistics().held
    if "refs" in found:
        found["refs"] -= len(here._tokens._ready)  # a pool, more or less full
    return found, classes()


def prepare(actor: Any) -> None:
    """Has a participant load the backends, and remember as many freed keys as it ever does; runs inside of it."""
    for name in BACKENDS:
        backends.load(name)
    this_participant().store.free([task_key(at.to_bytes(24, "big"), 1) for at in range(REMEMBERED)])


def _await_end_of_waits() -> None:
    """Waits until the wait monitor has let go of the wait that it saw last."""
    until_s = time.monotonic() + SETTLE_S
    while any(type(one) is _Wait for one in gc.get_objects()) and time.monotonic() < until_s:
        time.sleep(0.05)
        gc.collect()


def figures_of_driver() -> tuple[Figures, Counter[str]]:
    """What the driver holds, and what its controller knows."""
    controller = Controller.current()
    for peer in controller.participants.all():
        if peer._tokens is not None:
            peer._tokens._let_go()  # up to some for each participant are ready to be lent
    call_tokens.let_go()
    controller.participants._give_back_slots()  # of actors that were killed; else the next lease does
    give_back()
    groups = controller.groups
    found = figures_of_process()
    found["groups"] = sum(len(one) for one in vars(groups).values() if isinstance(one, (dict, deque)))
    found["peers"] = len(controller.participants._peers)
    found["flights"] = len(list(controller.plans.trackers()))
    actors = getattr(getattr(ray, "_private", None), "state", None)
    if hasattr(actors, "actors"):
        found["actors"] = sum(one.get("State") == "ALIVE" for one in actors.actors().values())
    return found, classes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What all processes hold after so many cycles of a phase, and kills; by process."""

    cycle: int
    kills: int = 0
    figures: dict[str, Figures]
    classes: dict[str, Counter[str]]


def look(cycle: int, actors: Sequence[Any], *, kills: int = 0, before: Look | None = None, waits: bool = True) -> Look:
    """Looks at all processes.

    Args:
        cycle: How many cycles there were.
        actors: The lasting actors.
        kills: How many actors were killed.
        before: An earlier look.
        waits: Whether to look again, for a while, until they hold no more than before; without an earlier look, until
            they hold as much as a moment ago.
    """
    until_s = time.monotonic() + SETTLE_S
    found = _look(cycle, kills, actors)
    last = before
    while waits and (last is None or any(grown(last, found)) or (before is None and any(grown(found, last)))):
        if time.monotonic() > until_s:
            break
        time.sleep(0.2)
        last, found = before or found, _look(cycle, kills, actors)
    return found


def _look(cycle: int, kills: int, actors: Sequence[Any]) -> Look:
    told = ray.get([actor.call.remote(figures_of_actor) for actor in actors], timeout=60)
    names = [f"actor {at}" for at in range(len(actors))]
    all_of_them = {"driver": figures_of_driver(), **dict(zip(names, told, strict=True))}
    return Look(
        cycle=cycle,
        kills=kills,
        figures={name: one for name, (one, _) in all_of_them.items()},
        classes={name: one for name, (_, one) in all_of_them.items()},
    )


# ---------------------------------------------------------------------------------------------- judging


def grown(first: Look, last: Look) -> Iterator[str]:
    """What is more than the rules allow, of the figures that are counted."""
    for rule in RULES:
        for process, figures in first.figures.items():
            if rule.spread is None or rule.figure not in figures:
                continue
            before, after = figures[rule.figure], last.figures[process][rule.figure]
            if after > before + rule.spread + rule.per_kill * (last.kills - first.kills):
                yield f"{process}: {rule.means}: {before} after {first.cycle} cycles, {after} after {last.cycle}"


def rising(looks: Sequence[Look], *, killed: bool) -> Iterator[str]:
    """What grows faster than the rules allow, of the figures that are measured."""
    cycles = looks[-1].cycle - looks[0].cycle
    for rule in RULES:
        bound = rule.slope_killed if killed else rule.slope
        for process in looks[0].figures if rule.spread is None else ():
            found = slope(looks, process, rule.figure)
            if found > bound and found * cycles > rule.least:
                yield f"{process}: {rule.means}: {found:,.0f} bytes more per cycle, {bound:,.0f} are allowed"


def slope(looks: Sequence[Look], process: str, figure: str) -> float:
    """How much a figure grows per cycle: a straight line through all looks, by least squares."""
    cycles = np.array([one.cycle for one in looks], float)
    values = np.array([one.figures[process][figure] for one in looks], float)
    return float(np.polyfit(cycles, values, 1)[0]) if len(looks) > 1 else 0.0


def by_class(first: Look, last: Look) -> Iterator[str]:
    """Of which classes there are more than before: where to look for the cause."""
    for process, before in first.classes.items():
        more = last.classes[process] - before
        if more:
            yield f"{process}: " + ", ".join(f"{name} +{count}" for name, count in more.most_common(8))
