"""Requests of each operation in one group."""

from __future__ import annotations

from typing import Any

from raycollect.core.model import GroupSpec, Key, OpKind, ReduceOp, task_key
from raycollect.planner import Request
from tests.support.values import replace

Operands = tuple[int, Key | None, Key | None]


def key_of(rank: int, salt: int = 0) -> Key:
    return task_key(bytes([rank % 256, salt]) * 12, 1)


def ring(world: int) -> GroupSpec:
    return GroupSpec(name="ring", group_id="0123", backend="local", world_size=world)


def given_by(ranks: Any, salt: int = 0) -> tuple[Operands, ...]:
    """Each rank gives something, and takes nothing else."""
    return tuple((rank, key_of(rank, salt), None) for rank in ranks)


def rooted_at(ranks: Any, root: int) -> tuple[Operands, ...]:
    """The root gives something, the others take it."""
    return tuple((r, key_of(r), None) if r == root else (r, None, key_of(r)) for r in ranks)


def allreduce(world: int, **changes: Any) -> Request:
    request = Request(kind=OpKind.ALLREDUCE, group=ring(world), operands=given_by(range(world)), op=ReduceOp.SUM)
    return replace(request, **changes)


def broadcast(world: int, root: int = 0, **changes: Any) -> Request:
    request = Request(kind=OpKind.BROADCAST, group=ring(world), operands=rooted_at(range(world), root), root=root)
    return replace(request, **changes)


def barrier(world: int, **changes: Any) -> Request:
    operands = tuple((rank, None, None) for rank in range(world))
    return replace(Request(kind=OpKind.BARRIER, group=ring(world), operands=operands), **changes)


def send(world: int, root: int, peer: int, *, given: bool = True, **changes: Any) -> Request:
    operands = rooted_at(sorted((root, peer)), root)
    if not given:
        operands = tuple((rank, src, None) for rank, src, _ in operands)
    request = Request(kind=OpKind.SEND, group=ring(world), operands=operands, root=root, peer=peer)
    return replace(request, **changes)
