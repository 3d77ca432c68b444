"""Drivers that run on a host of a cluster of three; `test_hosts` and `test_host_faults` start them by name.

Each is a function of the two workers per host; what it prints is in the message of a test that fails.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import ray

import raycollect as col
from raycollect.backends.tcp.probe import BURST_NBYTES
from raycollect.core.model import RANK_ORDER
from raycollect.driver.controller import Controller
from raycollect.group import link_costs
from raycollect.group.measured_links import MeasuredLinks
from tests.hosts.cluster import outside
from tests.ray.three_nodes import every_call
from tests.ray.workers import Buffers

PER_HOST = 2
LIMIT_S = 8.0  # how long calls in a fault wait
SLACK_S = 15.0  # how much later an error may come on a machine that is shared
FAR = 1 << 21  # elements: enough that what else is on the links does not count

Worker = ray.remote(num_cpus=0)(Buffers)


def on(host: int):
    """A worker on a host."""
    return Worker.options(resources={f"host{host}": 0.1}).remote()


def keep(workers, values):
    """Refs to a value on each worker."""
    return [w.make.remote(copied, value) for w, value in zip(workers, values, strict=True)]


def copied(self, value):
    return [one.copy() for one in value] if isinstance(value, list) else value.copy()


def fill(workers, size, *, pieces=False):
    """Refs to different values on each worker; second, the values."""
    values = [np.random.default_rng(rank).uniform(0.5, 1.5, size).astype(np.float32) for rank in range(len(workers))]
    given = [list(value.reshape(len(workers), -1)) if pieces else value for value in values]
    return keep(workers, given), values


def by_host(parts):
    """The left fold over hosts of those inside each."""
    inside = [functools.reduce(np.add, parts[at : at + PER_HOST]) for at in range(0, len(parts), PER_HOST)]
    return functools.reduce(np.add, inside)


def same(refs, expected):
    """All refs hold that, bit for bit."""
    for found in col.get(refs):
        np.testing.assert_array_equal(found, expected)


# ------------------------------------------------------------------------------------------ what comes out


def bits(workers):
    """Every way of calling gives the same bits: the fold host by host; on request, that in rank order."""
    group = col.declare_collective_group(workers)
    assert group.backend == "tcp", group.backend
    for size in (100, 100_002):
        refs, values = fill(workers, size)
        total = by_host(values)
        same(col.allreduce_refs(refs, inplace=False), total)
        with col.batch():
            made = [col.allreduce_refs(refs, inplace=False) for _ in range(3)]
        for one in made:
            same(one, total)
        with col.capture() as step:
            step.returns(col.allreduce_refs(refs, inplace=False))
        for _ in range(4):
            for found in step.run():
                np.testing.assert_array_equal(found, total)
        step.close()
        found = ray.get([w.call.remote(member_sum, v) for w, v in zip(workers, values, strict=True)])
        for one in found:
            np.testing.assert_array_equal(one, total)
    (row,) = col.plan(col.allreduce_refs, refs).rows
    assert "over hosts" in row.bits, row.bits
    group.destroy()
    col.declare_collective_group(workers, pg_options=dict([RANK_ORDER]))
    same(col.allreduce_refs(refs, inplace=False), functools.reduce(np.add, values))
    (row,) = col.plan(col.allreduce_refs, refs).rows
    assert row.bits == "the left fold in rank order", row.bits
    col.destroy_collective_group()


def member_sum(self, value):
    found = value.copy()
    col.allreduce(found)
    return found


def calls(workers):
    """The members' own calls, by the driver's group and by one of gloo that they make."""
    trio = [workers[0], workers[2], workers[1]]
    col.declare_collective_group(trio)
    ray.get([actor.call.remote(every_call) for actor in trio])
    col.destroy_collective_group()


def minimum(workers):
    """No link carries more than 3 % above the fewest bytes possible."""
    col.declare_collective_group(workers)
    hosts, world, nbytes = 3, len(workers), 4 * FAR * 3
    refs, _ = fill(workers, 3 * FAR)
    pieces, _ = fill(workers, 3 * FAR, pieces=True)
    others, _ = fill(workers, 3 * FAR, pieces=True)
    scattered = col.reducescatter_refs(None, pieces)
    gathered = col.allgather_refs(None, scattered)
    least = {
        "allreduce": (lambda: col.allreduce_refs(refs), 2 * (hosts - 1) / hosts),
        "reduce": (lambda: col.reduce_refs(refs), 1),
        "broadcast": (lambda: col.broadcast_refs(refs), 1),
        "reducescatter": (lambda: col.reducescatter_refs(scattered, pieces), (hosts - 1) / hosts),
        "allgather": (lambda: col.allgather_refs(gathered, scattered), PER_HOST * (hosts - 1) / world),
        "alltoall": (lambda: col.alltoall_refs(others, pieces), PER_HOST * (world - PER_HOST) / world),
    }
    for name, (run, share) in least.items():
        sends_little(name, run, share * nbytes)
    col.destroy_collective_group()
    col.declare_collective_group(workers, backend="gloo")
    for name in ("broadcast", "allgather"):  # what is not left to the library
        run, share = least[name]
        sends_little(f"{name} on gloo", run, share * nbytes)
    col.destroy_collective_group()


def sends_little(name, run, least):
    run()  # so that nothing is formed or learned any more
    before = outside("counters")
    run()
    sent = [new[0] - old[0] for old, new in zip(before, outside("counters"), strict=True)]
    print(f"{name}: {[f'{one / 1e6:.2f}' for one in sent]} MB by host, the least is {least / 1e6:.2f}")
    assert max(sent) < 1.03 * least, name


def links(workers):
    """What the links cost is measured once for each pair of hosts, also for other controllers, and told."""
    group = col.declare_collective_group(workers)
    refs = buffers(workers)
    first = _between(refs)
    assert first.source == "measured", first
    assert first.bandwidth < 1.5 * 125e6, "no link carries more, but for what a burst hides"
    group.destroy()
    before = outside("counters")
    col.declare_collective_group(list(reversed(workers)))
    sent = [new[0] - old[0] for old, new in zip(before, outside("counters"), strict=True)]
    assert max(sent) < BURST_NBYTES, "nothing is measured again"
    second = _between(refs)
    assert (second.latency_s, second.bandwidth) == (first.latency_s, first.bandwidth), second
    membership = Controller.current().groups.named("default")
    assert len(MeasuredLinks().of(membership)) == 3, "in the cluster's store"
    os.environ["RAYCOLLECT_COSTS"] = tempfile.mkstemp()[1]
    link_costs.write(os.environ["RAYCOLLECT_COSTS"], [link_costs.given(latency_s=1.0, bandwidth=2.0)])
    col.destroy_collective_group()
    col.declare_collective_group(workers)
    told = _between(refs)
    assert (told.latency_s, told.bandwidth, told.source) == (1.0, 2.0, "from the file")
    del os.environ["RAYCOLLECT_COSTS"]


def _between(refs):
    (found,) = (one for one in col.plan(col.allreduce_refs, refs).links if one.place == "between")
    print(found)
    return found


# ------------------------------------------------------------------------------------------ faults


def fails(run: Callable[[], object], *kinds: type[BaseException], within_s: float) -> tuple[BaseException, float]:
    """The error that a call raises in bounded time; second, how long that took."""
    began_s = time.monotonic()
    try:
        run()
    except kinds as exc:
        took_s = time.monotonic() - began_s
        print(f"{type(exc).__name__} after {took_s:.1f} s: {exc}")
        assert took_s < within_s, f"{took_s:.1f} s"
        return exc, took_s
    raise AssertionError("no error")


def timed_out(refs):
    """The timeout of an allreduce, and how long it took."""
    kind = col.errors.CollectiveTimeoutError
    return fails(lambda: col.allreduce_refs(refs, timeout_s=LIMIT_S), kind, within_s=LIMIT_S + SLACK_S)


def link(workers):
    """A link between two hosts is cut: it is named, and once it is whole the group works on."""
    group = col.declare_collective_group(workers)
    refs = buffers(workers)
    col.allreduce_refs(refs)
    outside("cut_link", 2, 3)
    exc, _ = timed_out(refs)
    assert exc.cut == ("10.77.0.2 and 10.77.0.3",), exc.cut
    assert "may be healthy" in str(exc)
    outside("heal_link", 2, 3)
    again(group, workers)


def buffers(workers):
    return [w.get_buffer.remote() for w in workers]


def again(group, workers):
    """The group, or one in its place, works."""
    until_s = time.monotonic() + 60
    while True:
        try:
            made = col.allreduce_refs(keep(workers, [np.ones(5)] * len(workers)), inplace=False, timeout_s=20)
            break
        except (col.errors.CollectiveTimeoutError, col.errors.GroupBrokenError) as exc:
            print(f"again: {exc}")
            assert time.monotonic() < until_s
            if isinstance(exc, col.errors.GroupBrokenError):
                group.rebuild()
    same(made, np.full(5, float(len(workers))))


def healed(workers):
    """A cable is pulled for five seconds in a kernel: nobody hears of it."""
    col.declare_collective_group(workers)
    refs, values = fill(workers, 8 * FAR)
    work = col.allreduce_refs(refs, inplace=False, async_op=True, timeout_s=60)
    outside("cut", 3)
    time.sleep(5)  # the fault itself
    outside("heal", 3)
    same(work.wait(), by_host(values))


def in_kernel(workers):
    """The same while bytes are under way."""
    group = col.declare_collective_group(workers)
    refs, _ = fill(workers, 16 * FAR)
    work = col.allreduce_refs(refs, inplace=False, async_op=True, timeout_s=LIMIT_S)
    outside("cut_link", 2, 3)
    exc, _ = fails(work.wait, col.errors.CollectiveTimeoutError, within_s=LIMIT_S * 2 + SLACK_S)
    assert exc.cut == ("10.77.0.2 and 10.77.0.3",), exc.cut
    outside("heal_link", 2, 3)
    again(group, workers)


def one_way(workers):
    """What one host sends another is lost, and not what comes back: as a cut link."""
    group = col.declare_collective_group(workers)
    refs = buffers(workers)
    col.allreduce_refs(refs)
    outside("lose", 2, 3)
    exc, _ = timed_out(refs)
    assert exc.cut == ("10.77.0.2 and 10.77.0.3",), exc.cut
    outside("find", 2, 3)
    again(group, workers)


def gloo_link(workers):
    """As `link`, where a library moves the bytes."""
    group = col.declare_collective_group(workers, backend="gloo")
    refs, _ = fill(workers, 4 * FAR)
    col.allreduce_refs(refs)
    outside("cut_link", 2, 3)
    exc, _ = timed_out(refs)
    assert exc.cut == ("10.77.0.2 and 10.77.0.3",), exc.cut
    outside("heal_link", 2, 3)
    again(group, workers)


def cut_before(workers):
    """A cable is pulled before the plan, and in again after 25 s: the host's link is named; then all go on."""
    group = col.declare_collective_group(workers)
    refs = buffers(workers)
    col.allreduce_refs(refs)
    outside("cut", 3)
    exc, _ = fails(
        lambda: col.allreduce_refs(refs, timeout_s=LIMIT_S),
        col.errors.CollectiveTimeoutError,
        col.errors.ParticipantDiedError,
        within_s=LIMIT_S + SLACK_S,
    )
    assert "10.77.0.3" in str(exc) or exc.rank in (4, 5), exc
    time.sleep(15)  # the fault itself
    outside("heal", 3)
    answer(workers)  # nobody was ended
    group.rebuild(workers, timeout_s=120)
    again(group, workers)


def answer(workers):
    """Waits until Ray reaches all actors again: its own connections have to be made anew."""
    until_s = time.monotonic() + 90
    while True:
        try:
            ray.get([w.read.remote() for w in workers])
            return
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < until_s
            time.sleep(1)  # Ray tells nobody when it does


def silent(workers):
    """A host falls silent while everybody waits: told within the documented time, and the others go on."""
    group = col.declare_collective_group(workers)
    refs = buffers(workers)
    col.allreduce_refs(refs)
    held = workers[0].call.remote(lambda self: time.sleep(60))  # so that the plan waits, and the driver asks once
    work = col.allreduce_refs(buffers(workers), async_op=True, timeout_s=120)
    outside("cut", 3)
    exc, took_s = fails(work.wait, col.errors.ParticipantDiedError, within_s=16)
    assert exc.rank in (4, 5), exc.rank
    print(f"silence was told after {took_s:.1f} s")
    ray.cancel(held, force=False)
    left = workers[:4]
    ray.get([w.read.remote() for w in left[1:]])  # survivors are alive
    group.rebuild(left, timeout_s=120)
    again(group, left)


def raylet(workers):
    """Ray's own process on a host is gone: the members there end, and are named; the others go on."""
    group = col.declare_collective_group(workers)
    col.allreduce_refs(buffers(workers))
    assert outside("signal", 3, "raylet", 9) == 1
    exc, _ = fails(
        lambda: [col.allreduce_refs(buffers(workers), timeout_s=30) for _ in range(200)],
        col.errors.ParticipantDiedError,
        col.errors.GroupBrokenError,
        col.errors.ActorGoneError,
        within_s=90,
    )
    print(exc)
    group.rebuild(workers[:4], timeout_s=60)
    again(group, workers[:4])


_ALL = (bits, calls, minimum, links, link, in_kernel, one_way, gloo_link, healed, cut_before, silent, raylet)
PROGRAMS = {one.__name__: one for one in _ALL}


def main(names: Sequence[str]) -> None:
    """Runs programs one after the other, on the same workers."""
    ray.init(log_to_driver=False, logging_level="warning")
    workers = [on(host) for host in (1, 2, 3) for _ in range(PER_HOST)]
    for name in names:
        began_s = time.monotonic()
        PROGRAMS[name](workers)
        with contextlib.suppress(col.errors.UnknownGroupError):
            col.destroy_collective_group()
        print(f"{name}: done in {time.monotonic() - began_s:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
