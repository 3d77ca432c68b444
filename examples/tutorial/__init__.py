"""The programs of a torch.distributed tutorial, on four ranks, in both ways of calling a collective.

Each module prints what the tutorial prints, twice: first with every rank making its own call (``imperative``), then
with the driver making one call over refs (``declarative``). Run one with ``python -m examples.tutorial.all_reduce``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import raycollect as col

WORLD_SIZE = 4

Way = Callable[[list[Any]], list[str]]
"""Runs the collective on four workers and returns what each rank saw, in rank order."""


def run(worker: Any, *ways: Way) -> list[list[str]]:
    """Runs each way on workers of its own, and prints the results."""
    told = []
    for way in ways:
        workers = [worker.remote(rank) for rank in range(WORLD_SIZE)]
        col.declare_collective_group(workers)
        lines = way(workers)
        col.destroy_collective_group()
        print(f"{way.__name__}:", *lines, sep="\n  ")
        told.append(lines)
    return told


def shown(name: str, before: list[Any], after: list[Any]) -> list[str]:
    """Writes what the ranks held before and after, as the tutorial does."""
    return [
        *(f"Rank {rank} before {name}: {tensor}" for rank, tensor in enumerate(before)),
        *(f"Rank {rank} after {name}: {tensor}" for rank, tensor in enumerate(after)),
    ]
