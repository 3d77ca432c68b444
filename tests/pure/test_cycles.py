"""Without the cyclic garbage collector: what has ended, and what nobody has any more, is freed at once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress

import numpy as np
import pytest

from raycollect.core.model import Kernel, OpKind, ReduceOp
from raycollect.errors import (
    CollectiveTimeoutError,
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
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import run_launch
from tests.pure.processes import join, leave_all, outcome
from tests.support import cycles
from tests.support.waiting import wait_until


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


def _sum(communicator, launch, n):
    x = np.ones(n)
    with suppress(RaycollectError):
        run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=x, dst=x, op=ReduceOp.SUM))


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_communicator_that_is_closed_leaves_nothing(backend):
    def life():
        team = ThreadTeam(backend, 2)
        team.run(_sum, team.launch(), 3)
        team.run(_sum, team.launch(timeout_s=0.1), 3, ranks=[0])  # nobody else comes
        team.close()

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


def _fails(kinds, work):
    """Waits in vain in both ways; asyncio itself would keep what comes out of a coroutine."""

    async def wait():
        with suppress(kinds):
            await work
            raise AssertionError(f"none of {kinds} was raised")

    cycles.fails(kinds, work.wait)
    asyncio.run(wait())


def _calls(name, rank, x, y, z):
    col.allreduce(x, name)
    col.allreduce(y, name, async_op=True).wait()
    col.allreduce(z, name, async_op=True)  # nobody waits
    col.allgather([np.zeros(3), np.zeros(3)], x, name)
    sent = col.send(y, 1 - rank, name, async_op=True)
    col.recv(z, 1 - rank, name)
    sent.wait()


def _refused(name, rank, x, y, z):
    for wrong in ([x[: 1 + rank], name], [x, name, "nonsense"], [object() if rank else x, name]):
        cycles.fails(RefusedError, col.allreduce, *wrong)
    _fails(RefusedError, col.allreduce(y[: 1 + rank], name, async_op=True))
    col.allreduce(z[: 1 + rank], name, async_op=True)  # nobody waits
    col.barrier(name)


def _late(name, rank, x, y, z):
    if rank == 0:
        cycles.fails(CollectiveTimeoutError, col.allreduce, x, name, timeout_s=0.1)
        _fails(CollectiveTimeoutError, col.allreduce(y, name, async_op=True, timeout_s=0.1))


def _library_fails(name, rank, x, y, z):
    """A kernel fails on one rank."""
    if rank == 0:

        def fail(*_):
            raise RuntimeError("in the middle")

        init.get_group_handle(name).communicator("all").communicator.launch = fail
        cycles.fails((FaultError, InternalError), col.allreduce, x, name, timeout_s=5)
        return
    with suppress(FaultError, InternalError):  # some backends need nobody for what is left to do
        col.allreduce(x, name, timeout_s=5)


def _one_leaves(name, rank, x, y, z):
    if rank == 1:
        init.destroy_collective_group(name)
        return
    cycles.fails(GroupBrokenError, col.allreduce, x, name)
    _fails(GroupBrokenError, col.allreduce(y, name, async_op=True))


def _left_under_way(name, rank, x, y, z):
    """The group is destroyed while calls wait, or are queued; its handle is used afterwards."""
    process_group = init.get_group_handle(name)
    works = [col.allreduce(one, name, async_op=True) for one in (x, y)] if rank == 0 else []
    init.destroy_collective_group(name)
    for work in works:
        cycles.fails(GroupBrokenError, work.wait)
    cycles.fails(GroupBrokenError, process_group.form)


def _dies(name, rank, x, y, z):
    """Rank 1 is killed by the test."""
    if rank == 0:
        cycles.fails(RaycollectError, col.allreduce, x, name)
        _fails(GroupBrokenError, col.allreduce(y, name, async_op=True))


def _lived(life, name, rank):
    """One rank's life; no tensor outlives it."""
    col.barrier(name)
    tensors = [np.full(3, rank + 1.0) for _ in range(3)]
    known = [weakref.ref(one) for one in tensors]
    life(name, rank, *tensors)
    del tensors
    assert all(one() is None for one in known)


LIVES = [
    *((life, "shm") for life in (_calls, _refused, _late, _library_fails, _one_leaves, _left_under_way, _dies)),
    *((life, "tcp") for life in (_calls, _refused, _library_fails)),
    *(pytest.param(life, "gloo", marks=pytest.mark.full) for life in (_calls, _refused, _library_fails)),
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
    _check(taken if life is not _dies else taken[:1], befores)


def _live(crew, taken, backend, life):
    joining = [one.start(join, 2, rank, backend, "g", 20_000, crew.rendezvous) for rank, one in enumerate(taken)]
    assert [outcome(one) for one in joining] == [None, None]
    living = taken if life is not _dies else taken[:1]
    lived = [one.start(_lived, life, "g", rank) for rank, one in enumerate(living)]
    if life is _dies:
        taken[1].call(_lived, life, "g", 1)
        taken[1].kill()
    assert [outcome(one) for one in lived] == [None] * len(lived)
    for one in living:
        one.call(leave_all)


def _check(taken, befores):
    for process, before in zip(taken, befores, strict=False):
        after, found = process.call(_last, before)
        assert "\n".join(found) == ""
        assert cycles.more(after, before) == {}


def _join_in_vain(rank, world_size, rendezvous):
    cycles.fails(RaycollectError, join, world_size, rank, "shm", "v", 300, rendezvous)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3)], ids=str)
def test_a_group_that_did_not_come_about_leaves_nothing(crew, sizes):
    taken = crew.take(2)
    _live(crew, taken, "shm", _calls)
    befores = [one.call(_first) for one in taken]
    joining = [
        one.start(_join_in_vain, rank, size, crew.rendezvous)
        for rank, (one, size) in enumerate(zip(taken, sizes, strict=True))
    ]
    assert [outcome(one) for one in joining] == [None, None]
    _check(taken, befores)
