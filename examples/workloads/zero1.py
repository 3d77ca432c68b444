"""ZeRO, stage 1: every actor has the whole model, and the optimizer's state of a part of it.

    python -m examples.workloads.zero1 [--actors 4] [--steps 60] [--runs 9] [--json]

The perceptron of `torch_ddp`, with Adam. A step of a rank: the gradient over its part of the batch; a reduce-scatter,
which gives it the mean gradient of its part of the parameters; Adam on that part alone; an allgather of the updated
parts. The parts are views of one tensor and may differ in size by one.

The program trains by a captured step, and by calls that the actors make themselves. It checks that all ranks hold the
same bits, that one process with the whole Adam reaches the same weights, and how much state a rank keeps. Then it times
a step beside torch's own: `ZeroRedundancyOptimizer` under `DistributedDataParallel`, over gloo.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import raycollect as col
from examples.workloads.images import CLASSES, PIXELS, load
from examples.workloads.report import Check, Report, Timing, command_line, compare, declared, ending, ensure_ray
from examples.workloads.torch_ddp import Learner, begin

LEARNING_RATE = 0.001
MAX_DIFFERENCE = 1e-5
BATCH = 50
STEPS_PER_TURN = 10
WIDTHS = (64, 4096)
GROUP = "shards of the optimizer"


class Sharded(Learner):
    """A replica whose optimizer has this rank's part of the parameters. It does not use Ray."""

    def begin(self, *args: Any, **settings: Any) -> None:
        """Makes the replica; the arguments are those of `Learner.begin`."""
        super().begin(*args, **settings)
        self.parts = list(self.parameters["float32"].detach().tensor_split(self.ranks))
        self.gradient_parts = list(self.gradients["float32"].tensor_split(self.ranks))
        size = self.parts[self.rank].numel()
        self.mine = torch.nn.Parameter(col.empty(size, torch.float32, library="torch"))
        self.mine.data.copy_(self.parts[self.rank])
        self.mine.grad = col.zeros(size, torch.float32, library="torch")
        self.adam = torch.optim.Adam([self.mine], lr=LEARNING_RATE)

    def parts_of_gradient(self) -> list[torch.Tensor]:
        """The gradient over this part of the next batch, a piece for each rank."""
        self.gradient()
        return self.gradient_parts

    def my_gradient(self) -> torch.Tensor | None:
        """Where the mean gradient of this rank's parameters goes."""
        return self.mine.grad

    def update(self) -> torch.Tensor:
        """Takes an optimizer step; the updated parameters of this rank."""
        self.adam.step()
        return self.mine.data

    def parts_of_parameters(self) -> list[torch.Tensor]:
        """The module's parameters, a piece for each rank."""
        return self.parts

    def state_elements(self) -> int:
        """How many numbers the optimizer keeps."""
        return sum(value.numel() for state in self.adam.state.values() for value in state.values())


@ray.remote(num_cpus=0)
class Replica(col.CollectiveParticipant, Sharded):
    """A replica in an actor."""

    def train(self, steps: int) -> None:
        """Trains by collectives that this actor calls itself; all ranks have to be called."""
        for _ in range(steps):
            col.reducescatter(self.my_gradient(), self.parts_of_gradient(), GROUP, op=col.ReduceOp.AVG)
            col.allgather(self.parts, self.update(), GROUP)

    def join(self, store: str) -> None:
        """Makes a replica like this one for torch's way; a file of this name is where all meet."""
        from torch.distributed.optim import ZeroRedundancyOptimizer  # only here: it warns of something of torch's own

        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=self.rank, world_size=self.ranks)
        self.theirs = DistributedDataParallel(copy.deepcopy(self.module))
        self.their_optimizer = ZeroRedundancyOptimizer(
            self.theirs.parameters(), optimizer_class=torch.optim.Adam, lr=LEARNING_RATE
        )

    def train_theirs(self, steps: int) -> None:
        """Trains that one; all ranks have to be called."""
        for _ in range(steps):
            self.their_optimizer.zero_grad()
            self._loss(self.theirs).backward()
            self.their_optimizer.step()

    def leave(self) -> None:
        """Leaves the group of `join`."""
        del self.theirs, self.their_optimizer
        distributed.destroy_process_group()


def trace(replicas: list[Any]) -> col.Step[[]]:
    """An iteration."""
    wholes = [replica.parts_of_parameters.remote() for replica in replicas]
    targets = [replica.my_gradient.remote() for replica in replicas]

    @col.step
    def iterate() -> None:
        gradients = [replica.parts_of_gradient.remote() for replica in replicas]
        col.reducescatter_refs(targets, gradients, GROUP, op=col.ReduceOp.AVG)
        updated = [replica.update.remote() for replica in replicas]
        col.allgather_refs(wholes, updated, GROUP)

    return iterate


def train_in_one_process(steps: int, width: int) -> tuple[NDArray[np.float32], int]:
    """The reference: the same training in one process; the weights, and how many numbers the optimizer keeps."""
    learner = Sharded()
    learner.begin(load()[0], width=width, batch=BATCH, rank=0, ranks=1)
    for _ in range(steps):
        pieces = learner.parts_of_gradient()
        learner.mine.grad = pieces[0].clone()
        learner.parts[0].copy_(learner.update())
    return learner.weights(), learner.state_elements()


def check_training(replicas: list[Any], steps: int, width: int) -> list[Check]:
    """Trains in both ways and in one process, and compares."""
    expected, whole = train_in_one_process(steps, width)
    checks, settings = [], {"width": width, "batch": BATCH}
    for way in ("captured", "in the actors"):
        begin(replicas, load()[0], **settings)
        if way == "captured":
            step = trace(replicas)
            for _ in range(steps):
                step()
            step.close()
        else:
            ray.get([replica.train.remote(steps) for replica in replicas])
        weights = col.get([replica.weights.remote() for replica in replicas])
        kept = max(ray.get([replica.state_elements.remote() for replica in replicas]))
        same = all(np.array_equal(weights[0], one) for one in weights)
        difference = float(np.linalg.norm(weights[0] - expected) / np.linalg.norm(expected))
        share = kept / whole
        checks += [
            Check(name=f"all ranks, {way}", found="the same bits" if same else "different weights", good=same),
            Check(
                name=f"beside one process, {way}",
                found=f"relative difference {difference:.1e}  (at most {MAX_DIFFERENCE:.0e})",
                good=difference <= MAX_DIFFERENCE,
            ),
            Check(
                name=f"the optimizer's state, {way}",
                found=f"{share:.2f} of the whole in each of {len(replicas)} ranks",
                good=share < 1.1 / len(replicas),
            ),
        ]
    return checks


def time_steps(replicas: list[Any], width: int, runs: int) -> Timing:
    """Times a step in all ways; each turn is some steps one after the other."""
    begin(replicas, load()[0], width=width, batch=BATCH)
    step = trace(replicas)

    def call(method: str) -> None:
        ray.get([getattr(replica, method).remote(STEPS_PER_TURN) for replica in replicas])

    ways: dict[str, Callable[[], object]] = {
        "captured": lambda: [step() for _ in range(STEPS_PER_TURN)],
        "calls in the actors": partial(call, "train"),
        "DDP, ZeroRedundancyOptimizer, gloo": partial(call, "train_theirs"),
    }
    with tempfile.TemporaryDirectory() as folder:
        ray.get([replica.join.remote(str(Path(folder) / "store")) for replica in replicas])
        spent = compare(ways, runs, warmup=1)
        ray.get([replica.leave.remote() for replica in replicas])
    step.close()
    elements = (PIXELS + 1) * width + (width + 1) * CLASSES
    ms = {way: each / STEPS_PER_TURN for way, each in spent.items()}
    return Timing(what=f"{elements * 4 / 1e6:.2f} MB of parameters", ms=ms)


def main(actors: int = 4, steps: int = 60, runs: int = 9, widths: Sequence[int] = WIDTHS) -> Report:
    """Trains and compares, then times.

    Args:
        actors: How many replicas there are.
        steps: Steps of training.
        runs: How often each way is timed, ten steps at a time.
        widths: Units of the hidden layer; the first is the one that is trained.
    """
    ensure_ray()
    replicas = [Replica.remote() for _ in range(actors)]
    with ending(replicas), declared(replicas, GROUP):
        checks = check_training(replicas, steps, widths[0])
        timings = tuple(time_steps(replicas, width, runs) for width in widths)
    title = f"ZeRO-1 of a perceptron in {actors} actors"
    return Report(title=title, unit="step", checks=tuple(checks), timings=timings)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Data-parallel training with a sharded optimizer.")
    made.add_argument("--actors", type=int, default=4, help="replicas (default 4)")
    made.add_argument("--steps", type=int, default=60, help="steps of training (default 60)")
    made.add_argument("--runs", type=int, default=9, help="how often each way is timed (default 9)")
    made.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of the hidden layer (default 64 4096)")
    return made


if __name__ == "__main__":
    command_line(main, parser())
