"""Versions for actors whose methods overlap: a lock of the actor excludes them while a version is copied."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.ray.weight_actors import SHAPES, Weights, replicas

pytestmark = pytest.mark.usefixtures("cluster")

UPDATES = 100


class Engine(col.CollectiveParticipant):
    """Generates while its weights are updated; each element is the number of its version."""

    def __init__(self):
        self.weights = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self.seen, self.mixed, self.is_over = set(), [], False

    def read(self):
        return {float(value) for array in self.weights.values() for value in np.unique(array)}

    def note(self, *read, version=None):
        values = set().union(*read)
        self.seen |= values
        if len(values) > 1 or (version is not None and values != {float(version.number)}):
            self.mixed.append((sorted(values), version and version.number))


@ray.remote(num_cpus=0)
class AsyncEngine(Engine):
    def __init__(self):
        super().__init__()
        self.lock, self.held = asyncio.Lock(), asyncio.Event()
        self.ticks = 0

    async def get(self):
        return self.weights

    async def generate(self, sub):
        """One step after the other, each of which gives way to others before it has read all."""
        while not self.is_over:
            async with self.lock:
                before, version = self.read(), sub.version()
                await asyncio.sleep(0)
                self.note(before, self.read(), version=version)
            self.ticks += 1
            await asyncio.sleep(0)

    async def stop(self):
        self.is_over = True
        return sorted(self.seen), self.mixed

    async def look(self):
        return sorted(self.read())

    async def hold(self):
        await self.lock.acquire()

    async def release(self):
        self.lock.release()

    @asynccontextmanager
    async def paused(self):
        async with self.lock:
            yield

    @asynccontextmanager
    async def broken(self):
        raise OSError("no engine")
        yield

    async def forgotten(self):
        """No context manager."""

    async def fill(self, value):
        async with self.lock:
            for array in self.weights.values():
                array[...] = value
                await asyncio.sleep(0)


class EngineOfThreads(Engine):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def get(self):
        return self.weights

    def generate(self, sub):
        while not self.is_over:
            with self.lock:
                self.note(self.read(), self.read(), version=sub.version())

    def stop(self):
        self.is_over = True
        return sorted(self.seen), self.mixed


@ray.remote(num_cpus=0, max_concurrency=4)
class ThreadedEngine(EngineOfThreads):
    @contextmanager
    def paused(self):
        with self.lock:
            yield


@ray.remote(num_cpus=0, concurrency_groups={"compute": 2})
class GroupedEngine(EngineOfThreads):
    @ray.method(concurrency_group="compute")
    def generate(self, sub):
        super().generate(sub)


@pytest.fixture
def engine():
    made = []

    def make(cls):
        made.append(cls.remote())
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


@pytest.mark.parametrize(
    ("cls", "lock"),
    [
        (AsyncEngine, "lock"),
        (AsyncEngine, "paused"),
        (ThreadedEngine, "lock"),
        (ThreadedEngine, "paused"),
        (GroupedEngine, "lock"),
    ],
)
def test_an_actor_that_generates_while_its_weights_are_updated_never_reads_a_mixed_version(
    actors, name, engine, cls, lock
):
    (trainer,), rollout = actors(Weights, 1), engine(cls)
    with (
        col.publish(replicas([trainer]), name) as pub,
        col.subscribe(name, [rollout.get.remote()], lock=lock) as sub,
    ):
        trainer.fill.remote(1)
        pub.put()
        sub.update()
        generating = [rollout.generate.remote(sub) for _ in range(2)]
        for number in range(2, UPDATES + 2):
            trainer.fill.remote(number)
            assert pub.put().number == number
            assert sub.update().version.number == number
        seen, mixed = ray.get(rollout.stop.remote())
        ray.get(generating)
    assert mixed == []
    assert len(seen) > 2


def test_a_lock_that_is_never_released_leaves_the_old_version(actors, name, engine):
    (trainer,), rollout = actors(Weights, 1), engine(AsyncEngine)
    with (
        col.publish(replicas([trainer]), name) as pub,
        col.subscribe(name, [rollout.get.remote()], lock="paused") as sub,
    ):
        trainer.fill.remote(1)
        pub.put()
        sub.update()
        ray.get(rollout.hold.remote())
        trainer.fill.remote(2)
        pub.put()
        with pytest.raises(errors.VersionTimeoutError) as raised:
            sub.update(timeout_s=1)
        assert (raised.value.missing, raised.value.is_shown) == ((0,), False)
        assert ray.get(rollout.look.remote()) == [1.0]
        assert sub.version().number == 1
        ray.get(rollout.release.remote())
        assert sub.update().version.number == 2
        assert ray.get(rollout.look.remote()) == [2.0]


def test_an_async_trainer_is_copied_while_its_lock_is_held(actors, name, engine):
    (rollout,), trainer = actors(Weights, 1), engine(AsyncEngine)
    with (
        col.publish([trainer.get.remote()], name, lock="lock") as pub,
        col.subscribe(name, replicas([rollout])) as sub,
    ):
        for number in range(1, 21):
            filling = trainer.fill.remote(number)
            pub.put()
            sub.update()
            values, _ = ray.get(rollout.look.remote(sub))
            assert len(values) == 1
            ray.get(filling)
        ray.get(trainer.hold.remote())
        with pytest.raises(errors.VersionTimeoutError):
            pub.put(timeout_s=1)
        ray.get(trainer.release.remote())
        assert pub.put().number == 21
        with pytest.raises(errors.UnsupportedError):
            pub.stream().call("fill", 1)


@pytest.mark.parametrize(
    ("lock", "error"),
    [
        (None, errors.UnsupportedError),
        ("no_such_lock", errors.InvalidArgumentError),
        ("ticks", errors.InvalidArgumentError),
        (3, errors.InvalidArgumentError),
    ],
)
def test_what_is_no_lock_is_refused_before_anything_is_attached(name, engine, lock, error):
    actor = engine(AsyncEngine)
    for call in (
        lambda: col.publish([actor.get.remote()], name, lock=lock),
        lambda: col.subscribe(name, [actor.get.remote()], lock=lock),
    ):
        with pytest.raises(error):
            call()
    with pytest.raises(errors.UnsupportedError):
        col.subscribe(name, [actor.get.remote()], lock="lock", inplace=True)


@pytest.mark.parametrize(
    ("lock", "error"), [("broken", errors.VersionError), ("forgotten", errors.InvalidArgumentError)]
)
def test_a_lock_that_fails_fails_the_update(actors, name, engine, lock, error):
    (trainer,), rollout = actors(Weights, 1), engine(AsyncEngine)
    with (
        col.publish(replicas([trainer]), name) as pub,
        col.subscribe(name, [rollout.get.remote()], lock=lock) as sub,
    ):
        trainer.fill.remote(1)
        pub.put()
        with pytest.raises(error):
            sub.update()
        assert ray.get(rollout.look.remote()) == [0.0]
