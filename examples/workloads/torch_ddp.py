"""Data-parallel training with torch: each actor has a part of every batch, and one call averages the gradients.

    python -m examples.workloads.torch_ddp [--actors 4] [--steps 200]

A perceptron learns scikit-learn's handwritten digits by stochastic gradient descent. Every actor has a replica of the
module and of its optimizer, with parameters and gradients in shared memory (`modules.share`). The parts of a batch are
of unequal size, and some may be empty. So each actor scales the summed loss of its part by `ranks / images of the
batch`: then the average over ranks is the mean over images.

The program checks that all replicas hold the same bits, and that one process with the whole batches reaches the same
weights within 1e-5 of their norm: the float32 sums of the parts are added in another order.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

import raycollect as col
from examples.workloads import common, modules
from examples.workloads.images import CLASSES, PIXELS, Images, load

SEED = 0
MAX_DIFFERENCE = 1e-5
MIN_ACCURACY = 0.93


class Learner:
    """A replica, and its part of every batch. It does not use Ray."""

    def begin(self, images: Images, rank: int, ranks: int, batch: int = 50, width: int = 64) -> None:
        """Makes the replica, always with the same weights."""
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        layers = torch.nn.Linear(PIXELS, width), torch.nn.ReLU(), torch.nn.Linear(width, CLASSES)
        self.module = torch.nn.Sequential(*layers)
        self.parameters = modules.share(self.module)
        self.gradients = modules.share_gradients(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.pixels, self.labels = torch.tensor(images.pixels), torch.tensor(images.labels)
        self.batch, self.rank, self.ranks, self.steps = batch, rank, ranks, 0

    def gradient(self) -> dict[str, torch.Tensor]:
        """Computes the gradient over this part of the next batch, in place; returns one tensor for each dtype."""
        self.optimizer.zero_grad(set_to_none=False)
        self._loss().backward()
        return self.gradients

    def apply(self) -> None:
        """Takes an optimizer step by the gradients as they are."""
        self.optimizer.step()

    def weights(self) -> NDArray[np.float32]:
        """All parameters, [n] float32; the memory itself."""
        return self.parameters["float32"].numpy()

    def _loss(self) -> torch.Tensor:
        """This part's share of the mean loss over the batch, times the number of ranks; of no images it is zero."""
        epoch, at = divmod(self.steps, -(-len(self.labels) // self.batch))
        order = np.random.default_rng((SEED, epoch)).permutation(len(self.labels))
        chosen = order[at * self.batch : (at + 1) * self.batch]
        part = torch.from_numpy(np.array_split(chosen, self.ranks)[self.rank])
        self.steps += 1
        losses = torch.nn.functional.cross_entropy(self.module(self.pixels[part]), self.labels[part], reduction="sum")
        return losses * (self.ranks / len(chosen))


@ray.remote(num_cpus=0)
class Replica(col.CollectiveParticipant, Learner):
    """A learner in an actor: the mixin is all that it needs."""


def train(replicas: list[Any], steps: int) -> None:
    """Trains in lockstep, by a step that is traced once."""

    @col.step
    def iterate() -> None:
        gradients = [replica.gradient.remote() for replica in replicas]
        col.allreduce_refs(gradients, group_name="replicas", op=col.ReduceOp.AVG)
        for replica in replicas:
            replica.apply.remote()

    for _ in range(steps):
        iterate()
    iterate.close()


def accuracy(module: torch.nn.Module, images: Images) -> float:
    with torch.no_grad():
        predicted = module(torch.tensor(images.pixels)).argmax(dim=1).numpy()
    return float(np.mean(predicted == images.labels))


def main(actors: int = 4, steps: int = 200, batch: int = 50) -> dict[str, bool]:
    """Trains in actors and in one process; returns what holds."""
    images, test = load()
    replicas: list[Any] = [Replica.remote() for _ in range(actors)]
    ray.get([replica.begin.remote(images, rank, actors, batch) for rank, replica in enumerate(replicas)])
    col.declare_collective_group(replicas, group_name="replicas")
    train(replicas, steps)
    weights = col.get([replica.weights.remote() for replica in replicas])
    col.destroy_collective_group("replicas")

    alone = Learner()
    alone.begin(images, 0, 1, batch)
    for _ in range(steps):
        alone.gradient()
        alone.apply()
    difference = np.linalg.norm(weights[0] - alone.weights()) / np.linalg.norm(alone.weights())
    return {
        "all replicas hold the same bits": len({each.tobytes() for each in weights}) == 1,
        "one process reaches the same weights": float(difference) <= MAX_DIFFERENCE,
        "the digits are recognised": accuracy(alone.module, test) >= MIN_ACCURACY,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Data-parallel training with torch.")
    parser.add_argument("--actors", type=int, default=4, help="replicas (default 4)")
    parser.add_argument("--steps", type=int, default=200, help="steps of training (default 200)")
    parser.add_argument("--batch", type=int, default=50, help="images of a batch, over all replicas (default 50)")
    arguments = parser.parse_args()
    common.start_ray()
    common.finish(main(**vars(arguments)))
