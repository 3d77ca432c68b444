"""The cost of a collective in closed form, from how many ranks are on how many hosts.

Moving n bytes takes ``latency + n / bandwidth`` (Hockney, "The communication challenge for MPP", 1994). So everything
made of such moves is a line in n, and lines can be added, compared and cut. n is the bytes that one rank gives, all
pieces together. For w ranks:

==============  ==========================  =====================================  =====================================
kind            shared memory (`shm`)       mesh (`tcp`)                           ring (libraries)
==============  ==========================  =====================================  =====================================
ALLREDUCE       each rank folds a slice     each its slice, then to all [1]        reduce-scatter + allgather [2]
                of all, into all
REDUCE          the same, into one          the same, to the root                  reduce-scatter [2], then to the root
BROADCAST       all copy from the root      scatter + allgather [1]                binomial tree [1]
ALLGATHER       all copy from all           all to all                             ring [1]
SCAN, EXSCAN    each folds from all before  each to all behind it                  the same
others          the receiver copies         directly from sender to receiver       the same
==============  ==========================  =====================================  =====================================

A library beside a mesh runs some operations by rings, and the mesh all else (`Pricing.rings`, `backends.meshed`).

Between hosts of which one has several ranks, the mesh goes host by host: `backends.tcp.by_host` has the bytes. What
goes on inside the hosts happens meanwhile.

[1] Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication Operations in MPICH", 2005. [2] Patarasuk,
Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. The ranks of one host share its link
to other hosts: what they send at the same time takes as long as if one of them sent all of it. The model assumes that a
binomial tree enters each host once; that is exact where hosts hold equal powers of two of consecutive ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from raycollect.core.model import OpKind, Pricing
from raycollect.planner.topology import BETWEEN, INSIDE, Link, Topology

MESSAGE_S = 3e-6
"""What a message of any size costs the process that sends or receives it."""

EXCHANGE_S = 1e-3
"""How long a launch takes to begin where arrivals go through the controller or rank 0."""


CONTENTION = 1.2
"""How much longer an exchange takes where ranks share the link of their host: many flows at once overrun its queue.

Measured at 200 Mbit/s to 2 Gbit/s, with queues of 20 ms: 1.1 to 1.4.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Time as a line in the bytes that a rank gives."""

    fixed_s: float = 0.0
    per_byte_s: float = 0.0

    def time_s(self, nbytes: float) -> float:
        """The seconds for n bytes."""
        return self.fixed_s + nbytes * self.per_byte_s

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed_s + other.fixed_s, self.per_byte_s + other.per_byte_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of an operation."""

    line: Line = Line()
    inside: float = 0.0  # the bytes that all ranks together move inside hosts, per byte that a rank gives
    between: float = 0.0  # the same between hosts

    def __add__(self, other: Cost) -> Cost:
        """The cost of one after the other."""
        return Cost(
            line=self.line + other.line, inside=self.inside + other.inside, between=self.between + other.between
        )

    def times(self, count: int) -> Cost:
        """The cost of repeating it, one after the other."""
        line = Line(self.line.fixed_s * count, self.line.per_byte_s * count)
        return Cost(line=line, inside=self.inside * count, between=self.between * count)

    def traffic(self, nbytes: int) -> tuple[int, int]:
        """The bytes moved inside and between hosts where each rank gives n bytes."""
        return round(self.inside * nbytes), round(self.between * nbytes)


FREE = Cost()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks are on how many hosts: all that costs depend on."""

    sizes: tuple[tuple[int, int], ...]  # (ranks on a host, hosts with so many), the largest first
    crossings: int  # how many ranks have their successor in the ring on another host
    root_size: int  # how many ranks are on the root's host
    rank_order: bool = False  # whether reductions are folded in rank order, whatever hosts the ranks are on
    inside: Link = INSIDE
    between: Link = BETWEEN

    @classmethod
    def of(cls, topology: Topology, root: int = -1, *, rank_order: bool = False) -> Layout:
        """The layout of a topology; without a root (-1), rank 0 stands for it."""
        hosts = topology.hosts
        counts = Counter(hosts)
        return cls(
            sizes=tuple(sorted(Counter(counts.values()).items(), reverse=True)),
            crossings=sum(here != there for here, there in zip(hosts, (*hosts[1:], hosts[0]), strict=True)),
            root_size=counts[hosts[max(root, 0)]],
            rank_order=rank_order,
            inside=topology.inside,
            between=topology.between,
        )

    @classmethod
    def uniform(cls, hosts: int, ranks: int, inside: Link = INSIDE, between: Link = BETWEEN) -> Layout:
        """The layout of consecutive ranks on hosts of equal size."""
        crossings = hosts if hosts > 1 else 0
        return cls(sizes=((ranks, hosts),), crossings=crossings, root_size=ranks, inside=inside, between=between)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return sum(size * count for size, count in self.sizes)

    @property
    def host_count(self) -> int:
        """How many hosts there are."""
        return sum(count for _, count in self.sizes)

    @property
    def largest(self) -> int:
        """The ranks on the largest host."""
        return self.sizes[0][0]

    @property
    def inside_pairs(self) -> int:
        """How many ordered pairs of different ranks share a host."""
        return sum(size * (size - 1) * count for size, count in self.sizes)

    @property
    def between_pairs(self) -> int:
        """How many ordered pairs of ranks are on different hosts."""
        return self.world * (self.world - 1) - self.inside_pairs

    @property
    def farthest(self) -> Link:
        """The slowest link."""
        return self.between if self.host_count > 1 else self.inside

    def one_host(self, ranks: int) -> Layout:
        """The layout of some ranks of one of these hosts."""
        return Layout.uniform(1, ranks, self.inside, self.between)

    def pair(self, link: Link) -> Layout:
        """The layout of two ranks with a link."""
        return Layout.uniform(2, 1, self.inside, link)


def depth(count: int) -> int:
    """The rounds of a binomial tree over so many ranks."""
    return (count - 1).bit_length()


_Price = Callable[[Layout], Cost]
"""The cost of a kernel over two ranks or more."""


def _shared_memory(by_rank: Callable[[int], float], in_all: Callable[[int], float], layout: Layout) -> Cost:
    """Ranks copy side by side between two barriers: by world size, what the busiest rank copies and what all copy."""
    world = layout.world
    line = Line(2 * layout.inside.latency_s, by_rank(world) / layout.inside.bandwidth)
    return Cost(line=line, inside=in_all(world))


def _all_to_all(share: float, layout: Layout) -> Cost:
    """Every rank sends a share to every other one, all at once."""
    world = layout.world
    busiest = max(size * (world - size) for size, _ in layout.sizes) * (CONTENTION if layout.largest > 1 else 1)
    line = Line(
        layout.farthest.latency_s + (world - 1) * MESSAGE_S,
        share * max((layout.largest - 1) / layout.inside.bandwidth, busiest / layout.between.bandwidth),
    )
    return Cost(line=line, inside=layout.inside_pairs * share, between=layout.between_pairs * share)


def _to_all_behind(layout: Layout) -> Cost:
    """Every rank sends all to each rank behind it: the first one as much as in `_all_to_all`, all together half."""
    whole = _all_to_all(1, layout)
    return replace(whole, inside=whole.inside / 2, between=whole.between / 2)


def _at_root(share: float, layout: Layout) -> Cost:
    """The root sends a share to every other rank, or gets one from each."""
    world = layout.world
    near, far = layout.root_size - 1, world - layout.root_size
    line = Line(
        layout.farthest.latency_s + (world - 1) * MESSAGE_S,
        share * max(near / layout.inside.bandwidth, far / layout.between.bandwidth),
    )
    return Cost(line=line, inside=near * share, between=far * share)


def _ring(share: float, rounds: int, layout: Layout) -> Cost:
    """Every rank sends to its successor, round after round; a share in all."""
    world = layout.world
    link, beside_ = layout.farthest, max(1.0, layout.crossings / layout.host_count)
    line = Line(rounds * (link.latency_s + MESSAGE_S), share * beside_ / link.bandwidth)
    return Cost(line=line, inside=(world - layout.crossings) * share, between=layout.crossings * share)


def _tree(layout: Layout) -> Cost:
    """A binomial tree over the hosts, then one inside each."""
    links = (*(layout.between,) * depth(layout.host_count), *(layout.inside,) * depth(layout.largest))
    hops = (Line(link.latency_s + MESSAGE_S, 1 / link.bandwidth) for link in links)
    return Cost(line=sum(hops, Line()), inside=layout.world - layout.host_count, between=layout.host_count - 1)


def _point_to_point(layout: Layout) -> Cost:
    """One rank sends to another over the slowest link."""
    far = layout.host_count > 1
    line = Line(layout.farthest.latency_s + MESSAGE_S, 1 / layout.farthest.bandwidth)
    return Cost(line=line, inside=1.0 - far, between=float(far))


def _mesh_reduce(layout: Layout) -> Cost:
    """Of two ranks, both sides would send as many bytes either way, so one sends its whole tensor."""
    world = layout.world
    return _at_root(1, layout) if world <= 2 else _all_to_all(1 / world, layout) + _at_root(1 / world, layout)


def _mesh_broadcast(layout: Layout) -> Cost:
    """A slice to each other rank, which sends it on to all but the root; meanwhile the next chunk comes."""
    world = layout.world
    if world <= 2:
        return _at_root(1, layout)
    share = 1 / (world - 1)
    first, on = _at_root(share, layout), _all_to_all(share, layout)
    # Everybody sends to everybody, the root before the others; only to the root nobody does.
    inside, between = on.inside - first.inside, on.between - first.between
    line = Line(first.line.fixed_s + on.line.fixed_s, max(first.line.per_byte_s, on.line.per_byte_s))
    return Cost(line=line, inside=inside, between=between)


def _host_by_host(
    busiest: Callable[[int], float], between: Callable[[int], float], rounds: int, beside_: float, layout: Layout
) -> Cost:
    """Ranks share what their host sends: by hosts, what the busiest one sends or gets, and what all send.

    `beside_` is what each rank but one of a host gives the others there.
    """
    hosts = layout.host_count
    line = Line(
        rounds * (layout.between.latency_s + layout.inside.latency_s + (hosts + layout.largest - 2) * MESSAGE_S),
        max(
            busiest(hosts) / layout.between.bandwidth,
            beside_ * (layout.largest - 1) / layout.largest / layout.inside.bandwidth,
        ),
    )
    return Cost(line=line, inside=beside_ * (layout.world - hosts), between=between(hosts))


def _gathered_by_host(layout: Layout) -> Cost:
    """Each piece once to every other host; n is what a rank gives, so that all together have w of them."""
    world, least = layout.world, layout.sizes[-1][0]
    busiest = max(layout.largest * (layout.host_count - 1), world - least)
    return _host_by_host(lambda h: busiest, lambda h: world * (h - 1), 1, world, layout)


_BY_HOST: dict[OpKind, _Price] = {
    OpKind.ALLREDUCE: partial(_host_by_host, lambda h: 2 * (h - 1) / h, lambda h: 2 * (h - 1), 2, 2),
    OpKind.REDUCE: partial(_host_by_host, lambda h: 2 * (h - 1) / h, lambda h: (h - 1) * (1 + 1 / h), 2, 1),
    OpKind.REDUCESCATTER: partial(_host_by_host, lambda h: (h - 1) / h, lambda h: h - 1, 1, 1),
    OpKind.BROADCAST: partial(_host_by_host, lambda h: 1, lambda h: h - 1, 2, 1),
    OpKind.ALLGATHER: _gathered_by_host,
}
"""The mesh between hosts of which one has several ranks."""

_FOLDS = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCESCATTER)

_DIRECT: dict[OpKind, _Price] = {
    OpKind.REDUCESCATTER: lambda at: _all_to_all(1 / at.world, at),
    OpKind.ALLTOALL: lambda at: _all_to_all(1 / at.world, at),
    OpKind.GATHER: partial(_at_root, 1),
    OpKind.SCATTER: lambda at: _at_root(1 / at.world, at),
    OpKind.SCAN: _to_all_behind,
    OpKind.EXSCAN: _to_all_behind,
    OpKind.SEND: _point_to_point,
    OpKind.BARRIER: partial(_all_to_all, 0),
}
"""Directly from sender to receiver."""

_SHARED: dict[OpKind, _Price] = {
    OpKind.ALLREDUCE: partial(_shared_memory, lambda w: 2 * (w - 1) / w, lambda w: 2 * (w - 1)),
    OpKind.REDUCE: partial(_shared_memory, lambda w: 1, lambda w: (w - 1) + (w - 1) / w),
    OpKind.BROADCAST: partial(_shared_memory, lambda w: 1, lambda w: w - 1),
    OpKind.ALLGATHER: partial(_shared_memory, lambda w: w - 1, lambda w: w * (w - 1)),
    OpKind.GATHER: partial(_shared_memory, lambda w: 1, lambda w: w - 1),
    OpKind.SCATTER: partial(_shared_memory, lambda w: 1 / w, lambda w: (w - 1) / w),
    OpKind.REDUCESCATTER: partial(_shared_memory, lambda w: (w - 1) / w, lambda w: w - 1),
    OpKind.ALLTOALL: partial(_shared_memory, lambda w: (w - 1) / w, lambda w: w - 1),
    OpKind.SCAN: partial(_shared_memory, lambda w: w - 1, lambda w: w * (w - 1) / 2),
    OpKind.EXSCAN: partial(_shared_memory, lambda w: w - 1, lambda w: w * (w - 1) / 2),
    OpKind.SEND: partial(_shared_memory, lambda w: 1, lambda w: 1),
    OpKind.BARRIER: partial(_shared_memory, lambda w: 0, lambda w: 0),
}

_MESH: dict[OpKind, _Price] = _DIRECT | {
    OpKind.ALLREDUCE: lambda at: _all_to_all(1 / at.world, at).times(2),
    OpKind.REDUCE: _mesh_reduce,
    OpKind.BROADCAST: _mesh_broadcast,
    OpKind.ALLGATHER: partial(_all_to_all, 1),
}

_RING: dict[OpKind, _Price] = _DIRECT | {
    OpKind.ALLREDUCE: lambda at: _ring(2 * (at.world - 1) / at.world, 2 * (at.world - 1), at),
    OpKind.REDUCE: lambda at: _ring((at.world - 1) / at.world, at.world - 1, at) + _at_root(1 / at.world, at),
    OpKind.BROADCAST: _tree,
    OpKind.ALLGATHER: lambda at: _ring(at.world - 1, at.world - 1, at),
}

_TRANSPORTS: dict[str, dict[OpKind, _Price]] = {"memory": _SHARED, "mesh": _MESH, "ring": _RING}


def priced(kind: OpKind, pricing: Pricing, place: Topology | Layout) -> Cost:
    """The cost of a backend's own kernel, from the beginning of its launch; in a `Topology` rank 0 is the root."""
    layout = Layout.of(place) if isinstance(place, Topology) else place
    if layout.world == 1:
        return FREE
    goes_by_host = pricing.by_host and 1 < layout.host_count < layout.world
    in_rank_order = layout.rank_order or bool(pricing.rings)  # the mesh beside a library folds so on all hosts
    if goes_by_host and kind in _BY_HOST and (kind not in _FOLDS or not in_rank_order):
        return _BY_HOST[kind](layout)
    prices = _TRANSPORTS[pricing.transport]
    if kind in pricing.rings and not (kind is OpKind.BROADCAST and pricing.by_host and layout.host_count > 1):
        prices = _RING
    return prices[OpKind.SEND if kind is OpKind.RECV else kind](layout)


def launch(pricing: Pricing, layout: Layout) -> Cost:
    """The cost of beginning one more launch, at which all ranks of the layout meet."""
    if layout.world == 1:
        seconds = 0.0
    elif pricing.transport == "memory":
        seconds = 2 * layout.inside.latency_s
    elif pricing.transport == "mesh" and not pricing.rings:
        seconds = layout.farthest.latency_s + (layout.world - 1) * MESSAGE_S
    else:
        seconds = EXCHANGE_S
    return Cost(line=Line(seconds))
