"""What P4 and P5 promise of tensors in shared memory: whoever dies, the others go on, and nobody keeps its memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.backends.shm import in_place
from raycollect.pos.arena import NAME
from raycollect.pos.segments import Segments
from tests.support.actors import Worker
from tests.support.waiting import wait_until

SIZE = 2 << 20
"""Elements of float32: 8 MB."""


# What the actors run ------------------------------------------------------------------------------------------


def fill(self):
    """Overwrites the actor's array with ones; makes it if need be."""
    if len(self.buffer) != SIZE:
        self.buffer = col.empty(SIZE, np.float32)
    self.buffer[:] = 1
    col.mark_written(self.buffer)
    return self.buffer


def arenas(self):
    """The inodes of the arenas that this process has mapped, and of those that it has open; and that of its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {int(line.split()[4]) for line in lines if f"memfd:{NAME}" in line}
    opened = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            if str(file.readlink()).startswith(f"/memfd:{NAME}"):
                opened.add(file.stat().st_ino)
        except FileNotFoundError:  # closed meanwhile
            continue
    return mapped, opened, os.fstat(Segments.current().arena.segment.fd).st_ino


def holds_its_own_only(self):
    mapped, opened, own = arenas(self)
    return mapped == opened == {own}


def strike(self, blocks=3):
    """Amid this member's next kernel it dies."""
    fold = in_place.fold

    def struck(*args):
        nonlocal blocks
        blocks -= 1
        if blocks == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        fold(*args)

    in_place.fold = struck


# What the tests ask -------------------------------------------------------------------------------------------


def formed(workers, name="default"):
    """A group whose members have mapped each other's arenas; and the refs of their arrays, which hold ones."""
    group = col.declare_collective_group(workers, group_name=name)
    refs = [worker.make.remote(fill) for worker in workers]
    col.allreduce_refs(refs, name)
    assert all((found == len(workers)).all() for found in col.get(refs))
    found = ray.get([worker.call.remote(arenas) for worker in workers])
    everybody = {own for _, _, own in found}
    assert len(everybody) == len(workers)
    assert all(mapped == opened == everybody for mapped, opened, _ in found)
    ray.get([worker.call.remote(lambda self: fill(self).size) for worker in workers])
    return group, refs


def assert_alone(workers):
    """These have their own arena, and nothing of anybody else's; they hear of a death by a way of its own."""
    assert wait_until(lambda: all(ray.get([worker.call.remote(holds_its_own_only) for worker in workers])))


def assert_dirty_until_overwritten(workers, refs):
    """Nobody reads what was left half-written, nor works on it; once it is whole, it is worked on again."""
    name = f"again of {len(workers)}"
    group = col.declare_collective_group(workers, group_name=name)
    for ref in refs:
        with pytest.raises(errors.TensorDirtyError):
            col.get(ref)
    with pytest.raises(errors.TensorDirtyError) as caught:
        col.allreduce_refs(refs, name)
    assert [violation.rank for violation in caught.value.violations] == list(range(len(workers)))
    assert [member.store.dirty for member in group.statistics().members] == [1] * len(workers)
    ray.get([worker.call.remote(lambda self: fill(self).size) for worker in workers])
    assert_works(group, refs)


def assert_works(group, refs):
    """The group works in place on these arrays, which hold ones."""
    col.allreduce_refs(refs, group.name)
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(SIZE, group.world_size, np.float32))
    for member in group.statistics().members:
        assert member.store.dirty == 0
        assert member.arena.mapped


# ---------------------------------------------------------------------------------------------- members


def test_a_member_that_is_killed_amid_a_kernel(actors):
    workers = actors(Worker, 3)
    group, refs = formed(workers)
    ray.get(workers[1].call.remote(strike))
    with pytest.raises(errors.ParticipantDiedError) as caught:
        col.allreduce_refs(refs)
    assert caught.value.rank == 1
    survivors, refs = [workers[0], workers[2]], [refs[0], refs[2]]
    assert_alone(survivors)
    assert [one and one.arena.mapped for one in group.statistics().members] == [0, None, 0]
    assert_dirty_until_overwritten(survivors, refs)
    col.destroy_collective_group("again of 2")
    assert_alone(survivors)


def test_a_group_that_ends_leaves_nothing_mapped(actors):
    workers = actors(Worker, 3)
    group, refs = formed(workers)
    other = col.declare_collective_group(workers[:2], group_name="other")
    col.allreduce_refs(refs[:2], "other")
    group.destroy()
    assert wait_until(lambda: ray.get(workers[2].call.remote(holds_its_own_only)))
    assert all(member.arena.mapped for member in other.statistics().members)
    other.destroy()
    assert_alone(workers)
