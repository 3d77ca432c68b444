"""raycollect: the driver states a collective once, over ObjectRefs; every participant runs its matching half.

::

    import raycollect as col

    col.declare_collective_group([A, B])
    col.allreduce_refs([A.get_buffer.remote(), B.get_buffer.remote()])   # both buffers now hold the sum

Names are loaded on first use, so that the planner and the backends import without Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycollect import errors as errors
    from raycollect import types as types
    from raycollect.api import allgather_refs as allgather_refs
    from raycollect.api import allreduce_refs as allreduce_refs
    from raycollect.api import alltoall_refs as alltoall_refs
    from raycollect.api import barrier as barrier
    from raycollect.api import broadcast_refs as broadcast_refs
    from raycollect.api import gather_refs as gather_refs
    from raycollect.api import recv_ref as recv_ref
    from raycollect.api import reduce_refs as reduce_refs
    from raycollect.api import reducescatter_refs as reducescatter_refs
    from raycollect.api import scatter_refs as scatter_refs
    from raycollect.api import send_ref as send_ref
    from raycollect.backends.adopted import register_collective_backend as register_collective_backend
    from raycollect.bars import ProgressBars as ProgressBars
    from raycollect.bars import progress as progress
    from raycollect.batches import Batch as Batch
    from raycollect.batches import batch as batch
    from raycollect.bulletin import DirectoryBulletin as DirectoryBulletin
    from raycollect.captured import Capture as Capture
    from raycollect.captured import capture as capture
    from raycollect.declared import Group as Group
    from raycollect.declared import GroupStatistics as GroupStatistics
    from raycollect.declared import GroupStatus as GroupStatus
    from raycollect.declared import MemberStatistics as MemberStatistics
    from raycollect.declared import MemberStatus as MemberStatus
    from raycollect.declared import create_collective_group as create_collective_group
    from raycollect.declared import declare_collective_group as declare_collective_group
    from raycollect.declared import destroy_collective_group as destroy_collective_group
    from raycollect.declared import destroy_group as destroy_group
    from raycollect.gauge import Progress as Progress
    from raycollect.gauge import RankProgress as RankProgress
    from raycollect.handle import Handle as Handle
    from raycollect.imperative import allgather as allgather
    from raycollect.imperative import allreduce as allreduce
    from raycollect.imperative import alltoall as alltoall
    from raycollect.imperative import broadcast as broadcast
    from raycollect.imperative import gather as gather
    from raycollect.imperative import get_collective_group_size as get_collective_group_size
    from raycollect.imperative import get_group_handle as get_group_handle
    from raycollect.imperative import get_rank as get_rank
    from raycollect.imperative import gloo_available as gloo_available
    from raycollect.imperative import init_collective_group as init_collective_group
    from raycollect.imperative import is_backend_available as is_backend_available
    from raycollect.imperative import is_group_initialized as is_group_initialized
    from raycollect.imperative import nccl_available as nccl_available
    from raycollect.imperative import recv as recv
    from raycollect.imperative import reduce as reduce
    from raycollect.imperative import reducescatter as reducescatter
    from raycollect.imperative import scatter as scatter
    from raycollect.imperative import send as send
    from raycollect.model import ReduceOp as ReduceOp
    from raycollect.multigpu import allgather_multigpu as allgather_multigpu
    from raycollect.multigpu import allreduce_multigpu as allreduce_multigpu
    from raycollect.multigpu import broadcast_multigpu as broadcast_multigpu
    from raycollect.multigpu import recv_multigpu as recv_multigpu
    from raycollect.multigpu import reduce_multigpu as reduce_multigpu
    from raycollect.multigpu import reducescatter_multigpu as reducescatter_multigpu
    from raycollect.multigpu import send_multigpu as send_multigpu
    from raycollect.multigpu import synchronize as synchronize
    from raycollect.multigpu_refs import allgather_multigpu_refs as allgather_multigpu_refs
    from raycollect.multigpu_refs import allreduce_multigpu_refs as allreduce_multigpu_refs
    from raycollect.multigpu_refs import broadcast_multigpu_refs as broadcast_multigpu_refs
    from raycollect.multigpu_refs import reduce_multigpu_refs as reduce_multigpu_refs
    from raycollect.multigpu_refs import reducescatter_multigpu_refs as reducescatter_multigpu_refs
    from raycollect.multigpu_refs import send_multigpu_ref as send_multigpu_ref
    from raycollect.observe.summary import Summary as Summary
    from raycollect.observe.summary import SummaryRow as SummaryRow
    from raycollect.participant import CollectiveParticipant as CollectiveParticipant
    from raycollect.participant import by_value as by_value
    from raycollect.pending import Pending as Pending
    from raycollect.planned import plan as plan
    from raycollect.planner.explain import Explanation as Explanation
    from raycollect.rank_table import RankTable as RankTable
    from raycollect.runtime import mark_written as mark_written
    from raycollect.tensors import arena_statistics as arena_statistics
    from raycollect.tensors import array as array
    from raycollect.tensors import empty as empty
    from raycollect.tensors import full as full
    from raycollect.tensors import ones as ones
    from raycollect.tensors import zeros as zeros
    from raycollect.timelines import Timeline as Timeline
    from raycollect.timelines import summary as summary
    from raycollect.timelines import timeline as timeline
    from raycollect.values import free as free
    from raycollect.values import get as get
    from raycollect.work import CapturedRun as CapturedRun
    from raycollect.work import Work as Work

__version__ = "0.1.0"

_HOMES: dict[str, str] = {
    "Batch": "batches",
    "Capture": "captured",
    "CapturedRun": "work",
    "CollectiveParticipant": "participant",
    "DirectoryBulletin": "bulletin",
    "Explanation": "planner.explain",
    "Group": "declared",
    "GroupStatistics": "declared",
    "GroupStatus": "declared",
    "Handle": "handle",
    "MemberStatistics": "declared",
    "MemberStatus": "declared",
    "Pending": "pending",
    "Progress": "gauge",
    "ProgressBars": "bars",
    "RankProgress": "gauge",
    "RankTable": "rank_table",
    "ReduceOp": "model",
    "Summary": "observe.summary",
    "SummaryRow": "observe.summary",
    "Timeline": "timelines",
    "Work": "work",
    "allgather": "imperative",
    "allgather_multigpu": "multigpu",
    "allgather_multigpu_refs": "multigpu_refs",
    "allgather_refs": "api",
    "allreduce": "imperative",
    "allreduce_multigpu": "multigpu",
    "allreduce_multigpu_refs": "multigpu_refs",
    "allreduce_refs": "api",
    "alltoall": "imperative",
    "alltoall_refs": "api",
    "arena_statistics": "tensors",
    "array": "tensors",
    "barrier": "api",
    "batch": "batches",
    "broadcast": "imperative",
    "broadcast_multigpu": "multigpu",
    "broadcast_multigpu_refs": "multigpu_refs",
    "broadcast_refs": "api",
    "by_value": "participant",
    "capture": "captured",
    "create_collective_group": "declared",
    "declare_collective_group": "declared",
    "destroy_collective_group": "declared",
    "destroy_group": "declared",
    "empty": "tensors",
    "errors": "errors",
    "free": "values",
    "full": "tensors",
    "gather": "imperative",
    "gather_refs": "api",
    "get": "values",
    "get_collective_group_size": "imperative",
    "get_group_handle": "imperative",
    "get_rank": "imperative",
    "gloo_available": "imperative",
    "init_collective_group": "imperative",
    "is_backend_available": "imperative",
    "is_group_initialized": "imperative",
    "mark_written": "runtime",
    "nccl_available": "imperative",
    "ones": "tensors",
    "plan": "planned",
    "progress": "bars",
    "recv": "imperative",
    "recv_multigpu": "multigpu",
    "recv_ref": "api",
    "reduce": "imperative",
    "reduce_multigpu": "multigpu",
    "reduce_multigpu_refs": "multigpu_refs",
    "reduce_refs": "api",
    "reducescatter": "imperative",
    "reducescatter_multigpu": "multigpu",
    "reducescatter_multigpu_refs": "multigpu_refs",
    "reducescatter_refs": "api",
    "register_collective_backend": "backends.adopted",
    "scatter": "imperative",
    "scatter_refs": "api",
    "send": "imperative",
    "send_multigpu": "multigpu",
    "send_multigpu_ref": "multigpu_refs",
    "send_ref": "api",
    "summary": "timelines",
    "synchronize": "multigpu",
    "timeline": "timelines",
    "types": "types",
    "zeros": "tensors",
}
"""Public name -> the module it lives in."""

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{home}")
    value = module if name == home else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
