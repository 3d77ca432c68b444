"""Lowers a request to the buffers and kernels of each rank: to the backend's own kernel, or to its substitutes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from raycollect.core.model import OpKind
from raycollect.core.operations import OPERATIONS, PAIR, OperationSpec, has_part
from raycollect.errors import Violation, refusal
from raycollect.planner.algorithms import by_pairs
from raycollect.planner.ir import Operands, Part, Request
from raycollect.planner.membership import Membership
from raycollect.planner.template import Buffer, Local, Role, Template, TemplateStep

_OPERAND = Buffer(role=Role.OPERAND)
_LEARNED = Buffer(role=Role.LEARNED)
_PIECE = Buffer(role=Role.PIECE, source=0)
_LIKE = Buffer(role=Role.LIKE, source=0)
_GATHERED = Buffer(role=Role.LEARNED, scratch=True)

_Writer = Callable[[Request, Operands], Template]
"""Writes the template of one rank."""


def _own(request: Request, operands: Operands) -> Template:
    """The backend's own kernel.

    The root of a broadcast only reads, so that its tensor may be read-only; of a reduce only the root writes.
    """
    spec, (rank, _, taken) = OPERATIONS[request.kind], operands
    gives, takes = (has_part(who, rank, request.root, request.peer) for who in (spec.gives, spec.takes))
    buffers = [_OPERAND] if gives else []
    if takes and spec.in_place:
        buffers += [] if request.inplace else [_LIKE]
    elif takes:
        buffers.append(_OPERAND if taken is not None else _new_output(spec) if gives else _LEARNED)
    src, dst = 0 if gives else -1, len(buffers) - 1 if takes else -1
    is_send = spec.kind is OpKind.SEND
    step = TemplateStep(
        kind=OpKind.RECV if is_send and takes else spec.kind,
        src=src,
        dst=dst,
        op=request.op,
        peer=request.peer if is_send and gives else request.root,
    )
    result = src if gives and spec.takes in ("others", "peer") else dst
    return Template(buffers=tuple(buffers), steps=(step,), src=src, dst=-1 if spec.in_place else dst, result=result)


def _new_output(spec: OperationSpec) -> Buffer:
    """The new output of a rank that also gives."""
    if spec.takes_pieces:
        return _LEARNED
    return _PIECE if spec.gives_pieces else _LIKE


def committed(part: Part, request: Request) -> Part:
    """Turns a part that makes new tensors into the in-place one, which commits after all ranks have results."""
    return dataclasses.replace(part, request=request, templates=tuple(map(_committed, part.templates)))


def _committed(template: Template) -> Template:
    output = next((index for index, buffer in enumerate(template.buffers) if buffer.is_output), -1)
    buffers = tuple(replace(buffer, scratch=buffer.scratch or buffer.is_output) for buffer in template.buffers)
    ways = []
    for way in template.ways:
        at = way[-1].at if way else 0
        back = (TemplateStep(kind=Local.COPY, src=output, dst=template.src, at=at),) if output >= 0 else ()
        ways.append((*way, TemplateStep(kind=Local.COMMIT, at=at), *back))
    result = template.src if output >= 0 else template.result
    return replace(template, buffers=buffers, steps=ways[0], others=tuple(ways[1:]), result=result)


def _by_broadcast(request: Request, operands: Operands) -> Template:
    """An allreduce or allgather: the first rank gets the result, and gives it to all."""
    own = _own(request, operands)
    root, dst = operands[0] == 0, own.result
    first = OpKind.REDUCE if request.kind is OpKind.ALLREDUCE else OpKind.GATHER
    steps = (
        TemplateStep(kind=first, src=0, dst=dst if root else -1, op=request.op, peer=0),
        TemplateStep(kind=OpKind.BROADCAST, src=dst if root else -1, dst=-1 if root else dst, peer=0),
    )
    return replace(own, steps=steps)


def _on_all(request: Request, operands: Operands) -> Template:
    """A reduce or gather: all ranks get the result, and all except the root drop it."""
    own, scratch = _own(request, operands), Buffer(role=Role.LIKE, source=0, scratch=True)
    kind = OpKind.ALLREDUCE
    if request.kind is OpKind.GATHER:
        kind, scratch = OpKind.ALLGATHER, _GATHERED
    is_root = operands[0] == request.root
    step = TemplateStep(kind=kind, src=0, dst=own.result if is_root else 1, op=request.op)
    return replace(own, buffers=own.buffers if is_root else (_OPERAND, scratch), steps=(step,))


def _of_all(request: Request, operands: Operands) -> Template:
    """An operation that moves values: all ranks get all values, and each copies its own results."""
    spec, rank = OPERATIONS[request.kind], operands[0]
    if spec.takes_pieces:
        return _on_all(request, operands)
    own, (giver,) = _own(request, operands), spec.givers(rank, len(request.operands), request.root)
    gathered = len(own.buffers)
    steps = (
        TemplateStep(kind=OpKind.ALLGATHER, src=0, dst=gathered),
        TemplateStep(kind=Local.COPY, src=gathered, src_piece=giver, dst=own.dst),
    )
    return replace(own, buffers=(*own.buffers, _GATHERED), steps=steps)


def _by_scatter(request: Request, operands: Operands) -> Template:
    own = _own(request, operands)
    scratch = (Buffer(role=Role.LIKE, source=0, scratch=True),) if operands[0] == 0 else ()
    at = 2 if scratch else -1
    steps = (
        TemplateStep(kind=OpKind.REDUCE, src=0, dst=at, op=request.op, peer=0),
        TemplateStep(kind=OpKind.SCATTER, src=at, dst=1, peer=0),
    )
    return replace(own, buffers=(*own.buffers, *scratch), steps=steps)


_WRITERS: dict[tuple[OpKind, ...], _Writer | None] = {
    (OpKind.REDUCE, OpKind.BROADCAST): _by_broadcast,
    (OpKind.GATHER, OpKind.BROADCAST): _by_broadcast,
    (OpKind.ALLREDUCE,): _on_all,
    (OpKind.ALLGATHER,): _of_all,
    (OpKind.REDUCE, OpKind.SCATTER): _by_scatter,
    (): lambda request, operands: Template(buffers=(), steps=()),
    PAIR: None,
}
"""The writers of an operation's substitutes (`OperationSpec.substitutes`); None for the algorithm of pairs."""


def lower(request: Request, membership: Membership) -> Part:
    """Chooses buffers and kernels for each rank.

    Raises:
        UnsupportedError: The backend can't run the operation, nor any substitute.
    """
    write = _writer(request)
    written = [(write or _own)(request, operands) for operands in request.operands]
    part = Part(request=request, templates=(), parts=()).over(written)
    return part if write else by_pairs(part, membership)


def _writer(request: Request) -> _Writer | None:
    kind, ops = request.kind, request.group.ops
    if _has(ops, PAIR if kind is OpKind.SEND else (kind,)):
        return _own
    for needs in OPERATIONS[kind].substitutes:
        if _has(ops, needs):
            return _WRITERS[needs]
    substituted = [
        other.value for other, spec in OPERATIONS.items() if any(_has(ops, needs) for needs in spec.substitutes)
    ]
    actual = f"{kind.value}, which backend {request.group.backend!r} does not have"
    expected = f"one of {', '.join(sorted({*ops, *substituted}))}"
    violation = Violation(kind="unsupported", rank=-1, field="op", found=actual, expected=expected)
    raise refusal(kind.value, request.group.name, (violation,))


def _has(ops: Sequence[str], kinds: Sequence[OpKind]) -> bool:
    return all(kind.value in ops for kind in kinds)
