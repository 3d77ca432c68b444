"""An asynchronous parameter server: workers push gradients and pull weights, each at its own pace.

    python -m examples.workloads.parameter_server [--workers 3] [--updates 60] [--slack 2] [--runs 5] [--json]

A server holds the weights of a softmax classifier for scikit-learn's handwritten digits, which sees them through
random features. Each worker computes the gradient of a small batch of its own, `send_ref` pushes it into the worker's
inbox in the server, the server applies it, and another `send_ref` pulls the new weights into the worker's buffer. All
of these tensors lie in shared memory and are made once; nothing goes through the object store.

The driver has a coroutine per worker. It starts an exchange when the worker's gradient is ready, not before:
collectives run in the order of the calls, so one called earlier would block the server until the slowest worker comes.
The calls of an exchange need no waiting in between, as each comes after the others in the actors' queues; Work handles
are awaited like refs. Captured, an exchange and the computation after it are one run, in which the server is free again
once it has given its weights.

Weights and gradients travel with their version, so the server knows how stale each gradient is: how many updates it has
made since the worker pulled. A worker may be at most `slack` updates ahead of the slowest one (stale synchronous
parallel, Ho et al. 2013), which bounds the staleness: while a worker computes one gradient, each other one makes at
most `2 * slack + 2` updates.

The program checks that the loss falls, that staleness keeps its bound, and that no update is lost or done twice: the
server counts them for each worker, and its weights are the sum of all gradients that the workers have pushed. Then it
times an update, over all workers, in these ways: by calls, by captured steps, and through the object store.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray

import raycollect as col
from examples.workloads.images import CLASSES, PIXELS, Images, load
from examples.workloads.report import Check, Report, Timing, command_line, compare, declared, ending, ensure_ray

Array = NDArray[np.float32]
Message = dict[str, Any]
"""`values`: [features, 10] float32, weights or a gradient; `version`: [1] int64, of the weights."""

SEED = 0
BATCH = 16
SLOWEST_BATCH = 64
RATE = 0.5
FEATURES = (256, 4096, 32768)
GROUP = "server and workers"
MAX_DIFFERENCE = 1e-4


def projection(features: int) -> Array:
    """Draws random features, always the same ones; [64, features] float32."""
    drawn = np.random.default_rng(SEED).standard_normal((PIXELS, features), np.float32)
    return drawn * np.float32(np.sqrt(2 / features))


def features_of(pixels: Array, drawn: Array) -> Array:
    """[n, 64] pixels -> [n, features]."""
    return np.maximum(pixels @ drawn, 0)


def softmax(scores: Array) -> Array:
    """[n, 10] scores -> [n, 10] probabilities."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances: Array = powers / powers.sum(axis=1, keepdims=True)
    return chances


def mean_loss(weights: Array, images: Images) -> float:
    """The mean cross entropy over all images."""
    chances = softmax(features_of(images.pixels, projection(len(weights))) @ weights)
    return float(-np.log(chances[np.arange(len(images.labels)), images.labels]).mean())


def message(features: int) -> Message:
    """A message in shared memory, all zeros."""
    return {"values": col.zeros((features, CLASSES), np.float32), "version": col.zeros(1, np.int64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The server's history.

    Attributes:
        updates: How many of each worker.
        staleness: Of each update, in order: how many versions there were since the worker had pulled.
        weights: [features, 10] float32.
    """

    updates: list[int]
    staleness: list[int]
    weights: Array


@ray.remote(num_cpus=0)
class Server(col.CollectiveParticipant):
    """Holds the weights, and an inbox for each worker."""

    def begin(self, workers: int, features: int) -> None:
        """Resets it."""
        self.weights = message(features)
        self.inboxes = [message(features) for _ in range(workers)]
        self.updates = [0] * workers
        self.staleness: list[int] = []

    def get_weights(self) -> Message:
        return self.weights

    def get_inbox(self, worker: int) -> Message:
        return self.inboxes[worker]

    def update(self, worker: int) -> None:
        """Applies what lies in an inbox."""
        self._apply(worker, self.inboxes[worker])

    @col.by_value
    def weights_by_value(self) -> Message:
        return self.weights

    def served(self) -> Served:
        return Served(updates=self.updates, staleness=self.staleness, weights=self.weights["values"])

    @col.by_value
    def update_by_value(self, worker: int, gradient: Message) -> Message:
        """Applies a gradient, and returns the new weights."""
        self._apply(worker, gradient)
        return self.weights

    def _apply(self, worker: int, gradient: Message) -> None:
        version = self.weights["version"]
        self.staleness.append(int(version[0] - gradient["version"][0]))
        self.updates[worker] += 1
        self.weights["values"] -= RATE * gradient["values"]
        version += 1


@ray.remote(num_cpus=0)
class Worker(col.CollectiveParticipant):
    """Holds images, a copy of the weights, and the gradient that it computes by them."""

    def begin(self, images: Images, features: int, seed: int, batch: int) -> None:
        """Forgets all it had.

        Args:
            images: All images.
            features: How many random features the classifier sees of an image.
            seed: Of the order in which this worker sees the images.
            batch: Images of a batch: a larger one makes a slower worker.
        """
        self.images, self.projection, self.batch = images, projection(features), batch
        self.rng = np.random.default_rng(seed)
        self.weights, self.gradient = message(features), message(features)
        self.total = np.zeros((features, CLASSES))

    def get_weights(self) -> Message:
        return self.weights

    def get_gradient(self) -> Message:
        return self.gradient

    def compute(self) -> None:
        """Computes the gradient of the next batch by the weights that were pulled last."""
        self._compute(self.weights)

    def pushed(self) -> NDArray[np.float64]:
        """The sum of all gradients but the last, which nobody has pushed; [features, 10] float64."""
        return self.total

    @ray.method(num_returns=2)
    @col.by_value
    def compute_by_value(self, weights: Message) -> tuple[Message, bool]:
        """Computes a gradient by these weights; returns it, and True, which the driver can wait for."""
        self._compute(weights)
        return self.gradient, True

    def _compute(self, weights: Message) -> None:
        self.total += self.gradient["values"]  # it has been pushed, otherwise there would be no next one
        chosen = self.rng.integers(len(self.images.labels), size=self.batch)
        seen = features_of(self.images.pixels[chosen], self.projection)
        errors = softmax(seen @ weights["values"])
        errors[np.arange(self.batch), self.images.labels[chosen]] -= 1
        np.matmul(seen.T, errors / np.float32(self.batch), out=self.gradient["values"])
        self.gradient["version"][:] = weights["version"]


# ---------------------------------------------------------------------------------------------- ways to exchange


class Way(Protocol):
    """How gradients come to the server, and weights to the workers; each worker is a number."""

    async def begin(self, worker: int) -> None:
        """Has a worker compute its first gradient, and waits for it."""
        ...

    async def update(self, worker: int) -> None:
        """Pushes the gradient, has it applied, pulls the new weights and has the next gradient computed by them."""
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...


class Refs:
    """The tensors of server and workers, which stay the same ones all the time."""

    def __init__(self, server: Any, workers: list[Any]) -> None:
        self.server, self.workers = server, workers
        self.weights = server.get_weights.remote()
        self.inboxes = [server.get_inbox.remote(worker) for worker in range(len(workers))]
        self.copies = [worker.get_weights.remote() for worker in workers]
        self.gradients = [worker.get_gradient.remote() for worker in workers]


class ByCalls(Refs):
    """By `send_ref` and Ray calls. Each stands behind the others in the actors' queues."""

    async def begin(self, worker: int) -> None:
        await self.workers[worker].compute.remote()

    async def update(self, worker: int) -> None:
        push = col.send_ref(self.gradients[worker], self.inboxes[worker], GROUP, async_op=True)
        self.server.update.remote(worker)
        pull = col.recv_ref(self.copies[worker], self.weights, GROUP, async_op=True)
        computed = self.workers[worker].compute.remote()
        await push
        await pull
        await computed

    def close(self) -> None:
        """Nothing is held."""


class Captured(Refs):
    """By a step for each worker. The server has done its part before the worker computes."""

    def __init__(self, server: Any, workers: list[Any]) -> None:
        super().__init__(server, workers)
        self.steps = [col.step(partial(self._exchange, worker)) for worker in range(len(workers))]

    async def begin(self, worker: int) -> None:
        await self.workers[worker].compute.remote()

    async def update(self, worker: int) -> None:
        await self.steps[worker].start()

    def close(self) -> None:
        for step in self.steps:
            step.close()

    def _exchange(self, worker: int) -> None:
        col.send_ref(self.gradients[worker], self.inboxes[worker], GROUP)
        self.server.update.remote(worker)
        col.recv_ref(self.copies[worker], self.weights, GROUP)
        self.workers[worker].compute.remote()


class ByObjectStore:
    """Without raycollect: gradients and weights are values of Ray's."""

    def __init__(self, server: Any, workers: list[Any]) -> None:
        self.server, self.workers = server, workers
        self.gradients: list[Any] = [None for _ in workers]

    async def begin(self, worker: int) -> None:
        await self._compute(worker, self.server.weights_by_value.remote())

    async def update(self, worker: int) -> None:
        await self._compute(worker, self.server.update_by_value.remote(worker, self.gradients[worker]))

    async def _compute(self, worker: int, weights: Any) -> None:
        self.gradients[worker], done = self.workers[worker].compute_by_value.remote(weights)
        await done  # not the gradient: the driver does not need it

    def close(self) -> None:
        """Its refs go with it."""


WAYS: dict[str, Callable[[Any, list[Any]], Way]] = {
    "send_ref, captured": Captured,
    "send_ref, calls": ByCalls,
    "object store": ByObjectStore,
}


async def drive(way: Way, workers: int, updates: int, slack: int) -> None:
    """Has each worker do so many updates at its own pace, none more than `slack` ahead of the slowest."""
    done = [0] * workers
    moved = asyncio.Condition()

    async def work(worker: int) -> None:
        await way.begin(worker)
        for _ in range(updates):
            async with moved:
                await moved.wait_for(lambda: done[worker] - min(done) <= slack)
            await way.update(worker)
            async with moved:
                done[worker] += 1
                moved.notify_all()

    await asyncio.gather(*map(work, range(workers)))


# ---------------------------------------------------------------------------------------------- the whole


def begin(server: Any, workers: list[Any], images: Images, features: int) -> None:
    """Restarts all; the last worker is the slowest."""
    held = ray.put(images)
    batches = [BATCH] * (len(workers) - 1) + [SLOWEST_BATCH]
    ready = [server.begin.remote(len(workers), features)]
    for seed, (worker, batch) in enumerate(zip(workers, batches, strict=True)):
        ready.append(worker.begin.remote(held, features, seed, batch))
    ray.get(ready)


def check_way(name: str, server: Any, workers: list[Any], *, updates: int, slack: int) -> list[Check]:
    """Trains in one way, and returns the checks."""
    (images, _), count = load(), len(workers)
    begin(server, workers, images, FEATURES[0])
    way = WAYS[name](server, workers)
    asyncio.run(drive(way, count, updates, slack))
    way.close()
    served: Served = ray.get(server.served.remote())
    pushed = sum(col.get([worker.pushed.remote() for worker in workers]))
    difference = float(np.linalg.norm(served.weights + RATE * pushed) / np.linalg.norm(served.weights))
    first, last = (mean_loss(weights, images) for weights in (np.zeros_like(served.weights), served.weights))
    most, bound = max(served.staleness), (count - 1) * (2 * slack + 2)
    mean = sum(served.staleness) / len(served.staleness)
    whole = served.updates == [updates] * count and difference < MAX_DIFFERENCE
    return [
        Check(name=f"loss, {name}", found=f"{first:.2f} at first, {last:.2f} at last", good=last < first / 2),
        Check(
            name=f"staleness, {name}",
            found=f"mean {mean:.1f}, largest {most}  (at most {bound})",
            good=most <= bound,
        ),
        Check(
            name=f"updates, {name}",
            found=f"{sum(served.updates)} of {updates * count}; weights beside all gradients: {difference:.0e}",
            good=whole,
        ),
    ]


def time_updates(server: Any, workers: list[Any], *, features: int, updates: int, runs: int) -> Timing:
    """Times an update in all ways; each turn is so many of each worker."""
    begin(server, workers, load()[0], features)
    count = len(workers)
    ways = {name: make(server, workers) for name, make in WAYS.items()}
    spent = compare({name: partial(_turn, way, count, updates) for name, way in ways.items()}, runs, warmup=1)
    for way in ways.values():
        way.close()
    ms = {name: each / (count * updates) for name, each in spent.items()}
    return Timing(what=f"{features * CLASSES * 4 / 1e6:.2f} MB of weights, {count} workers", ms=ms)


def _turn(way: Way, workers: int, updates: int) -> None:
    asyncio.run(drive(way, workers, updates, slack=updates))


def main(
    workers: int = 3, updates: int = 60, slack: int = 2, runs: int = 5, features: Sequence[int] = FEATURES
) -> Report:
    """Trains in each way, then times.

    Args:
        workers: How many workers there are.
        updates: How many updates each of them makes.
        slack: How many updates a worker may be ahead of the slowest one.
        runs: How often each way is timed, ten updates of each worker at a time.
        features: How many random features the classifiers that are timed have.
    """
    ensure_ray()
    server, *others = everyone = [Server.remote(), *(Worker.remote() for _ in range(workers))]
    with ending(everyone), declared(everyone, GROUP):
        checks = [check for name in WAYS for check in check_way(name, server, others, updates=updates, slack=slack)]
        timings = tuple(time_updates(server, others, features=size, updates=10, runs=runs) for size in features)
    return Report(
        title=f"An asynchronous parameter server and {workers} workers",
        unit="update",
        checks=tuple(checks),
        timings=timings,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="An asynchronous parameter server.")
    made.add_argument("--workers", type=int, default=3, help="workers (default 3)")
    made.add_argument("--updates", type=int, default=60, help="updates of each worker (default 60)")
    made.add_argument("--slack", type=int, default=2, help="how far a worker may be ahead of the slowest (default 2)")
    made.add_argument("--runs", type=int, default=5, help="how often each way is timed (default 5)")
    made.add_argument("--features", type=int, nargs="+", default=FEATURES, help="of the classifiers that are timed")
    return made


if __name__ == "__main__":
    command_line(main, parser())
