"""Quantities, ranks and steps of a plan in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raycollect.core.model import OpKind, ReduceOp
from raycollect.planner.ir import Part, Request
from raycollect.planner.report import Act
from raycollect.planner.template import Local, Step, Template
from raycollect.planner.topology import Roster

_PEER: dict[OpKind | Local, str] = {
    OpKind.REDUCE: "to",
    OpKind.GATHER: "to",
    OpKind.SEND: "to",
    OpKind.BROADCAST: "from",
    OpKind.SCATTER: "from",
    OpKind.RECV: "from",
}
"""Operation -> the preposition before its peer."""


def nbytes_words(nbytes: float) -> str:
    """Bytes in the unit that fits: ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1023.95:  # which four digits would round up to 1024
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def seconds_words(seconds: float) -> str:
    """Seconds in the unit that fits: ``"3.1 ms"``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} us"


def counted(count: int, noun: str) -> str:
    """A count with its noun: ``"1 call"``, ``"3 calls"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def op_words(request: Request) -> str:
    """An operation with its reduce op and root: ``"reduce sum to rank 1"``."""
    name = request.name if request.lists is None else f"{request.name}_multigpu"
    words = [name, *_reduce_op(request.op)]
    if request.kind is OpKind.SEND:
        words.append(f"from rank {request.root} to rank {request.peer}")
    elif request.kind in _PEER:
        words.append(f"{_PEER[request.kind]} rank {request.root}")
    return " ".join(words)


def ranks_words(ranks: Sequence[int]) -> str:
    """Ranks, with runs as ranges: ``"0-3, 6"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[1]}" for run in runs)


def columns(rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Rows as lines of text; the first one has the titles, of which those in `right` have their cells on that side."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if title in right else "<" for title in rows[0]]
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(map(format, row, forms)) for row in rows]


def clipped(words: str, most: int) -> str:
    """A list of ranks, cut with an ellipsis where it is too long."""
    return words if len(words) <= most else f"{words[: most - 5].rpartition(',')[0]}, ..."


def numbered(calls: Sequence[int]) -> str:
    """Calls by their numbers: ``"calls 0-3"``."""
    return f"call{'s' if len(calls) > 1 else ''} {ranks_words(calls)}"


def named(names: Sequence[str], most: int) -> str:
    """The first of some names, and how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def acts(part: Part, roster: Roster, way: int, base: int) -> tuple[Act, ...]:
    """What the ranks do for a request by one algorithm; ranks with the same steps are together."""
    by_template: dict[int, list[int]] = {}
    for rank, index in zip(part.ranks, part.parts, strict=True):
        by_template.setdefault(index, []).append(rank)
    several = any(step.at for template in part.templates for step in template.ways[way])
    found: dict[tuple[str, ...], list[int]] = {}
    for index, ranks in by_template.items():
        template = part.templates[index]
        words = _Words(part, roster, template, ranks[0])
        steps = tuple(
            words.step(step) + (f" (launch {base + step.at})" if several or base else "") for step in template.ways[way]
        )
        found.setdefault(steps, []).extend(ranks)
    return tuple(Act(ranks=tuple(sorted(ranks)), steps=steps) for steps, ranks in found.items())


class _Words:
    """Describes the steps of ranks that have the same template."""

    def __init__(self, part: Part, roster: Roster, template: Template, rank: int) -> None:
        self._part = part
        self._template = template
        self._rank = rank
        inner = (*roster.hosts, roster.leaders)
        self._names = {one.spec.group_id: one.spec.name for one in inner if one is not None}

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
        words = [step.kind.value, *_reduce_op(step.op)]
        if step.src_piece >= 0 or step.dst_piece >= 0:
            words.append(_piece(max(step.src_piece, step.dst_piece)).strip())
        if step.peer >= 0 and step.kind in _PEER:
            words.append(f"{_PEER[step.kind]} {peer}")
        return " ".join([*words, *where]) + self._target(step)

    def _crossing(self, step: Step) -> str:
        if step.kind is Local.FOLD:
            return " ".join(["fold", *_reduce_op(step.op), "over the GPUs of the rank, into scratch"])
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


def _reduce_op(op: ReduceOp | None) -> list[str]:
    return [] if op is None else [op.name.lower()]


def _piece(piece: int) -> str:
    return "" if piece < 0 else f" piece {piece}"
