"""Forked children of a driver, and processes without memory or descriptors."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import select
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.faults.groups import BACKENDS, PATIENT_S, assert_works, refs_of
from tests.support.actors import Worker


def in_child(self, function, *args):
    """What a function gives or raises, as text, in a forked child of the actor, which ends at once."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            try:
                text = repr(function(self, *args))
            except BaseException as exc:
                text = f"{type(exc).__name__}: {exc}"
            os.write(write, text.encode())
        finally:
            os._exit(0)
    os.close(write)
    poller = select.poll()  # not select: the number may be above 1,024, as Ray keeps a socket to each dead actor
    poller.register(read, select.POLLIN)
    ready = poller.poll(1000 * PATIENT_S)
    text = os.read(read, 1 << 16).decode() if ready else "nothing"
    os.close(read)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return text


def by_folder(self):
    """A group of its own, of one, which needs no Ray."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        col.init_collective_group(1, 0, group_name="of its own", rendezvous=f"file://{folder}")
        tensor = np.full(1, 3.0)
        col.allreduce(tensor, "of its own")
        return tensor.tolist()


IN_A_CHILD = {
    "nothing": (lambda self: None, "None"),
    "its call": (lambda self: col.allreduce(self.buffer, timeout_s=1), "UnknownGroupError: group 'default'"),
    "its rank": (lambda self: (col.get_rank(), col.is_group_initialized()), "(-1, False)"),
    "its tensor": (lambda self: self.get_buffer().tolist(), "[4.0, 4.0"),
    "an array": (lambda self: (col.ones(3) * 2).tolist(), "[2.0, 2.0, 2.0]"),
    "the arena": (lambda self: col.arena_statistics().in_use, "0"),
    "what another holds": (lambda self: np.asarray(self.handle).tolist(), "[1.0, 1.0"),
    "what it holds": (lambda self: np.asarray(self.own).tolist(), "[4.0, 4.0"),
    "whole again": (lambda self: col.mark_written(self.buffer), "None"),
    "a group": (lambda self: col.init_collective_group(1, 0, group_name="of its own"), "InvalidGroupError"),
    "a group without Ray": (by_folder, "[3.0]"),
    "what its parent drives": (lambda self: col.get(self.refs), "ForkedError"),
    "the end of a group": (lambda self: col.destroy_collective_group(), "ForkedError"),
    "an exception": (lambda self: 1 // 0, "ZeroDivisionError"),
}
"""What a forked child of an actor does, and how what comes of it begins."""


@pytest.mark.parametrize("backend", ["shm", *(pytest.param(one, marks=pytest.mark.full) for one in BACKENDS[1:])])
def test_a_forked_child_has_no_part_in_its_parents_groups_and_does_them_no_harm(actors, backend):
    pair, (other,) = actors(Worker, 2), actors(Worker, 1)
    group = col.declare_collective_group(pair, backend=backend)
    refs = refs_of(pair)
    for _ in range(2):
        col.allreduce_refs(refs)

    def keep(self, handle, own):
        self.handle, self.own, self.refs = handle[0], own[0], []

    ray.get(pair[0].call.remote(keep, [ray.get(other.get_buffer.remote())], [ray.get(refs[0])]))
    for name, (function, begins) in IN_A_CHILD.items():
        found = ray.get(pair[0].call.remote(in_child, function))
        assert found.startswith(begins), f"{name}: {found}"
        col.allreduce_refs(refs, op="max", timeout_s=PATIENT_S)
    assert group.status().state == "alive"
    np.testing.assert_array_equal(col.get(refs), np.full((2, 10), 4))
    np.testing.assert_array_equal(ray.get(pair[0].call.remote(lambda self: np.asarray(self.handle))), np.ones(10))
    assert_works(pair, "default")


@pytest.mark.parametrize("name", ["call", "group", "get"])
def test_forked_child_of_the_driver_is_refused(actors, name):
    pair = actors(Worker, 2)
    group = col.declare_collective_group(pair)
    refs = refs_of(pair)
    col.allreduce_refs(refs)
    uses = {
        "call": lambda self: col.allreduce_refs(refs, op="max"),
        "group": lambda self: col.declare_collective_group(pair, group_name="another"),
        "get": lambda self: col.get(refs[0]),
    }
    assert in_child(None, uses[name]).startswith("ForkedError: ")
    col.allreduce_refs(refs, op="max", timeout_s=PATIENT_S)
    assert group.status().state == "alive"


def live_on(self):
    """A child that lives until it is killed; returns its process, which has come to rest by then."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write, b"here")
        signal.pause()
        os._exit(0)
    os.read(read, 4)
    os.close(read)
    os.close(write)
    return pid


def test_a_child_that_lives_on_does_not_hide_the_death_of_its_parent(actors):
    """It has none of its parent's connections, and none of the memory of groups open."""
    trio = actors(Worker, 3)
    group = col.declare_collective_group(trio)
    refs = refs_of(trio)
    col.allreduce_refs(refs)
    child = ray.get(trio[1].call.remote(live_on))
    try:
        open_files = [str(file.readlink()) for file in Path(f"/proc/{child}/fd").iterdir()]
        assert not [file for file in open_files if "raycollect-arena" in file]
        col.allreduce_refs(refs, timeout_s=PATIENT_S)
        ray.kill(trio[1])
        with pytest.raises((errors.ParticipantDiedError, errors.GroupBrokenError), match="Buffers"):
            while True:  # until Ray has killed it
                col.allreduce_refs(refs, timeout_s=PATIENT_S)
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
    group.destroy()
    assert_works([trio[0], trio[2]])


def pool(self, count):
    """Work in forked processes, as of a data loader; they end by themselves: Ray's SIGTERM can hang in a child."""
    workers = multiprocessing.get_context("fork").Pool(2)
    found = sum(workers.map(abs, range(count)))
    workers.close()
    workers.join()
    return found


@pytest.mark.parametrize("concurrency", [1, 3], ids=["ordered", "threaded"])
def test_worker_processes_of_an_actor_while_collectives_go_on(actors, concurrency):
    pair = actors(Worker, 2, max_concurrency=concurrency) if concurrency > 1 else actors(Worker, 2)
    refs = refs_of(pair)
    works, sums = [], []
    for _ in range(3):
        sums.append(pair[0].call.remote(pool, 10))
        works.append(col.allreduce_refs(refs, async_op=True, timeout_s=PATIENT_S))
    for work in works:
        work.wait()
    assert ray.get(sums) == [45] * 3
    np.testing.assert_array_equal(col.get(refs), np.full((2, 10), 8))


def test_a_member_without_shared_memory_is_named(actors):
    """The others hear why, nobody is left leased, and the same members form a group that needs none."""
    pair, (rival,) = actors(Worker, 2), actors(Worker, 1)

    def break_memfd(self):
        from raycollect.core import shared_memory

        def refuse(name, nbytes):
            raise OSError("no memory, as a test wants it")

        shared_memory.create = refuse

    ray.get([one.call.remote(break_memfd) for one in pair])
    with pytest.raises(errors.BackendUnavailableError, match=r"rank 0 can't make \d+ bytes of shared memory: no"):
        col.declare_collective_group(pair, backend="shm", timeout_s=PATIENT_S)

    def drive(self, workers):
        col.declare_collective_group(workers, backend="tcp").destroy()

    ray.get(rival.call.remote(drive, pair))
    col.declare_collective_group(pair, backend="tcp", timeout_s=PATIENT_S)
    assert_works(pair, "default")


# ---------------------------------------------------------------------------------------------- nothing left to give


@contextmanager
def without_descriptors():
    """Leaves this process no file descriptor to open: the three below the limit are in use, whatever others close."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_driver_without_descriptors_says_so_and_works_afterwards(actors):
    """It can't connect to its actors, which live."""
    known, new = actors(Worker, 2), actors(Worker, 2)
    col.declare_collective_group(known)
    assert_works(known, "default")
    ray.get([one.get_buffer.remote() for one in new])
    with without_descriptors() as limit, pytest.raises(errors.ResourceLimitError) as caught:
        col.declare_collective_group(new, group_name="new", timeout_s=PATIENT_S)
    assert (caught.value.resource, caught.value.limit) == ("file descriptors", limit)
    assert pickle.loads(pickle.dumps(caught.value)).limit == limit
    assert_works(known, "default")
    col.declare_collective_group(new, group_name="new", timeout_s=PATIENT_S)
    assert_works(new, "new")


def lose_threads(self, is_lost):
    """Lets this process start no more threads, as the system does at a limit; or lets it again."""
    import threading  # that of the actor's process

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    if is_lost:
        self.start, threading.Thread.start = threading.Thread.start, refuse
    else:
        threading.Thread.start = self.start


def capture(group):
    refs = refs_of(group.actors)
    with col.capture(timeout_s=PATIENT_S) as step:
        col.allreduce_refs(refs)
    step.close()


def declare_again(group):
    col.declare_collective_group(group.actors, group_name="another", timeout_s=PATIENT_S)


@pytest.mark.parametrize("use", [declare_again, capture])
def test_a_member_without_threads_says_so_and_works_afterwards(actors, use):
    pair = actors(Worker, 2)
    group = col.declare_collective_group(pair)
    assert_works(pair, "default")
    ray.get(pair[1].call.remote(lose_threads, True))
    with pytest.raises(errors.ResourceLimitError) as caught:
        use(group)
    error = caught.value
    assert (error.resource, error.rank) == ("threads", 1)
    assert error.actor == group.status().members[1].actor
    ray.get(pair[1].call.remote(lose_threads, False))
    use(group)
    assert_works(pair, "default")
