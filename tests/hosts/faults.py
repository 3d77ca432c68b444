"""Faults of several hosts: cables that are pulled, raylets that stop, a head that is lost; see `programs`.

After each, the error is typed, comes in bounded time and names a host or its ranks; who was not hit lives, and the
group works on, or is rebuilt.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import ray

import raycollect as col
from tests.hosts.cluster import outside
from tests.hosts.values import FAR, PER_HOST, by_host, fill, keep, on, same
from tests.support.actors import buffers

LIMIT_S = 8.0  # how long calls in a fault wait
SLACK_S = 15.0  # how much later an error may come on a machine that is shared
RECOVERY_S = 90.0  # how long Ray may take to reach its actors again

Timeout, Died = col.errors.CollectiveTimeoutError, col.errors.ParticipantDiedError


@dataclass(frozen=True)
class Cut:
    """A way in which hosts don't reach each other any more; what ends it, and how errors tell it."""

    begin: tuple[str, int] | tuple[str, int, int]
    end: tuple[str, int] | tuple[str, int, int]
    told: Callable[[BaseException], bool]


def _names_link(exc: BaseException) -> bool:
    return isinstance(exc, Timeout) and exc.cut == ("10.77.0.2 and 10.77.0.3",)


def _names_host(exc: BaseException) -> bool:
    """Which is host 3, where ranks 4 and 5 are."""
    return "10.77.0.3" in str(exc) or (isinstance(exc, Died) and exc.rank in (4, 5))


LINK = Cut(("cut_link", 2, 3), ("heal_link", 2, 3), _names_link)
ONE_WAY = Cut(("lose", 2, 3), ("find", 2, 3), _names_link)
HOST = Cut(("cut", 3), ("heal", 3), _names_host)


def fails(run: Callable[[], object], *kinds: type[BaseException], within_s: float) -> BaseException:
    """The error that a call raises in bounded time."""
    began_s = time.monotonic()
    try:
        run()
    except kinds as exc:
        took_s = time.monotonic() - began_s
        print(f"{type(exc).__name__} after {took_s:.1f} s: {exc}")
        assert took_s < within_s, f"{took_s:.1f} s"
        return exc
    raise AssertionError("no error")


def until(begun_s: float, lasts_s: float) -> None:
    """The rest of a fault."""
    time.sleep(max(begun_s + lasts_s - time.monotonic(), 0))


def again(group, workers):
    """The group, or one in its place, works."""
    until_s = time.monotonic() + RECOVERY_S
    while True:
        try:
            made = col.allreduce_refs(keep(workers, [np.ones(5)] * len(workers)), inplace=False, timeout_s=20)
            break
        except (Timeout, col.errors.GroupBrokenError) as exc:
            print(f"again: {exc}")
            assert time.monotonic() < until_s
            if isinstance(exc, col.errors.GroupBrokenError):
                group.rebuild()
    same(made, np.full(5, float(len(workers))))


def answer(workers, method="read"):
    """Waits until Ray reaches all actors again: its own connections have to be made anew."""
    until_s = time.monotonic() + RECOVERY_S
    while True:
        try:
            ray.get([getattr(w, method).remote() for w in workers])
            return
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < until_s
            time.sleep(1)  # Ray tells nobody when it does


# ------------------------------------------------------------------------------------------ cuts


def breaks(cut: Cut, workers, *, in_plan: bool = False, lasts_s: float = 0.0, backend: str = "auto") -> None:
    """A cut that outlasts a call: it is told in bounded time; once it is over, the group works, or is rebuilt."""
    group = col.declare_collective_group(workers, backend=backend)
    refs = fill(workers, 16 * FAR if in_plan else 4 * FAR)[0] if in_plan or backend == "gloo" else buffers(workers)
    if not in_plan:
        col.allreduce_refs(refs)
    work = col.allreduce_refs(refs, async_op=True, timeout_s=LIMIT_S) if in_plan else None
    begun_s = time.monotonic()
    outside(*cut.begin)
    call = work.wait if work is not None else lambda: col.allreduce_refs(refs, timeout_s=LIMIT_S)
    exc = fails(call, Timeout, Died, within_s=LIMIT_S * (1 + in_plan) + SLACK_S)
    assert cut.told(exc), exc
    assert isinstance(exc, Died) or cut is HOST or "may be healthy" in str(exc)
    ray.get([w.read.remote() for w in workers[1:PER_HOST]])  # survivors are alive
    until(begun_s, lasts_s)
    outside(*cut.end)
    answer(workers)  # nobody was ended
    if cut is HOST:
        group.rebuild(workers, timeout_s=120)
    again(group, workers)


def heals(cut: Cut, workers) -> None:
    """A cut of five seconds in a kernel: nobody hears of it."""
    col.declare_collective_group(workers)
    refs, values = fill(workers, 8 * FAR)
    work = col.allreduce_refs(refs, inplace=False, async_op=True, timeout_s=60)
    outside(*cut.begin)
    time.sleep(5)  # the fault itself
    outside(*cut.end)
    same(work.wait(), by_host(values))


def after(workers):
    """A cable is pulled when a plan has ended: what was made on other hosts is there, and they form a group."""
    group = col.declare_collective_group(workers)
    refs, values = fill(workers, 1000)
    made = col.allreduce_refs(refs, inplace=False)
    same(made, by_host(values))  # so that Ray has the answers, too
    begun_s = time.monotonic()
    outside(*HOST.begin)
    left = workers[: 2 * PER_HOST]
    same(made[: len(left)], by_host(values))
    group.rebuild(left, timeout_s=120)
    again(group, left)
    until(begun_s, 60)
    outside(*HOST.end)
    answer(workers)
    same(made, by_host(values))
    group.rebuild(workers, timeout_s=120)
    again(group, workers)


def silent(workers):
    """A host falls silent while everybody waits: told within the documented time, and the others go on."""
    group = col.declare_collective_group(workers)
    refs = buffers(workers)
    col.allreduce_refs(refs)
    held = workers[0].call.remote(lambda self: time.sleep(60))  # so that the plan waits, and the driver asks once
    work = col.allreduce_refs(buffers(workers), async_op=True, timeout_s=120)
    outside(*HOST.begin)
    exc = fails(work.wait, Died, within_s=16)
    assert exc.rank in (4, 5), exc.rank
    ray.cancel(held, force=False)
    left = workers[:4]
    ray.get([w.read.remote() for w in left[1:]])  # survivors are alive
    group.rebuild(left, timeout_s=120)
    again(group, left)


# ------------------------------------------------------------------------------------------ Ray's processes


def paused(workers):
    """A raylet is stopped for 25 s: calls in place go on; one that makes something says for whom it waits."""
    group = col.declare_collective_group(workers)
    refs, values = fill(workers, 1000)
    begun_s = time.monotonic()
    assert outside("signal", 3, "raylet", int(signal.SIGSTOP)) == 1
    for _ in range(5):
        col.allreduce_refs(refs, op="max", timeout_s=20)
        time.sleep(1)  # the fault itself
    exc = fails(lambda: col.allreduce_refs(refs, inplace=False, timeout_s=LIMIT_S), Timeout, within_s=LIMIT_S + SLACK_S)
    assert exc.missing == (4, 5), exc
    until(begun_s, 25)
    outside("signal", 3, "raylet", int(signal.SIGCONT))
    answer(workers)
    same(refs, functools.reduce(np.maximum, values))
    again(group, workers)


def raylet(workers):
    """Ray's own process on a host is gone: the members there end, and are named; the others go on; a new node joins."""
    group = col.declare_collective_group(workers)
    col.allreduce_refs(buffers(workers))
    assert outside("signal", 3, "raylet", int(signal.SIGKILL)) == 1
    broken = (Died, col.errors.GroupBrokenError, col.errors.ActorGoneError)
    fails(lambda: [col.allreduce_refs(buffers(workers), timeout_s=30) for _ in range(200)], *broken, within_s=90)
    left = workers[:4]
    group.rebuild(left, timeout_s=60)
    again(group, left)
    outside("start_node", 3)
    returned = [*left, *(on(3) for _ in range(PER_HOST))]
    group.rebuild(returned, timeout_s=120)
    again(group, returned)


def head(workers):
    """Ray's head is lost: calls of the group go on, as they need nobody but its members."""
    col.declare_collective_group(workers)
    refs, values = fill(workers, 1000)
    same(col.allreduce_refs(refs, inplace=False), by_host(values))
    assert outside("signal", 1, "gcs_server", int(signal.SIGKILL)) == 1
    for _ in range(5):
        col.allreduce_refs(refs, timeout_s=20)
        time.sleep(1)  # the fault itself


PROGRAMS: dict[str, Callable[..., None]] = {
    "link": partial(breaks, LINK),
    "link_in_plan": partial(breaks, LINK, in_plan=True),
    "link_of_gloo": partial(breaks, LINK, backend="gloo"),
    "one_way": partial(breaks, ONE_WAY, lasts_s=25.0),
    "one_way_in_plan": partial(breaks, ONE_WAY, in_plan=True),
    "host": partial(breaks, HOST, lasts_s=25.0),
    "host_in_plan": partial(breaks, HOST, in_plan=True, lasts_s=25.0),
    "host_for_a_minute": partial(breaks, HOST, lasts_s=60.0),
    "host_heals": partial(heals, HOST),
    "link_heals": partial(heals, LINK),
    "one_way_heals": partial(heals, ONE_WAY),
    **{one.__name__: one for one in (after, silent, paused, raylet, head)},
}
