"""Lowers requests whose operands are lists with tensors of each GPU of a rank.

Each rank copies its list to the group's GPU, folded where the operation reduces. The kernels of any algorithm run on
that, and the rank spreads the result over its GPUs. So a list is written at the very end, and ranks send each other
only what one GPU each would send.
"""

from __future__ import annotations

from dataclasses import replace

from raycollect.core.model import OpKind
from raycollect.errors import Violation
from raycollect.planner.ir import GpuLists, Operands, Part, Request
from raycollect.planner.template import Buffer, Local, Role, Step, Template

LISTS_BACKEND = "nccl"
"""The backend whose groups may have several GPUs per process."""

_KINDS = (
    OpKind.ALLREDUCE,
    OpKind.REDUCE,
    OpKind.BROADCAST,
    OpKind.ALLGATHER,
    OpKind.REDUCESCATTER,
    OpKind.SEND,
)
_INDEXES: dict[OpKind, tuple[str, ...]] = {
    OpKind.REDUCE: ("dst_tensor",),
    OpKind.BROADCAST: ("src_tensor",),
    OpKind.SEND: ("src_tensor", "dst_tensor"),
}
"""Which indexes of `GpuLists` an operation has."""

_MOST_GPUS = 1 << 16
"""More than a process has; a larger number might not fit into a message."""

_OPERAND = Buffer(role=Role.OPERAND)


def listed_violations(request: Request) -> list[Violation]:
    """What is wrong with a request of lists, as far as it shows without any tensor."""
    lists, kind = request.lists, request.kind
    if lists is None:
        return []
    found = []

    def wrong(what: str, name: str, value: object, expected: str) -> None:
        found.append(Violation(kind=what, rank=-1, field=name, found=str(value), expected=expected))

    if request.group.backend != LISTS_BACKEND:
        wrong("unsupported", "backend", request.group.backend, f"{LISTS_BACKEND}, for several GPUs per process")
    if kind not in _KINDS:
        known = ", ".join(one.value for one in _KINDS)
        wrong("unsupported", "op", f"{kind.value} of lists with a tensor of each GPU", f"one of {known}")
    for name in _INDEXES.get(kind, ()):
        if not 0 <= getattr(lists, name) < _MOST_GPUS:
            expected = f"0 or more, and less than {_MOST_GPUS}"
            wrong("argument", "gpu index" if kind is OpKind.SEND else name, getattr(lists, name), expected)
    if not request.inplace and kind is OpKind.REDUCE:
        wrong("argument", "inplace", False, "True: the result goes into one tensor of a list")
    if kind is OpKind.SEND and any(rank == request.peer and dst is None for rank, _, dst in request.operands):
        wrong("argument", "output", "to be made", "a list, or a tensor, that is there already")
    return found


def listed(part: Part, request: Request) -> Part:
    """Turns a part for one tensor per rank, in place where possible, into that of the same request with lists."""
    written = [
        _listed(part.templates[index], request, operands)
        for index, operands in zip(part.parts, request.operands, strict=True)
    ]
    return part.over(written, request=request)


def _listed(template: Template, request: Request, operands: Operands) -> Template:
    """The lists come first in the buffers, then their stand-ins and whatever else the kernels use."""
    lists: list[Buffer] = []
    place: dict[int, int] = {}  # a buffer of the kernels -> that of the list for which it stands
    for index, given in ((template.src, operands[1]), (template.dst, operands[2])):
        if index >= 0 and index not in place:
            place[index] = len(lists)
            lists.append(_OPERAND if given is not None else Buffer(role=Role.LISTS, source=0))
    result = place.get(template.result, -1)
    if result >= 0 and not request.inplace:
        result = len(lists)
        lists.append(Buffer(role=Role.LIKE, source=0))
    count = len(lists)
    kernels = (
        Buffer(role=Role.HOME, source=place[index], scratch=True)
        if index in place
        else replace(one, source=one.source + count if one.source >= 0 else -1)
        for index, one in enumerate(template.buffers)
    )
    ways = tuple(_way(way, template, request, operands[0], (count, result)) for way in template.ways)
    return Template(
        buffers=(*lists, *kernels),
        steps=ways[0],
        src=place.get(template.src, -1),
        dst=place.get(template.dst, -1),
        result=result,
        others=ways[1:],
    )


def _way(
    way: tuple[Step, ...], template: Template, request: Request, rank: int, moved: tuple[int, int]
) -> tuple[Step, ...]:
    count, result = moved
    first, last = (way[0].at, way[-1].at) if way else (0, 0)
    steps = [
        replace(
            one,
            src=one.src + count if one.src >= 0 else -1,
            dst=one.dst + count if one.dst >= 0 else -1,
        )
        for one in way
    ]
    kind, source, target = crossing_of(request, rank)
    if template.src >= 0:
        come = Step(kind=kind, src=0, dst=template.src + count, op=request.op, src_piece=source, at=first)
        steps.insert(0, come)
    if request.snapshot:
        steps.append(Step(kind=Local.COMMIT, at=last))
    if result >= 0 and (request.kind is not OpKind.SEND or rank == request.peer):
        but = source if template.src >= 0 else -1  # the root has that one
        back = Step(kind=Local.SPREAD, src=template.result + count, dst=result, at=last)
        steps.append(replace(back, src_piece=but, dst_piece=target))
    return tuple(steps)


def crossing_of(request: Request, rank: int) -> tuple[Local, int, int]:
    """How a rank brings its list, which tensor of it, and into which one its result goes; -1: all of them."""
    lists = request.lists or GpuLists()
    named = _INDEXES.get(request.kind, ())
    source = lists.src_tensor if "src_tensor" in named and rank == request.root else -1
    taker = request.peer if request.kind is OpKind.SEND else request.root
    target = lists.dst_tensor if "dst_tensor" in named and rank == taker else -1
    return Local.FOLD if request.op is not None else Local.BRING, source, target
