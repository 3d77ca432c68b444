"""What users do by mistake or in good faith hurts nobody: no hang, no dead process, no wrong data; a clear error."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.lives import lasting
from tests.ray.test_imperative import told
from tests.ray.test_refusals import Gate
from tests.ray.test_store import wait_until
from tests.ray.workers import Buffers, Worker

BACKENDS = ("shm", "tcp", "gloo")
PATIENT_S = 20.0


def refs_of(workers):
    refs = [worker.get_buffer.remote() for worker in workers]
    ray.wait(refs, num_returns=len(refs))
    return refs


def assert_works(workers, *group_name):
    """The next collective is right, of new tensors."""
    refs = [worker.make.remote(lambda self, n: np.full(5, n), rank + 1) for rank, worker in enumerate(workers)]
    col.allreduce_refs(refs, *group_name, timeout_s=PATIENT_S)
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(5, sum(range(len(workers) + 1))))


# ---------------------------------------------------------------------------------------------- forked children


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


@pytest.mark.parametrize("backend", BACKENDS)
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
    assert in_child(None, uses[name]).startswith("ForkedError: this process was forked")
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


# ---------------------------------------------------------------------------------------------- tensors that change


def resize(self):
    self.buffer.resize(16, refcheck=False)


def resize_back(self):
    self.buffer.resize(8, refcheck=False)
    self.buffer[:] = 1


def replace_it(self):
    self.buffer = np.full(8, 100, np.float32)


def delete(self):
    del self.buffer


def close(self):
    self.buffer.flags.writeable = False


def torch_resize(self):
    self.buffer.resize_(16)


def torch_resize_back(self):
    self.buffer.resize_(8).fill_(1)


def torch_set(self):
    import torch

    self.buffer.set_(torch.ones(8))


def torch_data(self):
    import torch

    self.buffer.data = torch.ones(4, 2).t()


def torch_data_back(self):
    import torch

    self.buffer.data = torch.ones(8)


def torch_storage(self):
    self.buffer.untyped_storage().resize_(0)


def empty_list(self):
    self.buffer.clear()


def wipe(self):
    """What no method should do: it empties the store behind everybody's back."""
    from raycollect.member.runtime import Runtime

    store = Runtime.current().store
    store.free(list(store._held))


def of_numpy(self):
    self.buffer = np.ones(8, np.float32)
    return self.buffer


def of_torch(self):
    import torch

    self.buffer = torch.ones(8)
    return self.buffer


def of_list(self):
    self.buffer = [np.ones(8, np.float32)]
    return self.buffer


CHANGES: dict[Any, list[tuple[Any, Any]]] = {
    of_numpy: [(resize, errors.MismatchError), (resize_back, None), (replace_it, None), (delete, None)],
    of_torch: [
        (torch_resize, errors.MismatchError),
        (torch_resize_back, None),
        (torch_set, None),
        (torch_data, errors.MismatchError),
        (torch_data_back, None),
        (torch_storage, errors.NotATensorError),
        (torch_data_back, None),
        (delete, None),
    ],
    of_list: [(empty_list, None), (wipe, errors.TensorFreedError)],
    "closed": [(close, errors.ReadOnlyError)],
}
"""How a tensor is made -> what its actor does between two collectives, and what the next one raises; None: it works."""


@pytest.mark.parametrize(
    ("make", "backend"),
    [(of_numpy, "shm"), (of_numpy, "tcp"), (of_torch, "shm"), (of_torch, "gloo"), (of_list, "tcp"), ("closed", "gloo")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_tensor_changed_after_its_return_is_read_anew(actors, backend, make):
    """A ref names storage: what it holds is looked at by each collective anew, and let go of by none."""
    pytest.importorskip("torch")
    pair = actors(Worker, 2)
    col.declare_collective_group(pair, backend=backend)
    refs = [worker.make.remote(make if callable(make) else of_numpy) for worker in pair]
    for _ in range(3):  # it is remembered by then
        col.allreduce_refs(refs, op="max")
    for change, error in CHANGES[make]:
        ray.get(pair[0].call.remote(change))
        if error is None:
            col.allreduce_refs(refs, op="max", timeout_s=PATIENT_S)
        else:
            with pytest.raises(error) as caught:
                col.allreduce_refs(refs, timeout_s=PATIENT_S)
            assert caught.value.violations
        assert all(np.asarray(leaf).max() == 1 for leaf in np.ravel(col.get(refs[1])))
    assert_works(pair, "default")


# ---------------------------------------------------------------------------------------------- who drives whom


def drive(self, workers, count=1, name="inner"):
    """Drives a group of others; returns what they hold in the end."""
    group = col.declare_collective_group(workers, group_name=name)
    refs = [worker.make.remote(lambda self: np.ones(3)) for worker in workers]
    for _ in range(count):
        col.allreduce_refs(refs, name, timeout_s=PATIENT_S)
    found = float(col.get(refs[0])[0])
    group.destroy()
    return found


def test_an_actor_drives_its_own_group_while_it_is_in_one(actors):
    outer, (first, second) = actors(Worker, 2), actors(Worker, 2)
    col.declare_collective_group(outer, group_name="outer")
    refs = refs_of(outer)
    nested = outer[0].call.remote(drive, [first, second], 10)
    work = col.allreduce_refs(refs, "outer", async_op=True)
    assert ray.get(nested) == 2**10
    work.wait(PATIENT_S)
    np.testing.assert_array_equal(col.get(refs), np.full((2, 10), 2))
    assert_works([first, second])


def by_call(refs):
    col.allreduce_refs(refs, timeout_s=5)


def by_batch(refs):
    with col.batch(timeout_s=5):
        col.allreduce_refs(refs)


def by_step(refs):
    with col.capture(timeout_s=5) as step:
        col.allreduce_refs(refs)
    step.run()


@pytest.mark.parametrize("way", [by_call, by_batch, by_step], ids=lambda way: way.__name__)
def test_an_actor_that_drives_a_plan_that_it_takes_part_in(actors, way):
    pair = actors(Worker, 2)

    def drive_oneself(self, workers):
        way([worker.get_buffer.remote() for worker in workers])

    (found,) = told([pair[0].call.remote(drive_oneself, pair)])
    assert isinstance(found, errors.SelfDrivenError), found
    assert pair[0]._actor_id.hex()[:6] in found.actor
    assert_works(pair)


def test_two_drivers_of_the_same_actors_and_two_of_others(actors):
    """The second one is told who has them; it is given those that are nobody's, and the others once they are free."""
    trio, rivals = actors(Worker, 3), actors(Worker, 2)
    group = col.declare_collective_group(trio[:2])
    for wanted in (trio[:2], [trio[2], trio[1]]):
        (found,) = told([rivals[0].call.remote(drive, wanted)])
        assert isinstance(found, errors.ControllerConflictError), found
        assert "driver process" in found.holder
        assert str(os.getpid()) in found.holder
        assert found.actor.startswith("Buffers(")
    assert_works(trio[:2], "default")
    group.destroy()
    halves = [[trio[0], trio[1]], [trio[2], *actors(Worker, 1)]]
    at_once = [rival.call.remote(drive, half, 20) for rival, half in zip(rivals, halves, strict=True)]
    assert ray.get(at_once) == [2**20] * 2
    assert_works(trio)


# ---------------------------------------------------------------------------------------------- threads, coroutines


def in_threads(self, sizes, rounds, timeout_s):
    """Calls from as many threads as there are sizes; what each gets."""
    rank, found = col.get_rank(), {}

    def call(at):
        try:
            for _ in range(rounds):
                tensor = np.full(sizes[at], rank + 1.0)
                col.allreduce(tensor, timeout_s=timeout_s)
            found[at] = tensor.tolist()
        except errors.RaycollectError as exc:
            found[at] = type(exc).__name__

    threads = [threading.Thread(target=call, args=(at,)) for at in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return None if any(thread.is_alive() for thread in threads) else [found[at] for at in range(len(sizes))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_of_members_that_call_at_once(actors, backend):
    """They are told so, or their calls have met by luck; nobody waits for ever, and the group works on."""
    pair = actors(Worker, 2)
    col.declare_collective_group(pair, backend=backend)
    refused = ("ConcurrentCallError", "CollectiveTimeoutError", "PlanAbortedError")  # the last: just past the door
    for found in ray.get([one.call.remote(in_threads, [4, 4, 4], 10, 2) for one in pair]):
        assert found is not None, "a thread waits for ever"
        assert all(one in (*refused, [3.0] * 4) for one in found), found
    for found in ray.get([one.call.remote(in_threads, [4, 8], 3, 2) for one in pair]):
        assert found is not None, "a thread waits for ever"
        assert all(one in (*refused, "MismatchError", [3.0] * 4, [3.0] * 8) for one in found), found
    assert ray.get([one.call.remote(in_threads, [2], 1, PATIENT_S) for one in pair]) == [[[3.0] * 2]] * 2


class Coroutines(col.CollectiveParticipant):
    """An async actor that makes collectives in its coroutines."""

    async def join(self, world, rank):
        col.init_collective_group(world, rank)

    async def by_thread(self, count):
        for _ in range(count):
            tensor = np.ones(4)
            await asyncio.to_thread(col.allreduce, tensor)
        return tensor.tolist()

    async def in_the_loop(self, count):
        for _ in range(count):
            tensor = np.ones(4)
            col.allreduce(tensor, timeout_s=PATIENT_S)
        return tensor.tolist()

    async def awaited(self, count):
        for _ in range(count):
            tensor = np.ones(4)
            await col.allreduce(tensor, async_op=True)
        return tensor.tolist()

    async def items(self):
        for n in range(2):
            yield np.full(3, n + 1.0)
        raise ValueError("half-way")


def test_coroutines_that_call_at_once(actors):
    pair = actors(ray.remote(Coroutines), 2)
    ray.get([one.join.remote(2, rank) for rank, one in enumerate(pair)])
    for name in ("in_the_loop", "awaited"):  # one thread
        found = ray.get([getattr(one, name).remote(3) for one in pair for _ in range(3)], timeout=60)
        assert found == [[2.0] * 4] * 6
    for _ in range(3):  # one after the other, in any threads
        assert ray.get([one.by_thread.remote(3) for one in pair], timeout=60) == [[2.0] * 4] * 2
    streams = [list(one.items.remote()) for one in pair]
    assert_half(streams)


# ---------------------------------------------------------------------------------------------- generators


class Streams(Buffers):
    """Generators of every kind, of which the last items fail."""

    def two(self):
        yield np.full(3, 1.0)
        yield np.full(3, 2.0)

    @ray.method(num_returns=2)
    def declared(self):
        yield np.full(3, 1.0)
        yield np.full(3, 2.0)

    def half(self):
        yield from self.two()
        raise ValueError("half-way")

    @ray.method(num_returns=3)
    def declared_half(self):
        yield from self.two()
        raise ValueError("half-way")


Stream = lasting(ray.remote(Streams))


def assert_half(streams):
    """Two items can be used, and the third is the exception."""
    for at in range(2):
        refs = [stream[at] for stream in streams]
        col.allreduce_refs(refs, timeout_s=PATIENT_S)
        np.testing.assert_array_equal(col.get(refs), np.full((len(refs), 3), 2.0 * (at + 1)))
    with pytest.raises(errors.ProducerFailedError, match="ValueError: half-way"):
        col.allreduce_refs([stream[2] for stream in streams], timeout_s=PATIENT_S)
    with pytest.raises(ray.exceptions.RayTaskError, match="half-way"):
        col.get(streams[0][2])


CALLS = {
    "streamed": lambda one: one.two.remote(),
    "streamed, though declared": lambda one: one.declared.options(num_returns="streaming").remote(),
    "declared": lambda one: one.declared.remote(),
    "said by the caller": lambda one: one.two.options(num_returns=2).remote(),
}


def test_the_items_of_a_generator_are_never_taken_for_each_other(actors):
    """How its caller numbers them is for Ray alone to know: where the actor can't, they go by value."""
    pair = actors(Stream, 2)
    for name, call in CALLS.items():
        items = [list(call(one)) for one in pair]
        for at in range(2):
            refs = [of_one[at] for of_one in items]
            np.testing.assert_array_equal(col.get(refs), np.full((2, 3), at + 1.0))
            if name == "said by the caller":
                with pytest.raises(errors.NotATensorError, match=r"@ray\.method\(num_returns=n\)"):
                    col.allreduce_refs(refs, timeout_s=PATIENT_S)
            else:
                col.allreduce_refs(refs, timeout_s=PATIENT_S)
                np.testing.assert_array_equal(col.get(refs), np.full((2, 3), 2.0 * (at + 1)))
    assert_works(pair)


def test_a_generator_that_raises_half_way(actors):
    pair = actors(Stream, 2)
    for name in ("half", "declared_half"):
        assert_half([list(getattr(one, name).remote()) for one in pair])
    assert_works(pair)


# ---------------------------------------------------------------------------------------------- memory, descriptors


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and what is told of it.

    Attributes:
        values: What each rank brings.
        error: What is raised.
        field: What is named; of rank 1.
        starved: True: there is no memory on rank 1.
        inplace: As of the call.
    """

    values: Any
    error: type[errors.RaycollectError]
    field: str
    starved: bool = False
    inplace: bool = True


FAULTS = {
    "an output": Fault(lambda rank: np.ones(5), errors.AllocationError, "output", starved=True, inplace=False),
    "staging": Fault(lambda rank: [np.ones(5), np.zeros(5)], errors.AllocationError, "staging", starved=True),
    "a shape": Fault(lambda rank: np.ones(5 + rank % 2), errors.MismatchError, "shape"),
    "no tensor": Fault(lambda rank: "text" if rank == 1 else np.ones(5), errors.NotATensorError, "operand"),
    "one tensor twice": Fault(
        lambda rank: [np.ones(5)] * 2 if rank == 1 else [np.ones(5), np.ones(5)], errors.AliasError, "operand"
    ),
}


def starve(self, how):
    """From now on nothing is allocated for collectives in this process, or everything again."""
    from raycollect.member.runtime import Runtime
    from raycollect.pos import tensors

    def refuse(info):
        raise MemoryError("there is none")

    runtime = Runtime.current()
    runtime.instruments = replace(runtime.instruments, allocate=refuse if how else tensors.allocate)


def descriptors(self):
    """How much this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - it is pickled with no more than it needs


def go_wrong(workers, fault):
    """A call that fails; it names the rank at fault, and no value has changed."""
    refs = [one.make.remote(lambda self, make, n: make(n), fault.values, rank) for rank, one in enumerate(workers)]
    was = col.get(refs)
    ray.get(workers[1].call.remote(starve, fault.starved))
    for _ in range(3):
        with pytest.raises(fault.error) as caught:
            col.allreduce_refs(refs, "default", inplace=fault.inplace, timeout_s=PATIENT_S)
        assert {(violation.rank, violation.field) for violation in caught.value.violations} == {(1, fault.field)}
    ray.get(workers[1].call.remote(starve, False))
    for found, value in zip(col.get(refs), was, strict=True):
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("backend", ["shm", *(pytest.param(one, marks=pytest.mark.full) for one in BACKENDS[1:])])
def test_failed_calls_change_nothing(actors, backend):
    """Values, dirt and open files are those of before, and the next one is right."""
    trio = actors(Worker, 3)
    group = col.declare_collective_group(trio, backend=backend)
    counts = []
    for _ in range(3):
        for fault in FAULTS.values():
            go_wrong(trio, fault)
            assert_works(trio, "default")
        counts.append(ray.get([one.call.remote(descriptors) for one in trio]))
    first, *_, last = counts  # by then all is open that is opened once; 30 failures later there are no more
    assert all(now < before + len(FAULTS) for before, now in zip(first, last, strict=True)), counts
    assert [member.store.dirty for member in group.statistics().members] == [0] * 3


def test_late_ranks_leave_no_descriptors_behind(actors):
    pair, (gate,) = actors(Worker, 2), actors(Gate, 1, max_concurrency=8)
    col.declare_collective_group(pair)
    refs = refs_of(pair)
    col.allreduce_refs(refs, op="max")
    before = ray.get([one.call.remote(descriptors) for one in pair])
    blocked = pair[1].call.remote(lambda self, gate: ray.get(gate.wait.remote()), gate)
    for _ in range(3):
        with pytest.raises(errors.CollectiveTimeoutError):
            col.allreduce_refs(refs, timeout_s=0.3)
    ray.get(gate.open.remote())
    ray.get(blocked)
    col.allreduce_refs(refs, op="max")
    assert wait_until(lambda: ray.get(pair[0].call.remote(descriptors)) <= before[0])


def test_a_member_without_shared_memory_is_named(actors):
    """The others hear why, and the same members form a group that needs none."""
    pair = actors(Worker, 2)

    def break_memfd(self):
        from raycollect.core import shared_memory

        def refuse(name, nbytes):
            raise OSError("no memory, as a test wants it")

        shared_memory.create = refuse

    ray.get([one.call.remote(break_memfd) for one in pair])
    with pytest.raises(errors.BackendUnavailableError, match=r"rank 0 can't make \d+ bytes of shared memory: no"):
        col.declare_collective_group(pair, backend="shm", timeout_s=PATIENT_S)
    col.declare_collective_group(pair, backend="tcp", timeout_s=PATIENT_S)
    assert_works(pair, "default")
