"""What ranks do for a request, step by step, in words."""

from __future__ import annotations

from dataclasses import replace

from raycollect.core.model import OpKind
from raycollect.planner.ir import Part
from raycollect.planner.report import Act, ActStep
from raycollect.planner.template import Local, Step, Template
from raycollect.planner.wording import PEER, ranks_words, reduce_op_words


def acts(part: Part, way: int, base: int) -> tuple[Act, ...]:
    """What the ranks do for a request by one algorithm; ranks with the same steps are together."""
    by_template: dict[int, list[int]] = {}
    for rank, index in zip(part.ranks, part.parts, strict=True):
        by_template.setdefault(index, []).append(rank)
    several = any(step.at for template in part.templates for step in template.ways[way])
    found: dict[tuple[ActStep, ...], list[int]] = {}
    for index, ranks in by_template.items():
        template = part.templates[index]
        words = _Words(template)
        steps = tuple(
            replace(words.step(step), launch=base + step.at if several or base else None) for step in template.ways[way]
        )
        found.setdefault(steps, []).extend(ranks)
    return tuple(Act(ranks=tuple(sorted(ranks)), steps=steps) for steps, ranks in found.items())


class _Words:
    """Describes the steps of ranks that have the same template."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def step(self, step: Step) -> ActStep:
        """One step, such as ``"reduce sum to rank 0"``."""
        if isinstance(step.kind, Local):
            return ActStep(words=self._local(step), is_local=True)
        is_message = step.kind in (OpKind.SEND, OpKind.RECV)
        where = [f"over ranks {ranks_words(step.ranks)}"] if step.ranks and not is_message else []
        words = [step.kind.value, *reduce_op_words(step.op)]
        piece = max(step.src_piece, step.dst_piece)
        if piece >= 0:
            words.append(_piece(piece).strip())
        has_peer = step.peer >= 0 and step.kind in PEER
        if has_peer:
            words.append(f"{PEER[step.kind]} rank {step.peer}")
        return ActStep(
            words=" ".join([*words, *where]),
            target=self._target(step),
            peer=step.peer if has_peer else -1,
            gives=PEER.get(step.kind) != "from",
            piece=piece,
            is_message=step.kind is OpKind.SEND,
            is_local=step.kind is OpKind.RECV,
        )

    def _local(self, step: Step) -> str:
        if step.kind is Local.COMMIT:
            return "wait until all ranks have come so far"
        whole = " its place" if step.dst == self._template.src else " the output"
        return f"copy{_piece(step.src_piece)} to{_piece(step.dst_piece) or whole}"

    def _target(self, step: Step) -> str:
        if step.dst < 0:
            return ""
        if step.dst == step.src:
            return ", in place"
        buffer = self._template.buffers[step.dst]
        return ", into a new tensor" if buffer.is_output else ", into scratch" if buffer.scratch else ""


def _piece(piece: int) -> str:
    return "" if piece < 0 else f" piece {piece}"
