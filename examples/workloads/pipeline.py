"""Pipeline stages: each actor has one stage of a network, and micro-batches go from stage to stage.

    python -m examples.workloads.pipeline [--stages 3] [--batches 16]

Stages overlap: while a stage works on one micro-batch, the stage before it works on the next one. So the driver does
not wait between micro-batches. Two ways, each checked against the whole network in one process:

- a step of one micro-batch, of which several runs are under way at once;
- `send` and `recv` that the stages call themselves, in one actor call per stage.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raycollect as col
from examples.workloads import common

Array = NDArray[np.float32]

WIDTH, ROWS = 256, 512
SLOTS = 2  # buffers at each end of a transfer: a stage works on one while the other travels
GROUP = "stages"


def make_weights(stage: int) -> Array:
    """The weights of the two layers of a stage, [2, WIDTH, WIDTH]."""
    return np.random.default_rng(stage).standard_normal((2, WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)


def make_batch(at: int) -> Array:
    """A micro-batch, [ROWS, WIDTH]."""
    return np.random.default_rng(1000 + at).standard_normal((ROWS, WIDTH), np.float32)


def layers(weights: Array, inputs: Array, out: Array) -> Array:
    """What a stage computes: [ROWS, WIDTH] -> [ROWS, WIDTH]."""
    for weight in weights:
        np.tanh(inputs @ weight, out=out)
        inputs = out
    return out


@ray.remote(num_cpus=0)
class Stage(col.CollectiveParticipant):
    """A stage whose tensors stay in its actor; the last one sums up its results."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.is_last = stage, stage == stages - 1
        self.weights = make_weights(stage)
        self.inputs, self.outputs = ([col.zeros((ROWS, WIDTH), np.float32) for _ in range(SLOTS)] for _ in range(2))

    def get_input(self, slot: int) -> Array:
        return self.inputs[slot]

    def get_output(self, slot: int) -> Array:
        return self.outputs[slot]

    def compute(self, at: int) -> float:
        """Computes a micro-batch, from buffer to buffer; returns the sum of the results."""
        inputs = self.inputs[at % SLOTS] if self.stage else make_batch(at)
        return float(layers(self.weights, inputs, self.outputs[at % SLOTS]).sum(dtype=np.float64))

    def loop(self, batches: int) -> list[float]:
        """Computes all micro-batches; a result travels while the next one is computed."""
        sends: list[Any] = []
        sums = []
        for at in range(batches):
            if self.stage:
                col.recv(self.inputs[at % SLOTS], self.stage - 1, GROUP)
            if len(sends) == SLOTS:
                sends.pop(0).wait()  # its buffer is the next one to be written
            sums.append(self.compute(at))
            if not self.is_last:
                sends.append(col.send(self.outputs[at % SLOTS], self.stage + 1, GROUP, async_op=True))
        for send in sends:
            send.wait()
        return sums


def micro_batch(stages: list[Any], slot: int) -> col.Step[[int]]:
    """A step that passes a micro-batch through all stages, in these buffers; it returns the sum."""
    ends = [(stage.get_output.remote(slot), after.get_input.remote(slot)) for stage, after in pairwise(stages)]

    @col.step
    def forward(at: int) -> Any:
        result = stages[0].compute.remote(at)
        for stage, (output, target) in zip(stages[1:], ends, strict=True):
            col.send_ref(output, target, GROUP)
            result = stage.compute.remote(at)
        return result

    return forward


def expected(stages: int, batches: int) -> list[float]:
    """The sums that the whole network gives in one process."""
    weights = [make_weights(stage) for stage in range(stages)]
    sums = []
    for at in range(batches):
        state = make_batch(at)
        for of_stage in weights:
            state = layers(of_stage, state, np.empty_like(state))
        sums.append(float(state.sum(dtype=np.float64)))
    return sums


def main(stages: int = 3, batches: int = 16) -> dict[str, bool]:
    """Passes all micro-batches in both ways; returns what holds."""
    actors: list[Any] = [Stage.remote(stage, stages) for stage in range(stages)]
    col.declare_collective_group(actors, group_name=GROUP)
    steps = [micro_batch(actors, slot) for slot in range(SLOTS)]
    runs = [steps[at % SLOTS].start(at) for at in range(batches)]  # a stage goes on when its part of a run has ended
    by_steps = [run.wait() for run in runs]
    for step in steps:
        step.close()
    by_loops = ray.get([actor.loop.remote(batches) for actor in actors])[-1]
    col.destroy_collective_group(GROUP)
    sums = expected(stages, batches)
    return {
        "several runs of a step give the sums of one process": np.allclose(by_steps, sums, rtol=1e-5, atol=1e-2),
        "sends of the stages give them, too": np.allclose(by_loops, sums, rtol=1e-5, atol=1e-2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A pipeline whose stages are actors.")
    parser.add_argument("--stages", type=int, default=3, help="stages (default 3)")
    parser.add_argument("--batches", type=int, default=16, help="micro-batches (default 16)")
    arguments = parser.parse_args()
    common.start_ray()
    common.finish(main(**vars(arguments)))
