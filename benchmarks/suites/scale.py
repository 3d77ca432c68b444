"""How an allreduce called from the driver grows with the number of actors."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import names
from benchmarks.ours import RaycollectAllreduce
from benchmarks.report import Record
from benchmarks.suite import BURST, Choice, Maker, entry, sweep
from benchmarks.targets import MB
from benchmarks.theirs import RayAllreduce

NAME = "scale"
TITLE = "allreduce called from the driver, over the number of actors"
REFERENCE = names.RAY
NEEDS_RAY = True

RANKS = (2, 4, 8, 16)
SIZES = (4, MB)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over each number of actors; torch has one world per process, so each number gets actors of its own."""
    for ranks in choice.ranks or RANKS:
        choice.progress(f"{NAME}: starts {ranks} actors")
        makers: list[Maker] = [
            entry(names.ORDINARY, RaycollectAllreduce, ranks),
            entry(names.ARENA, RaycollectAllreduce, ranks, arena=True),
            entry(names.RAY, RayAllreduce, ranks),
        ]
        sizes = choice.sizes or SIZES
        yield from sweep(
            NAME, choice, makers, op="allreduce", ranks=ranks, sizes=sizes, runs=lambda _: (40, 200), burst=BURST
        )
