"""What the algorithms look at to tell their cost, and whether they are possible."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.core.model import OpKind, ReduceOp
from raycollect.planner.cost import Layout
from raycollect.planner.ir import Part
from raycollect.planner.template import Step
from raycollect.planner.topology import Inner, Roster

Written = tuple[tuple[Step, ...], ...]
"""For each rank that takes part, ascending: its steps by some algorithm."""

_INNER_OPS = {
    "hosts": (OpKind.REDUCE, OpKind.BROADCAST),
    "leaders": (OpKind.REDUCE, OpKind.BROADCAST, OpKind.ALLREDUCE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A collective and its group, without naming any rank."""

    kind: OpKind
    backend: str  # the backend of the group
    layout: Layout  # how many ranks are where
    op: ReduceOp | None = None
    hosts: str = ""  # the backend of the hosts' groups; empty where there are none
    leaders: str = ""  # the backend of the leaders' group; empty where there is none
    bitwise: bool = True  # see `Roster.bitwise`
    root_leads: bool = True  # whether the root is the lowest rank of its host

    @classmethod
    def of(cls, part: Part, roster: Roster) -> Setting:
        """The setting of one part."""
        request, groups = part.request, roster.topology.groups()
        leaders = tuple(ranks[0] for ranks in groups)
        fits = (
            roster.leaders is not None
            and _serves(roster.leaders, leaders, "leaders")
            and len(roster.hosts) == len(groups)
            and all(_serves(inner, ranks, "hosts") for inner, ranks in zip(roster.hosts, groups, strict=True))
        )
        return cls(
            kind=request.kind,
            backend=roster.spec.backend,
            layout=Layout.of(roster.topology, request.root, rank_order=roster.bitwise),
            op=request.op,
            hosts=roster.hosts[0].spec.backend if fits else "",
            leaders=roster.leaders.spec.backend if fits and roster.leaders else "",
            bitwise=roster.bitwise,
            root_leads=request.root < 0 or request.root in leaders,
        )


def _serves(inner: Inner, ranks: tuple[int, ...], level: str) -> bool:
    return inner.ranks == ranks and (len(ranks) == 1 or all(op.value in inner.spec.ops for op in _INNER_OPS[level]))
