"""Data-parallel training on handwritten digits: four actors, gradients summed by one driver call per iteration.

    python examples/digits.py [--steps 200] [--actors 4]

A softmax classifier learns the 1,797 images that scikit-learn ships (UCI, 8 x 8 pixels) by gradient descent with
momentum. Each actor holds a shard of the images and its own copy of the weights. In an iteration every actor writes its
part of the gradient into its buffer, `allreduce_refs` sums the buffers in place, and every actor applies the sum.

The program trains twice: by Ray calls in a loop, and by a step (`raycollect.step`), which traces the same function once
and runs it again and again without a Ray call. It checks that the classifier is good, that the actors agree to the last
bit in both ways, and that one process with all images reaches the same weights. Then it times a reduction of the
gradient's size, and of a bigger model's, and compares it with Ray's object store.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from tqdm import tqdm

import raycollect as col

Array = NDArray[np.float64]

CLASSES = 10
MOMENTUM = 0.9
LEARNING_RATE = 1.0
TEST_SHARE = 0.2
SEED = 0

MIN_ACCURACY = 0.95
MAX_DIFFERENCE = 1e-6
BIG_NBYTES = 16_000_000
GROUP = "digits"


# ---------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Images and what they show.

    Attributes:
        pixels: [n, 65] float64: 64 pixels from 0 to 1, then a one that carries the bias.
        labels: [n] int64, the digits.
    """

    pixels: Array
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: NDArray[np.int64]) -> Images:
        """The images at these places."""
        return Images(pixels=self.pixels[index], labels=self.labels[index])

    def shards(self, count: int) -> list[Images]:
        """Splits the images into shards of (nearly) one size."""
        return [self.select(index) for index in np.array_split(np.arange(len(self)), count)]


def load() -> tuple[Images, Images]:
    """Loads the digits and splits them, always in the same way, into images to train on and images to test with."""
    from sklearn.datasets import load_digits  # only here: every actor imports this module

    digits: Any = load_digits()  # scikit-learn's own types say a tuple, too
    pixels = np.hstack([digits.data / 16.0, np.ones((len(digits.data), 1))])
    images = Images(pixels=pixels, labels=digits.target)
    order = np.random.default_rng(SEED).permutation(len(images))
    tests = int(TEST_SHARE * len(images))
    return images.select(order[tests:]), images.select(order[:tests])


# ---------------------------------------------------------------------------------------------- learning


class Learner:
    """A softmax classifier and the images it learns from. It does not use Ray.

    Args:
        images: The images of this learner.
        total: How many images all learners have together, so that the sum of their gradients is the mean over all.
    """

    def __init__(self, images: Images, total: int) -> None:
        self.pixels = images.pixels
        self.targets = np.eye(CLASSES)[images.labels]
        self.total = total
        self.parameters = np.zeros((images.pixels.shape[1], CLASSES))  # weights, and the bias as the last row
        self.velocity = np.zeros_like(self.parameters)
        self.buffer = np.zeros_like(self.parameters)

    def begin(self) -> None:
        """Forgets what it has learned."""
        self.parameters[...] = 0
        self.velocity[...] = 0

    def gradient(self) -> Array:
        """Writes the gradient over these images into its buffer, and returns it."""
        scores = self.pixels @ self.parameters
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        np.matmul(self.pixels.T, scores - self.targets, out=self.buffer)
        self.buffer /= self.total
        return self.buffer

    def apply(self, gradient: Array) -> None:
        """Takes one step down the gradient over all images."""
        self.velocity *= MOMENTUM
        self.velocity -= LEARNING_RATE * gradient
        self.parameters += self.velocity

    def weights(self) -> Array:
        """The parameters, [65, 10] float64."""
        return self.parameters


@ray.remote(num_cpus=0)  # so that four of them run on a laptop with two cores
class Trainer(col.CollectiveParticipant, Learner):
    """A learner in an actor: it only needs the mixin. The methods are for the comparison with the object store."""

    def pretend(self, nbytes: int) -> None:
        """Makes a stand-in for the gradient of a model of another size."""
        self.stand_in = np.ones(nbytes // 8)

    def get_stand_in(self) -> Array:
        return self.stand_in

    @col.by_value
    def get_stand_in_by_value(self) -> Array:
        return self.stand_in

    def set_stand_in(self, value: Array) -> None:
        np.copyto(self.stand_in, value)


def accuracy(parameters: Array, images: Images) -> float:
    """The share of images that are recognised."""
    return float(np.mean((images.pixels @ parameters).argmax(axis=1) == images.labels))


def train_in_one_process(images: Images, steps: int) -> Array:
    """The reference: the same training in one process with all images."""
    learner = Learner(images, total=len(images))
    for _ in range(steps):
        learner.apply(learner.gradient())
    return learner.weights()


# ---------------------------------------------------------------------------------------------- training in actors


def iterate(trainers: list[Any]) -> None:
    """One iteration, by Ray calls."""
    gradients = [trainer.gradient.remote() for trainer in trainers]
    col.allreduce_refs(gradients, group_name=GROUP)
    for trainer, gradient in zip(trainers, gradients, strict=True):
        trainer.apply.remote(gradient)  # gets the array itself; Ray's queue keeps the order


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The result of a training in actors.

    Attributes:
        weights: Each actor's.
        iteration_ms: How long an iteration took, the median.
    """

    weights: list[Array]
    iteration_ms: float


def train_in_actors(
    trainers: list[Any], iteration: Callable[[], object], test: Images, steps: int, name: str
) -> Trained:
    """Trains from the beginning, an iteration per step."""
    ray.get([trainer.begin.remote() for trainer in trainers])
    spent_ms = []
    bar = tqdm(range(steps), desc=name, unit="step")
    for step in bar:
        start_s = time.perf_counter()
        iteration()
        spent_ms.append((time.perf_counter() - start_s) * 1e3)
        if step % 25 == 24:
            bar.set_postfix(accuracy=f"{accuracy(col.get(trainers[0].weights.remote()), test):.3f}")
    weights = col.get([trainer.weights.remote() for trainer in trainers])
    return Trained(weights=weights, iteration_ms=statistics.median(spent_ms))


# ---------------------------------------------------------------------------------------------- timing


def reduce_in_place(trainers: list[Any]) -> None:
    """Leaves the mean of all stand-ins in every actor."""
    col.allreduce_refs([trainer.get_stand_in.remote() for trainer in trainers], group_name=GROUP, op=col.ReduceOp.AVG)


def reduce_by_object_store(trainers: list[Any]) -> None:
    """The same without raycollect: fetch the arrays, take the mean here, put it, send it back."""
    arrays = ray.get([trainer.get_stand_in_by_value.remote() for trainer in trainers])
    mean = ray.put(sum(arrays[1:], arrays[0]) / len(arrays))
    ray.get([trainer.set_stand_in.remote(mean) for trainer in trainers])


def compare(ways: list[Callable[[], None]], runs: int) -> list[float]:
    """Times several ways in turn, so that other load affects all of them alike; returns medians in ms."""
    times: list[list[float]] = [[] for _ in ways]
    for run in range(-3, runs):  # the first three warm up
        for way, spent in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            if run >= 0:
                spent.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(spent) for spent in times]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The median time to reduce an array of this size over all actors, in two ways."""

    nbytes: int
    allreduce_ms: float
    object_store_ms: float

    def __str__(self) -> str:
        size = f"{self.nbytes / 1e6:.0f} MB" if self.nbytes >= 1e6 else f"{self.nbytes / 1e3:.1f} kB"
        gain = self.object_store_ms / self.allreduce_ms
        return (
            f"{size}: allreduce_refs {self.allreduce_ms:.1f} ms, object store {self.object_store_ms:.1f} ms "
            f"({gain:.1f} times that)"
        )


def time_reductions(trainers: list[Any], nbytes: int, runs: int) -> Timing:
    """Times both ways at one size."""
    ray.get([trainer.pretend.remote(nbytes) for trainer in trainers])
    ours, theirs = compare([lambda: reduce_in_place(trainers), lambda: reduce_by_object_store(trainers)], runs)
    return Timing(nbytes=nbytes, allreduce_ms=ours, object_store_ms=theirs)


# ---------------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of the demo.

    Attributes:
        actors: How many actors trained.
        accuracy: The share of test images recognised.
        difference: The largest absolute difference between a weight of an actor and of the one process.
        same_bits: True where all actors hold the same bits, in both ways of training.
        loop_ms: The median time of an iteration by Ray calls.
        step_ms: The same of a call of the step.
        timings: How long a reduction takes, in two ways: at the gradient's size and at a bigger one.
    """

    actors: int
    accuracy: float
    difference: float
    same_bits: bool
    loop_ms: float
    step_ms: float
    timings: tuple[Timing, ...]

    @property
    def checks(self) -> list[tuple[str, str, bool]]:
        """The checks: name, what was found, and whether it is good."""
        return [
            (
                "test accuracy",
                f"{self.accuracy:.3f}  (at least {MIN_ACCURACY})",
                self.accuracy >= MIN_ACCURACY,
            ),
            (
                f"{self.actors} actors beside 1 process",
                f"largest difference of a weight {self.difference:.1e}  (at most {MAX_DIFFERENCE:.0e})",
                self.difference <= MAX_DIFFERENCE,
            ),
            (
                "all actors, in both ways",
                "the same bits" if self.same_bits else "different weights",
                self.same_bits,
            ),
        ]

    @property
    def ok(self) -> bool:
        """True where every check holds."""
        return all(good for _, _, good in self.checks)


def main(steps: int = 200, actors: int = 4, runs: int = 60) -> Result:
    """Trains in actors in two ways, and in one process; then times the reduction.

    Args:
        steps: Steps of gradient descent.
        actors: How many actors share the images.
        runs: How often a reduction is timed; a quarter of that at the bigger size.

    Returns:
        The result; `Result.ok` says whether it is good.
    """
    train, test = load()
    if not ray.is_initialized():
        ray.init(include_dashboard=False)  # joins the cluster that RAY_ADDRESS names, else starts Ray here
    trainers = [Trainer.remote(shard, total=len(train)) for shard in train.shards(actors)]
    col.declare_collective_group(trainers, group_name=GROUP)
    try:
        called = train_in_actors(trainers, lambda: iterate(trainers), test, steps, "by calls")
        step = col.step(iterate)  # the same iteration: traced once, and then without a Ray call
        captured = train_in_actors(trainers, lambda: step(trainers), test, steps, "by a step")
        step.close()
        timings = (
            time_reductions(trainers, called.weights[0].nbytes, runs),
            time_reductions(trainers, BIG_NBYTES, max(1, runs // 4)),
        )
    finally:
        col.destroy_collective_group(GROUP)
    expected = train_in_one_process(train, steps)
    weights = [*called.weights, *captured.weights]
    return Result(
        actors=actors,
        accuracy=accuracy(weights[0], test),
        difference=max(float(np.abs(found - expected).max()) for found in weights),
        same_bits=all(found.tobytes() == weights[0].tobytes() for found in weights),
        loop_ms=called.iteration_ms,
        step_ms=captured.iteration_ms,
        timings=timings,
    )


def show(result: Result) -> None:
    """Prints what was found."""
    print()
    for name, found, good in result.checks:
        print(f"{'ok' if good else 'NOT OK':>6}  {name:<26} {found}")
    times = f"by calls {result.loop_ms:.2f} ms, by a step {result.step_ms:.2f} ms"
    gain = result.loop_ms / result.step_ms
    print(f"{'':>6}  {'time per iteration':<26} {times} ({gain:.1f} times faster)")
    for timing in result.timings:
        print(f"{'':>6}  {'time per reduction':<26} {timing}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Data-parallel training on handwritten digits.")
    parser.add_argument("--steps", type=int, default=200, help="steps of gradient descent (default 200)")
    parser.add_argument("--actors", type=int, default=4, help="actors that share the images (default 4)")
    parser.add_argument("--runs", type=int, default=60, help="how often a reduction is timed (default 60)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    found = main(**vars(parse()))
    show(found)
    sys.exit(0 if found.ok else 1)
