"""ZeRO, stage 1: every actor has the whole model, and the optimizer's state of its part of the parameters only.

    python -m examples.workloads.zero1 [--actors 4] [--steps 60]

The perceptron of `torch_ddp`, with Adam. A step of a rank: the gradient over its part of the batch; a reduce-scatter,
which gives it the mean gradient of its part of the parameters; Adam on that part alone; an allgather of the updated
parts. The parts are views of one tensor and may differ in size by one.

The program checks that all ranks hold the same bits, that one process with the whole Adam reaches the same weights, and
how much state a rank keeps.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray
import torch

import raycollect as col
from examples.workloads import common
from examples.workloads.images import load
from examples.workloads.torch_ddp import MAX_DIFFERENCE, Learner


class Sharded(Learner):
    """A replica whose optimizer has this rank's part of the parameters. It does not use Ray."""

    def begin(self, *args: Any, **settings: Any) -> None:
        """Makes the replica; the arguments are those of `Learner.begin`."""
        super().begin(*args, **settings)
        self.parts = list(self.parameters["float32"].detach().tensor_split(self.ranks))
        self.gradient_parts = list(self.gradients["float32"].tensor_split(self.ranks))
        self.mine = torch.nn.Parameter(col.array(self.parts[self.rank]))
        self.mine.grad = col.zeros(self.mine.numel(), torch.float32, library="torch")
        self.adam = torch.optim.Adam([self.mine], lr=0.001)

    def parts_of_gradient(self) -> list[torch.Tensor]:
        """The gradient over this part of the next batch, a piece for each rank."""
        self.gradient()
        return self.gradient_parts

    def my_gradient(self) -> torch.Tensor | None:
        """Where the mean gradient of this rank's parameters goes."""
        return self.mine.grad

    def update(self) -> torch.Tensor:
        """Takes an optimizer step; returns the updated parameters of this rank."""
        self.adam.step()
        return self.mine.data

    def parts_of_parameters(self) -> list[torch.Tensor]:
        """The module's parameters, a piece for each rank."""
        return self.parts

    def state_elements(self) -> int:
        """How many numbers the optimizer keeps."""
        return sum(value.numel() for state in self.adam.state.values() for value in state.values())


@ray.remote(num_cpus=0)
class ShardedReplica(col.CollectiveParticipant, Sharded):
    """A replica in an actor: the mixin is all that it needs."""


def train(replicas: list[Any], steps: int) -> None:
    """Trains in lockstep, by a step that is traced once."""
    wholes = [replica.parts_of_parameters.remote() for replica in replicas]
    targets = [replica.my_gradient.remote() for replica in replicas]

    @col.step
    def iterate() -> None:
        gradients = [replica.parts_of_gradient.remote() for replica in replicas]
        col.reducescatter_refs(targets, gradients, "zero", op=col.ReduceOp.AVG)
        updated = [replica.update.remote() for replica in replicas]
        col.allgather_refs(wholes, updated, "zero")

    for _ in range(steps):
        iterate()
    iterate.close()


def main(actors: int = 4, steps: int = 60, width: int = 64) -> dict[str, bool]:
    """Trains in actors and in one process; returns what holds."""
    images, _ = load()
    replicas: list[Any] = [ShardedReplica.remote() for _ in range(actors)]
    ray.get([replica.begin.remote(images, rank, actors, width=width) for rank, replica in enumerate(replicas)])
    col.declare_collective_group(replicas, group_name="zero")
    train(replicas, steps)
    weights = col.get([replica.weights.remote() for replica in replicas])
    state = max(ray.get([replica.state_elements.remote() for replica in replicas]))
    col.destroy_collective_group("zero")

    alone = Sharded()
    alone.begin(images, 0, 1, width=width)
    assert alone.mine.grad is not None
    for _ in range(steps):
        alone.mine.grad.copy_(alone.parts_of_gradient()[0])
        alone.parts[0].copy_(alone.update())
    difference = np.linalg.norm(weights[0] - alone.weights()) / np.linalg.norm(alone.weights())
    return {
        "all ranks hold the same bits": len({each.tobytes() for each in weights}) == 1,
        "one process reaches the same weights": float(difference) <= MAX_DIFFERENCE,
        "a rank keeps its share of the optimizer's state": state < 1.1 * alone.state_elements() / actors,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Data-parallel training with a sharded optimizer.")
    parser.add_argument("--actors", type=int, default=4, help="replicas (default 4)")
    parser.add_argument("--steps", type=int, default=60, help="steps of training (default 60)")
    parser.add_argument("--width", type=int, default=64, help="units of the hidden layer (default 64)")
    arguments = parser.parse_args()
    common.start_ray()
    common.finish(main(**vars(arguments)))
