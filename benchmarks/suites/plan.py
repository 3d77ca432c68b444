"""The planner alone: how long it takes from a request to a verified plan with its programs encoded. No Ray runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from benchmarks import names
from benchmarks.interleave import timed
from benchmarks.report import Record
from benchmarks.suite import Choice, compare
from raycollect.dispatch import prepare
from raycollect.model import GroupSpec, OpKind, ReduceOp, task_key
from raycollect.planner import Request

NAME = "plan"
TITLE = "from a request to its encoded programs"
REFERENCE = names.PLANNED
NEEDS_RAY = False

RANKS = (2, 4, 8, 16, 64, 256, 1024)
_TASK_NBYTES = 24


class Planner:
    """Plans an allreduce.

    Args:
        name: What it is called.
        ranks: How many ranks.
        fresh: Whether each request is a new one, or always the same.
    """

    def __init__(self, name: str, ranks: int, *, fresh: bool) -> None:
        self.name = name
        self._ranks = ranks
        self._fresh = fresh
        self._salts = itertools.count(1)
        self._requests: Iterator[Request] = iter(())
        self._last: tuple[bytes, ...] = ()

    def prepare(self, nbytes: int) -> None:
        """Nothing: a plan does not depend on the size."""

    def fill(self) -> None:
        """Drops the last result."""
        self._last = ()

    def run(self, count: int) -> Sequence[float]:
        """Plans requests that were made before the clock runs."""
        salts = [next(self._salts) if self._fresh else 0 for _ in range(count)]
        requests = iter([self._request(salt) for salt in salts])

        def once() -> None:
            self._last = prepare(next(requests))[1]

        return timed(once, count)

    def check(self, runs: int) -> None:
        """Raises unless there is a program for each rank."""
        if len(set(self._last)) != self._ranks:
            raise AssertionError(f"{len(set(self._last))} programs for {self._ranks} ranks")

    def close(self) -> None:
        """Nothing is held."""

    def _request(self, salt: int) -> Request:
        operands = tuple(
            (rank, task_key(rank.to_bytes(8, "little") + salt.to_bytes(_TASK_NBYTES - 8, "little"), 1), None)
            for rank in range(self._ranks)
        )
        spec = GroupSpec(name="benchmark", group_id="benchmark", backend="shm", world_size=self._ranks)
        return Request(kind=OpKind.ALLREDUCE, group=spec, operands=operands, op=ReduceOp.SUM)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures an allreduce over each number of ranks."""
    for ranks in choice.ranks or RANKS:
        choice.progress(f"{NAME}: {ranks} ranks")
        contenders = [Planner(names.PLANNED, ranks, fresh=True), Planner(names.REMEMBERED, ranks, fresh=False)]
        runs = choice.runs_or(20, 100)
        yield from compare(contenders, suite=NAME, op="allreduce", ranks=ranks, nbytes=0, runs=runs)
