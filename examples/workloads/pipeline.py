"""Pipeline stages: each actor has one stage of a network, and micro-batches go from stage to stage.

    python -m examples.workloads.pipeline [--stages 3] [--batches 16] [--runs 9] [--json]

Stages overlap: while a stage works on one micro-batch, the stage before it works on the next one. So the driver must
not wait between micro-batches, and a stage must not wait for the stage behind it longer than that one's work takes. The
ways that are compared, each checked against the whole network in one process:

- a captured step of one micro-batch, of which several runs are under way at once;
- `send_ref(..., async_op=True)` into buffers of the next stage;
- handing the ref on: `stage.forward.remote(ref)`, and the next stage fetches the tensor;
- `send` and `recv` that the stages call themselves, in one actor call per stage: `ray.util.collective` and raycollect;
- the object store: the same as handing the ref on, by Ray alone;
- `send_ref` without `async_op`: the driver waits for each transfer, and no stages overlap.

A stage is two layers in numpy on one thread, which takes some milliseconds.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raycollect as col
from examples.workloads.report import Check, Report, Timing, command_line, compare, declared, ending, ensure_ray

Array = NDArray[np.float32]

SEED = 0
WIDTH = 256
ROWS = (512, 4096)
SLOTS = 2
"""Buffers at each end of a transfer, so that a stage can work on one while the other travels."""
GROUP = "stages"
MAX_DIFFERENCE = 1e-5


def make_weights(stage: int) -> Array:
    """The weights of a stage, [2, WIDTH, WIDTH]."""
    drawn = np.random.default_rng(SEED + stage).standard_normal((2, WIDTH, WIDTH), np.float32)
    return drawn / np.float32(np.sqrt(WIDTH))


def make_batch(at: int, rows: int) -> Array:
    """A micro-batch, [rows, WIDTH]."""
    return np.random.default_rng(1000 + at).standard_normal((rows, WIDTH), np.float32)


def layers(weights: Array, inputs: Array, out: Array) -> Array:
    """What a stage computes: [rows, WIDTH] -> [rows, WIDTH]."""
    for weight in weights:
        np.tanh(inputs @ weight, out=out)
        inputs = out
    return out


class Layers:
    """A stage without any communication."""

    def begin(self, stage: int, stages: int, rows: int, batches: int) -> None:
        """Makes the weights and the buffers; the first stage makes the micro-batches, too."""
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.weights = make_weights(stage)
        self.batches = [make_batch(at, rows) for at in range(batches)] if self.is_first else []
        self.inputs, self.outputs = ([col.zeros((rows, WIDTH), np.float32) for _ in range(SLOTS)] for _ in range(2))
        self.sums = [0.0] * batches

    def work(self, at: int, inputs: Array | None = None, out: Array | None = None) -> Array:
        """Does a micro-batch, and keeps a sum of the result in the last stage."""
        own = self.batches[at] if self.is_first else self.inputs[at % SLOTS]
        given = own if inputs is None else inputs
        made = layers(self.weights, given, np.empty_like(given) if out is None else out)
        if self.is_last:
            self.sums[at] = float(np.sum(made, dtype=np.float64))
        return made

    def taken(self) -> list[float]:
        """The sums of all micro-batches; forgets them."""
        sums, self.sums = self.sums, [0.0] * len(self.sums)
        return sums


@ray.remote(num_cpus=0)
class Stage(col.CollectiveParticipant, Layers):
    """A stage whose tensors stay in its actor."""

    def get_input(self, slot: int) -> Array:
        return self.inputs[slot]

    def get_output(self, slot: int) -> Array:
        return self.outputs[slot]

    def compute(self, at: int) -> None:
        """A micro-batch, from buffer to buffer."""
        self.work(at, out=self.outputs[at % SLOTS])

    def forward(self, at: int, inputs: Array | None = None) -> Array | None:
        """A micro-batch; the result stays here until its ref is gone."""
        made = self.work(at, inputs)
        return None if self.is_last else made

    def loop(self, stage: int, batches: int) -> None:
        """All micro-batches in one call. A result travels while the next one is made."""
        sends: list[Any] = []
        for at in range(batches):
            if not self.is_first:
                col.recv(self.inputs[at % SLOTS], stage - 1, GROUP)
            if len(sends) == SLOTS:
                sends.pop(0).wait()  # its buffer is the next one to be written
            self.compute(at)
            if not self.is_last:
                sends.append(col.send(self.outputs[at % SLOTS], stage + 1, GROUP, async_op=True))
        for send in sends:
            send.wait()

    def join(self, stages: int, stage: int) -> None:
        """Forms the group of ray.util.collective."""
        import_module("ray.util.collective").init_collective_group(stages, stage, "gloo", GROUP)

    def loop_of_ray(self, stage: int, batches: int) -> None:
        """The same by ray.util.collective, whose gloo sends into the sockets' buffers."""
        import ray.util.collective as theirs

        for at in range(batches):
            if not self.is_first:
                theirs.recv(self.inputs[at % SLOTS], stage - 1, GROUP)
            self.compute(at)
            if not self.is_last:
                theirs.send(self.outputs[at % SLOTS], stage + 1, GROUP)


@ray.remote(num_cpus=0)
class PlainStage(Layers):
    """A stage whose results go through the object store."""

    def forward(self, at: int, inputs: Array | None = None) -> Array | None:
        made = self.work(at, inputs)
        return None if self.is_last else made


# ---------------------------------------------------------------------------------------------- ways


def micro_batch(stages: list[Any], slot: int) -> col.Step[[int]]:
    """A micro-batch through all stages."""
    ends = [(one.get_output.remote(slot), two.get_input.remote(slot)) for one, two in pairwise(stages)]

    @col.step
    def forward(at: int) -> None:
        stages[0].compute.remote(at)
        for stage, (output, there) in zip(stages[1:], ends, strict=True):
            col.send_ref(output, there, GROUP)
            stage.compute.remote(at)

    return forward


def by_steps(steps: list[col.Step[[int]]], batches: int) -> None:
    """Several runs under way: each stage goes on with the next run when its part of one has ended."""
    for run in [steps[at % SLOTS].start(at) for at in range(batches)]:
        run.wait()


def by_sends(stages: list[Any], batches: int, async_op: bool) -> None:
    """A `send_ref` for each transfer."""
    ends = [
        [(one.get_output.remote(slot), two.get_input.remote(slot)) for slot in range(SLOTS)]
        for one, two in pairwise(stages)
    ]
    under_way: deque[Any] = deque()
    for at in range(batches):
        for stage, pair in zip(stages[:-1], ends, strict=True):
            stage.compute.remote(at)
            if async_op:
                under_way.append(col.send_ref(*pair[at % SLOTS], GROUP, async_op=True))
            else:
                col.send_ref(*pair[at % SLOTS], GROUP)
        done = stages[-1].compute.remote(at)
    for work in under_way:
        work.wait()
    ray.get(done)


def by_refs(stages: list[Any], batches: int) -> None:
    """Each stage gets the ref that the stage before it returns."""
    done = []
    for at in range(batches):
        ref = stages[0].forward.remote(at)
        for stage in stages[1:]:
            ref = stage.forward.remote(at, ref)
        done.append(ref)
    ray.get(done)


def by_loops(stages: list[Any], method: str, batches: int) -> None:
    """One actor call per stage, which sends and receives by itself."""
    ray.get([getattr(stage, method).remote(at, batches) for at, stage in enumerate(stages)])


# ---------------------------------------------------------------------------------------------- the whole


def expected(stages: int, rows: int, batches: int) -> list[float]:
    """The sums that the whole network gives in one process."""
    weights = [make_weights(stage) for stage in range(stages)]
    sums = []
    for at in range(batches):
        state = make_batch(at, rows)
        for one in weights:
            state = layers(one, state, np.empty_like(state))
        sums.append(float(np.sum(state, dtype=np.float64)))
    return sums


def time_ways(stages: list[Any], plain: list[Any], *, rows: int, batches: int, runs: int) -> tuple[Timing, Check]:
    """Times a pass of all micro-batches in all ways, and compares each with one process."""
    count = len(stages)
    ray.get([one.begin.remote(at, count, rows, batches) for those in (stages, plain) for at, one in enumerate(those)])
    steps = [micro_batch(stages, slot) for slot in range(SLOTS)]
    ways: dict[str, Callable[[], object]] = {
        "captured, several runs": partial(by_steps, steps, batches),
        "send_ref, async_op": partial(by_sends, stages, batches, True),
        "handing the ref on": partial(by_refs, stages, batches),
        "send and recv in the stages": partial(by_loops, stages, "loop", batches),
        "ray.util.collective": partial(by_loops, stages, "loop_of_ray", batches),
        "send_ref, waiting for each": partial(by_sends, stages, batches, False),
        "object store": partial(by_refs, plain, batches),
    }
    right, bad = expected(count, rows, batches), []
    for name, way in ways.items():
        way()
        found = ray.get([stage.taken.remote() for stage in (stages[-1], plain[-1])])
        if not np.allclose(found[name == "object store"], right, rtol=MAX_DIFFERENCE, atol=1e-2):
            bad.append(name)
    ms = compare(ways, runs)
    for step in steps:
        step.close()
    told = f"wrong: {bad}" if bad else "those of one process, in each way"
    what = f"{batches} micro-batches of {rows * WIDTH * 4 / 1e6:.2f} MB through {count} stages"
    return Timing(what=what, ms=ms), Check(name=f"results, {rows} rows", found=told, good=not bad)


def main(stages: int = 3, batches: int = 16, runs: int = 9, rows: Sequence[int] = ROWS) -> Report:
    """Checks and times all ways.

    Args:
        stages: How many stages, each an actor.
        batches: Micro-batches of a pass.
        runs: How often each way is timed.
        rows: Of a micro-batch.
    """
    ensure_ray()
    ours, plain = [Stage.remote() for _ in range(stages)], [PlainStage.remote() for _ in range(stages)]
    with ending([*ours, *plain]), declared(ours, GROUP):
        ray.get([stage.join.remote(stages, at) for at, stage in enumerate(ours)])
        found = [time_ways(ours, plain, rows=count, batches=batches, runs=runs) for count in rows]
    return Report(
        title=f"A pipeline of {stages} stages",
        unit="pass",
        checks=tuple(check for _, check in found),
        timings=tuple(timing for timing, _ in found),
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="A pipeline whose stages are actors.")
    made.add_argument("--stages", type=int, default=3, help="stages (default 3)")
    made.add_argument("--batches", type=int, default=16, help="micro-batches of a pass (default 16)")
    made.add_argument("--runs", type=int, default=9, help="how often each way is timed (default 9)")
    made.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of a micro-batch (default 512 4096)")
    return made


if __name__ == "__main__":
    command_line(main, parser())
