"""The choices of a run, and the measurement of one case of a suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.report import Record, Skip, rows_of
from raycollect.cli.harness import Contender, Skipped, interleave

KB, MB = 1 << 10, 1 << 20

Maker = tuple[str, Callable[[], Contender]]
"""A contender's name, and the function that makes it, or raises `Skipped` or ImportError."""

BURST = 6
"""Consecutive runs of a contender in its turn. As in a loop, a run pays for what the one before it has left: Ray tidies
up after a call has returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to measure; where a field is empty, the suite chooses."""

    quick: bool = False  # fewer cases and runs
    ranks: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()  # bytes per rank
    runs: int | None = None  # of each contender and case


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a suite, which is also the name of its file of results.

    Attributes:
        name: The table's name.
        title: Its heading.
        reference: The contender that the others are compared with.
    """

    name: str
    title: str
    reference: str = "ray.util.collective"


def entry(name: str, make: Callable[..., Contender], *args: Any, **kwargs: Any) -> Maker:
    """A maker of a contender whose first argument is its name."""
    return name, partial(make, name, *args, **kwargs)


def sweep(
    table: Table,
    choice: Choice,
    makers: Sequence[Maker],
    *,
    op: str,
    ranks: int,
    sizes: Sequence[int],
    runs: Callable[[int], tuple[int, int]],
    burst: int | Callable[[int], int] = 1,
) -> Iterator[Record]:
    """Makes the contenders, measures them at each size, and closes them.

    Args:
        table: The rows' table.
        choice: What was asked for.
        makers: The contenders.
        op: Their operation.
        ranks: The number of processes of each.
        sizes: Bytes per rank, unless the choice has them.
        runs: Bytes per rank -> the number of runs, quick and full, unless the choice has it.
        burst: The number of runs in a turn, or a function of the bytes.
    """
    with ExitStack() as closing:
        contenders = list[Contender]()
        for name, make in makers:
            try:
                contenders.append(make())
            except (Skipped, ImportError) as exc:
                yield Skip(suite=table.name, contender=name, reason=str(exc))
            else:
                closing.callback(contenders[-1].close)
        for nbytes in choice.sizes or sizes:
            quick, full = runs(nbytes)
            count, in_turn = (
                choice.runs or (quick if choice.quick else full),
                burst if isinstance(burst, int) else burst(nbytes),
            )
            warmup = 1 if in_turn > 1 else 3
            spent_s = interleave(contenders, nbytes=nbytes, runs=count, warmup=warmup, burst=in_turn)
            yield from rows_of(spent_s, suite=table.name, op=op, ranks=ranks, nbytes=nbytes)
