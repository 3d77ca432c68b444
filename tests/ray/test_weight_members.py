"""Processes that publish and subscribe tensors of their own, without a driver's refs."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.ray.weight_actors import SHAPES, Weights, replicas

pytestmark = pytest.mark.usefixtures("cluster")


def zeros(dtype="float32"):
    return {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}


def values(tensors):
    return sorted({float(value) for array in tensors.values() for value in np.unique(array)})


@ray.remote(num_cpus=0)
class Trainer:
    """An actor that is no participant, as a worker of Ray Train."""

    def begin(self, name):
        self.weights = zeros()
        self.pub = col.publish(self.weights, name)

    def put(self, value):
        for array in self.weights.values():
            array[...] = value
        return self.pub.put().number


@ray.remote(num_cpus=0)
class Rollout:
    """An actor that is no participant, as a replica of Ray Serve."""

    def begin(self, name, **options):
        self.weights = zeros()
        self.sub = col.subscribe(name, self.weights, **options)

    def begin_shard(self, name, layout, rank):
        self.weights = {"w": np.zeros(layout.local_shape(rank), np.float32)}
        self.sub = col.subscribe(name, self.weights, layout={"w": layout}, rank=rank)

    def update(self, *args, **kwargs):
        receipt = self.sub.update(*args, **kwargs)
        return receipt.version.number, self.sub.version().number, values(self.weights)

    def get(self):
        return self.weights

    def wrapped(self):
        said = []
        handler = logging.Handler()
        handler.emit = said.append
        logging.getLogger("raycollect").addHandler(handler)

        class Model(col.CollectiveParticipant):
            pass

        ray.remote(Model)  # an actor class is no instance
        before = len(said)
        Model(), Model()
        return before, len(said)


class SeenLock:
    """A lock of asyncio that tells when it is awaited."""

    def __init__(self):
        self.lock, self.awaited = asyncio.Lock(), asyncio.Event()

    async def __aenter__(self):
        self.awaited.set()
        await self.lock.acquire()

    async def __aexit__(self, *exc):
        self.lock.release()


@ray.remote(num_cpus=0)
class AsyncRollout:
    def __init__(self):
        self.weights, self.lock = zeros(), asyncio.Lock()
        self.mixed, self.seen, self.is_over = [], set(), False

    async def begin(self, name):
        self.sub = col.subscribe(name, self.weights, lock=self.lock)

    async def generate(self):
        while not self.is_over:
            async with self.lock:
                before = values(self.weights)
                await asyncio.sleep(0)
                after = values(self.weights)
            self.seen.update(before)
            if len({*before, *after}) > 1:
                self.mixed.append((before, after))
            await asyncio.sleep(0)

    async def update(self):
        return (await asyncio.to_thread(self.sub.update)).version.number

    async def update_in_the_loop(self):
        return self.sub.update(timeout_s=5)

    async def stop(self):
        self.is_over = True
        return sorted(self.seen), self.mixed


def test_actors_without_the_mixin_publish_and_subscribe_tensors_of_their_own(name):
    trainer, *rollouts = [Trainer.remote(), Rollout.remote(), Rollout.remote()]
    ray.get([trainer.begin.remote(name), *(rollout.begin.remote(name) for rollout in rollouts)])
    for number in (1, 2, 3):
        assert ray.get(trainer.put.remote(number)) == number
        assert ray.get([rollout.update.remote() for rollout in rollouts]) == [(number, number, [float(number)])] * 2
    with pytest.raises(errors.UnknownVersionError):
        ray.get(rollouts[0].update.remote(9))
    ray.kill(trainer)  # a latecomer reads from the receivers
    late = Rollout.remote()
    ray.get(late.begin.remote(name))
    assert ray.get(late.update.remote()) == (3, 3, [3.0])
    assert ray.get(rollouts[0].wrapped.remote()) == (0, 1)


def test_the_driver_publishes_tensors_of_its_own_to_actors_and_itself(actors, name):
    (rollout,), mine, target = actors(Weights, 1), zeros(), zeros()
    with col.publish(mine, name) as pub, col.subscribe(name, replicas([rollout])) as sub:
        with col.subscribe(name, target) as own:
            for number in (1, 2):
                for array in mine.values():
                    array[...] = number
                assert pub.put().number == number
                assert [receipt.version.number for receipt in pub.push([sub, own])] == [number] * 2
                assert ray.get(rollout.look.remote(sub)) == ([float(number)], number)
                assert values(target) == [float(number)]
        target["up"] = np.zeros((1,), np.float32)
        with pytest.raises(errors.InvalidArgumentError):
            own.update()
        mine["up"] = np.zeros((1,), np.float32)
        with pytest.raises(errors.TensorReplacedError):
            pub.put()
        assert sub.update().version.number == 2


def test_each_process_of_an_engine_subscribes_its_shard(name):
    full, layout = np.arange(24, dtype=np.float32).reshape(4, 6), col.layout([4, 6], mesh={"tp": 2}, spec=(None, "tp"))
    workers = [Rollout.remote() for _ in range(2)]
    with col.publish({"w": full}, name) as pub:
        ray.get([worker.begin_shard.remote(name, layout, rank) for rank, worker in enumerate(workers)])
        version = pub.put()
        assert [got[0] for got in ray.get([worker.update.remote(version) for worker in workers])] == [1, 1]
        shards = ray.get([worker.get.remote() for worker in workers])
        np.testing.assert_array_equal(np.concatenate([shard["w"] for shard in shards], axis=1), full)
        for rank in (2, -1, "0"):
            with pytest.raises(errors.InvalidArgumentError):
                col.subscribe(name, shards[0], layout={"w": layout}, rank=rank)


def test_an_async_process_updates_itself_while_it_generates(name):
    mine, rollout = zeros(), AsyncRollout.remote()
    with col.publish(mine, name) as pub:
        ray.get(rollout.begin.remote(name))
        generating = [rollout.generate.remote() for _ in range(2)]
        for number in range(1, 21):
            for array in mine.values():
                array[...] = number
            pub.put()
            assert ray.get(rollout.update.remote()) == number
        with pytest.raises(errors.UnsupportedError):  # it would wait for itself
            mine["up"][...] = 99
            pub.put()
            ray.get(rollout.update_in_the_loop.remote())
        seen, mixed = ray.get(rollout.stop.remote())
        ray.get(generating)
    assert mixed == []
    assert 20.0 in seen


@pytest.mark.parametrize("is_same", [True, False])
def test_an_event_loop_does_not_wait_for_a_thread_that_needs_it(name, is_same):
    async def updated():
        first, second = zeros(), zeros()
        lock = SeenLock()
        with col.subscribe(name, first, lock=lock) as sub, col.subscribe(name, second) as other:
            async with lock.lock:
                under_way = asyncio.create_task(asyncio.to_thread(sub.update, timeout_s=20))
                await lock.awaited.wait()
                with pytest.raises(errors.UnsupportedError):
                    (sub if is_same else other).update(timeout_s=5)
            assert (await under_way).version.number == 1
            assert other.update().version.number == 1
        return values(first), values(second)

    with col.publish({key: array + 3 for key, array in zeros().items()}, name) as pub:
        pub.put()
        assert asyncio.run(updated()) == (values({key: array + 3 for key, array in zeros().items()}),) * 2


@pytest.mark.parametrize("dtype", ["float16", np.float16, "auto"])
def test_rollouts_of_another_dtype_ask_for_it_by_its_name(actors, name, dtype):
    trainer, rollout = actors(Weights, 2)
    ref = rollout.make.remote(SHAPES, "float16")
    with col.publish(replicas([trainer]), name) as pub:
        trainer.fill.remote(1.5)
        pub.put()
        with col.subscribe(name, [ref]) as plain, pytest.raises(errors.LayoutError):
            plain.update()
        with pytest.raises(errors.LayoutError):
            col.subscribe(name, [ref], dtype="float64")
        with pytest.raises(errors.InvalidArgumentError):
            col.subscribe(name, [ref], dtype="int8")
        with col.subscribe(name, [ref], dtype=dtype) as sub:
            assert sub.update().version.number == 1
            assert ray.get(rollout.look.remote(sub)) == ([1.5], 1)


def test_a_trainer_puts_its_floats_in_the_dtype_of_its_rollouts(actors, name):
    trainer, rollout = actors(Weights, 2)
    ref = trainer.make.remote(SHAPES)
    with pytest.raises(errors.InvalidArgumentError):
        col.publish([ref], name, dtype="auto")
    with (
        col.publish([ref], name, dtype="float16") as pub,
        col.subscribe(name, [rollout.make.remote(SHAPES, "float16")]) as sub,
    ):
        for number in (1, 2, 2):
            trainer.fill.remote(number)
            assert pub.put().nbytes == sum(2 * int(np.prod(shape)) for shape in SHAPES.values())
            receipt = sub.update()
            assert receipt.version.dtypes["up"] == "float16"
            assert ray.get(rollout.look.remote(sub))[0] == [float(number)]
        assert receipt.nbytes == 0  # the last version has the same bits


def test_floats_of_torch_are_put_as_bfloat16_and_other_tensors_as_they_are(name):
    torch = pytest.importorskip("torch")
    mine = {"w": torch.full((8, 6), 1.5), "steps": torch.arange(3)}
    target = {"w": torch.zeros(8, 6, dtype=torch.bfloat16), "steps": torch.zeros(3, dtype=torch.int64)}
    with col.publish(mine, name, dtype=torch.bfloat16) as pub, col.subscribe(name, target) as sub:
        assert pub.put().nbytes == 2 * 48 + 8 * 3
        sub.update()
        assert torch.equal(target["w"].float(), mine["w"])
        assert torch.equal(target["steps"], mine["steps"])
