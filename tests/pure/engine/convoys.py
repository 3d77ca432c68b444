"""Participants in threads that run batches, and sums for them to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raycollect import backends
from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.planner import Request
from tests.pure.communicators import ThreadTeam
from tests.pure.fleet import WAIT_S, Convoy


@contextmanager
def convoy_of(
    groups: Sequence[Sequence[int]] | int, backend: str = "local", allocate: Callable[[Any], Any] = arrays.empty
) -> Iterator[Convoy]:
    """Participants of some groups, or of one of so many ranks; of another backend than `local` there is one group."""
    members = [range(groups)] if isinstance(groups, int) else groups
    team = None if backend == "local" else ThreadTeam(backend, len(members[0]))
    make = None if team is None else lambda _: team.communicators
    convoy = Convoy(members, make, coalesces=backends.get(backend).coalesces)
    convoy.allocate = allocate
    try:
        yield convoy
    finally:
        convoy.close()
        if team is not None:
            team.close()


def allreduces(convoy: Convoy, values: Sequence[Sequence[Any]], group: int = 0) -> list[Request]:
    """For each list of values, by rank, an allreduce of them."""
    membership = convoy.memberships[group]
    members = [int(name.removeprefix("actor-")) for name in membership.participants]
    return [
        Request(
            kind=OpKind.ALLREDUCE,
            group=membership.spec,
            operands=tuple((rank, convoy.keep(members[rank], value), None) for rank, value in enumerate(of_call)),
            op=ReduceOp.SUM,
            timeout_s=WAIT_S,
        )
        for of_call in values
    ]
