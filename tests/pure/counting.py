"""Counts bytes pair by pair, independently of the cost model: who sends how much to whom, for each kernel and part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from raycollect.core.model import OpKind
from raycollect.core.operations import OPERATIONS, PARTIAL_FOLDS
from raycollect.planner.ir import Part

Flow = tuple[int, int, float]
"""(giver, taker, bytes for each byte that a rank gives)."""


def _everybody(world: int, share: float) -> list[Flow]:
    return [(a, b, share) for a in range(world) for b in range(world) if a != b]


def _around(world: int, share: float) -> list[Flow]:
    return [(a, (a + 1) % world, share) for a in range(world) if world > 1]


def _to_root(world: int, root: int, share: float) -> list[Flow]:
    return [(a, root, share) for a in range(world) if a != root]


def _from_root(world: int, root: int, share: float) -> list[Flow]:
    return [(root, a, share) for a in range(world) if a != root]


def _to_takers(sources: Callable[[int, int], Sequence[int]], world: int, root: int) -> list[Flow]:
    return [(a, b, 1) for b in range(world) for a in sources(b, world) if a != b]


def _binomial(world: int, root: int) -> list[Flow]:
    """Everyone gets it from the one whose number lacks its lowest bit."""
    return [((at - (at & -at) + root) % world, (at + root) % world, 1) for at in range(1, world)]


def _spread(world: int, root: int) -> list[Flow]:
    """A slice to each, which sends it on to the others."""
    rest = [rank for rank in range(world) if rank != root]
    share = 1 / max(1, len(rest))
    return _from_root(world, root, share) + [(a, b, share) for a in rest for b in rest if a != b]


_DIRECT: dict[OpKind, Callable[[int, int], list[Flow]]] = {
    OpKind.REDUCESCATTER: lambda w, root: _everybody(w, 1 / w),
    OpKind.ALLTOALL: lambda w, root: _everybody(w, 1 / w),
    **{kind: partial(_to_takers, OPERATIONS[kind].sources) for kind in PARTIAL_FOLDS},
    OpKind.GATHER: lambda w, root: _to_root(w, root, 1),
    OpKind.SCATTER: lambda w, root: _from_root(w, root, 1 / w),
    OpKind.BARRIER: lambda w, root: [],
    OpKind.ALLREDUCE: lambda w, root: _everybody(w, 2 / w),
    OpKind.REDUCE: lambda w, root: _everybody(w, 1 / w) + _to_root(w, root, 1 / w),
    OpKind.ALLGATHER: lambda w, root: _everybody(w, 1),
}
_FLOWS: dict[str, dict[OpKind, Callable[[int, int], list[Flow]]]] = {
    "shm": _DIRECT | {OpKind.BROADCAST: lambda w, root: _from_root(w, root, 1)},
    "tcp": _DIRECT
    | {
        OpKind.BROADCAST: _spread,
        OpKind.REDUCE: lambda w, root: _to_root(w, root, 1) if w == 2 else _DIRECT[OpKind.REDUCE](w, root),
    },
    "gloo": _DIRECT
    | {
        OpKind.ALLREDUCE: lambda w, root: _around(w, 2 * (w - 1) / w),
        OpKind.REDUCE: lambda w, root: _around(w, (w - 1) / w) + _to_root(w, root, 1 / w),
        OpKind.BROADCAST: _spread,  # between hosts
    },
}
_FLOWS["library"] = _FLOWS["gloo"] | {
    OpKind.ALLGATHER: lambda w, root: _around(w, w - 1),
    OpKind.BROADCAST: _binomial,
}


KINDS = tuple(_FLOWS["library"])


def flows(kind: OpKind, backend: str, world: int, root: int) -> list[Flow]:
    """Who sends how much to whom in one kernel."""
    return _FLOWS.get(backend, _FLOWS["library"])[kind](world, root)


def _split(found: Iterator[Flow], hosts: Sequence[int]) -> tuple[float, float]:
    inside = between = 0.0
    for giver, taker, share in found:
        if hosts[giver] == hosts[taker]:
            inside += share
        else:
            between += share
    return inside, between


def counted(kind: OpKind, backend: str, hosts: Sequence[int], root: int) -> tuple[float, float]:
    """The bytes inside hosts and between them in one kernel of all ranks, for each byte that a rank gives."""
    return _split(iter(flows(kind, backend, len(hosts), root)), hosts)


def counted_part(part: Part, way: int, hosts: Sequence[int]) -> tuple[float, float]:
    """The same for all sends of a part, by one of its ways.

    Args:
        part: The part; all ranks of its group take part.
        way: Which of its ways.
        hosts: For each rank its host.
    """
    return _split(_part_flows(part, way), hosts)


def _part_flows(part: Part, way: int) -> Iterator[Flow]:
    share = 1 / len(part.ranks) if part.request.kind in (OpKind.ALLTOALL, OpKind.SCATTER) else 1.0
    for rank in part.ranks:
        for step in part.template(rank).ways[way]:
            if step.kind is OpKind.SEND:
                yield rank, step.peer, share
