"""What the algorithms of a part cost, and which tensors of a bundle travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycollect.core.model import PIECES, OpKind
from raycollect.planner.algorithms import ALGORITHMS, cost_of
from raycollect.planner.cost import FREE, Cost, Layout, priced
from raycollect.planner.fusion import buckets, offered
from raycollect.planner.ir import Part
from raycollect.planner.membership import Membership
from raycollect.planner.template import NATIVE

TOGETHER = frozenset({"shm"})
"""The backends that run kernels together (`raycollect.core.protocols.Together`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Which tensors of a bundle travel together."""

    tensors: int = 0  # how many tensors are packed
    kernels: int = 0  # in how many kernels
    nbytes: int = 0  # the most staging that a kernel takes on a rank
    together: int = 0  # how many tensors the backend runs with one synchronization of the ranks


def packing(kind: OpKind, backend: str, sizes: Sequence[tuple[str, int]], staging: int) -> Packing:
    """Predicts what travels together (`fusion`), from the dtype and the staging bytes of each tensor of a bundle."""
    runs_together = backend in TOGETHER and kind not in PIECES
    large = set(offered([nbytes for _, nbytes in sizes])) if runs_together else set[int]()
    rest = [one for at, one in enumerate(sizes) if at not in large]
    packed = [[rest[at][1] for at in bucket] for bucket in buckets(rest, staging) if len(bucket) > 1]
    return Packing(
        tensors=sum(map(len, packed)),
        kernels=len(packed),
        nbytes=max(map(sum, packed), default=0),
        together=len(large),
    )


def price(part: Part, membership: Membership, name: str) -> Cost:
    """The cost of one of a part's algorithms."""
    if name == NATIVE.name:
        return _own(part, membership)
    return cost_of(ALGORITHMS[name], part, membership)


def _own(part: Part, membership: Membership) -> Cost:
    """The cost of the backend's own kernels, or of those that substitute them, one after the other."""
    hosts = membership.topology.hosts
    place = replace(membership.topology, hosts=tuple(hosts[rank] for rank in part.ranks))
    layout = Layout.of(place, part.places.get(part.request.root, -1), rank_order=membership.bitwise)
    kinds = dict.fromkeys(
        OpKind.SEND if step.kind is OpKind.RECV else step.kind
        for template in part.templates
        for step in template.steps
        if isinstance(step.kind, OpKind)
    )
    return sum((priced(kind, membership.spec.backend, layout) for kind in kinds), FREE)
