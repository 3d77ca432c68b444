"""Every operation of the driver, against numpy, over the backends."""

from __future__ import annotations

import asyncio
import functools
import operator
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import ReduceOp, errors
from tests.ray.workers import Worker

FOLDS = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.AVG: operator.add,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = ["bool", *INTEGERS, "float16", "float32", "float64", "complex64"]


def inputs(world, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 5, shape).astype(dtype) for _ in range(world)]


def left_fold(op, arrays):
    folded = functools.reduce(FOLDS[op], arrays)
    return (folded / len(arrays) if op is ReduceOp.AVG else folded).astype(arrays[0].dtype)


def hold(actors, arrays):
    """Gives each actor an array and returns the refs."""
    ray.get([actor.set_buffer.remote(array) for actor, array in zip(actors, arrays, strict=True)])
    return [actor.get_buffer.remote() for actor in actors]


MORE = [pytest.param(backend, marks=pytest.mark.full) for backend in ("tcp", "gloo")]
on_shm = pytest.mark.parametrize("group", ["shm", *MORE], indirect=True)
"""For what is above the kernels; tests/pure/backends/test_conformance.py has these on all backends."""


@pytest.fixture(params=["shm", MORE[0], "gloo"])
def group(request, actors):
    """Three actors in a declared group."""
    return col.declare_collective_group(actors(Worker, 3), backend=request.param)


def test_allreduce_in_place(group):
    for op in ReduceOp:
        check_allreduce_in_place(group, op)


def check_allreduce_in_place(group, op):
    kinds = ("int32", "uint8", "bool") if op in BITWISE else ("float32", "float64", "float16")
    cases = [((7,), kinds[0]), ((2, 3), kinds[1]), ((1,), kinds[2]), ((0,), kinds[0]), ((1 << 18,), kinds[0])]
    for seed, (shape, dtype) in enumerate(cases):
        arrays = inputs(3, shape, dtype, seed)
        refs = hold(group.actors, arrays)
        assert col.allreduce_refs(refs, op=op) == refs
        for found in col.get(refs):
            np.testing.assert_allclose(found, left_fold(op, arrays), rtol=1e-3)
            assert found.dtype == np.dtype(dtype)


@on_shm
def test_allreduce_into_new_tensors(group):
    arrays = inputs(3, (1025,), "int64")
    refs = hold(group.actors, arrays)
    outs = col.allreduce_refs(refs, inplace=False)
    for found in col.get(outs):
        np.testing.assert_array_equal(found, sum(arrays))
    for found, given in zip(col.get(refs), arrays, strict=True):
        np.testing.assert_array_equal(found, given)


@on_shm
def test_broadcast(group):
    for root in range(3):
        arrays = inputs(3, (1001,), "float32", seed=root)
        refs = hold(group.actors, arrays)
        assert col.broadcast_refs(refs, src_rank=root) == refs
        for found in col.get(refs):
            np.testing.assert_array_equal(found, arrays[root])


@on_shm
def test_send_to_a_ref_and_to_an_actor(group):
    arrays = inputs(3, (300_001,), "float32")
    refs = hold(group.actors, arrays)
    assert col.send_ref(refs[2], refs[0]) == refs[0]
    np.testing.assert_array_equal(col.get(refs[0]), arrays[2])
    assert col.recv_ref(refs[1], refs[2]) == refs[1]
    np.testing.assert_array_equal(col.get(refs[1]), arrays[2])
    made = col.send_ref(refs[2], group.actors[1])
    np.testing.assert_array_equal(col.get(made), arrays[2])
    assert ray.get(made).actor_id == group.actors[1]._actor_id.hex()


@on_shm
def test_barrier(group):
    assert col.barrier() is None
    col.barrier(async_op=True).wait()


@on_shm
def test_containers_are_one_operand(group):
    def make(self, rank):
        return {"w": np.full((2, 3), rank, np.float32), "b": np.full(5, 10 * rank, np.int64)}

    refs = [actor.make.remote(make, rank) for rank, actor in enumerate(group.actors)]
    col.allreduce_refs(refs)
    outs = col.allreduce_refs(refs, inplace=False)
    for found in col.get(refs):
        np.testing.assert_array_equal(found["w"], np.full((2, 3), 3))
        np.testing.assert_array_equal(found["b"], np.full(5, 30))
    np.testing.assert_array_equal(col.get(outs[1])["b"], np.full(5, 90))
    made = col.send_ref(refs[0], group.actors[2])
    assert list(col.get(made)) == ["w", "b"]


@on_shm
def test_output_refs_chain(group):
    refs = hold(group.actors, inputs(3, (11,), "float32"))
    total = sum(col.get(refs))
    outs = col.allreduce_refs(refs, inplace=False)
    again = col.allreduce_refs(outs)
    np.testing.assert_array_equal(col.get(again[0]), 3 * total)
    ray.get(group.actors[0].set_buffer.remote(outs[0]))
    np.testing.assert_array_equal(ray.get(group.actors[0].read.remote()), 3 * total)
    ray.get(group.actors[0].set_buffer.remote(outs[2]))  # a copy from another participant
    np.testing.assert_array_equal(ray.get(group.actors[0].read.remote()), 3 * total)


def test_odd_arrays(group):
    """Views, other orders and other byte orders are worked on where they lie."""
    base = np.arange(60, dtype=">f4").reshape(6, 10)

    def make(self, cut):
        self.base = np.arange(60, dtype=">f4").reshape(6, 10)
        return self.base[cut]

    for cut in (np.s_[::2], np.s_[:, ::-1], np.s_[1:5, 3]):
        refs = [actor.make.remote(make, cut) for actor in group.actors]
        col.allreduce_refs(refs)
        np.testing.assert_array_equal(col.get(refs[1]), 3 * base[cut])
        untouched = base.copy()
        untouched[cut] *= 3
        np.testing.assert_array_equal(ray.get(group.actors[2].call.remote(lambda self: self.base)), untouched)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_dtype_travels(actors, backend):
    group = col.declare_collective_group(actors(Worker, 2), backend=backend)
    for dtype in DTYPES:
        arrays = inputs(2, (70,), dtype)
        refs = hold(group.actors, arrays)
        col.allreduce_refs(refs)
        np.testing.assert_array_equal(col.get(refs[0]), left_fold(ReduceOp.SUM, arrays))
        made = col.send_ref(refs[0], group.actors[1])
        np.testing.assert_array_equal(col.get(made), left_fold(ReduceOp.SUM, arrays))


def test_shm_gives_the_left_fold_in_rank_order_on_all_ranks(actors):
    group = col.declare_collective_group(actors(Worker, 3), backend="shm")
    rng = np.random.default_rng(7)
    arrays = [rng.standard_normal(300_001).astype(np.float32) for _ in range(3)]
    refs = hold(group.actors, arrays)
    col.allreduce_refs(refs)
    for found in col.get(refs):
        assert found.tobytes() == (arrays[0] + arrays[1] + arrays[2]).tobytes()


def test_one_rank_alone(actors):
    (actor,) = actors(Worker, 1)
    group = col.declare_collective_group([actor])
    assert group.backend == "local"
    ref = actor.get_buffer.remote()
    col.allreduce_refs([ref])
    np.testing.assert_array_equal(col.get(ref), np.ones(10))
    col.barrier()


# ---------------------------------------------------------------------------------------------- groups


def test_ranks_come_from_the_declaration(actors):
    a, b, c = actors(Worker, 3)
    group = col.declare_collective_group([a, b, c], world_size=3, ranks=[2, 0, 1], backend="shm", group_name="g")
    assert group.actors == (b, c, a)
    arrays = inputs(3, (5,), "float32")
    refs = hold([a, b, c], arrays)
    assert col.broadcast_refs(refs, src_rank=2, group_name="g") == [refs[1], refs[2], refs[0]]
    np.testing.assert_array_equal(col.get(refs[1]), arrays[0])


def test_the_documents_options(actors):
    a, b = actors(Worker, 2)
    options = {"group_name": "177", "world_size": 2, "ranks": [1, 0], "backend": "shm"}
    assert col.declare_collective_group([a, b], options=options).actors == (b, a)
    col.destroy_collective_group("177")
    assert col.create_collective_group([a, b], 2, [0, 1], "shm", "177").world_size == 2


def test_overlapping_groups(actors):
    a, b, c = actors(Worker, 3)
    col.declare_collective_group([a, b], group_name="ab")
    col.declare_collective_group([b, c], group_name="bc")
    col.declare_collective_group([c, a, b], group_name="cab")
    refs = [actor.get_buffer.remote() for actor in (a, b, c)]
    col.allreduce_refs(refs[:2], "ab")
    col.allreduce_refs(refs[1:], "bc")
    col.allreduce_refs(refs, "cab", op="max")
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(10, 3))


def test_destroying_leaves_the_actors_and_frees_the_name(actors):
    a, b = actors(Worker, 2)
    group = col.declare_collective_group([a, b])
    assert group.status().state == "alive"
    assert "alive" in repr(group)
    col.destroy_collective_group()
    assert group.status().state == "destroyed"
    col.declare_collective_group([b, a])
    refs = [a.get_buffer.remote(), b.get_buffer.remote()]
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 2))


def test_derived_groups_are_cached_and_bounded(actors):
    from raycollect.driver.controller import Controller

    workers = actors(Worker, 3)
    refs = [worker.get_buffer.remote() for worker in workers]
    col.allreduce_refs(refs)
    col.allreduce_refs(refs)
    assert len(Controller.current().groups._derived) == 1
    pairs = [(i, j, k) for i in range(3) for j in range(3) for k in range(3) if len({i, j, k}) == 3]
    for order in pairs:
        col.broadcast_refs([refs[i] for i in order])
    col.send_ref(refs[0], refs[1])
    assert len(Controller.current().groups._derived) == 7


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


def test_collectives_take_their_place_in_program_order(actors):
    a, b = actors(Worker, 2)
    col.declare_collective_group([a, b])
    refs = [a.get_buffer.remote(), b.get_buffer.remote()]

    def add(self, amount):
        self.buffer += amount

    for actor in (a, b):
        actor.call.remote(add, 1)  # 2, 2
    works = [col.allreduce_refs(refs, async_op=True)]  # 4, 4
    for actor in (a, b):
        actor.call.remote(add, 1)  # 5, 5
    works.append(col.allreduce_refs(refs, async_op=True))  # 10, 10
    seen = [actor.read.remote() for actor in (a, b)]
    for work in works:
        assert work.wait() == refs
        assert work.done()
    for found in ray.get(seen):
        np.testing.assert_array_equal(found, np.full(10, 10))


def test_a_get_waits_for_collectives_under_way(actors):
    a, b = actors(Worker, 2)
    refs = [a.get_buffer.remote(), b.get_buffer.remote()]
    for _ in range(5):
        col.allreduce_refs(refs, async_op=True)
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 32))


def test_await(actors):
    a, b = actors(Worker, 2)
    col.declare_collective_group([a, b])
    refs = [a.get_buffer.remote(), b.get_buffer.remote()]

    async def both():
        first = col.allreduce_refs(refs, async_op=True)
        second = col.allreduce_refs(refs, async_op=True)
        return await asyncio.gather(first, second)

    assert asyncio.run(both()) == [refs, refs]
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 4))


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
