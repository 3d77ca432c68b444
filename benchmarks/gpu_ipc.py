"""Ranks that share a GPU by CUDA IPC beside copies on that GPU: a part of `benchmarks.gpu`.

An allreduce of w ranks and n bytes has to read and write w times n bytes: each rank's share of it is that of a copy of
n bytes. So a rank's copy from device to device, at the same time as those of the others, is the limit; the goal is a
part of its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.gpu_ranks import COPY, OURS, Contender, Operands
from benchmarks.report import size as told
from raycollect.cli.harness import interleave
from raycollect.core.model import Launch
from raycollect.core.protocols import Communicator
from tests.gpu.sharing import form

__all__ = ["GOAL", "HEADS", "OPS", "PART", "body_shared", "form", "speed", "verdict"]

PART = "shared GPU"

GOAL, GOAL_FROM = 0.7, 1 << 20
"""The share of a copy's speed to be reached by an allreduce, and from how many bytes on."""

HEADS = ("operation, ranks on one GPU", "ranks", "size", "ours GB/s", "copy GB/s", "of a copy")

OPS = ("allreduce", "allgather", "reducescatter", "broadcast")


def body_shared(
    communicator: Communicator, launch: Launch, nbytes: int, runs: int
) -> dict[str, dict[str, list[float]]]:
    """Times the operations at one size on one rank: operation -> contender -> seconds."""
    found = {op: _interleaved(communicator, launch, Operands.make(op, communicator, nbytes), runs) for op in OPS}
    communicator.end(launch, True)
    return found


def _interleaved(communicator: Communicator, launch: Launch, operands: Operands, runs: int) -> dict[str, list[float]]:
    cupy, kernel = import_module("cupy"), operands.kernel()
    large = max(operands.src, operands.dst, key=lambda one: one.size)
    contenders = [
        Contender(OURS, lambda: communicator.launch(launch, (kernel,)), operands),
        Contender(COPY, _copy(cupy, large), operands, copies=True),
    ]
    return interleave(contenders, nbytes=large.nbytes, runs=runs)


def _copy(cupy: Any, source: Any) -> Callable[[], None]:
    """A copy of an array on a stream of its own, and a wait until the GPU has done it."""
    runtime, target = cupy.cuda.runtime, cupy.empty(source.size, np.float32)
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
    copied = (target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    def once() -> None:
        runtime.memcpyAsync(*copied)
        event.record(stream)
        event.synchronize()

    once.kept = target, source  # type: ignore[attr-defined]  # as long as it may copy
    return once


def speed(line: Any) -> tuple[str, ...]:
    """A line of `benchmarks.gpu` as a row under `HEADS`."""
    ours, copy = line.times_us.values()
    rates = [f"{line.nbytes / us / 1e3:.2f}" for us in (ours, copy)]
    return line.case, str(line.ranks), told(line.nbytes), *rates, f"{copy / ours:.0%}"


def verdict(lines: Sequence[Any]) -> str:
    """Says how often the goal was reached."""
    sums = [list(line.times_us.values()) for line in lines if line.case == "allreduce" and line.nbytes >= GOAL_FROM]
    reached = sum(copy / ours >= GOAL for ours, copy in sums)
    return f"goal, allreduce at {GOAL:.0%} of a copy from {told(GOAL_FROM)} on: reached in {reached} of {len(sums)}"
