"""Groups, order and results of the driver's collectives; `tests/contract` has what they compute."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actors import Worker, block
from tests.support.checks import refused


def test_one_rank_alone(actors):
    (actor,) = actors(Worker, 1)
    group = col.declare_collective_group([actor])
    assert group.backend == "local"
    ref = actor.get_buffer.remote()
    col.allreduce_refs([ref])
    np.testing.assert_array_equal(col.get(ref), np.ones(10))
    col.barrier()


# ---------------------------------------------------------------------------------------------- groups


def part(giver, taker=0, size=5):
    """What one rank gives another; no two are alike."""
    return np.arange(size, dtype=np.int64) + 100 * giver + 1000 * taker


def make(actors, function):
    """Keeps `function(rank)` in each actor."""
    return [actor.make.remote(lambda self, value: value, function(rank)) for rank, actor in enumerate(actors)]


def assert_same(found, expected):
    assert type(found) is type(expected)
    for one, other in zip(found, expected, strict=True) if isinstance(expected, list) else [(found, expected)]:
        np.testing.assert_array_equal(one, other, strict=True)


def test_derived_groups_take_their_ranks_from_the_tensors(actors):
    a, b = actors(Worker, 2)
    refs = make([a, b], part)
    pair = [part(0), part(1)]
    assert_same(col.get(col.allgather_refs(None, refs)[1]), pair)
    assert_same(col.get(col.gather_refs(None, refs[::-1], 0)), pair[::-1])
    source = b.make.remote(lambda self, value: value, pair)
    outs = col.scatter_refs([b, a], source)
    assert [ray.get(out).actor_id for out in outs] == [b._actor_id.hex(), a._actor_id.hex()]
    assert_same(col.get(outs), pair)
    lists = make([a, b], lambda rank: [part(rank, 0), part(rank, 1)])
    assert_same(col.get(col.reducescatter_refs(None, lists)), [part(0) + part(1), part(0, 1) + part(1, 1)])
    assert_same(col.get(col.alltoall_refs(None, lists[::-1])[0]), [part(1, 0), part(0, 0)])
    with refused(errors.MissingMemberError, "tensor_refs", "a declared group", actors=[a, b]):
        col.scatter_refs(None, source)


@pytest.fixture
def own_folder(monkeypatch):
    """Where temporary files of this process go, by a short path; into the usual folder tests beside this one write."""
    with tempfile.TemporaryDirectory(prefix="left-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def test_nothing_is_left_behind(actors, own_folder):
    """No named actors, no files, no shared memory by name."""

    def things():
        named = {str(one) for one in ray.util.list_named_actors(all_namespaces=True)}
        files = {str(path) for path in Path(own_folder).iterdir() if "raycollect" in path.name}
        return named | files | {str(path) for path in Path("/dev/shm").iterdir()}

    before = things()
    a, b = actors(Worker, 2, runtime_env={"env_vars": {"TMPDIR": own_folder}})
    col.declare_collective_group([a, b], backend="shm")
    refs = [a.get_buffer.remote(), b.get_buffer.remote()]
    col.allreduce_refs(refs)
    assert things() <= before
    ray.kill(a)
    ray.kill(b)
    assert things() <= before


# ---------------------------------------------------------------------------------------------- order, async


def test_await_needs_no_thread_of_the_default_pool_of_the_loop(actors):
    """Users may fill that with calls that wait for what is awaited."""
    a, b = actors(Worker, 2)
    col.declare_collective_group([a, b])
    ref, over = a.get_buffer.remote(), threading.Event()
    with col.capture() as step:
        step.returns(step.call(a.read))

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        waiting = loop.run_in_executor(None, over.wait)
        try:
            found = await asyncio.wait_for(step.run(async_op=True), 30)
            with pytest.raises(errors.ProducerFailedError):
                await asyncio.wait_for(col.allreduce_refs([ref, b.make.remote(lambda self: 1 / 0)], async_op=True), 30)
        finally:
            over.set()
            await waiting
        return found

    np.testing.assert_array_equal(asyncio.run(main()), np.ones(10))


def test_an_error_that_was_raised_is_not_logged_as_unhandled_too(actors, gate, monkeypatch):
    """The refs of outputs hold it as well, and Ray logs errors that nobody asked for: the last call shows that."""
    workers = actors(Worker, 2)
    logged, unhandled = [], threading.Event()

    def note(message, *args, **options):
        logged.append(message)
        unhandled.set()

    monkeypatch.setattr(ray._private.worker.logger, "error", note)
    col.allgather_refs(None, make(workers, part))  # while both can join a group
    busy = block(workers[1], gate)
    work = col.gather_refs(None, make(workers, part), async_op=True)
    assert work.cancel(), "as Ctrl-C does"
    del work
    ray.get([gate.open.remote(), busy])
    with pytest.raises(
        errors.InvalidArgumentError, match=r"int64\[5\] on cpu, expected .* whose first dimension 2 divides"
    ):
        col.alltoall_refs(None, make(workers, part))
    col.allgather_refs(None, make(workers, part))  # the refused one has landed on all ranks
    gc.collect()  # its traceback holds its refs
    work = col.reducescatter_refs(None, make(workers, part), async_op=True)
    resolved = threading.Event()
    work._tracker.when_resolved(resolved.set)
    assert resolved.wait(60)
    del work
    assert unhandled.wait(60)
    assert all("reducescatter" in message for message in logged), logged
