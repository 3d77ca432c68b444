"""What ranks do for a request, step by step, in words."""

from __future__ import annotations

from dataclasses import replace

from raycollect.core.model import OpKind
from raycollect.planner.ir import Part
from raycollect.planner.membership import Membership
from raycollect.planner.report import Act, ActStep
from raycollect.planner.template import Local, Step, Template
from raycollect.planner.wording import PEER, ranks_words, reduce_op_words


def acts(part: Part, membership: Membership, way: int, base: int) -> tuple[Act, ...]:
    """What the ranks do for a request by one algorithm; ranks with the same steps are together."""
    by_template: dict[int, list[int]] = {}
    for rank, index in zip(part.ranks, part.parts, strict=True):
        by_template.setdefault(index, []).append(rank)
    several = any(step.at for template in part.templates for step in template.ways[way])
    found: dict[tuple[ActStep, ...], list[int]] = {}
    for index, ranks in by_template.items():
        template = part.templates[index]
        words = _Words(part, membership, template, ranks[0])
        steps = tuple(
            replace(words.step(step), launch=base + step.at if several or base else None) for step in template.ways[way]
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

    def step(self, step: Step) -> ActStep:
        """One step, such as ``"reduce sum to rank 0 inside default/host-0"``."""
        if isinstance(step.kind, Local):
            return ActStep(words=self._local(step), is_local=True)
        where, peer, is_per_host = self._domain(step)
        words = [step.kind.value, *reduce_op_words(step.op)]
        piece = max(step.src_piece, step.dst_piece)
        if piece >= 0:
            words.append(_piece(piece).strip())
        has_peer = step.peer >= 0 and step.kind in PEER
        if has_peer:
            words.append(f"{PEER[step.kind]} {_host_root(step, peer, is_per_host)}")
        return ActStep(
            words=" ".join([*words, *where]),
            target=self._target(step),
            peer=peer if has_peer and not is_per_host else -1,
            gives=PEER.get(step.kind) != "from",
            piece=piece,
            is_message=step.kind is OpKind.SEND and not where,
            is_local=step.kind is OpKind.RECV,
            is_per_host=is_per_host,
        )

    def _local(self, step: Step) -> str:
        if step.kind is Local.COMMIT:
            return "wait until all ranks have come so far"
        whole = " its place" if step.dst == self._template.src else " the output"
        return f"copy{_piece(step.src_piece)} to{_piece(step.dst_piece) or whole}"

    def _domain(self, step: Step) -> tuple[list[str], int, bool]:
        """The ranks that run a step, in words; the peer among all ranks; whether each host does it by itself."""
        if step.level == 0:
            some = bool(step.ranks) and step.kind not in (OpKind.SEND, OpKind.RECV)
            return ([f"over ranks {ranks_words(step.ranks)}"] if some else []), step.peer, False
        level = self._part.levels[step.level - 1]
        group_id, outer = next((one, ranks) for one, ranks in level if self._rank in ranks)
        if len(level) > 1:  # hosts: what each of them does is told once
            return ([] if step.peer == 0 else ["inside the host"]), outer[step.peer], True
        within = f" of ranks {ranks_words([outer[rank] for rank in step.ranks])}" if step.ranks else ""
        return [f"over {self._names.get(group_id, group_id)}{within}"], outer[step.peer], False

    def _target(self, step: Step) -> str:
        if step.dst < 0:
            return ""
        if step.dst == step.src:
            return ", in place"
        buffer = self._template.buffers[step.dst]
        return ", into a new tensor" if buffer.is_output else ", into scratch" if buffer.scratch else ""


def _piece(piece: int) -> str:
    return "" if piece < 0 else f" piece {piece}"


def _host_root(step: Step, peer: int, is_per_host: bool) -> str:
    return "the host's first rank" if is_per_host and step.peer == 0 else f"rank {peer}"
