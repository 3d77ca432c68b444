"""Without the cyclic garbage collector: what has ended, and what nobody has any more, is freed at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends.adopted import register_collective_backend
from raycollect.channel import Hub, Server
from raycollect.core.model import Kernel, OpKind, ReduceOp
from raycollect.driver.participant_link import ParticipantLink
from raycollect.errors import (
    CollectiveTimeoutError,
    ConnectionLostError,
    FaultError,
    GroupBrokenError,
    InternalError,
    KernelError,
    RaycollectError,
    RefusedError,
    strip_traceback,
)
from raycollect.member import init
from raycollect.member import operations as col
from raycollect.member.runtime import this_runtime
from tests.pure.backends.adopted_groups import Threads
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import run_launch
from tests.pure.processes import join, leave_all, outcome
from tests.support import cycles
from tests.support.waiting import wait_until

# ---------------------------------------------------------------------------------------------- how it is seen


class Knot:
    """It has itself, and something."""

    def __init__(self, held):
        self.held = held
        self.itself = self


def test_a_cycle_that_holds_what_matters_is_told_of():
    [told] = cycles.left(lambda: Knot([np.ones(1)]))
    assert "Knot" in told
    assert told.startswith("numpy.ndarray WITH ")
    [told] = cycles.left(lambda: Knot(strip_traceback(KernelError(detail="x"))))
    assert told.startswith("raycollect.errors.KernelError WITH ")
    assert cycles.left(lambda: Knot("nothing")) == []
    assert gc.isenabled()
    assert gc.garbage == []


# ---------------------------------------------------------------------------------------------- connections


class Actor:
    """Stands for an actor's handle."""


class Owner:
    """What a peer tells, and what a server is told."""

    def __init__(self):
        self.links = []
        self.came = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def opened(self, link):
        self.links.append(link)
        self.came.release()

    def received(self, one, message):
        pass

    def lost(self, peer, reason):
        self.ended.release()

    def closed(self, link, reason):
        self.links.remove(link)
        self.ended.release()


def _leased(actor, ending):
    """Leases a participant, and ends that."""
    theirs, mine = Owner(), Owner()
    server, hub = Server("127.0.0.1", b"s" * 32, theirs), Hub()
    peer = ParticipantLink(mine, {"participant": True, "actor": "Worker(3f2a91)"}, actor)
    peer.link = hub.connect(server.address, {}, peer, 10)
    assert theirs.came.acquire(timeout=10)
    ending(peer, theirs.links[0], hub)
    assert mine.ended.acquire(timeout=10)
    assert theirs.ended.acquire(timeout=10)
    hub.close()
    server.close()


@pytest.mark.parametrize(
    "ending",
    [
        lambda peer, link, hub: peer.link.close(),
        lambda peer, link, hub: link.close(),
        lambda peer, link, hub: link.end(ConnectionLostError(detail="gone")),
        lambda peer, link, hub: hub.close(),
    ],
    ids=["here", "there", "lost", "all"],
)
def test_a_lease_that_has_ended_holds_no_actor(ending):
    actor = Actor()
    known = weakref.ref(actor)

    def life():
        nonlocal actor
        given, actor = actor, None
        _leased(given, ending)
        del given
        assert known() is None

    before = cycles.holding()
    assert "\n".join(cycles.left(life)) == ""
    assert cycles.more(cycles.settled(before), before) == {}


# ---------------------------------------------------------------------------------------------- backends


def _sum(communicator, launch, n):
    x = np.ones(n)
    with suppress(RaycollectError):
        run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=x, dst=x, op=ReduceOp.SUM))


@pytest.mark.parametrize("backend", ["local", "shm", "tcp", "threads"])
def test_a_communicator_that_is_closed_leaves_nothing(backend, monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    register_collective_backend("threads", Threads)

    def life():
        team = ThreadTeam(backend, 2)
        team.run(_sum, team.launch(), 3)
        team.run(_sum, team.launch(timeout_s=0.1), 3, ranks=[0])  # nobody else comes
        if backend != "shm":  # which trusts what was agreed on
            launch = team.launch(timeout_s=5)
            for one in [team.start(rank, _sum, launch, 3 + rank) for rank in team.everyone]:
                one.result(20)
        team.close()
        Threads.instances.clear()
        Threads.meetings.clear()

    life()  # what a process makes once
    before = cycles.holding()
    assert "\n".join(cycles.left(life)) == ""
    assert cycles.more(cycles.settled(before), before) == {}


# ---------------------------------------------------------------------------------------------- members


def _first():
    """A process as it is between groups, when the connections of the last one are closed."""
    hub = this_runtime().process_groups.hub
    assert wait_until(lambda: not hub._loop.owned)
    cycles.begin()
    return cycles.holding()


def _last(before):
    leave_all()
    return cycles.settled(before), cycles.end()


def _tensors(rank, count):
    """Arrays, and what tells whether they are still there."""
    made = [np.full(3, rank + 1.0) for _ in range(count)]
    return made, [weakref.ref(one) for one in made]


def _wait(work):
    """Waits for a work in both ways."""

    async def wait():
        await work

    work.wait()
    asyncio.run(wait())


def _wait_in_vain(work, kinds):
    """The same for one that fails; asyncio itself would keep what comes out of a coroutine."""

    async def wait():
        try:
            await work
        except kinds:
            return
        raise AssertionError(f"none of {kinds} was raised")

    cycles.fails(kinds, work.wait)
    asyncio.run(wait())


def _calls(name, rank):
    (x, y, z, w), known = _tensors(rank, 4)
    col.allreduce(x, name)
    _wait(col.allreduce(y, name, async_op=True))
    col.allreduce(z, name, async_op=True)  # nobody waits
    col.barrier(name)
    col.allgather([np.zeros(3), np.zeros(3)], w, name)
    sent = col.send(x, 1 - rank, name, async_op=True)
    col.recv(y, 1 - rank, name)
    sent.wait()
    del x, y, z, w, sent
    assert all(one() is None for one in known)


def _refused(name, rank):
    (x, y, z), known = _tensors(rank, 3)
    for wrong in ([x[: 1 + rank], name], [x, name, "nonsense"], [object() if rank else x, name]):
        cycles.fails(RefusedError, col.allreduce, *wrong)
    work = col.allreduce(y[: 1 + rank], name, async_op=True)
    for _ in range(2):
        _wait_in_vain(work, RefusedError)
    repr(work)
    col.allreduce(z[: 1 + rank], name, async_op=True)  # nobody waits
    col.barrier(name)
    del x, y, z, work, wrong
    assert all(one() is None for one in known)


def _late(name, rank):
    (x, y), known = _tensors(rank, 2)
    if rank == 0:
        cycles.fails(CollectiveTimeoutError, col.allreduce, x, name, timeout_s=0.1)
        work = col.allreduce(y, name, async_op=True, timeout_s=0.1)
        cycles.fails(CollectiveTimeoutError, work.wait)
        del work
    del x, y
    assert all(one() is None for one in known)


def _library_fails(name, rank):
    """A kernel fails on one rank."""
    (x,), known = _tensors(rank, 1)
    col.barrier(name)
    if rank == 0:

        def fail(*_):
            raise RuntimeError("in the middle")

        communicator = init.get_group_handle(name).communicator("all").communicator
        communicator.launch = fail
        del communicator
        cycles.fails((FaultError, InternalError), col.allreduce, x, name, timeout_s=5)
    else:
        with suppress(FaultError, InternalError):  # some backends need nobody for what is left to do
            col.allreduce(x, name, timeout_s=5)
    del x
    assert all(one() is None for one in known)


def _one_leaves(name, rank):
    (x, y), known = _tensors(rank, 2)
    col.barrier(name)
    if rank == 1:
        init.destroy_collective_group(name)
        return
    cycles.fails(GroupBrokenError, col.allreduce, x, name)
    work = col.allreduce(y, name, async_op=True)
    cycles.fails(GroupBrokenError, work.wait)
    del x, y, work
    assert all(one() is None for one in known)


def _started(process_group):
    process_group.communicator("all").start("x", lambda communicator, seq: None, 30.0).result()


def _left_under_way(name, rank):
    """The group is destroyed while calls wait, or are queued; its handle is used afterwards."""
    (x, y), known = _tensors(rank, 2)
    col.barrier(name)
    process_group = init.get_group_handle(name)
    works = [col.allreduce(x, name, async_op=True), col.allreduce(y, name, async_op=True)] if rank == 0 else []
    init.destroy_collective_group(name)
    for work in works:
        cycles.fails(GroupBrokenError, work.wait)
    cycles.fails(GroupBrokenError, process_group.form)
    cycles.fails(GroupBrokenError, _started, process_group)
    del process_group, x, y, works
    work = None
    assert all(one() is None for one in known)


EVERYWHERE = (_calls, _refused, _library_fails)
LIVES = [
    pytest.param(
        one, backend, marks=[pytest.mark.full] * (backend == "gloo"), id=f"{one.__name__.strip('_')}-{backend}"
    )
    for one in (*EVERYWHERE, _late, _one_leaves, _left_under_way)
    for backend in (("shm", "tcp", "gloo") if one in EVERYWHERE else ("shm",))
]


@pytest.mark.parametrize(("life", "backend"), LIVES)
def test_a_group_that_members_made_leaves_nothing(crew, life, backend):
    taken = crew.take(2)
    if any(backend not in one.warm for one in taken):  # what a process makes once: threads, memory
        for one in taken:
            one.warm.add(backend)
        _live(crew, taken, backend, _calls)
    befores = [one.call(_first) for one in taken]
    _live(crew, taken, backend, life)
    for process, before in zip(taken, befores, strict=True):
        after, found = process.call(_last, before)
        assert "\n".join(found) == ""
        assert cycles.more(after, before) == {}


def _live(crew, taken, backend, life):
    joining = [one.start(join, 2, rank, backend, "g", 20_000, crew.rendezvous) for rank, one in enumerate(taken)]
    assert [outcome(one) for one in joining] == [None, None]
    lived = [one.start(life, "g", rank) for rank, one in enumerate(taken)]
    assert [outcome(one) for one in lived] == [None, None]
    for one in taken:
        one.call(leave_all)


def _join_in_vain(rank, world_size, rendezvous):
    cycles.fails(RaycollectError, join, world_size, rank, "shm", "v", 300, rendezvous)


@pytest.mark.parametrize("sizes", [(2, 3), (2, None), (None, 2), (3, 3)], ids=str)
def test_a_group_that_did_not_come_about_leaves_nothing(crew, sizes):
    taken = crew.take(2)
    _live(crew, taken, "shm", _calls)
    befores = [one.call(_first) for one in taken]
    coming = [
        one.start(_join_in_vain, rank, size, crew.rendezvous)
        for rank, (one, size) in enumerate(zip(taken, sizes, strict=True))
        if size
    ]
    assert [outcome(one) for one in coming] == [None] * len(coming)
    for process, before in zip(taken, befores, strict=True):
        after, found = process.call(_last, before)
        assert "\n".join(found) == ""
        assert cycles.more(after, before) == {}


@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "member"])
def test_a_group_of_which_one_died_leaves_nothing(crew, victim):
    taken = crew.take(2)
    _live(crew, taken, "shm", _calls)
    other = taken[1 - victim]
    before = other.call(_first)
    joining = [one.start(join, 2, rank, "shm", "g", 20_000, crew.rendezvous) for rank, one in enumerate(taken)]
    assert [outcome(one) for one in joining] == [None, None]
    waiting = other.start(_waits_for_the_dead, "g", 1 - victim)
    taken[victim].kill()
    assert outcome(waiting) is None
    after, found = other.call(_last, before)
    assert "\n".join(found) == ""
    assert cycles.more(after, before) == {}


def _waits_for_the_dead(name, rank):
    (x, y), known = _tensors(rank, 2)
    cycles.fails(RaycollectError, col.allreduce, x, name)
    work = col.allreduce(y, name, async_op=True)
    cycles.fails(GroupBrokenError, work.wait)
    del x, y, work
    assert all(one() is None for one in known)
