"""One frame of the live view: plain values, which the page, the terminal and scripts get as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from raycollect import backends
from raycollect.core.operations import OpKind
from raycollect.group.link_costs import Costs
from raycollect.live_view.stream import ACTIVITIES, SLOT_S, Shares
from raycollect.observe.summary import SummaryRow
from raycollect.planner.prediction import Cluster, predict


class RankFrame(Struct, frozen=True, kw_only=True):
    """A rank of a group."""

    rank: int
    actor: str
    host: str
    pid: int
    device: str
    state: str  # the method that it runs, in words
    collectives: str  # the collectives that it has not ended, and its step in each
    awaited_s: float  # how long others have waited for it, in seconds
    is_last: bool  # whether others wait for it longest
    stack: tuple[str, ...]  # of the method, the innermost frame last
    stream: list[Shares]  # by time slot, the oldest first


class GroupFrame(Struct, frozen=True, kw_only=True):
    """A declared group."""

    name: str
    backend: str
    state: str
    detail: str  # why it is broken
    epoch: int
    ranks: tuple[RankFrame, ...]


class OperationFrame(Struct, frozen=True, kw_only=True):
    """The calls of one operation in one group within the last seconds."""

    group: str
    op: str
    backend: str
    ranks: int
    calls_per_s: float
    nbytes: int  # of one call, as nccl-tests count them
    median_s: float
    bandwidth: float  # algorithm bandwidth, in bytes per second; 0: nothing is moved
    predicted_bandwidth: float  # the planner's; 0: it has no prediction
    waiting: float  # the share of time in the consistency check
    last_rank: int  # the rank that is last most often; -1: none


class ReceiverFrame(Struct, frozen=True, kw_only=True):
    """A receiver group that the process drives."""

    actors: tuple[str, ...]  # by rank
    epoch: int
    number: int  # of the version that its methods see; 0: none
    behind: int  # how many versions were put after that one; after an older epoch, those of the newest epoch
    skipped: int  # how many versions its updates have skipped, in all


class PublicationFrame(Struct, frozen=True, kw_only=True):
    """A publication of the process, or one to which it has receiver groups."""

    name: str
    is_here: bool  # whether this process publishes it
    publisher: str  # the process that has put the newest version; empty: there is no version
    epoch: int
    number: int  # of the newest version
    nbytes: int
    holders: int  # how many receiving ranks are recorded with that version; those that died stay until it goes
    receivers: tuple[ReceiverFrame, ...]
    error: str  # why the newest version is unknown; empty: it is known


class Frame(Struct, frozen=True, kw_only=True):
    """What the groups of a process do at one moment."""

    at_s: float  # the time, in seconds since the epoch
    host: str
    pid: int
    program: str
    slot_s: float = SLOT_S
    activities: tuple[str, ...] = ACTIVITIES
    groups: tuple[GroupFrame, ...]
    operations: tuple[OperationFrame, ...]
    publications: tuple[PublicationFrame, ...] = ()
    missing: tuple[str, ...]  # participants whose spans are missing, and why


def last_rank(awaited_s: Sequence[float]) -> int:
    """Returns the rank for which others wait longest; -1: nobody waits."""
    longest = max(awaited_s, default=0.0)
    return awaited_s.index(longest) if longest > 0 else -1


def operation_frame(row: SummaryRow, duration_s: float, hosts: int, costs: Costs) -> OperationFrame:
    """Returns a row of a summary over `duration_s` seconds.

    `hosts` is the number of hosts of its group; 0 if unknown: then the row has no prediction.
    """
    nbytes = row.nbytes // max(row.calls, 1)
    predicted_s = _predicted_s(row, nbytes, hosts, costs)
    return OperationFrame(
        group=row.group,
        op=row.op,
        backend=row.backend,
        ranks=row.ranks,
        calls_per_s=row.calls / duration_s,
        nbytes=nbytes,
        median_s=row.median_s,
        bandwidth=row.algorithm_bandwidth,
        predicted_bandwidth=nbytes / predicted_s if predicted_s else 0.0,
        waiting=row.waiting,
        last_rank=row.last_rank,
    )


_WHOLE = (OpKind.ALLGATHER.value, OpKind.GATHER.value)
"""Operations whose bytes are those of the result, of which each rank gives its share."""


def _predicted_s(row: SummaryRow, nbytes: int, hosts: int, costs: Costs) -> float:
    """Returns how long a call takes by the planner's costs, on equal hosts; 0: it has none."""
    if not nbytes or not hosts or row.ranks % hosts:
        return 0.0
    given = nbytes // row.ranks if row.op in _WHOLE else nbytes
    try:
        cluster = Cluster(
            hosts=hosts,
            ranks_per_host=row.ranks // hosts,
            inside=costs.inside,
            between=costs.between,
            backend=backends.get(row.backend),
        )
        predictions = predict(row.op, given, cluster)
    except ValueError:  # an operation or a backend without prices, or a backend of one host
        return 0.0
    return predictions[0].time_s if predictions else 0.0
