"""Weights that are moved while they are computed: 100 layers, each of 10 ms of compute.

The compute is a loop over an array that fits into a cache, until it has had 10 ms of a core: what moving takes from it
counts. A stream should end when the longer of compute and transfer would end alone; without one, both take their times
one after the other. All values are checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks import names
from benchmarks.report import Record
from benchmarks.suite import Choice, Maker, entry, sweep
from benchmarks.suites.weights import Versions
from benchmarks.targets import MB

NAME = "streams"
TITLE = "weights that are moved while they are computed"
REFERENCE = names.COMPUTE
NEEDS_RAY = True

LAYERS, LAYER_S = 100, 0.01
RANKS = (2, 4)
"""A trainer, and one or three rollouts."""
_OP = f"{LAYERS} layers of {LAYER_S * 1000:.0f} ms"


class Model(col.CollectiveParticipant):
    """The trainer, or a rollout."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.work = np.ones(64 << 10, np.float32)

    def prepare(self, nbytes: int) -> None:
        """Makes the weights."""
        count = nbytes // (4 * LAYERS)
        self.weights = {f"layers.{at}": np.zeros(count, np.float32) for at in range(LAYERS)}

    def fill(self, value: float) -> None:
        """Gives all elements a value."""
        for array in self.weights.values():
            array.fill(value)

    def get(self) -> dict[str, Any]:
        """The weights, as one ref."""
        return self.weights

    def is_right(self, value: float) -> bool:
        """Whether all elements have a value."""
        return all(bool((array == np.float32(value)).all()) for array in self.weights.values())

    def layers(self, value: float) -> Iterator[str]:
        """Computes the layers, and yields the name of each."""
        for name, array in self.weights.items():
            self._compute()
            array.fill(value)
            yield name

    def compute(self, value: float) -> None:
        """Computes the layers."""
        for _ in self.layers(value):
            pass

    def _compute(self) -> None:
        until_s = time.thread_time() + LAYER_S
        while time.thread_time() < until_s:
            np.negative(self.work, out=self.work)


class Training(Versions):
    """A trainer and its rollouts; it computes the weights, and they are moved then."""

    ACTOR = Model
    computes = moves = True

    def fill(self) -> None:
        """The next turn: the rollouts have no weights; where nothing is computed, the trainer has them."""
        self.turn = next(_turns)
        value = 0.0 if self.computes else float(self.turn)
        calls = [actor.fill.remote(0.0) for actor in self.rollouts]
        ray.get([*calls, self.trainer.fill.remote(value)])

    def operate(self) -> None:
        """The one, then the other."""
        if self.computes:
            ray.get(self.trainer.compute.remote(float(self.turn)))
        if self.moves:
            super().operate()

    def is_right(self) -> list[bool]:
        """Whether each rollout has the weights of the turn; where none are moved, nothing is wrong."""
        return super().is_right() if self.moves else []


class Compute(Training):
    """It computes only."""

    moves = False


class Move(Training):
    """It moves only."""

    computes = False


class Streamed(Training):
    """Each layer is moved while the next is computed."""

    def operate(self) -> None:
        """One stream."""
        stream = self.pub.stream(self.subs)
        stream.call("layers", float(self.turn))
        stream.commit()


_turns = iter(range(1, 1 << 20))


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over a trainer and its rollouts."""
    for ranks in choice.ranks or RANKS:
        choice.progress(f"{NAME}: starts {ranks} actors for each contender")
        makers: list[Maker] = [
            entry(names.COMPUTE, Compute, ranks - 1),
            entry(names.VERSIONS, Move, ranks - 1),
            entry(names.AFTER, Training, ranks - 1),
            entry(names.STREAM, Streamed, ranks - 1),
        ]
        sizes = choice.sizes or (LAYERS * MB,)
        yield from sweep(NAME, choice, makers, op=_OP, ranks=ranks, sizes=sizes, runs=lambda _: (3, 8))
