"""What the algorithms look at to tell their cost, and whether they are possible."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.core.model import OpKind, ReduceOp
from raycollect.planner.cost import Layout
from raycollect.planner.ir import Part
from raycollect.planner.membership import Membership
from raycollect.planner.template import Step

Written = tuple[tuple[Step, ...], ...]
"""For each rank that takes part, ascending: its steps by some algorithm."""

_HOST_OPS = OpKind.REDUCE, OpKind.BROADCAST
_LEADER_OPS = *_HOST_OPS, OpKind.ALLREDUCE
"""What the groups inside a group have to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A collective and its group, without naming any rank."""

    kind: OpKind
    backend: str  # the backend of the group
    layout: Layout  # how many ranks are where
    op: ReduceOp | None = None
    hosts: str = ""  # the backend of the hosts' groups; empty where there are none
    leaders: str = ""  # the backend of the leaders' group; empty where there is none
    bitwise: bool = True  # see `Membership.bitwise`
    root_leads: bool = True  # whether the root is the lowest rank of its host

    @classmethod
    def of(cls, part: Part, membership: Membership) -> Setting:
        """The setting of one part."""
        request, groups = part.request, membership.topology.groups()
        leaders, inner = tuple(ranks[0] for ranks in groups), membership.inner
        fits = [membership.ranks_of(one) for one in inner] == [*groups, leaders] and all(
            one.spec.world_size == 1 or all(op.value in one.spec.ops for op in ops)
            for one, ops in zip(inner, [*[_HOST_OPS] * len(groups), _LEADER_OPS], strict=True)
        )
        return cls(
            kind=request.kind,
            backend=membership.spec.backend,
            layout=Layout.of(membership.topology, request.root, rank_order=membership.bitwise),
            op=request.op,
            hosts=inner[0].spec.backend if fits else "",
            leaders=inner[-1].spec.backend if fits else "",
            bitwise=membership.bitwise,
            root_leads=request.root < 0 or request.root in leaders,
        )
