"""The algorithms for each operation, and which is the cheapest for how many bytes.

The backend's own kernel is the first choice, and on one host the only one. On several hosts each cost is a line in the
bytes that a rank gives; the lower envelope of these lines has the cheapest algorithm for each size. Where a backend
lacks an operation but can send and receive, an algorithm of sends and receives replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from raycollect.core.model import OpKind, Pricing
from raycollect.core.operations import PAIR
from raycollect.planner import pairs
from raycollect.planner.cost import Cost, HostLayout, Line, priced
from raycollect.planner.ir import Part
from raycollect.planner.membership import Membership
from raycollect.planner.pairs import Written
from raycollect.planner.template import NATIVE, Buffer, Choice, Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way of doing some operations."""

    name: str
    kinds: frozenset[OpKind]
    needs: tuple[OpKind, ...] = ()  # the operations that the backend must have
    cost: Callable[[OpKind, Pricing, HostLayout], Cost]  # by operation, how the backend moves data, and layout
    # Writes the steps of each rank; None for the backend's own kernel
    write: Callable[[Part, Membership], Written] | None = None
    scratch: Callable[[Template], tuple[Buffer, ...]] = lambda template: ()  # the buffers that a rank needs in addition
    # The most ranks for which it is considered: the steps of some grow with the square of the ranks
    at_most: int = 1 << 30


_ROWS = (
    Algorithm(
        name=NATIVE.name,
        kinds=frozenset(OpKind),
        cost=priced,
    ),
    Algorithm(
        name="tree",
        kinds=frozenset({OpKind.BROADCAST}),
        needs=PAIR,
        cost=pairs.tree_cost,
        write=pairs.tree,
    ),
    Algorithm(
        name="ring",
        kinds=frozenset({OpKind.ALLGATHER}),
        needs=PAIR,
        cost=pairs.ring_cost,
        write=pairs.ring,
        at_most=128,
    ),
    Algorithm(
        name="pairwise",
        kinds=frozenset({OpKind.ALLTOALL, OpKind.GATHER, OpKind.SCATTER}),
        needs=PAIR,
        cost=pairs.pairwise_cost,
        write=pairs.pairwise,
        scratch=pairs.scratch,
        at_most=0,  # a backend's own kernel is as direct, in one launch
    ),
)

ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def by_pairs(part: Part, membership: Membership) -> Part:
    """Replaces a kernel that the backend lacks by sends and receives."""
    return build(part, membership, next(row for row in _ROWS if row.needs and part.request.kind in row.kinds))


def build(part: Part, membership: Membership, algorithm: Algorithm) -> Part:
    """Replaces a part's own kernel by the steps of one algorithm, which must be possible."""
    if algorithm.write is None:
        return part
    written = algorithm.write(part, membership)
    mine = [part.templates[index] for index in part.parts]
    templates = [
        replace(template, buffers=(*template.buffers, *algorithm.scratch(template)), steps=steps, others=())
        for template, steps in zip(mine, written, strict=True)
    ]
    choices = (_choice(algorithm, written, 0),)
    return part.over(templates, choices=choices)


def route(part: Part, membership: Membership) -> Part:
    """Adds the algorithms that are cheaper than the backend's own kernel for some sizes."""
    request = part.request
    if membership.topology.host_count == 1 or request.kind.value not in request.group.ops or part.rounds > 1:
        return part
    others = _others(part, membership)
    if not others:
        return part
    rows = [_ROWS[0], *others]
    taken = [(rows[at], start) for at, start in envelope([cost_of(row, part, membership).line for row in rows])]
    if taken[0] == (_ROWS[0], 0):
        del taken[0]  # the first choice already
    if not taken:
        return part
    return _with_others(part, membership, taken)


def rivals(part: Part, membership: Membership) -> tuple[str, ...]:
    """Algorithms that are possible for a part but cost more than its choices at any size."""
    if membership.topology.host_count == 1 or part.rounds > 1:
        return ()  # there the planner does not look for any
    mine = {choice.name for choice in part.choices}
    return tuple(row.name for row in _others(part, membership) if row.name not in mine)


def cost_of(algorithm: Algorithm, part: Part, membership: Membership) -> Cost:
    """The cost of a part by one algorithm."""
    layout = HostLayout.of(membership.topology, part.request.root, rank_order=membership.bitwise)
    return algorithm.cost(part.request.kind, membership.pricing, layout)


def _others(part: Part, membership: Membership) -> list[Algorithm]:
    """The algorithms besides the backend's own kernel, where the backend can run them."""
    kind, ops = part.request.kind, part.request.group.ops
    rows = [row for row in _ROWS[1:] if kind in row.kinds and membership.spec.world_size <= row.at_most]
    return [row for row in rows if all(needed.value in ops for needed in row.needs)]


def _with_others(part: Part, membership: Membership, taken: Sequence[tuple[Algorithm, int]]) -> Part:
    own: Written = tuple(part.templates[index].steps for index in part.parts)
    ways = [own if row.write is None else row.write(part, membership) for row, _ in taken]
    choices = [_choice(row, way, start) for (row, start), way in zip(taken, ways, strict=True)]
    templates = [
        replace(part.templates[index], others=tuple(way[place] for way in ways))
        for place, index in enumerate(part.parts)
    ]
    return part.over(templates, choices=(NATIVE, *choices))


def _choice(row: Algorithm, way: Written, start: int) -> Choice:
    return Choice(
        name=row.name,
        at_least=start,
        width=1 + max((steps[-1].at for steps in way if steps), default=0),
    )


def envelope(lines: Sequence[Line]) -> list[tuple[int, int]]:
    """The lower envelope of lines: (index of a line, bytes from which it is the lowest), ascending from 0 bytes."""
    at = min(range(len(lines)), key=lambda index: (lines[index].fixed_s, lines[index].per_byte_s))
    starts = [(at, 0)]
    while True:
        best, start = -1, math.inf
        for other, line in enumerate(lines):
            gained = lines[at].per_byte_s - line.per_byte_s
            if gained <= 0:
                continue
            cross = (line.fixed_s - lines[at].fixed_s) / gained
            if cross < start or (cross == start and line.per_byte_s < lines[best].per_byte_s):
                best, start = other, cross
        if best < 0 or start > _MOST_NBYTES:
            return starts
        at, first = best, math.ceil(start)
        if first == starts[-1][1]:
            starts.pop()  # it is the lowest for less than a byte
        starts.append((at, first))


_MOST_NBYTES = 1 << 62
"""More than any rank gives."""
