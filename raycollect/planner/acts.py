"""What ranks do for a request, step by step, in words."""

from __future__ import annotations

from raycollect.core.model import OpKind
from raycollect.planner.ir import Part
from raycollect.planner.membership import Membership
from raycollect.planner.report import Act
from raycollect.planner.template import Local, Step, Template
from raycollect.planner.wording import PEER, ranks_words, reduce_op_words


def acts(part: Part, membership: Membership, way: int, base: int) -> tuple[Act, ...]:
    """What the ranks do for a request by one algorithm; ranks with the same steps are together."""
    by_template: dict[int, list[int]] = {}
    for rank, index in zip(part.ranks, part.parts, strict=True):
        by_template.setdefault(index, []).append(rank)
    several = any(step.at for template in part.templates for step in template.ways[way])
    found: dict[tuple[str, ...], list[int]] = {}
    for index, ranks in by_template.items():
        template = part.templates[index]
        words = _Words(part, membership, template, ranks[0])
        steps = tuple(
            words.step(step) + (f" (launch {base + step.at})" if several or base else "") for step in template.ways[way]
        )
        found.setdefault(steps, []).extend(ranks)
    return tuple(Act(ranks=tuple(sorted(ranks)), steps=steps) for steps, ranks in found.items())


class _Words:
    """Describes the steps of ranks that have the same template."""

    def __init__(self, part: Part, membership: Membership, template: Template, rank: int) -> None:
        self._part = part
        self._template = template
        self._rank = rank
        self._names = {one.spec.group_id: one.spec.name for one in membership.inner}

    def step(self, step: Step) -> str:
        """One step, such as ``"reduce sum to rank 0 inside default/host-0"``."""
        if step.kind is Local.COMMIT:
            return "wait until all ranks have come so far"
        if step.kind is Local.COPY:
            whole = " its place" if step.dst == self._template.src else " the output"
            return f"copy{_piece(step.src_piece)} to{_piece(step.dst_piece) or whole}"
        if isinstance(step.kind, Local):
            return self._crossing(step)
        where, peer = self._domain(step)
        words = [step.kind.value, *reduce_op_words(step.op)]
        if step.src_piece >= 0 or step.dst_piece >= 0:
            words.append(_piece(max(step.src_piece, step.dst_piece)).strip())
        if step.peer >= 0 and step.kind in PEER:
            words.append(f"{PEER[step.kind]} {peer}")
        return " ".join([*words, *where]) + self._target(step)

    def _crossing(self, step: Step) -> str:
        if step.kind is Local.FOLD:
            return " ".join(["fold", *reduce_op_words(step.op), "over the GPUs of the rank, into scratch"])
        at = step.dst_piece if step.kind is Local.SPREAD else step.src_piece
        which = f"the tensor {'on GPU' if self._part.request.kind is OpKind.SEND else 'at place'} {at}"
        if step.kind is Local.BRING:
            return f"copy {which if at >= 0 else 'the list'} to the group's GPU, into scratch"
        return f"copy to {which}" if at >= 0 else f"copy to the {'other ' * (step.src_piece >= 0)}GPUs of the rank"

    def _domain(self, step: Step) -> tuple[list[str], str]:
        if step.level == 0:
            some = bool(step.ranks) and step.kind not in (OpKind.SEND, OpKind.RECV)
            return ([f"over ranks {ranks_words(step.ranks)}"] if some else []), f"rank {step.peer}"
        level = self._part.levels[step.level - 1]
        group_id, outer = next((one, ranks) for one, ranks in level if self._rank in ranks)
        if len(level) > 1:  # hosts: what each of them does is told once
            peer = "the host's first rank" if step.peer == 0 else f"rank {outer[step.peer]}"
            return ([] if step.peer == 0 else ["inside the host"]), peer
        within = f" of ranks {ranks_words([outer[rank] for rank in step.ranks])}" if step.ranks else ""
        return [f"over {self._names.get(group_id, group_id)}{within}"], f"rank {outer[step.peer]}"

    def _target(self, step: Step) -> str:
        if step.dst < 0:
            return ""
        if step.dst == step.src:
            return ", in place"
        buffer = self._template.buffers[step.dst]
        return ", into a new tensor" if buffer.is_output else ", into scratch" if buffer.scratch else ""


def _piece(piece: int) -> str:
    return "" if piece < 0 else f" piece {piece}"
