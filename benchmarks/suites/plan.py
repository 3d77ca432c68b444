"""The planner alone: how long it takes from calls to a verified plan with its programs encoded. No Ray runs.

Allreduces are native; the all-to-all is made of sends, of which there are as many as pairs of ranks. "Planned" starts
with nothing remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

from benchmarks import names
from benchmarks.interleave import timed
from benchmarks.report import Record
from benchmarks.suite import Choice, compare
from raycollect import planner
from raycollect.core.model import Address, GroupSpec, Member, OpKind, ReduceOp
from raycollect.driver import dispatch
from raycollect.driver.dispatch import RequestKey, prepare
from raycollect.group.membership import membership_of

NAME = "plan"
TITLE = "from calls to their encoded programs"
REFERENCE = names.PLANNED
NEEDS_RAY = False

RANKS = (2, 4, 8, 16, 64, 256, 1024)
MANY = 200
PAIRS_RANKS = (2, 4, 8, 16, 64)
_STAGING = 32 << 20


class Planner:
    """Plans calls of one kind.

    Args:
        name: What it is called.
        ranks: How many ranks.
        count: How many calls.
        kind: ALLREDUCE or ALLTOALL; the backend has everything but the latter.
        fresh: Whether nothing is remembered when it begins.
    """

    def __init__(self, name: str, ranks: int, *, count: int = 1, kind: OpKind = OpKind.ALLREDUCE, fresh: bool) -> None:
        self.name = name
        self._ranks = ranks
        self._fresh = fresh
        ops = tuple(one.value for one in OpKind if one is not OpKind.ALLTOALL)
        spec = GroupSpec(name="benchmark", group_id="benchmark", backend="shm", world_size=ranks, ops=ops)
        address = Address(host="127.0.0.1", port=1, secret=b"")
        members = tuple(
            Member(
                rank=rank,
                actor_id=f"actor {rank}",
                actor=f"actor {rank}",
                address=address,
                machine="here",
                node_id="here",
                pid=rank,
                incarnation="",
                ordered=True,
            )
            for rank in range(ranks)
        )
        self._group = membership_of(spec, members)
        self._kind, self._count = kind, count
        self._last: tuple[bytes, ...] = ()

    def prepare(self, nbytes: int) -> None:
        """Nothing: a plan does not depend on the size."""

    def fill(self) -> None:
        """Drops the last result."""
        self._last = ()

    def run(self, count: int) -> Sequence[float]:
        """Plans calls that were made before the clock runs."""
        spent = []
        for _ in range(count):
            asked = tuple(self._asked(number) for number in range(self._count))
            if self._fresh:
                forget()
            else:
                self._once(asked)  # others may have had all forgotten
            spent += timed(lambda asked=asked: self._once(asked), 1)
        return spent

    def _once(self, asked: tuple[RequestKey, ...]) -> None:
        self._last = prepare(asked, _STAGING).programs

    def check(self, runs: int) -> None:
        """Raises unless there is a program for each rank."""
        if len(set(self._last)) != self._ranks:
            raise AssertionError(f"{len(set(self._last))} programs for {self._ranks} ranks")

    def close(self) -> None:
        """Nothing is held."""

    def _asked(self, number: int) -> RequestKey:
        pieces, width = self._kind is OpKind.ALLTOALL, 2 if self._kind is OpKind.ALLTOALL else 1
        first = number * self._ranks * width
        operands = tuple(
            (rank, first + rank, first + self._ranks + rank if pieces else None) for rank in range(self._ranks)
        )
        op = None if pieces else ReduceOp.SUM
        return RequestKey(self._group, self._kind, operands, op, -1, -1, True, 60.0)


def forget() -> None:
    """Drops all that planning remembers."""
    modules = [one for one in vars(planner).values() if isinstance(one, ModuleType)]
    for module in (dispatch, *modules):
        for one in vars(module).values():
            if hasattr(one, "cache_clear"):
                one.cache_clear()


def measure(choice: Choice) -> Iterator[Record]:
    """Measures one allreduce, 200 of them, and an all-to-all of sends, over each number of ranks."""
    cases = (
        ("allreduce", OpKind.ALLREDUCE, 1, RANKS),
        (f"{MANY} allreduces", OpKind.ALLREDUCE, MANY, RANKS),
        ("alltoall of sends", OpKind.ALLTOALL, 1, PAIRS_RANKS),
    )
    for op, kind, count, worlds in cases:
        for ranks in choice.ranks or worlds:
            choice.progress(f"{NAME}: {op}, {ranks} ranks")
            contenders = [
                Planner(names.PLANNED, ranks, count=count, kind=kind, fresh=True),
                Planner(names.REMEMBERED, ranks, count=count, kind=kind, fresh=False),
            ]
            runs = choice.runs_or(5, 25)
            yield from compare(contenders, suite=NAME, op=op, ranks=ranks, nbytes=0, runs=runs)
