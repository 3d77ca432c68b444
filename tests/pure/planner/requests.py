"""Requests of each operation in one group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from raycollect.core.model import GroupSpec, Key, OpKind, ReduceOp, task_key
from raycollect.core.operations import OPERATIONS, PAIR
from raycollect.planner import Request
from tests.pure.meaning import KINDS, REDUCTIONS, roots_of, takers
from tests.support.values import replace

ALL_OPS = tuple(kind.value for kind in OpKind)
SUBSTITUTES = {kind: OPERATIONS[kind].substitutes for kind in KINDS if OPERATIONS[kind].substitutes}
"""Operation -> the operations of which it is made where a backend lacks it."""
COLLECTIVE_SUBSTITUTES = {kind: needs for kind, ways in SUBSTITUTES.items() for needs in ways if needs != PAIR}
"""The same, of collectives alone."""
Operands = tuple[int, Key | None, Key | None]


def ring(world: int, ops: tuple[str, ...] = ALL_OPS) -> GroupSpec:
    return GroupSpec(name="ring", group_id="0123", backend="local", world_size=world, ops=ops)


def key_of(rank: int, salt: int = 0) -> Key:
    return task_key(bytes([rank % 256, salt]) * 12, 1)


def given_by(ranks: Any, salt: int = 0) -> tuple[Operands, ...]:
    """Each rank gives something, and takes nothing else."""
    return tuple((rank, key_of(rank, salt), None) for rank in ranks)


def allreduce(world: int, **changes: Any) -> Request:
    return replace(request_of(OpKind.ALLREDUCE, world), **changes)


def broadcast(world: int, root: int = 0, **changes: Any) -> Request:
    return replace(request_of(OpKind.BROADCAST, world, root), **changes)


def barrier(world: int, **changes: Any) -> Request:
    return replace(request_of(OpKind.BARRIER, world), **changes)


def send(world: int, root: int, peer: int, *, given: bool = True, **changes: Any) -> Request:
    return replace(request_of(OpKind.SEND, world, root, peer, given=given), **changes)


def givers(kind: OpKind, world: int, root: int) -> list[int]:
    if kind is OpKind.BARRIER:
        return []
    return [root] if kind in (OpKind.BROADCAST, OpKind.SCATTER, OpKind.SEND) else list(range(world))


def request_of(
    kind: OpKind, world: int, root: int = -1, peer: int = -1, *, given: bool = True, ops: tuple[str, ...] = ALL_OPS
) -> Request:
    """A request that makes sense; `given`: whoever may bring an output does."""
    gives, takes = givers(kind, world, root), takers(kind, world, root, peer)
    ranks = sorted((root, peer)) if kind is OpKind.SEND else range(world)
    brings = [rank for rank in takes if given or kind is OpKind.BROADCAST]
    return Request(
        kind=kind,
        group=ring(world, ops),
        operands=tuple(
            (rank, key_of(rank, 0) if rank in gives else None, key_of(rank, 1) if rank in brings else None)
            for rank in ranks
        ),
        op=ReduceOp.SUM if kind in REDUCTIONS else None,
        root=root,
        peer=peer,
        inplace=given,
    )


def requests_of(kind: OpKind, world: int, **arguments: Any) -> Iterator[Request]:
    for (root, peer), given in itertools.product(roots_of(kind, world), (True, False)):
        yield request_of(kind, world, root, peer, given=given, **arguments)
