"""The hosts of the ranks of a group, and the costs of the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The cost of moving n bytes between two ranks: ``latency_s + n / bandwidth`` (Hockney), in bytes per second."""

    latency_s: float
    bandwidth: float
    source: str = field(default="assumed", compare=False)  # the origin of the numbers, for people

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bandwidth > 0):
            raise ValueError(f"no such link: {self.latency_s} s, {self.bandwidth} bytes per second")


INSIDE = Link(latency_s=15e-6, bandwidth=6e9)
"""Shared memory of one machine, if not measured."""
BETWEEN = Link(latency_s=60e-6, bandwidth=1.2e9)
"""A network of 10 Gbit/s, if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The host of each rank."""

    hosts: tuple[int, ...]  # for each rank, the number of its host, counted from 0 in the order of the ranks
    inside: Link = INSIDE  # the link between ranks of one host
    between: Link = BETWEEN  # the link between ranks of different hosts; ranks of one host share it

    @classmethod
    def of(cls, places: Sequence[object], *, inside: Link = INSIDE, between: Link = BETWEEN) -> Topology:
        """The topology of ranks by the names of their hosts."""
        numbers: dict[object, int] = {}
        hosts = tuple(numbers.setdefault(place, len(numbers)) for place in places)
        return cls(hosts=hosts, inside=inside, between=between)

    @property
    def host_count(self) -> int:
        """The number of hosts."""
        return len(set(self.hosts))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each host, its ranks, ascending."""
        by_host: dict[int, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            by_host.setdefault(host, []).append(rank)
        return tuple(tuple(ranks) for _, ranks in sorted(by_host.items()))
