"""Collectives made of sends and receives between two ranks at a time.

Each pair that meets is a launch of its own, so pairs that share no rank run side by side under one number. A rank
copies its own value. Where w ranks each give n bytes:

============  ================================  ==============================================================
name          kinds                             launches, one after the other
============  ================================  ==============================================================
``tree``      BROADCAST                         a binomial tree over the hosts, then one inside each:
                                                ``ceil(log2 hosts) + ceil(log2 ranks of the largest host)``
``ring``      ALLGATHER                         w - 1 times every rank sends on what it got last, in the order
                                                of the hosts: senders at even places, at odd ones, and for an
                                                odd w the last one: 2 (w - 1) or 3 (w - 1)
``pairwise``  ALLTOALL, GATHER, SCATTER         every pair once, as in a tournament ("circle method"): w - 1, or
                                                w for an odd w; at a root each other rank in turn: w - 1
============  ================================  ==============================================================

Source: Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec.structs import replace

from raycollect.core.model import OpKind, Pricing
from raycollect.core.operations import OPERATIONS
from raycollect.planner.cost import FREE, Cost, HostLayout, Line, depth, launch, priced
from raycollect.planner.ir import Part
from raycollect.planner.membership import Membership
from raycollect.planner.template import Buffer, Local, Role, Template, TemplateStep

_T = TypeVar("_T")

Written = tuple[tuple[TemplateStep, ...], ...]
"""For each rank that takes part, ascending: its steps by some algorithm."""


class _StepWriter:
    """Collects the steps of all ranks."""

    def __init__(self, part: Part) -> None:
        self._steps: dict[int, list[TemplateStep]] = {rank: [] for rank in part.ranks}

    def send(self, at: int, giver: int, src: tuple[int, int], taker: int, dst: tuple[int, int]) -> None:
        # The two are all that take part where there are only two.
        pair = (min(giver, taker), max(giver, taker)) if len(self._steps) > 2 else ()
        self._steps[giver].append(
            TemplateStep(kind=OpKind.SEND, src=src[0], src_piece=src[1], peer=taker, ranks=pair, at=at)
        )
        self._steps[taker].append(
            TemplateStep(kind=OpKind.RECV, dst=dst[0], dst_piece=dst[1], peer=giver, ranks=pair, at=at)
        )

    def copy(self, rank: int, src: tuple[int, int], dst: tuple[int, int]) -> None:
        """Copies in the launch of the rank's previous step; the first copy in the launch of the rank's first step."""
        self._steps[rank].append(
            TemplateStep(kind=Local.COPY, src=src[0], src_piece=src[1], dst=dst[0], dst_piece=dst[1], at=_LAST)
        )

    def written(self) -> Written:
        return tuple(_placed(steps) for steps in self._steps.values())


_LAST = -1


def _placed(steps: list[TemplateStep]) -> tuple[TemplateStep, ...]:
    at = next((step.at for step in steps if step.at != _LAST), 0)
    placed = []
    for step in steps:
        at = at if step.at == _LAST else step.at
        placed.append(replace(step, at=at))
    return tuple(placed)


def tree(part: Part, membership: Membership) -> Written:
    """Writes a broadcast as a binomial tree over the hosts, then one inside each."""
    root, writer = part.request.root, _StepWriter(part)
    hosts = [_rotated(ranks, root) for ranks in membership.topology.groups()]
    buffer = {rank: part.template(rank).result for rank in part.ranks}
    first = [ranks[0] for ranks in _rotated(hosts, hosts[membership.topology.hosts[root]])]
    begin = depth(len(first))
    edges = [(at, a, b) for at, a, b in _binomial(first)]
    edges += [(begin + at, a, b) for ranks in hosts for at, a, b in _binomial(ranks)]
    for at, giver, taker in edges:
        writer.send(at, giver, (buffer[giver], -1), taker, (buffer[taker], -1))
    return writer.written()


def _rotated(items: Sequence[_T], first: _T) -> tuple[_T, ...]:
    at = items.index(first) if first in items else 0
    return (*items[at:], *items[:at])


def _binomial(ranks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for at in range(depth(len(ranks))):
        for giver in range(min(1 << at, len(ranks) - (1 << at))):
            yield at, ranks[giver], ranks[giver + (1 << at)]


def tree_cost(kind: OpKind, pricing: Pricing, layout: HostLayout) -> Cost:
    """The cost of a tree."""
    line = _hops(pricing, layout.one_host(2), depth(layout.largest))
    line += _hops(pricing, layout.pair(layout.between), depth(layout.hosts))
    return Cost(line=line, inside=layout.world - layout.hosts, between=layout.hosts - 1)


def ring(part: Part, membership: Membership) -> Written:
    """Writes an allgather in which each rank sends on its latest piece, in the order of the hosts."""
    order = [rank for ranks in membership.topology.groups() for rank in ranks]
    writer, world, phases = _StepWriter(part), len(order), len(_phases(len(order)))
    for rank in part.ranks:
        template = part.template(rank)
        writer.copy(rank, (template.src, -1), (template.dst, rank))
    for turn in range(world - 1):
        for phase, places in enumerate(_phases(world)):
            for place in places:
                giver, taker, piece = order[place], order[(place + 1) % world], order[place - turn]
                src = (part.template(giver).dst, piece) if turn else (part.template(giver).src, -1)
                writer.send(turn * phases + phase, giver, src, taker, (part.template(taker).dst, piece))
    return writer.written()


def _phases(world: int) -> tuple[range, ...]:
    """The senders of each of the launches in which all ranks send once."""
    if world % 2 == 0:
        return range(0, world, 2), range(1, world, 2)
    return range(0, world - 1, 2), range(1, world, 2), range(world - 1, world)


def ring_cost(kind: OpKind, pricing: Pricing, layout: HostLayout) -> Cost:
    """The cost of a ring."""
    world = layout.world
    if world == 1:
        return FREE
    far = layout.hosts if layout.hosts > 1 else 0
    pair = layout.pair(layout.between) if far else layout.one_host(2)
    line = _hops(pricing, pair, len(_phases(world)) * (world - 1))
    return Cost(line=line, inside=(world - far) * (world - 1), between=far * (world - 1))


def pairwise(part: Part, membership: Membership) -> Written:
    """Writes an all-to-all, gather or scatter in which ranks meet pair by pair."""
    writer = _StepWriter(part)
    write = _at_root if OPERATIONS[part.request.kind].root else _alltoall
    write(part, writer)
    return writer.written()


def scratch(template: Template) -> tuple[Buffer, ...]:
    """The scratch of a rank whose output may be its input: results must not overwrite unsent values."""
    given_and_taken = template.src >= 0 and template.dst >= 0 and template.buffers[template.dst].role is Role.OPERAND
    return (Buffer(role=Role.LIKE, source=template.dst, scratch=True),) if given_and_taken else ()


def _alltoall(part: Part, writer: _StepWriter) -> None:
    """The lower rank of a pair sends first; the higher one receives into scratch, as it may be in place."""
    templates = [part.template(rank) for rank in part.ranks]
    landing = [len(template.buffers) if scratch(template) else template.dst for template in templates]
    for rank, template in enumerate(templates):
        writer.copy(rank, (template.src, rank), (template.dst, rank))
    for at, low, high in tournament(len(templates)):
        a, b = templates[low], templates[high]
        writer.send(at, low, (a.src, high), high, (landing[high], low))
        writer.send(at, high, (b.src, low), low, (a.dst, high))
        if landing[high] != b.dst:
            writer.copy(high, (landing[high], low), (b.dst, low))


def tournament(world: int) -> Iterator[tuple[int, int, int]]:
    """Yields (round, lower, higher) for every pair, in ascending rounds; none is in two pairs of a round.

    (The circle method.)
    """
    circle = world - 1 + world % 2
    for at in range(circle):
        for a in range(circle):
            b = (at - a) % circle
            if a < b:
                yield at, a, b
            elif a == b and circle < world:
                yield at, a, world - 1


def _at_root(part: Part, writer: _StepWriter) -> None:
    """The root gives each rank its piece, or takes one from each."""
    root, spec = part.request.root, OPERATIONS[part.request.kind]

    def ends(giver: int, taker: int) -> tuple[tuple[int, int], tuple[int, int]]:
        src = part.template(giver).src, taker if spec.gives_pieces else -1
        return src, (part.template(taker).dst, giver if spec.takes_pieces else -1)

    writer.copy(root, *ends(root, root))
    for at, rank in enumerate(rank for rank in part.ranks if rank != root):
        giver, taker = (root, rank) if spec.gives == "root" else (rank, root)
        src, dst = ends(giver, taker)
        writer.send(at, giver, src, taker, dst)


def pairwise_cost(kind: OpKind, pricing: Pricing, layout: HostLayout) -> Cost:
    """The cost of pairwise exchange."""
    world = layout.world
    if world == 1:
        return FREE
    share = 1 / world if OPERATIONS[kind].gives_pieces else 1
    if OPERATIONS[kind].root:
        near, far = layout.root_size - 1, world - layout.root_size
        line = _hops(pricing, layout.one_host(2), near, share) + _hops(pricing, layout.pair(layout.between), far, share)
        return Cost(line=line, inside=near * share, between=far * share)
    far_pair = layout.pair(layout.between) if layout.hosts > 1 else layout.one_host(2)
    rounds = world - 1 + world % 2
    begun = launch(pricing, far_pair) + priced(OpKind.SEND, pricing, far_pair).times(2)
    busiest = max(ranks * (world - ranks) for ranks, _ in layout.sizes)
    per_byte_s = (layout.largest - 1) / layout.inside.bandwidth + busiest / layout.between.bandwidth
    return Cost(
        line=Line(rounds * begun.line.fixed_s, 2 * share * per_byte_s),
        inside=layout.inside_pairs * share,
        between=layout.between_pairs * share,
    )


def _hops(pricing: Pricing, pair: HostLayout, count: int, share: float = 1) -> Line:
    begun, sent = launch(pricing, pair).line, priced(OpKind.SEND, pricing, pair).line
    return Line(count * (begun.fixed_s + sent.fixed_s), count * share * sent.per_byte_s)
