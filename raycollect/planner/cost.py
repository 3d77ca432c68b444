"""The cost of a collective in closed form, from how many ranks are on how many hosts.

Moving n bytes takes ``latency + n / bandwidth`` (Hockney, "The communication challenge for MPP", 1994). So everything
made of such moves is a line in n, and lines can be added, compared and cut. n is the bytes that one rank gives, all
pieces together. For w ranks:

==============  ==========================  =====================================  =====================================
kind            shared memory               mesh                                   ring
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

Between hosts of which one has several ranks, the mesh goes host by host: `backends.tcp.by_host` has the bytes.
Transfers inside the hosts overlap with those between them.

[1] Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication Operations in MPICH", 2005. [2] Patarasuk,
Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. The ranks of one host share its link
to other hosts: simultaneous sends take as long as if one of the ranks sent all of the bytes. The model assumes that a
binomial tree enters each host once; that is exact where hosts hold equal powers of two of consecutive ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

from raycollect.core.model import OpKind, Pricing
from raycollect.core.operations import OPERATIONS, OperationSpec, has_part
from raycollect.planner.topology import BETWEEN, INSIDE, Link, Topology

MESSAGE_S = 3e-6
"""The time that a message of any size takes in the process that sends or receives it."""

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
class HostLayout:
    """The numbers of ranks per host, on which all costs depend, and the costs of the links between them.

    The methods that return a `Cost` are the patterns of which prices are made (`OperationSpec.price`).
    """

    sizes: tuple[tuple[int, int], ...]  # (ranks on a host, hosts with so many), the largest first
    crossings: int  # how many ranks have their successor in the ring on another host
    root_size: int  # how many ranks are on the root's host
    rank_order: bool = False  # whether reductions are folded in rank order on any hosts
    inside: Link = INSIDE  # the link inside a host
    between: Link = BETWEEN  # the link between hosts, which the ranks of one host share

    @classmethod
    def of(cls, topology: Topology, root: int = -1, *, rank_order: bool = False) -> HostLayout:
        """The layout of a topology; without a root (-1), rank 0 is the root."""
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
    def uniform(cls, hosts: int, ranks: int, inside: Link = INSIDE, between: Link = BETWEEN) -> HostLayout:
        """The layout of consecutive ranks on hosts of equal size."""
        crossings = hosts if hosts > 1 else 0
        return cls(sizes=((ranks, hosts),), crossings=crossings, root_size=ranks, inside=inside, between=between)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return sum(size * count for size, count in self.sizes)

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return sum(count for _, count in self.sizes)

    @property
    def largest(self) -> int:
        """The ranks on the largest host."""
        return self.sizes[0][0]

    @property
    def smallest(self) -> int:
        """The ranks on the smallest host."""
        return self.sizes[-1][0]

    @property
    def inside_pairs(self) -> int:
        """How many ordered pairs of different ranks share a host."""
        return sum(size * (size - 1) * count for size, count in self.sizes)

    @property
    def between_pairs(self) -> int:
        """How many ordered pairs of ranks are on different hosts."""
        return self.world * (self.world - 1) - self.inside_pairs

    @property
    def slowest(self) -> Link:
        """The slowest link."""
        return self.between if self.hosts > 1 else self.inside

    def one_host(self, ranks: int) -> HostLayout:
        """The layout of some ranks of one of these hosts."""
        return HostLayout.uniform(1, ranks, self.inside, self.between)

    def pair(self, link: Link) -> HostLayout:
        """The layout of two ranks with a link."""
        return HostLayout.uniform(2, 1, self.inside, link)

    def copies(self, busiest: float, total: float) -> Cost:
        """Ranks copy in parallel between two barriers: the bytes of the busiest rank, and of all ranks."""
        return Cost(line=Line(2 * self.inside.latency_s, busiest / self.inside.bandwidth), inside=total)

    def all_to_all(self, share: float) -> Cost:
        """Every rank sends a share to every other one, all at once."""
        world = self.world
        busiest = max(size * (world - size) for size, _ in self.sizes) * (CONTENTION if self.largest > 1 else 1)
        line = Line(
            self.slowest.latency_s + (world - 1) * MESSAGE_S,
            share * max((self.largest - 1) / self.inside.bandwidth, busiest / self.between.bandwidth),
        )
        return Cost(line=line, inside=self.inside_pairs * share, between=self.between_pairs * share)

    def at_root(self, share: float) -> Cost:
        """The root sends a share to every other rank, or gets one from each."""
        world = self.world
        near, far = self.root_size - 1, world - self.root_size
        line = Line(
            self.slowest.latency_s + (world - 1) * MESSAGE_S,
            share * max(near / self.inside.bandwidth, far / self.between.bandwidth),
        )
        return Cost(line=line, inside=near * share, between=far * share)

    def passed_on(self, share: float) -> Cost:
        """The root sends a share to each other rank, which sends it on to all but the root."""
        first, on = self.at_root(share), self.all_to_all(share)
        # All ranks send to all others except the root, which sends first.
        inside, between = on.inside - first.inside, on.between - first.between
        line = Line(first.line.fixed_s + on.line.fixed_s, max(first.line.per_byte_s, on.line.per_byte_s))
        return Cost(line=line, inside=inside, between=between)

    def ring(self, share: float, rounds: int) -> Cost:
        """Every rank sends to its successor, round after round; a share in all."""
        link, per_link = self.slowest, max(1.0, self.crossings / self.hosts)
        line = Line(rounds * (link.latency_s + MESSAGE_S), share * per_link / link.bandwidth)
        return Cost(line=line, inside=(self.world - self.crossings) * share, between=self.crossings * share)

    def tree(self) -> Cost:
        """A binomial tree over the hosts, then one inside each."""
        links = (*(self.between,) * depth(self.hosts), *(self.inside,) * depth(self.largest))
        hops = (Line(link.latency_s + MESSAGE_S, 1 / link.bandwidth) for link in links)
        return Cost(line=sum(hops, Line()), inside=self.world - self.hosts, between=self.hosts - 1)

    def point_to_point(self) -> Cost:
        """One rank sends to another over the slowest link."""
        is_far = self.hosts > 1
        line = Line(self.slowest.latency_s + MESSAGE_S, 1 / self.slowest.bandwidth)
        return Cost(line=line, inside=1.0 - is_far, between=float(is_far))

    def host_by_host(self, busiest: float, total: float, *, rounds: int, inside: float) -> Cost:
        """Ranks share the sends of their host: the bytes of the busiest host, and the bytes of all hosts.

        `inside` is the bytes that each rank of a host except one gives the others there.
        """
        line = Line(
            rounds * (self.between.latency_s + self.inside.latency_s + (self.hosts + self.largest - 2) * MESSAGE_S),
            max(
                busiest / self.between.bandwidth,
                inside * (self.largest - 1) / self.largest / self.inside.bandwidth,
            ),
        )
        return Cost(line=line, inside=inside * (self.world - self.hosts), between=total)


def depth(count: int) -> int:
    """The rounds of a binomial tree over so many ranks."""
    return (count - 1).bit_length()


def priced(kind: OpKind, pricing: Pricing, layout: HostLayout) -> Cost:
    """The cost of a backend's own kernel, from the beginning of its launch."""
    if layout.world == 1:
        return FREE
    spec = OPERATIONS[OpKind.SEND if kind is OpKind.RECV else kind]
    price, several = spec.price, layout.hosts > 1
    in_rank_order = layout.rank_order or bool(pricing.rings)  # the mesh beside a library folds so on all hosts
    goes_by_host = pricing.by_host and several and layout.hosts < layout.world and not (spec.folds and in_rank_order)
    in_rings = kind in pricing.rings and not (kind is OpKind.BROADCAST and pricing.by_host and several)
    line = price.mesh
    if pricing.transport == "memory":
        line = price.memory or partial(_copied, spec)
    elif goes_by_host and price.by_host is not None:
        line = price.by_host
    elif (in_rings or pricing.transport == "ring") and price.ring is not None:
        line = price.ring
    cost: Cost = _direct(spec, layout) if line is None else line(layout)
    return cost


def _received(spec: OperationSpec, world: int) -> list[int]:
    """For each rank that takes, from how many others it gets a value or piece; rank 0 is the root."""
    takers = [position for position in range(world) if has_part(spec.takes, position, 0, 1)]
    givers = ((position, spec.givers(position, world, 0)) for position in takers)
    return [len(some) - (position in some) for position, some in givers]


def _copied(spec: OperationSpec, layout: HostLayout) -> Cost:
    """Every rank copies its results from the memory of the others."""
    received, pieces = _received(spec, layout.world), layout.world if spec.gives_pieces else 1
    return layout.copies(max(received, default=0) / pieces, sum(received) / pieces)


def _direct(spec: OperationSpec, layout: HostLayout) -> Cost:
    """Every rank sends directly to the receivers of its value."""
    if spec.takes == "peer":
        return layout.point_to_point()
    share = 1 / layout.world if spec.gives_pieces else 1
    if spec.root:
        return layout.at_root(share)
    whole = layout.all_to_all(share if spec.gives else 0)
    part = sum(_received(spec, layout.world)) / (layout.world * (layout.world - 1))  # of all pairs of ranks
    return replace(whole, inside=whole.inside * part, between=whole.between * part)


def launch(pricing: Pricing, layout: HostLayout) -> Cost:
    """The cost of beginning one more launch, at which all ranks of the layout meet."""
    if layout.world == 1:
        seconds = 0.0
    elif pricing.transport == "memory":
        seconds = 2 * layout.inside.latency_s
    elif pricing.transport == "mesh" and not pricing.rings:
        seconds = layout.slowest.latency_s + (layout.world - 1) * MESSAGE_S
    else:
        seconds = EXCHANGE_S
    return Cost(line=Line(seconds))
