"""What P4 and P5 promise of tensors in shared memory: whoever dies, the others go on, and nobody keeps its memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.backends.shm import in_place
from raycollect.pos.arena import NAME
from raycollect.pos.segments import Segments
from tests.faults import inject
from tests.support.actors import Gate, Worker
from tests.support.waiting import has_ended, wait_until

ROOT = Path(__file__).parents[2]
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


def strike(self, reached=None, gate=None, blocks=3):
    """Amid this member's next kernel it dies, or says that it has reached a gate and waits there."""
    fold = in_place.fold

    def struck(*args):
        nonlocal blocks
        blocks -= 1
        if blocks == 0 and gate is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if blocks == 0:
            ray.get(reached.open.remote())
            ray.get(gate.wait.remote())
        fold(*args)

    in_place.fold = struck


def put(actor, point):
    """Lets an actor die at a point of the next plan."""
    if point == "in_kernel":
        ray.get(actor.call.remote(strike))
    else:
        ray.get(actor.call.remote(inject.put, point, "die", "exit"))


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


def is_sum_or_dirty(ref):
    try:
        return bool((col.get(ref) == 3).all())
    except errors.TensorDirtyError:
        return True


# ---------------------------------------------------------------------------------------------- members


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("before_check", marks=pytest.mark.full),
        "in_kernel",
        pytest.param("after_kernel", marks=pytest.mark.full),
    ],
)
def test_a_member_that_is_killed(actors, point):
    workers = actors(Worker, 3)
    group, refs = formed(workers)
    put(workers[1], point)
    with pytest.raises(errors.ParticipantDiedError) as caught:
        col.allreduce_refs(refs)
    assert caught.value.rank == 1
    survivors, refs = [workers[0], workers[2]], [refs[0], refs[2]]
    assert_alone(survivors)
    assert [one and one.arena.mapped for one in group.statistics().members] == [0, None, 0]
    if point == "before_check":
        assert all((found == 1).all() for found in col.get(refs))
        assert_works(col.declare_collective_group(survivors, group_name="again"), refs)
    elif point == "after_kernel":  # the others may have ended the kernel before they heard, or not
        assert all(is_sum_or_dirty(ref) for ref in refs)
    else:
        assert_dirty_until_overwritten(survivors, refs)
        col.destroy_collective_group("again of 2")
        assert_alone(survivors)


def test_a_member_that_stalls_amid_a_kernel(actors):
    """The others stop, and it does as soon as it goes on; the group can be used again."""
    workers = actors(Worker, 3)
    reached, gate = actors(Gate, 2, max_concurrency=8)
    group, refs = formed(workers)
    ray.get(workers[1].call.remote(strike, reached, gate))
    work = col.allreduce_refs(refs, async_op=True)
    ray.get(reached.wait.remote())
    assert work.cancel()
    with pytest.raises(errors.PlanAbortedError, match="cancelled"):
        work.wait()
    for ref in (refs[0], refs[2]):
        with pytest.raises(errors.TensorDirtyError):
            col.get(ref)
    ray.get(gate.open.remote())
    assert_dirty_until_overwritten(workers, refs)
    ray.get([worker.call.remote(lambda self: fill(self).size) for worker in workers])
    assert_works(group, refs)


@pytest.mark.parametrize(
    "declared", [True, pytest.param(False, marks=pytest.mark.full)], ids=["declared", "of their own"]
)
def test_a_member_that_is_killed_amid_a_call_of_its_own(actors, declared):
    workers = actors(Worker, 3)
    if declared:
        col.declare_collective_group(workers, group_name="mortal")

    def reduce(self, name, rank, world):
        """Reduces the actor's array in a group of that name, which is made if need be."""
        if not col.is_group_initialized(name):
            col.init_collective_group(world, rank, "shm", name)
        col.allreduce(self.buffer, name)
        return self.buffer[0]

    def on(some, name):
        return [one.call.remote(reduce, name, rank, len(some)) for rank, one in enumerate(some)]

    refs = [worker.make.remote(fill) for worker in workers]
    assert ray.get(on(workers, "mortal")) == [3, 3, 3]
    assert all(len(mapped) == 3 for mapped, _, _ in ray.get([worker.call.remote(arenas) for worker in workers]))
    ray.get(workers[1].call.remote(strike))
    survivors = [workers[0], workers[2]]
    for call in on(workers, "mortal")[::2]:
        with pytest.raises(errors.ParticipantDiedError, match="rank 1"):
            ray.get(call)
    assert_alone(survivors)
    for call in on(survivors, "again"):
        with pytest.raises(errors.TensorDirtyError):
            ray.get(call)
    with pytest.raises(errors.TensorDirtyError):
        col.get(refs[0])
    ray.get([worker.call.remote(lambda self: fill(self).size) for worker in survivors])
    assert ray.get(on(survivors, "again")) == [2, 2]
    ray.get([worker.call.remote(lambda self: col.destroy_collective_group("again")) for worker in survivors])
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


# ---------------------------------------------------------------------------------------------- the driver

DRIVER = """
    import sys

    import ray

    import raycollect as col
    from tests.faults.test_arena_faults import formed
    from tests.support.actors import Worker

    ray.init(address=sys.argv[1], namespace="killed", log_to_driver=False, configure_logging=False)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"TMPDIR": sys.argv[2]}}}
    workers = [Worker.options(**options).remote() for _ in range(2)]
    workers.append(Worker.options(**options, name="stays", lifetime="detached").remote())
    mine = col.ones(1 << 20)
    group, refs = formed(workers)
    copy = col.get(refs[0])
    print("pids", *(member.pid for member in group.status().members), flush=True)
    sys.stdin.read()
"""


@pytest.mark.full
def test_a_driver_that_is_killed(tidy, tmp_path):
    """Its actors end, and their memory with them; one that is detached lives on, with its own arena alone."""
    folder = tmp_path / "t"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), ray.get_runtime_context().gcs_address, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        line = next(line for line in driver.stdout if line.startswith("pids"))  # Ray may print warnings before
        *pids, _ = map(int, line.split()[1:])
        driver.kill()
    assert wait_until(lambda: all(has_ended(pid) for pid in pids), 60)
    stays = ray.get_actor("stays", "killed")
    try:
        assert_alone([stays])
        assert ray.get(stays.call.remote(lambda self: float(self.buffer.sum()))) == SIZE
        made = stays.make.remote(fill)
        np.testing.assert_array_equal(col.get(made), np.ones(SIZE))
    finally:
        ray.kill(stays)
    assert not list(folder.iterdir())
    assert not [file for file in Path("/dev/shm").iterdir() if "raycollect" in file.name]
