"""What a call tells a group that has the shape of Ray's `BaseGroup`: one class per operation, names as in Ray.

Values are fields of each instance; on the class, as in Ray, one call's reduce op would become the process's default.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from raycollect.model import ReduceOp

__all__ = [
    "AllGatherOptions",
    "AllReduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "RecvOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "SendOptions",
    "unset_timeout_ms",
]

unset_timeout_ms: timedelta = timedelta(milliseconds=-1)
"""Stands for no timeout. A `timedelta` for all its name, as in Ray."""


@dataclass(slots=True)
class AllReduceOptions:
    """Of an allreduce."""

    reduceOp: ReduceOp = ReduceOp.SUM  # noqa: N815 - the name that Ray gave it, here and below
    timeout_ms: timedelta = unset_timeout_ms


@dataclass(slots=True)
class BarrierOptions:
    """Of a barrier."""

    timeout_ms: timedelta = unset_timeout_ms


@dataclass(slots=True)
class ReduceOptions:
    """Of a reduce to `root_rank`."""

    reduceOp: ReduceOp = ReduceOp.SUM  # noqa: N815
    root_rank: int = 0
    root_tensor: int = 0
    timeout_ms: timedelta = unset_timeout_ms


@dataclass(slots=True)
class AllGatherOptions:
    """Of an allgather."""

    timeout_ms: timedelta = unset_timeout_ms


@dataclass(slots=True)
class BroadcastOptions:
    """Of a broadcast from `root_rank`."""

    root_rank: int = 0
    root_tensor: int = 0
    timeout_ms: timedelta = unset_timeout_ms


@dataclass(slots=True)
class ReduceScatterOptions:
    """Of a reduce-scatter."""

    reduceOp: ReduceOp = ReduceOp.SUM  # noqa: N815
    timeout_ms: timedelta = unset_timeout_ms


@dataclass(slots=True)
class SendOptions:
    """Of a send to `dst_rank`; `n_elements` 0 means all."""

    dst_rank: int = 0
    dst_gpu_index: int = 0
    n_elements: int = 0
    timeout_ms: timedelta = unset_timeout_ms


@dataclass(slots=True)
class RecvOptions:
    """Of a receive from `src_rank`; `n_elements` 0 means all."""

    src_rank: int = 0
    src_gpu_index: int = 0
    n_elements: int = 0
    timeout_ms: timedelta = unset_timeout_ms
