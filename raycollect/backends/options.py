"""The options passed to groups in the shape of Ray's `BaseGroup`: one class per operation, names as in Ray.

Values are fields of each instance: with class attributes, as in Ray, one call's reduce op would change the process's
default.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from raycollect.core.model import ReduceOp

unset_timeout_ms: timedelta = timedelta(milliseconds=-1)  # No timeout. A `timedelta` despite its name, as in Ray.


@dataclass(slots=True)
class BarrierOptions:
    """Options of a barrier, and of every other operation."""

    timeout_ms: timedelta = unset_timeout_ms


@dataclass(slots=True)
class AllGatherOptions(BarrierOptions):
    """Options of an allgather."""


@dataclass(slots=True)
class AllReduceOptions(BarrierOptions):
    """Options of an allreduce."""

    reduceOp: ReduceOp = ReduceOp.SUM  # noqa: N815 - the name that Ray gave it


@dataclass(slots=True)
class ReduceScatterOptions(AllReduceOptions):
    """Options of a reduce-scatter."""


@dataclass(slots=True)
class BroadcastOptions(BarrierOptions):
    """Options of a broadcast from `root_rank`."""

    root_rank: int = 0
    root_tensor: int = 0


@dataclass(slots=True)
class ReduceOptions(AllReduceOptions):
    """Options of a reduce to `root_rank`."""

    root_rank: int = 0
    root_tensor: int = 0


@dataclass(slots=True)
class SendOptions(BarrierOptions):
    """Options of a send to `dst_rank`; `n_elements` 0 means all."""

    dst_rank: int = 0
    dst_gpu_index: int = 0
    n_elements: int = 0


@dataclass(slots=True)
class RecvOptions(BarrierOptions):
    """Options of a receive from `src_rank`; `n_elements` 0 means all."""

    src_rank: int = 0
    src_gpu_index: int = 0
    n_elements: int = 0
