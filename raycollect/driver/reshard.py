"""`reshard_refs`: tensors move between any two layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raycollect.core.model import TENSOR, GroupLike, OpKind, Structure
from raycollect.driver import held_values, operand_binding
from raycollect.driver.call import Call
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.operand_binding import Operand
from raycollect.driver.pending import Pending
from raycollect.errors import Violation
from raycollect.group.membership import Membership
from raycollect.planner import Reshard
from raycollect.planner.layout import Layout
from raycollect.planner.reshard import naming

__all__ = ["reshard_refs"]

Layouts = Layout | Mapping[str, Layout]
"""The layout of a tensor, or of the tensors of a dict by name or pattern."""


def reshard_refs(
    src_refs: Sequence[Any],
    dst_refs: Sequence[Any],
    group_name: GroupLike = "default",
    *,
    src: Layouts,
    dst: Layouts,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Moves tensors from one layout to another: from a trainer's ranks to those of a rollout, say.

    Both sides say how the global tensors lie on their ranks (`layout`, `fused_layouts`, `Layout.of_regions`). The sides
    may have different numbers of ranks, and share actors. The plan is proven before anything is sent: each target gets
    each of its elements once, the right one; and nothing moves where the layouts leave a hole. What a target's process
    holds is copied there; the rest comes from the nearest rank that holds it. Each host gets each byte once at most.

    Args:
        src_refs: One ref per rank of the sources, in the order of their layouts' ranks. Each stands for a tensor, or
            for a dict of tensors by name, in host memory. They are only read.
        dst_refs: The same of the targets, which are written in place; or actor handles, where the tensors are made: as
            numpy arrays, or by the library of what the same actor gives. Elements in no region stay as they are.
        group_name: A declared group that has all of these actors; ``"default"`` is derived from the refs where it was
            not declared. Other ranks of the group have no part in it.
        src: The layout of what the sources hold; with dicts, of each tensor by name, or by a pattern as of `fnmatch`:
            ``"layers.*.up"``. An exact name comes before patterns, and of those the first that matches counts. Names
            that only `src` has stay where they are. Of a partial sum, the targets get the sum of the addends, added up
            in their order.
        dst: The layout that the targets want, with the same shapes and dtypes. If it has patterns, they say it of each
            tensor of `src`.
        async_op: True: returns a `Work` at once.
        timeout_s: How long ranks wait for each other, in seconds; by default as the group was declared, or 60.

    Returns:
        The targets' refs, in the order of `dst_refs`; or a `Work` of them.

    Raises:
        LayoutError: The layouts do not fit each other, or the tensors do not fit them; has all holes, overlaps,
            differences and tensors without a layout. Nothing has moved.
        CollectiveTimeoutError: A method that makes a source has not returned in time, and its tensors' names had to be
            known, as `src` has patterns.
        RefusedError, GroupError, FaultError: As `allreduce_refs`.
    """
    return ReshardCall(group_name, timeout_s, src_refs=src_refs, dst_refs=dst_refs).start(src, dst, async_op=async_op)


class ReshardCall(Call):
    """One call of `reshard_refs`."""

    name = "reshard"

    def __init__(self, group_name: GroupLike, timeout_s: float | None, *, src_refs: Any, dst_refs: Any) -> None:
        super().__init__(OpKind.ALLTOALL, group_name, timeout_s, src_refs=src_refs, dst_refs=dst_refs)

    def start(self, src: Any, dst: Any, *, async_op: bool) -> Any:
        """Sends the reshard, or records it."""
        self._check_async(async_op)
        said = self._layouts("src", src), self._layouts("dst", dst)
        self._raise()
        held, wanted = self._named(*said)
        self._raise()
        given, taken = self._bound["src_refs"], self._bound["dst_refs"]
        reshard = Reshard(tuple(held.items()), tuple(wanted.items()), tuple(given), tuple(taken))
        request_list, membership = self._request_list, self._membership
        if self._batch is not None:
            self._batch.outermost.held.hold(self._controller, membership)
        source = request_list.source
        operands = tuple((rank, source(given.get(rank)), source(taken.get(rank))) for rank in reshard.ranks)
        results = [self._ref(rank, one) for rank, one in taken.items()]
        asked = RequestKey(
            membership.roster, OpKind.ALLTOALL, operands, None, -1, -1, True, self._limit_s, reshard=reshard
        )
        request_list.add(asked, membership, results)
        return self._result(async_op)

    def _layouts(self, name: str, given: Any) -> dict[str, Layout]:
        named = {"": given} if isinstance(given, Layout) else given
        if not isinstance(named, Mapping) or not all(isinstance(one, Layout) for one in named.values()):
            self._wrong(name, given, "a Layout (see raycollect.layout), or a dict of Layouts by name or pattern")
            return {}
        found = {str(key): one for key, one in named.items()}
        self._violations += naming.pattern_faults(name, found)
        return found

    def _named(self, src: dict[str, Layout], dst: dict[str, Layout]) -> tuple[dict[str, Layout], dict[str, Layout]]:
        """The layouts by name alone: those of `src` by what its refs hold, those of `dst` by what `src` then has."""
        found, missing = src, list[str]()
        if naming.has_patterns(src):
            held = self._held("src_refs")
            if held is not None:
                found, missing = naming.of_held(src, held)
            elif naming.has_patterns(dst):
                self._wrong("src", list(src), "names: it is not known before the call what these refs will hold")
            else:
                found, _ = naming.of_names(src, dst)
        if missing:
            self._violations.append(naming.unmatched("src", missing, src))
        if naming.has_patterns(dst):
            dst, missing = naming.of_names(dst, found)
            if missing:
                self._violations.append(naming.unmatched("dst", missing, dst))
        return found, dst

    def _held(self, name: str) -> list[str] | None:
        """The names of the tensors that the refs hold; None: a plan that is still to run makes some of them."""
        operands = self._bound[name]
        if any(type(one.ref) is Pending for one in operands.values()):
            return None
        handles, violations = held_values.handles_of(
            {rank: one.ref for rank, one in operands.items()}, self._limit_s, self.name, self._group_name
        )
        self._violations += violations
        return list(dict.fromkeys(key for one in handles.values() for key in _keys(one.structure)))

    def _is_left_out(self, name: str, value: Any) -> bool:
        return False

    def _makes(self, name: str, position: int) -> bool:
        return name == "dst_refs"

    def _find(self, operands: Mapping[str, list[Operand]]) -> Membership:
        actors = {one.actor_id: one for side in operands.values() for one in side}
        return super()._find({"refs": list(actors.values())})

    def _bind(self, name: str, operands: list[Operand], *, alone: bool) -> dict[int, Operand]:
        bound = operand_binding.bind(operands, self._membership)
        if isinstance(bound, dict):
            return bound
        self._violations += [_of(name, one) for one in bound]
        return {}


def _keys(structure: Structure) -> tuple[str, ...]:
    return ("",) if structure == TENSOR else tuple(str(name) for name in structure.names)


def _of(name: str, violation: Violation) -> Violation:
    return replace(violation, field=f"{violation.field} of {name}")
