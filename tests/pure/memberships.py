"""Memberships as tests need them: which rank is on which host, and the inner groups that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raycollect.core.model import GroupSpec, OpKind, ReduceOp
from raycollect.planner import Membership, Request, Topology
from raycollect.planner.algorithms import ALGORITHMS, build
from raycollect.planner.ir import Part
from raycollect.planner.lower import lower
from raycollect.planner.setting import Setting
from tests.pure.meaning import REDUCTIONS

IN_PLACE = (*(kind for kind in REDUCTIONS if kind is not OpKind.REDUCESCATTER), OpKind.BARRIER)

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
    inner: bool = True,
    bitwise: bool = True,
    ops: tuple[str, ...] = ALL_OPS,
    **links: Any,
) -> Membership:
    """A group whose rank r is on the host `places[r]`, by default with groups of each host and of the leaders."""
    topology = Topology.of(places, **links)
    groups = topology.groups()
    outer = Membership(
        spec=spec(group_id, len(places), backend, ops),
        participants=tuple(members) or tuple(map(str, range(len(places)))),
        topology=topology,
        bitwise=bitwise,
    )
    if not inner:
        return outer
    inside = [part_of(outer, spec(f"{group_id}/{at}", len(ranks), "shm"), ranks) for at, ranks in enumerate(groups)]
    leaders = spec(f"{group_id}/leaders", len(groups), backend)
    return replace(outer, inner=(*inside, part_of(outer, leaders, [ranks[0] for ranks in groups])))


def part_of(outer: Membership, spec: GroupSpec, ranks: Sequence[int]) -> Membership:
    """A group inside another one, of these ranks of that."""
    return replace(Membership.alone(spec), participants=tuple(outer.participants[rank] for rank in ranks))


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
    ranks = range(of.spec.world_size)
    gives = {root} if kind in (OpKind.BROADCAST, OpKind.SCATTER) else set() if kind is OpKind.BARRIER else {*ranks}
    takes: set[int] = set()
    if kind is OpKind.BROADCAST:
        takes = {*ranks} - {root}
    elif given and kind is OpKind.GATHER:
        takes = {root}
    elif given and kind not in IN_PLACE:
        takes = {*ranks}
    operands = tuple(
        (rank, f"{rank} gives" if rank in gives else None, f"{rank} takes" if rank in takes else None) for rank in ranks
    )
    return Request(kind=kind, group=of.spec, operands=operands, op=bare.op, root=bare.root, inplace=inplace)


def own(of: Membership, asked: Request) -> Part:
    """The backend's own way, without any other."""
    return lower(asked, of)


def built(name: str, of: Membership, asked: Request) -> Part | None:
    """A request done by one algorithm; None where that is not possible."""
    native, algorithm = own(of, asked), ALGORITHMS[name]
    return build(native, of, algorithm) if algorithm.serves(Setting.of(native, of)) else None


def names(part: Part) -> list[str]:
    """The algorithms of a part."""
    return [choice.name for choice in part.choices]
