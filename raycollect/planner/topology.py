"""Where the ranks of a group are, and what the links between them cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The cost of moving n bytes between two ranks: ``latency_s + n / bandwidth`` (Hockney), in bytes per second."""

    latency_s: float
    bandwidth: float
    source: str = field(default="assumed", compare=False)  # where the numbers are from, for people

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bandwidth > 0):
            raise ValueError(f"no such link: {self.latency_s} s, {self.bandwidth} bytes per second")

    def time_s(self, nbytes: float) -> float:
        """The seconds for n bytes."""
        return self.latency_s + nbytes / self.bandwidth


INSIDE = Link(latency_s=15e-6, bandwidth=6e9)
"""Shared memory of one machine, where nobody has measured it."""
BETWEEN = Link(latency_s=60e-6, bandwidth=1.2e9)
"""A network of 10 Gbit/s, where nobody has measured it."""


def slowest(links: Iterable[Link]) -> Link:
    """One link as slow as each of some, of which there is one at least."""
    found = tuple(links)
    latency_s, bandwidth = max(one.latency_s for one in found), min(one.bandwidth for one in found)
    return replace(found[0], latency_s=latency_s, bandwidth=bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """What the links between hosts cost, pair by pair."""

    measured: Mapping[tuple[int, int], Link]  # two hosts, the lower one first -> their link
    other: Link  # that of all other pairs
    hosts: int  # how many there are, two at least

    def of(self, one: int, other: int) -> Link:
        """The link of two hosts."""
        return self.measured.get((min(one, other), max(one, other)), self.other)

    def slowest(self) -> tuple[int, int]:
        """The two hosts whose link has the least bandwidth."""
        pairs = [(one, other) for one in range(self.hosts) for other in range(one + 1, self.hosts)]
        return min(pairs, key=lambda pair: self.of(*pair).bandwidth)

    def exchange(self) -> Link:
        """The link that each host seems to have while all send to all.

        A host's own link is as fast as the fastest of its pairs, and in an exchange each pair carries an equal part of
        what a host sends.
        """
        everyone = range(self.hosts)
        pairs = {one: [self.of(one, other) for other in everyone if other != one] for one in everyone}
        own = min(max(link.bandwidth for link in links) for links in pairs.values())
        least = slowest(link for links in pairs.values() for link in links)
        return replace(least, bandwidth=min(own, least.bandwidth * (self.hosts - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where each rank is."""

    hosts: tuple[int, ...]  # for each rank, the number of its host, counted from 0 in the order of the ranks
    inside: Link = INSIDE  # the link between ranks of one host
    between: Link = BETWEEN  # the link between ranks of different hosts; ranks of one host share it
    pairs: Pairs | None = None  # the links between hosts one by one, where they are known; `between` is `exchange`

    @classmethod
    def of(cls, places: Sequence[object], *, inside: Link = INSIDE, between: Link = BETWEEN) -> Topology:
        """The topology of ranks by the names of their hosts."""
        numbers: dict[object, int] = {}
        hosts = tuple(numbers.setdefault(place, len(numbers)) for place in places)
        return cls(hosts=hosts, inside=inside, between=between)

    def on_links(self, measured: Mapping[tuple[int, int], Link]) -> Topology:
        """The same ranks, with measured links between hosts; see `Pairs`."""
        if not measured or self.host_count == 1:
            return self
        pairs = Pairs(measured=measured, other=self.between, hosts=self.host_count)
        return replace(self, between=pairs.exchange(), pairs=pairs)

    @property
    def host_count(self) -> int:
        """How many hosts there are."""
        return len(set(self.hosts))

    def on(self, host: int) -> tuple[int, ...]:
        """The ranks of a host, ascending."""
        return tuple(rank for rank, other in enumerate(self.hosts) if other == host)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each host, its ranks, ascending."""
        found: dict[int, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return tuple(tuple(ranks) for _, ranks in sorted(found.items()))

    @property
    def is_contiguous(self) -> bool:
        """Whether the ranks of each host are consecutive, so that folding host by host is folding in rank order."""
        return list(self.hosts) == sorted(self.hosts)
