"""Predicts the cost of a collective on any cluster, in closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from raycollect.core.model import OpKind, Pricing
from raycollect.planner.algorithms import ALGORITHMS
from raycollect.planner.cost import HostLayout
from raycollect.planner.topology import BETWEEN, INSIDE, Link


class PricedBackend(Protocol):
    """The properties of a backend that a prediction needs: `Capabilities`, as `raycollect.backends.get` returns it."""

    @property
    def name(self) -> str:
        """Its name, for messages."""
        ...

    @property
    def pricing(self) -> Pricing:
        """How it moves data."""
        ...

    @property
    def bitwise(self) -> bool:
        """Whether it folds elements in rank order."""
        ...

    @property
    def cross_host(self) -> bool:
        """Whether it serves several hosts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal hosts with consecutive ranks."""

    hosts: int
    ranks_per_host: int
    inside: Link = INSIDE  # the link inside a host
    between: Link = BETWEEN  # the link between hosts, shared by the ranks of one host
    backend: PricedBackend  # such as ``raycollect.backends.get("tcp")``
    # Whether elements have to be folded in rank order; None if the backend decides (`shm`; `tcp` on request,
    # and where each rank has a host of its own or all have one)
    bitwise: bool | None = None

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise ValueError(f"no such cluster: {self.hosts} hosts with {self.ranks_per_host} ranks each")
        if self.hosts > 1 and not self.backend.cross_host:
            raise ValueError(f"backend {self.backend.name!r} serves one host, not {self.hosts}")

    @property
    def in_rank_order(self) -> bool:
        """Whether elements are folded in rank order."""
        if self.bitwise is not None:
            return self.bitwise
        by_host = self.backend.pricing.by_host and 1 not in (self.hosts, self.ranks_per_host)
        return self.backend.bitwise and not by_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted cost of one algorithm; bytes are those of all ranks together."""

    name: str
    time_s: float
    nbytes_inside: int
    nbytes_between: int


def predict(kind: OpKind | str, nbytes: int, cluster: Cluster) -> tuple[Prediction, ...]:
    """Predicts the cost of each algorithm that is possible, the fastest first.

    Args:
        kind: The operation, or its name; rank 0 is the root.
        nbytes: The bytes that a rank gives, all pieces together.
        cluster: The cluster.

    Raises:
        ValueError: The operation is unknown, or `nbytes` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"a rank can't give {nbytes} bytes")
    if not isinstance(kind, OpKind) and kind not in {operation.value for operation in OpKind}:
        raise ValueError(f"no operation {kind!r}; there are {', '.join(operation.value for operation in OpKind)}")
    bitwise = cluster.in_rank_order
    layout = HostLayout.uniform(cluster.hosts, cluster.ranks_per_host, cluster.inside, cluster.between)
    layout, predictions = replace(layout, rank_order=bitwise), []
    for name, algorithm in ALGORITHMS.items():
        if OpKind(kind) in algorithm.kinds:
            cost = algorithm.cost(OpKind(kind), cluster.backend.pricing, layout)
            inside, between = cost.traffic(nbytes)
            predictions.append(
                Prediction(name=name, time_s=cost.line.time_s(nbytes), nbytes_inside=inside, nbytes_between=between)
            )
    return tuple(sorted(predictions, key=lambda prediction: prediction.time_s))
