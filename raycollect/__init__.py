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
    from raycollect.backends.adopted import register_collective_backend as register_collective_backend
    from raycollect.captured.captured_run import CapturedRun as CapturedRun
    from raycollect.captured.step import Capture as Capture
    from raycollect.captured.step import capture as capture
    from raycollect.core.model import ReduceOp as ReduceOp
    from raycollect.driver.batch import Batch as Batch
    from raycollect.driver.batch import batch as batch
    from raycollect.driver.dry_run import plan as plan
    from raycollect.driver.group import Group as Group
    from raycollect.driver.group import create_collective_group as create_collective_group
    from raycollect.driver.group import declare_collective_group as declare_collective_group
    from raycollect.driver.group import destroy_collective_group as destroy_collective_group
    from raycollect.driver.group import destroy_group as destroy_group
    from raycollect.driver.group import this_process as this_process
    from raycollect.driver.group_status import GroupStatistics as GroupStatistics
    from raycollect.driver.group_status import GroupStatus as GroupStatus
    from raycollect.driver.group_status import MemberStatistics as MemberStatistics
    from raycollect.driver.group_status import MemberStatus as MemberStatus
    from raycollect.driver.operations import allgather_refs as allgather_refs
    from raycollect.driver.operations import allreduce_refs as allreduce_refs
    from raycollect.driver.operations import alltoall_refs as alltoall_refs
    from raycollect.driver.operations import barrier as barrier
    from raycollect.driver.operations import broadcast_refs as broadcast_refs
    from raycollect.driver.operations import exscan_refs as exscan_refs
    from raycollect.driver.operations import gather_refs as gather_refs
    from raycollect.driver.operations import recv_ref as recv_ref
    from raycollect.driver.operations import reduce_refs as reduce_refs
    from raycollect.driver.operations import reducescatter_refs as reducescatter_refs
    from raycollect.driver.operations import scan_refs as scan_refs
    from raycollect.driver.operations import scatter_refs as scatter_refs
    from raycollect.driver.operations import send_ref as send_ref
    from raycollect.driver.pending import Pending as Pending
    from raycollect.driver.progress import Progress as Progress
    from raycollect.driver.progress import RankProgress as RankProgress
    from raycollect.driver.progress_bar import ProgressBars as ProgressBars
    from raycollect.driver.progress_bar import progress as progress
    from raycollect.driver.reshard import reshard_refs as reshard_refs
    from raycollect.driver.timeline import Timeline as Timeline
    from raycollect.driver.timeline import summary as summary
    from raycollect.driver.timeline import timeline as timeline
    from raycollect.driver.values import free as free
    from raycollect.driver.values import get as get
    from raycollect.driver.work import Work as Work
    from raycollect.group.bootstrap_store import DirectoryBulletin as DirectoryBulletin
    from raycollect.group.rank_table import RankTable as RankTable
    from raycollect.member.init import get_collective_group_size as get_collective_group_size
    from raycollect.member.init import get_group_handle as get_group_handle
    from raycollect.member.init import get_rank as get_rank
    from raycollect.member.init import gloo_available as gloo_available
    from raycollect.member.init import init_collective_group as init_collective_group
    from raycollect.member.init import is_backend_available as is_backend_available
    from raycollect.member.init import is_group_initialized as is_group_initialized
    from raycollect.member.init import nccl_available as nccl_available
    from raycollect.member.multigpu_operations import allgather_multigpu as allgather_multigpu
    from raycollect.member.multigpu_operations import allreduce_multigpu as allreduce_multigpu
    from raycollect.member.multigpu_operations import broadcast_multigpu as broadcast_multigpu
    from raycollect.member.multigpu_operations import recv_multigpu as recv_multigpu
    from raycollect.member.multigpu_operations import reduce_multigpu as reduce_multigpu
    from raycollect.member.multigpu_operations import reducescatter_multigpu as reducescatter_multigpu
    from raycollect.member.multigpu_operations import send_multigpu as send_multigpu
    from raycollect.member.multigpu_operations import synchronize as synchronize
    from raycollect.member.objects import allgather_object as allgather_object
    from raycollect.member.objects import broadcast_object as broadcast_object
    from raycollect.member.objects import gather_object as gather_object
    from raycollect.member.objects import scatter_object as scatter_object
    from raycollect.member.operations import allgather as allgather
    from raycollect.member.operations import allreduce as allreduce
    from raycollect.member.operations import alltoall as alltoall
    from raycollect.member.operations import broadcast as broadcast
    from raycollect.member.operations import exscan as exscan
    from raycollect.member.operations import gather as gather
    from raycollect.member.operations import recv as recv
    from raycollect.member.operations import reduce as reduce
    from raycollect.member.operations import reducescatter as reducescatter
    from raycollect.member.operations import scan as scan
    from raycollect.member.operations import scatter as scatter
    from raycollect.member.operations import send as send
    from raycollect.member.participant import CollectiveParticipant as CollectiveParticipant
    from raycollect.member.participant import by_value as by_value
    from raycollect.member.runtime import mark_written as mark_written
    from raycollect.observe.summary import Summary as Summary
    from raycollect.observe.summary import SummaryRow as SummaryRow
    from raycollect.planner.joined import join_layouts as join_layouts
    from raycollect.planner.layout import Layout as Layout
    from raycollect.planner.layout import Region as Region
    from raycollect.planner.layout import fused_layouts as fused_layouts
    from raycollect.planner.layout import layout as layout
    from raycollect.planner.report import Explanation as Explanation
    from raycollect.pos.handle import Handle as Handle
    from raycollect.pos.tensors import arena_statistics as arena_statistics
    from raycollect.pos.tensors import array as array
    from raycollect.pos.tensors import empty as empty
    from raycollect.pos.tensors import full as full
    from raycollect.pos.tensors import ones as ones
    from raycollect.pos.tensors import zeros as zeros
    from raycollect.traced.kept import keep as keep
    from raycollect.traced.step import Step as Step
    from raycollect.traced.step import step as step
    from raycollect.weights.layouts.dtensors import layout_of as layout_of
    from raycollect.weights.layouts.record import record_layout as record_layout
    from raycollect.weights.protocol import Version as Version
    from raycollect.weights.publication import Publication as Publication
    from raycollect.weights.publication import publish as publish
    from raycollect.weights.receipts import RankReceipt as RankReceipt
    from raycollect.weights.receipts import Receipt as Receipt
    from raycollect.weights.safetensors import map_safetensors as map_safetensors
    from raycollect.weights.subscription import Subscription as Subscription
    from raycollect.weights.subscription import subscribe as subscribe

__version__ = "0.1.0"

_HOMES: dict[str, str] = {
    "Batch": "driver.batch",
    "Capture": "captured.step",
    "CapturedRun": "captured.captured_run",
    "CollectiveParticipant": "member.participant",
    "DirectoryBulletin": "group.bootstrap_store",
    "Explanation": "planner.report",
    "Group": "driver.group",
    "GroupStatistics": "driver.group_status",
    "GroupStatus": "driver.group_status",
    "Handle": "pos.handle",
    "Layout": "planner.layout",
    "MemberStatistics": "driver.group_status",
    "MemberStatus": "driver.group_status",
    "Pending": "driver.pending",
    "Progress": "driver.progress",
    "ProgressBars": "driver.progress_bar",
    "Publication": "weights.publication",
    "RankProgress": "driver.progress",
    "RankReceipt": "weights.receipts",
    "RankTable": "group.rank_table",
    "Receipt": "weights.receipts",
    "ReduceOp": "core.model",
    "Region": "planner.layout",
    "Step": "traced.step",
    "Subscription": "weights.subscription",
    "Summary": "observe.summary",
    "SummaryRow": "observe.summary",
    "Timeline": "driver.timeline",
    "Version": "weights.protocol",
    "Work": "driver.work",
    "allgather": "member.operations",
    "allgather_multigpu": "member.multigpu_operations",
    "allgather_object": "member.objects",
    "allgather_refs": "driver.operations",
    "allreduce": "member.operations",
    "allreduce_multigpu": "member.multigpu_operations",
    "allreduce_refs": "driver.operations",
    "alltoall": "member.operations",
    "alltoall_refs": "driver.operations",
    "arena_statistics": "pos.tensors",
    "array": "pos.tensors",
    "barrier": "driver.operations",
    "batch": "driver.batch",
    "broadcast": "member.operations",
    "broadcast_multigpu": "member.multigpu_operations",
    "broadcast_object": "member.objects",
    "broadcast_refs": "driver.operations",
    "by_value": "member.participant",
    "capture": "captured.step",
    "create_collective_group": "driver.group",
    "declare_collective_group": "driver.group",
    "destroy_collective_group": "driver.group",
    "destroy_group": "driver.group",
    "empty": "pos.tensors",
    "errors": "errors",
    "exscan": "member.operations",
    "exscan_refs": "driver.operations",
    "free": "driver.values",
    "fused_layouts": "planner.layout",
    "full": "pos.tensors",
    "gather": "member.operations",
    "gather_object": "member.objects",
    "gather_refs": "driver.operations",
    "get": "driver.values",
    "get_collective_group_size": "member.init",
    "get_group_handle": "member.init",
    "get_rank": "member.init",
    "gloo_available": "member.init",
    "init_collective_group": "member.init",
    "is_backend_available": "member.init",
    "is_group_initialized": "member.init",
    "join_layouts": "planner.joined",
    "keep": "traced.kept",
    "layout": "planner.layout",
    "layout_of": "weights.layouts.dtensors",
    "map_safetensors": "weights.safetensors",
    "mark_written": "member.runtime",
    "nccl_available": "member.init",
    "ones": "pos.tensors",
    "plan": "driver.dry_run",
    "progress": "driver.progress_bar",
    "publish": "weights.publication",
    "record_layout": "weights.layouts.record",
    "recv": "member.operations",
    "recv_multigpu": "member.multigpu_operations",
    "recv_ref": "driver.operations",
    "reduce": "member.operations",
    "reduce_multigpu": "member.multigpu_operations",
    "reduce_refs": "driver.operations",
    "reducescatter": "member.operations",
    "reducescatter_multigpu": "member.multigpu_operations",
    "reducescatter_refs": "driver.operations",
    "register_collective_backend": "backends.adopted",
    "reshard_refs": "driver.reshard",
    "scan": "member.operations",
    "scan_refs": "driver.operations",
    "scatter": "member.operations",
    "scatter_object": "member.objects",
    "scatter_refs": "driver.operations",
    "send": "member.operations",
    "send_multigpu": "member.multigpu_operations",
    "send_ref": "driver.operations",
    "step": "traced.step",
    "subscribe": "weights.subscription",
    "summary": "driver.timeline",
    "synchronize": "member.multigpu_operations",
    "this_process": "driver.group",
    "timeline": "driver.timeline",
    "types": "types",
    "zeros": "pos.tensors",
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
