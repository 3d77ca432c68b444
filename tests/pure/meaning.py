"""What each operation means, in numpy and independently of every backend: what each rank gives -> what each rank takes.

A value is an array; in pieces it is a list of arrays, one per rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import FOLDS, OPERATIONS, PIECEWISE, has_part

REDUCTIONS = FOLDS
ROOTED = tuple(kind for kind, spec in OPERATIONS.items() if spec.root and kind is not OpKind.SEND)

_TWO: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: lambda a, b: a | b if a.dtype == bool else a + b,
    ReduceOp.AVG: lambda a, b: a + b,
    ReduceOp.PRODUCT: lambda a, b: a & b if a.dtype == bool else a * b,
    ReduceOp.MIN: lambda a, b: np.where(a <= b, a, b),
    ReduceOp.MAX: lambda a, b: np.where(a >= b, a, b),
    ReduceOp.BAND: lambda a, b: a & b,
    ReduceOp.BOR: lambda a, b: a | b,
    ReduceOp.BXOR: lambda a, b: a ^ b,
}


def folded(op: ReduceOp, parts: Sequence[Any]) -> Any:
    """The left fold in rank order; narrow floats in float32, rounded once."""
    dtype = parts[0].dtype
    narrow = dtype == np.float16 or dtype.name.startswith(("bfloat16", "float8"))
    wide = [part.astype(np.float32) if narrow else part for part in parts]
    with np.errstate(all="ignore"):
        total = functools.reduce(_TWO[op], wide)
        if op is ReduceOp.AVG:
            count = total.real.dtype.type(len(parts))
            total = total.real / count + (1j * (total.imag / count) if total.dtype.kind == "c" else 0)
        return np.asarray(total).astype(dtype)


_MEANINGS: dict[OpKind, Callable[[int, Sequence[Any], int, int, Any], Any]] = {
    OpKind.ALLREDUCE: lambda r, gives, root, peer, op: folded(op, gives),
    OpKind.REDUCE: lambda r, gives, root, peer, op: folded(op, gives) if r == root else None,
    OpKind.BROADCAST: lambda r, gives, root, peer, op: gives[root],
    OpKind.ALLGATHER: lambda r, gives, root, peer, op: list(gives),
    OpKind.REDUCESCATTER: lambda r, gives, root, peer, op: folded(op, [give[r] for give in gives]),
    OpKind.GATHER: lambda r, gives, root, peer, op: list(gives) if r == root else None,
    OpKind.SCATTER: lambda r, gives, root, peer, op: gives[root][r],
    OpKind.ALLTOALL: lambda r, gives, root, peer, op: [give[r] for give in gives],
    OpKind.SCAN: lambda r, gives, root, peer, op: folded(op, gives[: r + 1]),
    OpKind.EXSCAN: lambda r, gives, root, peer, op: folded(op, gives[:r]) if r else gives[0],
    OpKind.SEND: lambda r, gives, root, peer, op: gives[root] if r in (root, peer) else None,
    OpKind.BARRIER: lambda r, gives, root, peer, op: None,
}
KINDS = tuple(_MEANINGS)


def meaning(kind: OpKind, gives: Sequence[Any], *, root: int = -1, peer: int = -1, op: Any = None) -> list[Any]:
    """What each rank takes; None: nothing."""
    return [_MEANINGS[kind](rank, gives, root, peer, op) for rank in range(len(gives))]


def gives_of(
    kind: OpKind, world: int, make: Callable[[int], Any], size: Callable[[int, int], int], root: int = -1
) -> list[Any]:
    """What each rank gives; None: nothing.

    Args:
        kind: The operation.
        world: The number of ranks.
        make: A size -> an array.
        size: (giver, taker) -> how many elements. Where only one of them counts, the other is 0.
        root: The root.
    """
    if kind is OpKind.BARRIER:
        return [None] * world
    if kind in (OpKind.BROADCAST, OpKind.SEND):
        return [make(size(0, 0)) if rank == root else None for rank in range(world)]
    if kind is OpKind.SCATTER:
        return [[make(size(0, to)) for to in range(world)] if rank == root else None for rank in range(world)]
    if kind is OpKind.REDUCESCATTER:
        return [[make(size(0, to)) for to in range(world)] for _ in range(world)]
    if kind is OpKind.ALLTOALL:
        return [[make(size(rank, to)) for to in range(world)] for rank in range(world)]
    in_pieces_there = kind in PIECEWISE
    return [make(size(rank if in_pieces_there else 0, 0)) for rank in range(world)]


def takers(kind: OpKind, world: int, root: int, peer: int = -1) -> list[int]:
    """The ranks that may take into a tensor that is not what they give."""
    everyone = list(range(world))
    return {
        OpKind.BROADCAST: [rank for rank in everyone if rank != root],
        OpKind.GATHER: [root],
        OpKind.SEND: [peer],
        OpKind.ALLGATHER: everyone,
        OpKind.SCATTER: everyone,
        OpKind.REDUCESCATTER: everyone,
        OpKind.ALLTOALL: everyone,
    }.get(kind, [])


def takes_in_place(kind: OpKind, rank: int, root: int) -> bool:
    """Whether a rank's result replaces what it gives, unless a new tensor is asked for."""
    return OPERATIONS[kind].in_place and has_part(OPERATIONS[kind].takes, rank, root, -1)


def roots_of(kind: OpKind, world: int) -> list[tuple[int, int]]:
    """(root, peer) for all that make sense."""
    if kind is OpKind.SEND:
        return list(itertools.permutations(range(world), 2))
    return [(root, -1) for root in range(world)] if kind in ROOTED else [(-1, -1)]
