"""Data-parallel training on handwritten digits: four actors, and an iteration that `col.step` traces.

    python examples/digits.py [--steps 200] [--actors 4]

A softmax classifier learns the 1,797 images that scikit-learn ships (UCI, 8 x 8 pixels) by gradient descent with
momentum. Each actor holds a shard of the images and a copy of the weights. In an iteration every actor computes its
part of the gradient, `allreduce_refs` sums the parts in place, and every actor applies the sum.

The program trains by Ray calls, and then by a step: the same function, traced once, runs without a Ray call. It checks
the accuracy, that all actors have the same weights to the last bit in both ways, and that one process with all images
reaches them, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raycollect as col

Array = NDArray[np.float64]

CLASSES = 10
MOMENTUM = 0.9
LEARNING_RATE = 1.0
SEED = 0
MIN_ACCURACY = 0.95
MAX_DIFFERENCE = 1e-6


@dataclass(frozen=True, slots=True)
class Images:
    pixels: Array  # [n, 65]: 64 pixels from 0 to 1, then a one that carries the bias
    labels: NDArray[np.int64]  # [n]

    def select(self, index: NDArray[np.int64]) -> Images:
        return Images(self.pixels[index], self.labels[index])


def load() -> tuple[Images, Images]:
    """Returns the images to train on and to test with, always the same."""
    from sklearn.datasets import load_digits  # only here: every actor imports this module

    digits: Any = load_digits()
    images = Images(np.hstack([digits.data / 16.0, np.ones((len(digits.data), 1))]), digits.target)
    order = np.random.default_rng(SEED).permutation(len(images.labels))
    return images.select(order[len(order) // 5 :]), images.select(order[: len(order) // 5])


class Learner:
    """A softmax classifier, and the images it learns from. It does not use Ray.

    Args:
        images: The images of this learner.
        total: The number of images of all learners, so that the sum of their gradients is the mean over all images.
    """

    def __init__(self, images: Images, total: int) -> None:
        self.pixels, self.targets, self.total = images.pixels, np.eye(CLASSES)[images.labels], total
        self.parameters = np.zeros((images.pixels.shape[1], CLASSES))  # weights, and the bias as the last row
        self.velocity = np.zeros_like(self.parameters)
        self.buffer = np.zeros_like(self.parameters)

    def restart(self) -> None:
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
        return self.parameters


@ray.remote(num_cpus=0)  # so that four of them run on a laptop with two cores
class Trainer(col.CollectiveParticipant, Learner):
    """A learner in an actor: the mixin is all that it needs."""


def accuracy(parameters: Array, images: Images) -> float:
    return float(np.mean((images.pixels @ parameters).argmax(axis=1) == images.labels))


def train_in_one_process(images: Images, steps: int) -> Array:
    learner = Learner(images, total=len(images.labels))
    for _ in range(steps):
        learner.apply(learner.gradient())
    return learner.weights()


def train_in_actors(trainers: list[Any], iterate: Callable[[], object], steps: int) -> tuple[list[Array], float]:
    """Trains from the beginning; returns the weights of each actor, and the median ms of an iteration."""
    ray.get([trainer.restart.remote() for trainer in trainers])
    spent_ms = []
    for _ in range(steps):
        start_s = time.perf_counter()
        iterate()
        spent_ms.append((time.perf_counter() - start_s) * 1e3)
    return col.get([trainer.weights.remote() for trainer in trainers]), statistics.median(spent_ms)


@dataclass(frozen=True, slots=True)
class Result:
    accuracy: float
    difference: float  # the largest between a weight of an actor and of one process
    same_bits: bool  # in all actors, in both ways of training
    calls_ms: float  # the median time of an iteration by Ray calls
    step_ms: float  # the same of a call of the step

    @property
    def ok(self) -> bool:
        return self.accuracy >= MIN_ACCURACY and self.difference <= MAX_DIFFERENCE and self.same_bits


def main(steps: int = 200, actors: int = 4) -> Result:
    """Trains in actors in two ways, and in one process."""
    train, test = load()
    shards = np.array_split(np.arange(len(train.labels)), actors)
    trainers = [Trainer.remote(train.select(shard), total=len(train.labels)) for shard in shards]
    col.declare_collective_group(trainers, group_name="digits")

    def iterate() -> None:
        gradients = [trainer.gradient.remote() for trainer in trainers]
        col.allreduce_refs(gradients, group_name="digits")
        for trainer, gradient in zip(trainers, gradients, strict=True):
            trainer.apply.remote(gradient)  # gets the array itself; Ray's queue keeps the order

    called, calls_ms = train_in_actors(trainers, iterate, steps)
    step = col.step(iterate)
    traced, step_ms = train_in_actors(trainers, step, steps)
    step.close()
    col.destroy_collective_group("digits")

    expected, weights = train_in_one_process(train, steps), [*called, *traced]
    return Result(
        accuracy=accuracy(weights[0], test),
        difference=max(float(np.abs(each - expected).max()) for each in weights),
        same_bits=len({each.tobytes() for each in weights}) == 1,
        calls_ms=calls_ms,
        step_ms=step_ms,
    )


def start_ray() -> None:
    """Joins the cluster that RAY_ADDRESS names, or starts Ray on this machine."""
    address = os.environ.get("RAY_ADDRESS", "local")
    print("starting Ray on this machine" if address == "local" else f"joining the Ray cluster at {address}", flush=True)
    ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Data-parallel training on handwritten digits.")
    parser.add_argument("--steps", type=int, default=200, help="steps of gradient descent (default 200)")
    parser.add_argument("--actors", type=int, default=4, help="actors that share the images (default 4)")
    arguments = parser.parse_args()
    start_ray()
    result = main(**vars(arguments))
    print(f"accuracy on test images         {result.accuracy:.3f}  (at least {MIN_ACCURACY})")
    print(f"largest difference of a weight  {result.difference:.1e}  (at most {MAX_DIFFERENCE:.0e})")
    print(f"weights of all actors           {'the same bits' if result.same_bits else 'DIFFERENT'}")
    print(f"an iteration by Ray calls       {result.calls_ms:.2f} ms")
    print(f"an iteration by a step          {result.step_ms:.2f} ms")
    sys.exit(0 if result.ok else "a check failed")
