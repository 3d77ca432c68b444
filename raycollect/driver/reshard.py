"""`reshard_refs`: tensors move between any two layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from ray import ObjectRef

from raycollect.core.model import GroupLike, OpKind
from raycollect.driver import held_values, own_tensors
from raycollect.driver.call import Call, task_wait
from raycollect.driver.controller import Controller
from raycollect.driver.operand_binding import Operand, TaskWait
from raycollect.driver.pending import Pending
from raycollect.driver.side_layouts import HeldTensors, SideLayouts, held_tensors
from raycollect.driver.work import Work
from raycollect.errors import wrong_flags
from raycollect.planner import Membership, Reshard
from raycollect.planner.layout import Layout
from raycollect.planner.reshard.request import Named

__all__ = ["reshard_refs"]

Layouts = Layout | Mapping[str, Layout]
"""The layout of a tensor, or of the tensors of a dict by name or pattern."""


# fmt: off
@overload
def reshard_refs(src_refs: Sequence[Any], dst_refs: Sequence[Any], group_name: GroupLike = ..., *,
    src: Layouts | None = ..., dst: Layouts | None = ..., inplace: bool = ..., snapshot: bool = ...,
    async_op: Literal[False] = ..., timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def reshard_refs(src_refs: Sequence[Any], dst_refs: Sequence[Any], group_name: GroupLike = ..., *,
    src: Layouts | None = ..., dst: Layouts | None = ..., inplace: bool = ..., snapshot: bool = ...,
    async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def reshard_refs(
    src_refs: Sequence[Any],
    dst_refs: Sequence[Any],
    group_name: GroupLike = "default",
    *,
    src: Layouts | None = None,
    dst: Layouts | None = None,
    inplace: bool = True,
    snapshot: bool = False,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Moves tensors from one layout to another: from a trainer's ranks to those of a rollout, say.

    Both sides say how the global tensors lie on their ranks (`layout`, `fused_layouts`, `Layout.of_regions`). The sides
    may have different numbers of ranks, and share actors. The plan is proven before anything is sent: each target gets
    each of its elements once, the right one; and nothing moves where the layouts leave a hole. What a target's process
    holds is copied there; the rest comes from the nearest rank that holds it. Each host gets each byte once at most.

    Args:
        src_refs: One ref per rank of the sources, in the order of their layouts' ranks. Each stands for a tensor, or
            for a dict of tensors by name, in host memory. They are only read. A tensor or dict of this process may
            stand in place of a ref, and so may a ref of `ray.put` or of a task: an actor of `dst_refs` takes it in.
        dst_refs: The same of the targets, which are written in place; or actor handles, where the tensors are made: as
            numpy arrays, or by the library of what the same actor gives. Elements in no region stay as they are.
        group_name: A declared group that has all of these actors; ``"default"`` is derived from the refs where it was
            not declared. Other ranks of the group have no part in it.
        src: The layout of what the sources hold; with dicts, of each tensor by name, or by a pattern as of `fnmatch`:
            ``"layers.*.up"``. An exact name comes before patterns, and of those the first that matches counts. Names
            that only `src` has stay where they are. Of a partial sum, the targets get the sum of the addends, added up
            in their order. With None, or where none of its patterns matches, DTensors of torch say it themselves.
        dst: The layout that the targets want, with the same shapes. Floats become those of a dtype that it asks for. If
            it has patterns, they say it of each tensor of `src`. DTensors to be written say it themselves likewise.
        inplace: False: given targets stay as they are, and new tensors like them hold the result, and what the targets
            have where no region is.
        snapshot: True, in place: as of `allreduce_refs`; no target is overwritten before all ranks have what they need.
        async_op: True: returns a `Work` at once.
        timeout_s: How long the whole call may take, in seconds: waits for methods, for tasks and for other ranks
            included. By default ranks wait for each other as long as the group was declared with, or 60 s.

    Returns:
        The targets' refs, in the order of `dst_refs`: the given ones in place, new ones otherwise; or a `Work` of them.

    Raises:
        LayoutError: The layouts do not fit each other, or the tensors do not fit them; has all holes, overlaps,
            differences and tensors without a layout. Nothing has moved.
        CollectiveTimeoutError: A method has not returned in time, and its tensors had to be known, as there are
            patterns, or no layouts.
        RefusedError, GroupError, FaultError: As `allreduce_refs`.
    """
    running = Controller.running()
    driver_rank = None if running is None else running.takes_part(group_name)
    wait = task_wait(ReshardCall.name, group_name, timeout_s)
    src_refs = own_tensors.sources_on(dst_refs, src_refs, driver_rank, wait)
    call = ReshardCall(group_name, timeout_s, src_refs=src_refs, dst_refs=dst_refs, wait=wait)
    return call.start(src, dst, inplace=inplace, snapshot=snapshot, async_op=async_op)


class ReshardCall(Call):
    """One call of `reshard_refs`."""

    name = "reshard"
    is_of_all = False

    def __init__(
        self, group_name: GroupLike, timeout_s: float | None, *, src_refs: Any, dst_refs: Any, wait: TaskWait
    ) -> None:
        super().__init__(OpKind.ALLTOALL, group_name, timeout_s, wait=wait, src_refs=src_refs, dst_refs=dst_refs)

    def start(self, src: Any, dst: Any, *, inplace: bool, snapshot: bool, async_op: bool) -> Any:
        """Sends the reshard, or records it."""
        self._violations += wrong_flags(inplace=inplace)
        self._check_snapshot(snapshot)
        self._check_async(async_op)
        sides = self._layouts("src", src), self._layouts("dst", dst)
        self._raise()
        held, wanted = self._named(*sides)
        self._raise()
        given, taken = self._bound["src_refs"], self._bound["dst_refs"]
        reshard = Reshard(held, wanted, tuple(given), tuple(taken))
        compiled = self._compiled(
            [(rank, given.get(rank), taken.get(rank)) for rank in reshard.ranks],
            [(rank, operand if inplace else None) for rank, operand in taken.items()],
            is_list=True,
            inplace=inplace,
            snapshot=snapshot and inplace,
            reshard=reshard,
        )
        return self.carry_out(compiled, async_op=async_op)

    def _layouts(self, name: str, given: Any) -> SideLayouts:
        named = {"": given} if isinstance(given, Layout) else given
        if named is None:
            return SideLayouts(name, None)
        if not isinstance(named, Mapping) or not all(isinstance(layout, Layout) for layout in named.values()):
            expected = "a Layout (see raycollect.layout), a dict of Layouts by name or pattern, or None for DTensors"
            self._wrong(name, given, expected)
            return SideLayouts(name, {})
        return SideLayouts(name, {str(key): layout for key, layout in named.items()})

    def _named(self, src: SideLayouts, dst: SideLayouts) -> tuple[Named, Named]:
        """The layouts by name alone."""
        if src.is_open:
            src.resolve_held(self._held("src_refs"), list(dst.layouts))
        if dst.is_open:
            dst.resolve(list(src.layouts), lambda: self._held("dst_refs"))
        self._violations += (*src.violations, *dst.violations)
        return tuple(src.layouts.items()), tuple(dst.layouts.items())

    def _held(self, name: str) -> list[HeldTensors] | None:
        """The names and placements of the refs' tensors; None if they do not exist yet."""
        operands = self._bound[name]
        if any(operand.ref is None or type(operand.ref) is Pending for operand in operands.values()):
            return None
        refs = {rank: operand.ref for rank, operand in operands.items()}
        left_s = self._wait.deadline.left_s()
        limit_s = self._limit_s if left_s is None else left_s
        handles, violations = held_values.handles_of(refs, limit_s, self.name, self._group_name)
        self._violations += violations
        self._raise()
        return [held_tensors(handles[rank]) for rank in operands]

    def _is_left_out(self, name: str, value: Any) -> bool:
        return False

    def _makes(self, name: str, position: int) -> bool:
        return name == "dst_refs"

    def _find(self, operands: Mapping[str, list[Operand]]) -> Membership:
        actors = {operand.actor_id: operand for side in operands.values() for operand in side}
        return super()._find({"refs": list(actors.values())})
