"""Allreduce called from the driver: the same actors for all contenders, buffers that persist, in place.

raycollect gets refs that persist over the calls; `ray.util.collective` gets one actor call per rank; the object store
goes through the driver. Each has a buffer of its own in each actor.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import names
from benchmarks.crew import crew
from benchmarks.ours import RaycollectAllreduce
from benchmarks.report import Record, size
from benchmarks.suite import BURST, Choice, Maker, close, compare, entry, gather
from benchmarks.targets import MB
from benchmarks.theirs import RayAllreduce, StoreAllreduce

NAME = "driver"
TITLE = "allreduce called from the driver, float32, in place"
REFERENCE = names.RAY
NEEDS_RAY = True

RANKS = (2, 4)
SIZES = (4, MB, 64 * MB)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 and 4 actors."""
    for ranks in choice.ranks or RANKS:
        choice.progress(f"{NAME}: starts {ranks} actors")
        with crew(ranks) as actors:
            makers: list[Maker] = [
                entry(names.ORDINARY, RaycollectAllreduce, actors),
                entry(names.ARENA, RaycollectAllreduce, actors, arena=True),
                entry(names.RAY, RayAllreduce, actors),
                entry(names.STORE, StoreAllreduce, actors),
            ]
            contenders, skipped = gather(NAME, makers)
            yield from skipped
            for nbytes in choice.sizes or SIZES:
                choice.progress(f"{NAME}: {ranks} actors, {size(nbytes)}")
                quick, full = (120, 400) if nbytes < MB else (60, 200) if nbytes < 16 * MB else (12, 48)
                runs = choice.runs_or(quick, full)
                yield from compare(
                    contenders, suite=NAME, op="allreduce", ranks=ranks, nbytes=nbytes, runs=runs, burst=BURST
                )
            close(contenders)
