"""What a suite is, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from benchmarks.interleave import Contender, interleave
from benchmarks.report import Record, Row, Skip, Skipped, rows_of, size

C = TypeVar("C", bound=Contender)
Maker = tuple[str, Callable[[], Contender]]
"""A contender's name, and what makes it or raises `Skipped`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to measure; whatever is empty, the suite chooses.

    Attributes:
        quick: Fewer cases, fewer runs.
        ranks: How many processes.
        sizes: Bytes per rank.
        busy_ms: How long methods compute, in milliseconds, where a suite has such methods.
        runs: Operations per contender and case.
        progress: Told what is being measured.
    """

    quick: bool = False
    ranks: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    busy_ms: tuple[float, ...] = ()
    runs: int | None = None
    progress: Callable[[str], None] = lambda _: None

    def runs_or(self, quick: int, full: int) -> int:
        """How many operations, where nobody has said."""
        return self.runs or (quick if self.quick else full)


class Suite(Protocol):
    """A module that measures.

    Attributes:
        NAME: What it is called on the command line.
        TITLE: What its table is called.
        REFERENCE: The contender that the others are compared with in the table.
        NEEDS_RAY: Whether Ray has to run.
    """

    NAME: str
    TITLE: str
    REFERENCE: str
    NEEDS_RAY: bool

    @staticmethod
    def measure(choice: Choice) -> Iterator[Record]:
        """Measures, and gives each record as soon as it has it."""
        ...


def entry(name: str, make: Callable[..., C], *args: Any, **kwargs: Any) -> tuple[str, Callable[[], C]]:
    """One line of what `gather` takes: a contender that is made with its name first."""
    return name, partial(make, name, *args, **kwargs)


def gather(suite: str, makers: Sequence[tuple[str, Callable[[], C]]]) -> tuple[list[C], list[Skip]]:
    """Makes the contenders that there are, and names the others with the reason.

    Args:
        suite: The suite.
        makers: (name, function that makes the contender, or raises `Skipped`, or an ImportError).
    """
    made: list[C] = []
    skipped = []
    try:
        for name, make in makers:
            try:
                made.append(make())
            except (Skipped, ImportError) as exc:
                skipped.append(Skip(suite=suite, contender=name, reason=str(exc)))
    except BaseException:
        close(made)
        raise
    return made, skipped


def close(contenders: Sequence[Contender]) -> None:
    """Has all contenders give back what they hold, also when one of them fails to."""
    with ExitStack() as closing:
        for contender in reversed(contenders):
            closing.callback(contender.close)


BURST = 6
"""How many calls of one contender follow each other in the suites with Ray.

As in the loops that people write, a call pays for what the one before it has left behind: Ray tidies up after a call
has returned. Where contenders took turns call by call, each would pay for another's.
"""


def sweep(
    suite: str,
    choice: Choice,
    makers: Sequence[Maker],
    *,
    op: str,
    ranks: int,
    sizes: Sequence[int],
    runs: Callable[[int], tuple[int, int]],
    burst: int = 1,
) -> Iterator[Record]:
    """Makes the contenders, measures them at each size in turn, and closes them.

    Args:
        suite: The suite.
        choice: What it was told.
        makers: See `gather`.
        op: What they do.
        ranks: How many processes they have.
        sizes: Bytes per rank.
        runs: Bytes per rank -> how many operations, by default in a quick run and in a full one.
        burst: See `BURST`.
    """
    contenders, skipped = gather(suite, makers)
    yield from skipped
    for nbytes in sizes:
        choice.progress(f"{suite}: {ranks} ranks, {op}, {size(nbytes)}")
        count = choice.runs_or(*runs(nbytes))
        yield from compare(contenders, suite=suite, op=op, ranks=ranks, nbytes=nbytes, runs=count, burst=burst)
    close(contenders)


def compare(
    contenders: Sequence[Contender], *, suite: str, op: str, ranks: int, nbytes: int, runs: int, burst: int = 1
) -> list[Row]:
    """Measures one case: all contenders, in turn."""
    times = interleave(contenders, nbytes=nbytes, runs=runs, warmup=1 if burst > 1 else 3, burst=burst)
    return rows_of(times, suite=suite, op=op, ranks=ranks, nbytes=nbytes)
