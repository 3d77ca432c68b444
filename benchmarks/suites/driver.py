"""Allreduce called from the driver: buffers that persist, in place.

raycollect gets refs that persist over the calls; `ray.util.collective` gets one actor call per rank; the object store
goes through the driver. Each has actors of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import names
from benchmarks.ours import RaycollectAllreduce
from benchmarks.report import Record
from benchmarks.suite import BURST, Choice, Maker, entry, sweep
from benchmarks.targets import MB
from benchmarks.theirs import RayAllreduce, StoreAllreduce

NAME = "driver"
TITLE = "allreduce called from the driver, float32, in place"
REFERENCE = names.RAY
NEEDS_RAY = True

RANKS = (2, 4)
SIZES = (4, MB, 64 * MB)


def _runs(nbytes: int) -> tuple[int, int]:
    return (120, 400) if nbytes < MB else (60, 200) if nbytes < 16 * MB else (12, 48)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 and 4 actors."""
    for ranks in choice.ranks or RANKS:
        choice.progress(f"{NAME}: starts {ranks} actors")
        makers: list[Maker] = [
            entry(names.ORDINARY, RaycollectAllreduce, ranks),
            entry(names.ARENA, RaycollectAllreduce, ranks, arena=True),
            entry(names.RAY, RayAllreduce, ranks),
            entry(names.STORE, StoreAllreduce, ranks),
        ]
        sizes = choice.sizes or SIZES
        yield from sweep(NAME, choice, makers, op="allreduce", ranks=ranks, sizes=sizes, runs=_runs, burst=BURST)
