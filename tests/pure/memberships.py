"""Memberships as tests need them: which rank is on which host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycollect import backends
from raycollect.core.model import GroupSpec, OpKind, Pricing, ReduceOp
from raycollect.planner import Membership, Request, Topology, complete_operands
from raycollect.planner.algorithms import ALGORITHMS, build
from raycollect.planner.ir import Part
from raycollect.planner.lower import lower
from tests.pure.meaning import REDUCTIONS

ALL_OPS = tuple(kind.value for kind in OpKind)
ROOTED = (OpKind.REDUCE, OpKind.BROADCAST, OpKind.GATHER, OpKind.SCATTER)

MADE = [(name, kind) for name, row in ALGORITHMS.items() if row.write for kind in sorted(row.kinds, key=str)]
"""(algorithm, operation) for all that are not the backend's own."""


def spec(group_id: str, world: int, backend: str, ops: tuple[str, ...] = ALL_OPS) -> GroupSpec:
    return GroupSpec(name=group_id, group_id=group_id, backend=backend, world_size=world, ops=ops)


def membership(
    places: Sequence[object],
    *,
    group_id: str = "g",
    members: Sequence[str] = (),
    backend: str = "tcp",
    bitwise: bool = True,
    ops: tuple[str, ...] = ALL_OPS,
    **links: Any,
) -> Membership:
    """A group whose rank r is on the host `places[r]`."""
    topology = Topology.of(places, **links)
    return Membership(
        spec=spec(group_id, len(places), backend, ops),
        participants=tuple(members) or tuple(map(str, range(len(places)))),
        topology=topology,
        bitwise=bitwise,
        pricing=backends.get(backend).pricing if backends.is_known(backend) else Pricing(),
    )


def request(
    kind: OpKind,
    of: Membership,
    root: int = 0,
    *,
    given: bool = True,
    op: ReduceOp = ReduceOp.SUM,
    inplace: bool = True,
) -> Request:
    """A request that makes sense, for all kinds but SEND; `given`: whoever may bring an output does."""
    bare = Request(
        kind=kind,
        group=of.spec,
        operands=(),
        op=op if kind in REDUCTIONS else None,
        root=root if kind in ROOTED else -1,
        inplace=inplace,
    )
    operands = tuple(
        (rank, src and f"{rank} gives", (dst if given or kind is OpKind.BROADCAST else None) and f"{rank} takes")
        for rank, src, dst in complete_operands(bare, "something")
    )
    return Request(kind=kind, group=of.spec, operands=operands, op=bare.op, root=bare.root, inplace=inplace)


def own(of: Membership, asked: Request) -> Part:
    """The backend's own way, without any other."""
    return lower(asked, of)


def built(name: str, of: Membership, asked: Request) -> Part:
    """A request done by one algorithm."""
    return build(own(of, asked), of, ALGORITHMS[name])


def names(part: Part) -> list[str]:
    """The algorithms of a part."""
    return [choice.name for choice in part.choices]
