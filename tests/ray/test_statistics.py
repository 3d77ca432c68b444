"""`Group.statistics`: what the members hold, whatever they are doing, and who does not say."""

from __future__ import annotations

import pytest
import ray

import raycollect as col
from raycollect.errors import KernelError
from tests.faults import inject
from tests.support.actors import Gate, Plain, Worker
from tests.support.waiting import stopped, wait_until

LIMITS = (64 << 20, 96 << 20)
NBYTES = 1 << 20


def limited(nbytes):
    """Options of an actor whose arena has that limit."""
    return {"runtime_env": {"env_vars": {"RAYCOLLECT_ARENA_LIMIT": str(nbytes)}}}


def fill(self):
    self.buffer = col.ones(NBYTES // 8)
    return self.buffer


@pytest.fixture
def pair(actors):
    """Two members whose arenas have the limits above."""
    return [actors(Worker, 1, **limited(limit))[0] for limit in LIMITS]


def test_statistics_count_store_and_arena(pair):
    group = col.declare_collective_group(pair)
    first, second = group.statistics().members
    assert [(one.rank, one.actor) for one in (first, second)] == [(m.rank, m.actor) for m in group.status().members]
    for one, limit in zip((first, second), LIMITS, strict=True):
        assert (one.store.held, one.store.dirty, one.store.freed) == (0, 0, 0)
        assert one.arena == type(one.arena)(limit=limit, mapped=0)

    refs = [worker.make.remote(fill) for worker in pair]
    col.allreduce_refs(refs)
    made = col.allreduce_refs(refs, inplace=False)
    ray.wait(made, num_returns=2)  # the last rank tells the end for all; the other may yet have to keep its output

    members = group.statistics().members
    for one, limit, other in zip(members, LIMITS, reversed(LIMITS), strict=True):
        assert one.store.held == 2
        assert (one.arena.limit, one.arena.in_use, one.arena.blocks) == (limit, 2 * NBYTES, 2)
        assert one.arena.in_use <= one.arena.backed <= limit
        assert one.arena.mapped == other
    lines = repr(group.statistics()).splitlines()
    assert len(lines) == 3
    for part in ("rank 1 (Buffers(", "2 refs held", "0 dirty", "2 MiB in 2 blocks", "limit 96 MiB", "64 MiB mapped"):
        assert part in lines[2]
    assert col.free(made) == 2
    assert wait_until(lambda: [one.arena.in_use for one in group.statistics().members] == [NBYTES] * 2)
    assert [one.store.freed for one in group.statistics().members] == [1, 1]


def test_dirt_is_counted_until_it_is_overwritten(actors):
    pair = actors(Worker, 2)
    group = col.declare_collective_group(pair)
    refs = [worker.make.remote(fill) for worker in pair]
    ray.get(pair[1].call.remote(inject.put, "after_kernel", "raise"))
    with pytest.raises(KernelError):
        col.allreduce_refs(refs)
    assert group.statistics().members[1].store.dirty == 1
    ray.get([worker.call.remote(lambda self: col.mark_written(self.buffer)) for worker in pair])
    assert [one.store.dirty for one in group.statistics().members] == [0, 0]


def test_busy_members_and_those_without_the_mixin_answer(actors):
    (busy,), (plain,), (gate,) = actors(Worker, 1), actors(Plain, 1), actors(Gate, 1, max_concurrency=8)
    group = col.declare_collective_group([busy, plain])

    def hold(self, gate):
        self.buffer = col.ones(NBYTES // 8)
        return ray.get(gate.wait.remote())

    blocked = [one.call.remote(hold, gate) for one in (busy, plain)]
    assert wait_until(lambda: all(one.arena.in_use >= NBYTES for one in group.statistics().members))
    assert ray.wait(blocked, num_returns=2, timeout=0)[1] == blocked
    ray.get(gate.open.remote())
    ray.get(blocked)


def test_dead_member_has_no_statistics(actors):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers)
    ray.kill(workers[1])
    assert wait_until(lambda: group.status().state == "broken")
    found = group.statistics()
    assert [one and one.rank for one in found.members] == [0, None, 2]
    assert "rank 1: gone, or silent" in repr(found)


def test_statistics_wait_for_a_stopped_member_no_longer_than_asked(actors):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)
    pid = group.status().members[0].pid
    with stopped(pid):
        assert [one and one.rank for one in group.statistics(timeout_s=3.0).members] == [None, 1]
    assert [one and one.rank for one in group.statistics().members] == [0, 1]
