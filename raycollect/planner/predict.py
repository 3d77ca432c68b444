"""What a collective would cost on a cluster that one does not have: in closed form, for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.model import OpKind, ReduceOp
from raycollect.planner.algorithms import ALGORITHMS
from raycollect.planner.cost import ONE_HOST, Layout
from raycollect.planner.setting import Setting
from raycollect.planner.topology import BETWEEN, INSIDE, Link

__all__ = ["Cluster", "Prediction", "predict"]

_BITWISE = ("local", "shm", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts that are alike, and the ranks on them, which follow each other host by host.

    Attributes:
        hosts: How many hosts.
        ranks_per_host: How many ranks on each.
        inside: What moving bytes costs inside a host.
        between: What it costs between hosts; the ranks of one host share it.
        backend: The backend of the group.
        inner: The backend of the ranks of one host among themselves.
        bitwise: Whether elements have to be folded in rank order; None: where the backend promises that (`shm`, `tcp`).
    """

    hosts: int
    ranks_per_host: int
    inside: Link = INSIDE
    between: Link = BETWEEN
    backend: str = "tcp"
    inner: str = "shm"
    bitwise: bool | None = None

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise ValueError(f"no such cluster: {self.hosts} hosts with {self.ranks_per_host} ranks each")
        if self.hosts > 1 and self.backend in ONE_HOST:
            raise ValueError(f"backend {self.backend!r} serves one host, not {self.hosts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one algorithm would cost.

    Attributes:
        name: The algorithm (`Choice.name`).
        time_s: Seconds.
        nbytes_inside: The bytes that travel inside hosts, of all ranks together.
        nbytes_between: The bytes that travel between hosts.
    """

    name: str
    time_s: float
    nbytes_inside: int
    nbytes_between: int


def predict(
    kind: OpKind | str, nbytes: int, cluster: Cluster, *, op: ReduceOp = ReduceOp.SUM
) -> tuple[Prediction, ...]:
    """Predicts what a collective would cost.

    Args:
        kind: The operation, or its name; rank 0 is the root.
        nbytes: The bytes that a rank gives, of pieces all together.
        cluster: Where the ranks are.
        op: The reduce op, of reductions.

    Returns:
        One prediction for each algorithm that is possible, the fastest first.

    Raises:
        ValueError: There is no such operation, or fewer than no bytes.
    """
    if nbytes < 0:
        raise ValueError(f"a rank can't give {nbytes} bytes")
    if not isinstance(kind, OpKind) and kind not in {one.value for one in OpKind}:
        raise ValueError(f"no operation {kind!r}; there are {', '.join(one.value for one in OpKind)}")
    setting = Setting(
        kind=OpKind(kind),
        backend=cluster.backend,
        layout=Layout.uniform(cluster.hosts, cluster.ranks_per_host, cluster.inside, cluster.between),
        op=op,
        hosts=cluster.inner,
        leaders=cluster.backend,
        bitwise=cluster.backend in _BITWISE if cluster.bitwise is None else cluster.bitwise,
    )
    found = []
    for name, algorithm in ALGORITHMS.items():
        if algorithm.serves(setting):
            cost = algorithm.cost(setting)
            inside, between = cost.traffic(nbytes)
            found.append(
                Prediction(name=name, time_s=cost.line.time_s(nbytes), nbytes_inside=inside, nbytes_between=between)
            )
    return tuple(sorted(found, key=lambda one: one.time_s))
