"""What a way of doing a collective costs, in closed form: by how many ranks are on how many hosts, not rank by rank.

Theory. Moving n bytes takes ``latency + n / bandwidth`` (Hockney, "The communication challenge for MPP", 1994), so that
everything made of such moves is a line in n, and lines can be added, compared and cut. n is what one rank gives, in
bytes: of pieces all of them together. For w ranks:

==============  ==========================  =====================================  =====================================
kind            shared memory (`shm`)       mesh (`tcp`)                           ring (`gloo` and everything else)
==============  ==========================  =====================================  =====================================
ALLREDUCE       each rank folds a slice     each its slice, then to all [1]        reduce-scatter + allgather [2]
                of all, into all
REDUCE          the same, into one          the same, to the root                  reduce-scatter [2], then to the root
BROADCAST       all copy from the root      scatter + allgather [1]                binomial tree [1]
ALLGATHER       all copy from all           everybody to everybody                 ring [1]
others          whoever takes a piece       straight from who gives to who takes   the same
                copies it
==============  ==========================  =====================================  =====================================

[1] Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication Operations in MPICH", 2005. [2] Patarasuk,
Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. The ranks of one host share the link
between hosts: what they send at the same time takes as long as if one of them sent all of it. A binomial tree is taken
to enter each host once; that is exact where hosts hold equal powers of two of ranks that follow each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from raycollect.model import OpKind
from raycollect.planner.topology import BETWEEN, INSIDE, Link, Topology

__all__ = [
    "EXCHANGE_S",
    "FREE",
    "MESSAGE_S",
    "ONE_HOST",
    "Cost",
    "Layout",
    "Line",
    "beside",
    "depth",
    "launch",
    "native",
    "priced",
]

MESSAGE_S = 3e-6
"""What one message costs the process that sends or takes it, whatever its size."""

EXCHANGE_S = 1e-3
"""How long a launch takes to begin where arrivals go through the controller or rank 0."""


@dataclass(frozen=True, slots=True)
class Line:
    """How long something takes, by the bytes that a rank gives.

    Attributes:
        fixed_s: Seconds, however few bytes.
        per_byte_s: Seconds for each byte.
    """

    fixed_s: float = 0.0
    per_byte_s: float = 0.0

    def time_s(self, nbytes: float) -> float:
        """How long n bytes take."""
        return self.fixed_s + nbytes * self.per_byte_s

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed_s + other.fixed_s, self.per_byte_s + other.per_byte_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What something costs.

    Attributes:
        line: How long it takes.
        inside: The bytes that travel inside hosts, of all ranks together, for each byte that a rank gives.
        between: The same for bytes that travel between hosts.
    """

    line: Line = Line()
    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """The cost of one after the other."""
        return Cost(
            line=self.line + other.line, inside=self.inside + other.inside, between=self.between + other.between
        )

    def times(self, count: int) -> Cost:
        """The cost of it several times, one after the other."""
        line = Line(self.line.fixed_s * count, self.line.per_byte_s * count)
        return Cost(line=line, inside=self.inside * count, between=self.between * count)

    def traffic(self, nbytes: int) -> tuple[int, int]:
        """The bytes inside hosts and between them, where each rank gives n bytes."""
        return round(self.inside * nbytes), round(self.between * nbytes)


FREE = Cost()
"""Nothing is done."""


def beside(costs: Iterable[tuple[Cost, int]]) -> Cost:
    """The cost of several things at the same time.

    Args:
        costs: (cost, how often it is there).
    """
    given = list(costs)
    return Cost(
        line=Line(
            max((cost.line.fixed_s for cost, _ in given), default=0.0),
            max((cost.line.per_byte_s for cost, _ in given), default=0.0),
        ),
        inside=sum(cost.inside * count for cost, count in given),
        between=sum(cost.between * count for cost, count in given),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks are on how many hosts: what costs follow from.

    Attributes:
        sizes: (ranks on a host, hosts with so many), the largest first.
        crossings: How many ranks have their successor (that of the last is rank 0) on another host.
        root_size: How many ranks are on the host of the root.
        contiguous: `Topology.is_contiguous`.
        inside: See `Topology`.
        between: See `Topology`.
    """

    sizes: tuple[tuple[int, int], ...]
    crossings: int
    root_size: int
    contiguous: bool = True
    inside: Link = INSIDE
    between: Link = BETWEEN

    @classmethod
    def of(cls, topology: Topology, root: int = -1) -> Layout:
        """The layout of ranks whose hosts are known one by one.

        Args:
            topology: Where they are.
            root: The root; -1: there is none, rank 0 stands for it.
        """
        hosts = topology.hosts
        counts = Counter(hosts)
        return cls(
            sizes=tuple(sorted(Counter(counts.values()).items(), reverse=True)),
            crossings=sum(here != there for here, there in zip(hosts, (*hosts[1:], hosts[0]), strict=True)),
            root_size=counts[hosts[max(root, 0)]],
            contiguous=topology.is_contiguous,
            inside=topology.inside,
            between=topology.between,
        )

    @classmethod
    def uniform(cls, hosts: int, ranks: int, inside: Link = INSIDE, between: Link = BETWEEN) -> Layout:
        """The layout of ranks that follow each other on hosts of equal size.

        Args:
            hosts: How many hosts.
            ranks: How many ranks on each.
            inside: See `Topology`.
            between: See `Topology`.
        """
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
        """How many ranks the largest host has."""
        return self.sizes[0][0]

    @property
    def inside_pairs(self) -> int:
        """How many ordered pairs of different ranks are on one host."""
        return sum(size * (size - 1) * count for size, count in self.sizes)

    @property
    def between_pairs(self) -> int:
        """How many ordered pairs of ranks are on different hosts."""
        return self.world * (self.world - 1) - self.inside_pairs

    @property
    def farthest(self) -> Link:
        """The slowest way between two ranks."""
        return self.between if self.host_count > 1 else self.inside

    def one_host(self, ranks: int) -> Layout:
        """So many ranks on one of these hosts, by themselves."""
        return Layout.uniform(1, ranks, self.inside, self.between)

    def apart(self, hosts: int) -> Layout:
        """One rank on each of so many of these hosts."""
        return Layout.uniform(hosts, 1, self.inside, self.between)


def depth(count: int) -> int:
    """How many rounds a binomial tree over so many needs."""
    return (count - 1).bit_length()


# ---------------------------------------------------------------------------------------------- patterns

_Price = Callable[[Layout], Cost]


def _copies(by_rank: Callable[[int], float], in_all: Callable[[int], float], layout: Layout) -> Cost:
    """Ranks that copy side by side, between two meetings.

    Args:
        by_rank: World size -> what the busiest rank copies.
        in_all: World size -> what all of them copy.
        layout: Where they are.
    """
    world = layout.world
    if world == 1:
        return FREE
    line = Line(2 * layout.inside.latency_s, by_rank(world) / layout.inside.bandwidth)
    return Cost(line=line, inside=in_all(world))


def _to_all(share: float, layout: Layout) -> Cost:
    """Every rank sends a share to every other one, all at once."""
    world = layout.world
    if world == 1:
        return FREE
    busiest = max(size * (world - size) for size, _ in layout.sizes)
    line = Line(
        layout.farthest.latency_s + (world - 1) * MESSAGE_S,
        share * max((layout.largest - 1) / layout.inside.bandwidth, busiest / layout.between.bandwidth),
    )
    return Cost(line=line, inside=layout.inside_pairs * share, between=layout.between_pairs * share)


def _at_root(share: float, layout: Layout) -> Cost:
    """The root sends a share to every other rank, or gets one from each."""
    world = layout.world
    if world == 1:
        return FREE
    near, far = layout.root_size - 1, world - layout.root_size
    line = Line(
        layout.farthest.latency_s + (world - 1) * MESSAGE_S,
        share * max(near / layout.inside.bandwidth, far / layout.between.bandwidth),
    )
    return Cost(line=line, inside=near * share, between=far * share)


def _round(share: float, rounds: int, layout: Layout) -> Cost:
    """Every rank sends to its successor, again and again, in all a share."""
    world = layout.world
    if world == 1:
        return FREE
    link, beside_ = layout.farthest, max(1.0, layout.crossings / layout.host_count)
    line = Line(rounds * (link.latency_s + MESSAGE_S), share * beside_ / link.bandwidth)
    return Cost(line=line, inside=(world - layout.crossings) * share, between=layout.crossings * share)


def _tree(layout: Layout) -> Cost:
    """A binomial tree over the hosts, then one inside each."""
    hops = (
        Line(link.latency_s + MESSAGE_S, 1 / link.bandwidth)
        for link, count in ((layout.between, depth(layout.host_count)), (layout.inside, depth(layout.largest)))
        for _ in range(count)
    )
    return Cost(line=sum(hops, Line()), inside=layout.world - layout.host_count, between=layout.host_count - 1)


def _one(layout: Layout) -> Cost:
    """One rank sends to another: to one as far away as there are."""
    if layout.world == 1:
        return FREE
    far = layout.host_count > 1
    line = Line(layout.farthest.latency_s + MESSAGE_S, 1 / layout.farthest.bandwidth)
    return Cost(line=line, inside=1.0 - far, between=float(far))


def _mesh_reduce(layout: Layout) -> Cost:
    """Two ranks send as many bytes either way, and so send them whole."""
    world = layout.world
    return _at_root(1, layout) if world <= 2 else _to_all(1 / world, layout) + _at_root(1 / world, layout)


def _mesh_broadcast(layout: Layout) -> Cost:
    """A slice to each other rank, which sends it on to all but the root."""
    world = layout.world
    if world <= 2:
        return _at_root(1, layout)
    share = 1 / (world - 1)
    first, on = _at_root(share, layout), _to_all(share, layout)
    # Everybody sends to everybody, the root before the others; only to the root nobody does.
    inside, between = on.inside - first.inside, on.between - first.between
    return Cost(line=first.line + on.line, inside=inside, between=between)


# ---------------------------------------------------------------------------------------------- tables

_DIRECT: dict[OpKind, _Price] = {
    OpKind.REDUCESCATTER: lambda at: _to_all(1 / at.world, at),
    OpKind.ALLTOALL: lambda at: _to_all(1 / at.world, at),
    OpKind.GATHER: partial(_at_root, 1),
    OpKind.SCATTER: lambda at: _at_root(1 / at.world, at),
    OpKind.SEND: _one,
    OpKind.BARRIER: partial(_to_all, 0),
}
"""Straight from who gives to who takes."""

_SHARED: dict[OpKind, _Price] = {
    OpKind.ALLREDUCE: partial(_copies, lambda w: 2 * (w - 1) / w, lambda w: 2 * (w - 1)),
    OpKind.REDUCE: partial(_copies, lambda w: 1, lambda w: (w - 1) + (w - 1) / w),
    OpKind.BROADCAST: partial(_copies, lambda w: 1, lambda w: w - 1),
    OpKind.ALLGATHER: partial(_copies, lambda w: w - 1, lambda w: w * (w - 1)),
    OpKind.GATHER: partial(_copies, lambda w: 1, lambda w: w - 1),
    OpKind.SCATTER: partial(_copies, lambda w: 1 / w, lambda w: (w - 1) / w),
    OpKind.REDUCESCATTER: partial(_copies, lambda w: (w - 1) / w, lambda w: w - 1),
    OpKind.ALLTOALL: partial(_copies, lambda w: (w - 1) / w, lambda w: w - 1),
    OpKind.SEND: partial(_copies, lambda w: 1, lambda w: 1),
    OpKind.BARRIER: partial(_copies, lambda w: 0, lambda w: 0),
}

_MESH: dict[OpKind, _Price] = _DIRECT | {
    OpKind.ALLREDUCE: lambda at: _to_all(1 / at.world, at).times(2),
    OpKind.REDUCE: _mesh_reduce,
    OpKind.BROADCAST: _mesh_broadcast,
    OpKind.ALLGATHER: partial(_to_all, 1),
}

_RING: dict[OpKind, _Price] = _DIRECT | {
    OpKind.ALLREDUCE: lambda at: _round(2 * (at.world - 1) / at.world, 2 * (at.world - 1), at),
    OpKind.REDUCE: lambda at: _round((at.world - 1) / at.world, at.world - 1, at) + _at_root(1 / at.world, at),
    OpKind.BROADCAST: _tree,
    OpKind.ALLGATHER: lambda at: _round(at.world - 1, at.world - 1, at),
}

_FAMILIES: dict[str, dict[OpKind, _Price]] = {"local": _SHARED, "shm": _SHARED, "tcp": _MESH}
"""Backend -> how it does each kind; whatever is not here does as rings do."""


ONE_HOST = frozenset(backend for backend, family in _FAMILIES.items() if family is _SHARED)
"""The backends whose ranks share memory."""


def priced(kind: OpKind, backend: str, place: Topology | Layout) -> Cost:
    """What a backend's own kernel costs, once its launch has begun.

    Args:
        kind: The operation.
        backend: The backend's name.
        place: Where the ranks are; of a `Topology` rank 0 is taken for the root.
    """
    layout = Layout.of(place) if isinstance(place, Topology) else place
    return _FAMILIES.get(backend, _RING)[OpKind.SEND if kind is OpKind.RECV else kind](layout)


def native(kind: OpKind, backend: str, place: Topology | Layout) -> Line:
    """How long a backend's own kernel takes; see `priced`."""
    return priced(kind, backend, place).line


def launch(backend: str, layout: Layout) -> Cost:
    """What it costs to begin one more launch, at which all ranks of the layout meet."""
    family = _FAMILIES.get(backend)
    if layout.world == 1:
        seconds = 0.0
    elif family is _SHARED:
        seconds = 2 * layout.inside.latency_s
    elif family is _MESH:
        seconds = layout.farthest.latency_s + (layout.world - 1) * MESSAGE_S
    else:
        seconds = EXCHANGE_S
    return Cost(line=Line(seconds))
