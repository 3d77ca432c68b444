"""How a request can be done, and which way is the cheapest.

Each algorithm is a row: for which operations it is, when it is possible, what it costs and how its steps are written.
What a backend does itself comes first, and is all there is on one host. Where ranks are on several, the costs are lines
in the bytes that a rank gives; of these the lower envelope is taken, so that each size has the cheapest way. Where a
backend can't do an operation but can send and receive, an algorithm made of these stands in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raycollect.model import OpKind
from raycollect.planner import hierarchical, pairs
from raycollect.planner.cost import Cost, Line, priced
from raycollect.planner.ir import Part
from raycollect.planner.setting import Setting, Written
from raycollect.planner.template import NATIVE, Buffer, Choice, Template
from raycollect.planner.topology import Roster

__all__ = ["ALGORITHMS", "STAND_INS", "Algorithm", "build", "envelope", "route", "stand_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way of doing some operations.

    Attributes:
        name: See `Choice.name`.
        kinds: The operations.
        needs: What the backend must have.
        cost: What it costs.
        write: The steps of each rank; None: those of the backend's own kernel.
        is_possible: Whether it can be done in some setting.
        stepwise: The operations that it folds in several kernels (`Choice.stepwise`).
        scratch: What a rank needs beside the buffers of the operation.
        levels: The inner groups in which it runs (`Part.levels`).
        at_most: How many ranks there may be where it is an alternative: the steps of some grow with the square.
    """

    name: str
    kinds: frozenset[OpKind]
    needs: tuple[OpKind, ...] = ()
    cost: Callable[[Setting], Cost]
    write: Callable[[Part, Roster], Written] | None = None
    is_possible: Callable[[Setting], bool] = lambda setting: True
    stepwise: frozenset[OpKind] = frozenset()
    scratch: Callable[[Template], tuple[Buffer, ...]] = lambda template: ()
    levels: Callable[[Roster], tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]] = lambda roster: ()
    at_most: int = 1 << 30

    def serves(self, setting: Setting) -> bool:
        """Whether the operation can be done this way."""
        return setting.kind in self.kinds and self.is_possible(setting)


_PAIR = (OpKind.SEND, OpKind.RECV)

_ROWS = (
    Algorithm(
        name=NATIVE.name,
        kinds=frozenset(OpKind),
        cost=lambda setting: priced(setting.kind, setting.backend, setting.layout),
    ),
    Algorithm(
        name="hierarchical",
        kinds=frozenset({OpKind.ALLREDUCE, OpKind.BROADCAST}),
        cost=hierarchical.cost,
        write=hierarchical.write,
        is_possible=hierarchical.is_possible,
        stepwise=frozenset({OpKind.ALLREDUCE}),
        levels=hierarchical.levels,
    ),
    Algorithm(
        name="tree",
        kinds=frozenset({OpKind.BROADCAST}),
        needs=_PAIR,
        cost=pairs.tree_cost,
        write=pairs.tree,
    ),
    Algorithm(
        name="ring",
        kinds=frozenset({OpKind.ALLGATHER}),
        needs=_PAIR,
        cost=pairs.ring_cost,
        write=pairs.ring,
        at_most=128,
    ),
    Algorithm(
        name="pairwise",
        kinds=frozenset({OpKind.ALLTOALL, OpKind.GATHER, OpKind.SCATTER}),
        needs=_PAIR,
        cost=pairs.pairwise_cost,
        write=pairs.pairwise,
        scratch=pairs.scratch,
        at_most=0,  # what backends do themselves is as direct, in one launch
    ),
)

ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}
"""Name -> algorithm."""

STAND_INS: dict[OpKind, Algorithm] = {kind: row for kind in OpKind for row in _ROWS if row.needs and kind in row.kinds}
"""What a backend lacks -> what stands for it where the backend can send and receive."""


def stand_in(part: Part, roster: Roster) -> Part:
    """Does by sends and receives what the backend can't do itself.

    Args:
        part: What the backend's own kernel would be; there must be a stand-in for it.
        roster: The group.
    """
    return build(part, roster, STAND_INS[part.request.kind])


def build(part: Part, roster: Roster, algorithm: Algorithm) -> Part:
    """Does by one algorithm what a part does by the backend's own kernel.

    Args:
        part: That part; its request must be one of the algorithm's.
        roster: The group.
        algorithm: The algorithm; it must be possible.
    """
    if algorithm.write is None:
        return part
    written = algorithm.write(part, roster)
    mine = [part.templates[index] for index in part.parts]
    templates = [
        replace(one, buffers=(*one.buffers, *algorithm.scratch(one)), steps=steps, others=())
        for one, steps in zip(mine, written, strict=True)
    ]
    return _assembled(part, templates, (_choice(algorithm, part, written, 0),), algorithm.levels(roster))


def route(part: Part, roster: Roster) -> Part:
    """Adds the algorithms that are cheaper than the backend's own kernel for some sizes.

    Args:
        part: The backend's own way.
        roster: The group.

    Returns:
        The part, where its group is on one host, or shapes are learned at the door, or nothing is cheaper.
    """
    request = part.request
    if roster.topology.host_count == 1 or request.kind.value not in request.group.ops or part.rounds > 1:
        return part
    rows = [row for row in _ROWS[1:] if request.kind in row.kinds and roster.spec.world_size <= row.at_most]
    rows = [row for row in rows if all(one.value in request.group.ops for one in row.needs)]
    if not rows:
        return part
    setting = Setting.of(part, roster)
    rows = [_ROWS[0], *(row for row in rows if row.is_possible(setting))]
    taken = [(rows[at], start) for at, start in envelope([row.cost(setting).line for row in rows])]
    if taken[0] == (_ROWS[0], 0):
        del taken[0]  # the first choice already
    if not taken:
        return part
    return _with_others(part, roster, taken)


def _with_others(part: Part, roster: Roster, taken: Sequence[tuple[Algorithm, int]]) -> Part:
    own: Written = tuple(part.templates[index].steps for index in part.parts)
    ways = [own if row.write is None else row.write(part, roster) for row, _ in taken]
    choices = [_choice(row, part, way, start) for (row, start), way in zip(taken, ways, strict=True)]
    templates = [
        replace(part.templates[index], others=tuple(way[place] for way in ways))
        for place, index in enumerate(part.parts)
    ]
    levels = next((found for row, _ in taken if (found := row.levels(roster))), ())
    return _assembled(part, templates, (NATIVE, *choices), levels)


def _choice(row: Algorithm, part: Part, way: Written, start: int) -> Choice:
    return Choice(
        name=row.name,
        at_least=start,
        stepwise=part.request.kind in row.stepwise,
        width=1 + max((steps[-1].at for steps in way if steps), default=0),
    )


def _assembled(
    part: Part,
    templates: Sequence[Template],
    choices: tuple[Choice, ...],
    levels: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...],
) -> Part:
    """The part with a template for each rank, of which equal ones become one."""
    known = {template: at for at, template in enumerate(dict.fromkeys(templates))}
    return replace(
        part,
        templates=tuple(known),
        parts=tuple(known[template] for template in templates),
        choices=choices,
        levels=levels,
    )


def envelope(lines: Sequence[Line]) -> list[tuple[int, int]]:
    """The lower envelope of some lines.

    Returns:
        (index of a line, the bytes from which on it is the lowest), ascending; the first one from 0 on.
    """
    at = min(range(len(lines)), key=lambda one: (lines[one].fixed_s, lines[one].per_byte_s))
    found = [(at, 0)]
    while True:
        best, start = -1, math.inf
        for one, line in enumerate(lines):
            gained = lines[at].per_byte_s - line.per_byte_s
            if gained <= 0:
                continue
            cross = (line.fixed_s - lines[at].fixed_s) / gained
            if cross < start or (cross == start and line.per_byte_s < lines[best].per_byte_s):
                best, start = one, cross
        if best < 0 or start > _MOST_NBYTES:
            return found
        at, first = best, math.ceil(start)
        if first == found[-1][1]:
            found.pop()  # it is the lowest for less than a byte
        found.append((at, first))


_MOST_NBYTES = 1 << 62
"""What nobody gives."""
