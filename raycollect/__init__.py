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
    from raycollect.captured.step import Capture as Capture
    from raycollect.captured.step import CapturedRun as CapturedRun
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
    from raycollect.driver.progress import ProgressBars as ProgressBars
    from raycollect.driver.progress import RankProgress as RankProgress
    from raycollect.driver.progress import progress as progress
    from raycollect.driver.reshard import reshard_refs as reshard_refs
    from raycollect.driver.timeline import Timeline as Timeline
    from raycollect.driver.timeline import summary as summary
    from raycollect.driver.timeline import timeline as timeline
    from raycollect.driver.values import free as free
    from raycollect.driver.values import get as get
    from raycollect.driver.work import Work as Work
    from raycollect.group.bootstrap_store import DirectoryBulletin as DirectoryBulletin
    from raycollect.group.rank_table import RankTable as RankTable
    from raycollect.live_view.cluster import ClusterView as ClusterView
    from raycollect.live_view.cluster import live_views as live_views
    from raycollect.live_view.view import LiveView as LiveView
    from raycollect.live_view.view import live as live
    from raycollect.member.init import get_collective_group_size as get_collective_group_size
    from raycollect.member.init import get_group_handle as get_group_handle
    from raycollect.member.init import get_rank as get_rank
    from raycollect.member.init import gloo_available as gloo_available
    from raycollect.member.init import init_collective_group as init_collective_group
    from raycollect.member.init import is_backend_available as is_backend_available
    from raycollect.member.init import is_group_initialized as is_group_initialized
    from raycollect.member.init import nccl_available as nccl_available
    from raycollect.member.mixin import CollectiveParticipant as CollectiveParticipant
    from raycollect.member.mixin import by_value as by_value
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
    from raycollect.member.participant import mark_written as mark_written
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
    from raycollect.ray_plugins import register_with_ray as register_with_ray
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

_NAMES: dict[str, str] = {
    "backends.adopted": "register_collective_backend",
    "captured.step": "Capture CapturedRun capture",
    "core.model": "ReduceOp",
    "driver.batch": "Batch batch",
    "driver.dry_run": "plan",
    "driver.group": (
        "Group create_collective_group declare_collective_group destroy_collective_group destroy_group this_process"
    ),
    "driver.group_status": "GroupStatistics GroupStatus MemberStatistics MemberStatus",
    "driver.operations": (
        "allgather_refs allreduce_refs alltoall_refs barrier broadcast_refs exscan_refs gather_refs recv_ref "
        "reduce_refs reducescatter_refs scan_refs scatter_refs send_ref"
    ),
    "driver.pending": "Pending",
    "driver.progress": "Progress ProgressBars RankProgress progress",
    "driver.reshard": "reshard_refs",
    "driver.timeline": "Timeline summary timeline",
    "driver.values": "free get",
    "driver.work": "Work",
    "errors": "errors",
    "group.bootstrap_store": "DirectoryBulletin",
    "group.rank_table": "RankTable",
    "live_view.cluster": "ClusterView live_views",
    "live_view.view": "LiveView live",
    "member.init": (
        "get_collective_group_size get_group_handle get_rank gloo_available init_collective_group "
        "is_backend_available is_group_initialized nccl_available"
    ),
    "member.multigpu_operations": (
        "allgather_multigpu allreduce_multigpu broadcast_multigpu recv_multigpu reduce_multigpu "
        "reducescatter_multigpu send_multigpu synchronize"
    ),
    "member.objects": "allgather_object broadcast_object gather_object scatter_object",
    "member.operations": (
        "allgather allreduce alltoall broadcast exscan gather recv reduce reducescatter scan scatter send"
    ),
    "member.mixin": "CollectiveParticipant by_value",
    "member.participant": "mark_written",
    "observe.summary": "Summary SummaryRow",
    "planner.joined": "join_layouts",
    "planner.layout": "Layout Region fused_layouts layout",
    "planner.report": "Explanation",
    "pos.handle": "Handle",
    "pos.tensors": "arena_statistics array empty full ones zeros",
    "ray_plugins": "register_with_ray",
    "traced.kept": "keep",
    "traced.step": "Step step",
    "types": "types",
    "weights.layouts.dtensors": "layout_of",
    "weights.layouts.record": "record_layout",
    "weights.protocol": "Version",
    "weights.publication": "Publication publish",
    "weights.receipts": "RankReceipt Receipt",
    "weights.safetensors": "map_safetensors",
    "weights.subscription": "Subscription subscribe",
}
"""Module -> the public names that live in it."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

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
