"""The same training by collectives: an actor whose gradients and weights are tensors for collectives."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import numpy as np
import ray

import raycollect as col
from examples.spacy_ner.learner import Array, Job, Learner
from examples.spacy_ner.threads import ONE_THREAD


@ray.remote(num_cpus=0, runtime_env=ONE_THREAD)  # so that four of them run on two cores
class Trainer(col.CollectiveParticipant):
    """A learner in an actor. Its arrays are in shared memory, where the others add to them in place."""

    def __init__(self, job: Job, rank: int, ranks: int) -> None:
        self._learner = Learner(job, rank, ranks, col.zeros)
        learner = self._learner
        self._gradients = {
            f"{at} {parameter.node.name} {parameter.name}": parameter.of(learner.flat_gradients)
            for at, parameter in enumerate(learner.parameters)
        }
        self._received = col.zeros(learner.pieces(learner.flat_gradients)[rank].size, np.float32)

    def restart(self) -> None:
        """Forgets what it has learned."""
        self._learner.restart()

    # ------------------------------------------------------------------------------------------ with an allreduce

    def gradients(self) -> dict[str, Array]:
        """Computes the gradients of its next batch: a dict of 31 arrays, the same ones each time."""
        self._learner.backward()
        return self._gradients

    def apply(self, gradients: dict[str, Array]) -> float:
        """Takes the optimizer's step with the reduced `gradients`; returns the loss of the batch."""
        self._learner.step_all()
        return self._learner.loss

    # ------------------------------------------------------------------------------------------ by owners

    def gradient_pieces(self) -> list[Array]:
        """Computes the gradients of its next batch: an array for each rank, of the parameters that this one owns."""
        self._learner.backward()
        return self._learner.pieces(self._learner.flat_gradients)

    def received(self) -> Array:
        """The array for the sum of the gradients of its own parameters."""
        return self._received

    def apply_owned(self, gradients: Array) -> Array:
        """Takes the optimizer's step of its own parameters, and returns these."""
        learner = self._learner
        learner.pieces(learner.flat_gradients)[learner.rank][...] = gradients
        learner.step_owned()
        return learner.pieces(learner.flat_weights)[learner.rank].copy()

    def weight_pieces(self) -> list[Array]:
        """All weights: an array for each rank."""
        return self._learner.pieces(self._learner.flat_weights)

    def loss(self) -> float:
        """That of its last batch."""
        return self._learner.loss

    # ------------------------------------------------------------------------------------------ imperative

    def join(self, library: str, ranks: int, rank: int, group: str) -> None:
        """Joins a group of `ray.util.collective`, or of this library by the same call."""
        _collectives(library).init_collective_group(ranks, rank, "gloo" if library == "ray" else "auto", group)

    def leave(self, library: str, group: str) -> None:
        """Leaves it."""
        _collectives(library).destroy_collective_group(group)

    def train(self, library: str, group: str, updates: int) -> list[float]:
        """Makes some updates with the others, an allreduce per parameter; returns the losses of its batches.

        The original documents replace ``inc_grad.remote`` with this.
        """
        allreduce, losses = _collectives(library).allreduce, []
        for _ in range(updates):
            self._learner.backward()
            for gradient in self._gradients.values():
                allreduce(gradient, group)
            self._learner.step_all()
            losses.append(self._learner.loss)
        return losses

    # ------------------------------------------------------------------------------------------ looking at it

    @col.by_value
    def digest(self) -> str:
        return self._learner.digest()

    @col.by_value
    def cpu_s(self) -> float:
        """The CPU time of this process, in seconds."""
        return time.process_time()

    @col.by_value
    def weights(self) -> Array:
        """All of them, one after the other."""
        return self._learner.flat_weights

    @col.by_value
    def evaluate(self) -> dict[str, Any]:
        return self._learner.evaluate()

    @col.by_value
    def settings(self) -> dict[str, int]:
        """The length of the training, from the config."""
        return {name: self._learner.training[name] for name in ("max_steps", "eval_frequency")}

    def save(self, path: Any) -> None:
        """Writes the pipeline; ``spacy.load`` reads it."""
        self._learner.save(path)


def _collectives(library: str) -> ModuleType:
    if library == "raycollect":
        return col
    from ray.util import collective

    return collective  # type: ignore[no-any-return]
