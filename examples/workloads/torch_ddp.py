"""Data-parallel training with torch: each actor has a part of every batch, and one call averages the gradients.

    python -m examples.workloads.torch_ddp [--actors 4] [--steps 200] [--batch 50] [--runs 9] [--json]

A perceptron with one hidden layer learns scikit-learn's handwritten digits by stochastic gradient descent with
momentum. Every actor has a replica of the module and of its optimizer, with parameters and gradients in shared memory
(`modules.share`). A step: each computes the gradient over its part of the batch, `allreduce_refs(..., op=AVG)` averages
them in place, each takes the same optimizer step.

The parts of a batch are of unequal size, and the last batch of an epoch is smaller still; some parts may be empty. So
each actor scales the summed loss of its part by `ranks / images of the batch`: then the average over ranks is the mean
over images, however they are distributed.

It trains by calls, then by a captured step, and checks that all replicas hold the same bits, in both ways, and that one
process which sees the whole batches reaches the same weights, within 1e-5 of their norm. They can't be the
same to the last bit: the parts' float32 sums are added in another order, and each step carries the difference on.

Then it times a step of a small and a larger perceptron in these ways:

- `allreduce_refs`, by calls and captured;
- `allreduce` inside the actors: one call of a `list` of all gradients, of an ordinary module;
- `DistributedDataParallel` of torch over gloo, its loop inside the actors: the driver makes one call for many steps;
- a parameter server in the driver: it gets all gradients, averages them, and puts the result.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import raycollect as col
from examples.workloads import modules
from examples.workloads.images import CLASSES, PIXELS, Images, load
from examples.workloads.report import Check, Report, Timing, command_line, compare, declared, ending, ensure_ray

SEED = 0
LEARNING_RATE = 0.1
MOMENTUM = 0.9
MIN_ACCURACY = 0.93
MAX_DIFFERENCE = 1e-5
STEPS_PER_TURN = 10
WIDTHS = (64, 4096)
GROUP = "replicas"


# ---------------------------------------------------------------------------------------------- learning


class Learner:
    """A replica, and its part of every batch. It does not use Ray."""

    def begin(self, images: Images, *, width: int, batch: int, rank: int, ranks: int) -> None:
        """Makes the replica, always with the same weights.

        Args:
            images: All images.
            width: Units of the hidden layer.
            batch: Images of a batch; an epoch's last one has what is left.
            rank: Which part of each batch is this replica's.
            ranks: How many parts there are.
        """
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        layers = torch.nn.Linear(PIXELS, width), torch.nn.ReLU(), torch.nn.Linear(width, CLASSES)
        self.module = torch.nn.Sequential(*layers)
        self.parameters = modules.share(self.module)
        self.gradients = modules.share_gradients(self.module)
        self.optimizer = self._optimizer(self.module)
        self.pixels, self.labels = torch.tensor(images.pixels), torch.tensor(images.labels)
        self.batch, self.rank, self.ranks, self.steps = batch, rank, ranks, 0

    def gradient(self) -> dict[str, torch.Tensor]:
        """Computes the gradient over this part of the next batch, in place.

        Returns:
            All gradients, one tensor for each dtype.
        """
        self.optimizer.zero_grad(set_to_none=False)
        self._loss(self.module).backward()
        return self.gradients

    def apply(self) -> None:
        """Takes an optimizer step by the gradients as they are."""
        self.optimizer.step()

    def weights(self) -> NDArray[np.float32]:
        """All parameters, [n] float32; the memory itself."""
        return self.parameters["float32"].numpy()

    def _optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def _loss(self, module: torch.nn.Module) -> torch.Tensor:
        """This part's share of the mean loss over the batch, times the number of ranks; of no images it is zero."""
        per_epoch = -(-len(self.labels) // self.batch)
        epoch, at = divmod(self.steps, per_epoch)
        order = np.random.default_rng((SEED, epoch)).permutation(len(self.labels))
        chosen = order[at * self.batch : (at + 1) * self.batch]
        part = torch.from_numpy(np.array_split(chosen, self.ranks)[self.rank])
        self.steps += 1
        losses = torch.nn.functional.cross_entropy(module(self.pixels[part]), self.labels[part], reduction="sum")
        return losses * (self.ranks / len(chosen))


@ray.remote(num_cpus=0)
class Replica(col.CollectiveParticipant, Learner):
    """A learner in an actor. Its own methods are for the comparison."""

    @col.by_value
    def gradient_by_value(self) -> NDArray[np.float32]:
        return self.gradient()["float32"].numpy()

    def apply_value(self, gradient: NDArray[np.float32]) -> None:
        np.copyto(self.gradients["float32"].numpy(), gradient)
        self.apply()

    def train_by_own_calls(self, steps: int) -> None:
        """Trains an ordinary copy of the module; all ranks have to be called."""
        for _ in range(steps):
            self.usual_optimizer.zero_grad()
            self._loss(self.usual).backward()
            col.allreduce([one.grad for one in self.usual.parameters()], GROUP, op=col.ReduceOp.AVG)
            self.usual_optimizer.step()

    def join(self, store: str) -> None:
        """Makes a replica like this one under `DistributedDataParallel`; a file of this name is where all meet."""
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=self.rank, world_size=self.ranks)
        self.usual, usual = copy.deepcopy(self.module), copy.deepcopy(self.module)  # in ordinary memory
        self.usual_optimizer = self._optimizer(self.usual)
        self.theirs = DistributedDataParallel(usual)
        self.their_optimizer = self._optimizer(usual)

    def train(self, steps: int) -> None:
        """Trains that one; all ranks have to be called."""
        for _ in range(steps):
            self.their_optimizer.zero_grad()
            self._loss(self.theirs).backward()
            self.their_optimizer.step()

    def leave(self) -> None:
        """Leaves the group of `join`."""
        del self.theirs
        distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------- training


def step_by_calls(replicas: list[Any]) -> None:
    """One step, by Ray calls."""
    gradients = [replica.gradient.remote() for replica in replicas]
    col.allreduce_refs(gradients, group_name=GROUP, op=col.ReduceOp.AVG)
    for replica in replicas:
        replica.apply.remote()  # behind the allreduce, in Ray's queue


def step_by_driver(replicas: list[Any]) -> None:
    """The same with the driver as the parameter server."""
    gradients = ray.get([replica.gradient_by_value.remote() for replica in replicas])
    mean = ray.put(sum(gradients[1:], gradients[0]) / len(gradients))
    ray.get([replica.apply_value.remote(mean) for replica in replicas])


def begin(replicas: list[Any], images: Images, *, width: int, batch: int) -> None:
    """Restarts all replicas."""
    held = ray.put(images)
    settings = {"width": width, "batch": batch, "ranks": len(replicas)}
    ray.get([replica.begin.remote(held, rank=rank, **settings) for rank, replica in enumerate(replicas)])


def train_in_one_process(images: Images, *, steps: int, width: int, batch: int) -> NDArray[np.float32]:
    """The reference: the same training in one process, with whole batches."""
    learner = Learner()
    learner.begin(images, width=width, batch=batch, rank=0, ranks=1)
    for _ in range(steps):
        learner.gradient()
        learner.apply()
    return learner.weights()


def accuracy(weights: NDArray[np.float32], images: Images, width: int) -> float:
    """The share of images that are recognised with these weights."""
    learner = Learner()
    learner.begin(images, width=width, batch=1, rank=0, ranks=1)
    np.copyto(learner.weights(), weights)
    with torch.no_grad():
        found = learner.module(learner.pixels).argmax(dim=1)
    return float((found == learner.labels).float().mean())


def check_training(replicas: list[Any], *, steps: int, width: int, batch: int) -> list[Check]:
    """Trains by calls, captured and in one process, and compares."""
    train, test = load()
    begin(replicas, train, width=width, batch=batch)
    for _ in range(steps):
        step_by_calls(replicas)
    weights = col.get([replica.weights.remote() for replica in replicas])
    begin(replicas, train, width=width, batch=batch)
    step = col.step(step_by_calls)
    for _ in range(steps):
        step(replicas)
    step.close()
    weights += col.get([replica.weights.remote() for replica in replicas])
    expected = train_in_one_process(train, steps=steps, width=width, batch=batch)
    difference = max(float(np.linalg.norm(one - expected) / np.linalg.norm(expected)) for one in weights)
    same = len({one.tobytes() for one in weights}) == 1
    reached = accuracy(weights[0], test, width)
    return [
        Check(name="test accuracy", found=f"{reached:.3f}  (at least {MIN_ACCURACY})", good=reached >= MIN_ACCURACY),
        Check(
            name=f"{len(replicas)} replicas beside 1 process",
            found=f"relative difference {difference:.1e}  (at most {MAX_DIFFERENCE:.0e})",
            good=difference <= MAX_DIFFERENCE,
        ),
        Check(name="all replicas, in both ways", found="the same bits" if same else "different weights", good=same),
    ]


def time_steps(replicas: list[Any], *, width: int, batch: int, runs: int) -> Timing:
    """Times a step in all ways; each turn is some steps one after the other."""
    train, _ = load()
    begin(replicas, train, width=width, batch=batch)
    step = col.step(step_by_calls)
    several = range(STEPS_PER_TURN)

    def calls() -> None:
        for _ in several:
            step_by_calls(replicas)
        col.barrier(GROUP)  # behind the last `apply`

    ways: dict[str, Callable[[], object]] = {
        "allreduce_refs, captured": lambda: [step(replicas) for _ in several],
        "allreduce_refs, calls": calls,
        "allreduce in the actors": lambda: ray.get([one.train_by_own_calls.remote(STEPS_PER_TURN) for one in replicas]),
        "DistributedDataParallel, gloo": lambda: ray.get([one.train.remote(STEPS_PER_TURN) for one in replicas]),
        "the driver as parameter server": lambda: [step_by_driver(replicas) for _ in several],
    }
    with tempfile.TemporaryDirectory() as folder:
        ray.get([replica.join.remote(str(Path(folder) / "store")) for replica in replicas])
        spent = compare(ways, runs, warmup=1)
        ray.get([replica.leave.remote() for replica in replicas])
    step.close()
    elements = (PIXELS + 1) * width + (width + 1) * CLASSES
    ms = {way: each / STEPS_PER_TURN for way, each in spent.items()}
    return Timing(what=f"{elements * 4 / 1e6:.2f} MB of gradients", ms=ms)


def main(actors: int = 4, steps: int = 200, batch: int = 50, runs: int = 9, widths: Sequence[int] = WIDTHS) -> Report:
    """Trains and compares, then times.

    Args:
        actors: How many replicas there are.
        steps: Steps of training.
        batch: Images of a batch, over all replicas.
        runs: How often each way is timed, ten steps at a time.
        widths: Units of the hidden layer; the first is the one that is trained.
    """
    ensure_ray()
    replicas = [Replica.remote() for _ in range(actors)]
    with ending(replicas), declared(replicas, GROUP):
        checks = check_training(replicas, steps=steps, width=widths[0], batch=batch)
        timings = tuple(time_steps(replicas, width=width, batch=batch, runs=runs) for width in widths)
    return Report(
        title=f"Data-parallel training of a perceptron in {actors} actors",
        unit="step",
        checks=tuple(checks),
        timings=timings,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Data-parallel training with torch.")
    made.add_argument("--actors", type=int, default=4, help="replicas (default 4)")
    made.add_argument("--steps", type=int, default=200, help="steps of training (default 200)")
    made.add_argument("--batch", type=int, default=50, help="images of a batch, over all replicas (default 50)")
    made.add_argument("--runs", type=int, default=9, help="how often each way is timed (default 9)")
    made.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of the hidden layer (default 64 4096)")
    return made


if __name__ == "__main__":
    command_line(main, parser())
