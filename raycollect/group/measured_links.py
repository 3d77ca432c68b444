"""The links between hosts that groups have measured, each pair of hosts once.

The members of a group measure what is not known yet while they join (`Probing`). Their controller keeps it, and the
cluster's store too, so that other controllers need not measure it again. An entry is of two hosts as they are now: a
node that starts anew is another one. `Group.rebuild` measures all anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from raycollect.core.codec import Codec
from raycollect.errors import ProtocolError
from raycollect.group import cluster_registry
from raycollect.group.link_costs import FILE, MEASURED
from raycollect.group.membership import BY_HOST
from raycollect.planner import Link, Membership
from raycollect.planner.pairs import tournament

_PREFIX = b"links/"

_LINKS = Codec[Sequence[float]](tuple[float, float], "link")

Pair = tuple[int, int]
"""Two hosts of a group by their numbers, the lower one first."""


class MeasuredLinks:
    """What one controller knows of the links between hosts. Any thread may call it."""

    def __init__(self) -> None:
        self._known: dict[bytes, Link] = {}

    def of(self, membership: Membership) -> dict[Pair, Link]:
        """The links between the hosts of a group, as far as they are known, and nobody has said what they cost."""
        keys = _keys(membership) if membership.topology.between.source != FILE else {}
        missing = [key for key in keys.values() if key not in self._known]
        for key, entry in cluster_registry.look_up(missing).items():
            link = _link(entry)
            if link is not None:
                self._known[key] = link
        return {pair: self._known[key] for pair, key in keys.items() if key in self._known}

    def add(self, membership: Membership, told: Mapping[int, Sequence[Sequence[float]]]) -> None:
        """Keeps what members have told: by rank, each (other rank, seconds, bytes per second)."""
        keys, hosts, new = _keys(membership), membership.topology.hosts, dict[bytes, bytes]()
        for rank, links in told.items():
            for other, *numbers in links:
                there, link = hosts[int(other)] if other in range(len(hosts)) else hosts[rank], _link(numbers)
                key = keys.get((min(hosts[rank], there), max(hosts[rank], there)))
                if key is not None and link is not None:
                    self._known[key], new[key] = link, _LINKS.encode(numbers)
        cluster_registry.keep(new)


def turns(membership: Membership, known: Mapping[Pair, Link]) -> dict[int, tuple[int, ...]]:
    """Who measures which links: for ranks that do, by turn the other rank, or -1. One rank of a host works for it."""
    if membership.spec.backend not in BY_HOST or membership.topology.between.source == FILE:
        return {}
    agents = [ranks[0] for ranks in membership.topology.groups()]
    found: dict[int, list[int]] = {}
    for turn, one, other in tournament(len(agents)):
        if (one, other) not in known:
            for rank, peer in ((agents[one], agents[other]), (agents[other], agents[one])):
                mine = found.setdefault(rank, [])
                mine += [-1] * (turn - len(mine)) + [peer]
    return {rank: tuple(others) for rank, others in found.items()}


def _keys(membership: Membership) -> dict[Pair, bytes]:
    groups = membership.topology.groups()
    machines = [membership.members[ranks[0]].machine for ranks in groups]
    return {
        (one, other): _key(machines[one], machines[other])
        for one in range(len(machines))
        for other in range(one + 1, len(machines))
    }


def _key(*machines: str) -> bytes:
    return _PREFIX + blake2b("\n".join(sorted(machines)).encode(), digest_size=16).hexdigest().encode()


def _link(numbers: bytes | Sequence[float]) -> Link | None:
    """A link of its latency and bandwidth, or of these packed; None where that makes no sense."""
    try:
        latency_s, bandwidth = _LINKS.decode(numbers) if isinstance(numbers, bytes) else map(float, numbers)
        is_finite = math.isfinite(latency_s + bandwidth)
        return Link(latency_s=latency_s, bandwidth=bandwidth, source=MEASURED) if is_finite else None
    except (ValueError, TypeError, ProtocolError):  # of another version
        return None
