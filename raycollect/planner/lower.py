"""From a request to the buffers and kernels of each rank: by the backend's own kernel, or by others that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from raycollect.core.model import PIECES, PREFIXES, OpKind
from raycollect.errors import Violation, refusal
from raycollect.planner.algorithms import by_pairs
from raycollect.planner.ir import Operands, Part, Request
from raycollect.planner.membership import Membership
from raycollect.planner.template import Buffer, Local, Role, Step, Template

_OPERAND = Buffer(role=Role.OPERAND)
_LEARNED = Buffer(role=Role.LEARNED)
_PIECE = Buffer(role=Role.PIECE, source=0)
_REDUCTIONS = (OpKind.ALLREDUCE, OpKind.REDUCE, *PREFIXES)

_Part = Callable[[Request, Operands], Template]
"""Writes the template of one rank."""


def _own(request: Request, operands: Operands) -> Template:
    """The backend's own kernel.

    The root of a broadcast only reads, so that its tensor may be read-only; of a reduce only the root writes.
    """
    kind, (rank, _, taken) = request.kind, operands
    is_root, sends = rank == request.root, kind in (OpKind.BROADCAST, OpKind.SEND)
    gives = is_root or not (sends or kind is OpKind.SCATTER)
    takes = not is_root if sends else is_root or kind not in (OpKind.REDUCE, OpKind.GATHER)
    buffers = [_OPERAND] if gives else []
    if takes and kind in _REDUCTIONS:
        buffers += [] if request.inplace else [Buffer(role=Role.LIKE, source=0)]
    elif takes:
        made = _PIECE if gives and PIECES.get(kind) == (True, False) else _LEARNED
        buffers.append(made if taken is None else _OPERAND)
    src, dst = 0 if gives else -1, len(buffers) - 1 if takes else -1
    step = Step(
        kind=OpKind.RECV if kind is OpKind.SEND and takes else kind,
        src=src,
        dst=dst,
        op=request.op,
        peer=request.peer if kind is OpKind.SEND and gives else request.root,
    )
    result = src if sends and gives else dst
    return Template(
        buffers=tuple(buffers), steps=(step,), src=src, dst=-1 if kind in _REDUCTIONS else dst, result=result
    )


def _barrier(request: Request, operands: Operands) -> Template:
    return Template(buffers=(), steps=(Step(kind=OpKind.BARRIER),))


def committed(part: Part, request: Request) -> Part:
    """Turns a part that makes new tensors into the in-place one, which commits after all ranks have results."""
    return dataclasses.replace(part, request=request, templates=tuple(map(_committed, part.templates)))


def _committed(template: Template) -> Template:
    made = next((index for index, buffer in enumerate(template.buffers) if buffer.is_output), -1)
    buffers = tuple(replace(one, scratch=one.scratch or one.is_output) for one in template.buffers)
    ways = []
    for way in template.ways:
        at = way[-1].at if way else 0
        back = (Step(kind=Local.COPY, src=made, dst=template.src, at=at),) if made >= 0 else ()
        ways.append((*way, Step(kind=Local.COMMIT, at=at), *back))
    result = template.src if made >= 0 else template.result
    return replace(template, buffers=buffers, steps=ways[0], others=tuple(ways[1:]), result=result)


def _by_broadcast(request: Request, operands: Operands) -> Template:
    """An allreduce or allgather: the first rank gets the result, and gives it to all."""
    made = _own(request, operands)
    root, dst = operands[0] == 0, made.result
    first = OpKind.REDUCE if request.kind is OpKind.ALLREDUCE else OpKind.GATHER
    steps = (
        Step(kind=first, src=0, dst=dst if root else -1, op=request.op, peer=0),
        Step(kind=OpKind.BROADCAST, src=dst if root else -1, dst=-1 if root else dst, peer=0),
    )
    return replace(made, steps=steps)


def _on_all(request: Request, operands: Operands) -> Template:
    """A reduce or gather: all ranks get the result, and all but the root forget it."""
    made, scratch = _own(request, operands), Buffer(role=Role.LEARNED, scratch=True)
    kind = OpKind.ALLGATHER
    if request.kind is OpKind.REDUCE:
        kind, scratch = OpKind.ALLREDUCE, Buffer(role=Role.LIKE, source=0, scratch=True)
    is_root = operands[0] == request.root
    step = Step(kind=kind, src=0, dst=made.result if is_root else 1, op=request.op)
    return replace(made, buffers=made.buffers if is_root else (_OPERAND, scratch), steps=(step,))


def _reducescatter_by_scatter(request: Request, operands: Operands) -> Template:
    made = _own(request, operands)
    scratch = (Buffer(role=Role.LIKE, source=0, scratch=True),) if operands[0] == 0 else ()
    at = 2 if scratch else -1
    steps = (
        Step(kind=OpKind.REDUCE, src=0, dst=at, op=request.op, peer=0),
        Step(kind=OpKind.SCATTER, src=at, dst=1, peer=0),
    )
    return replace(made, buffers=(*made.buffers, *scratch), steps=steps)


_PAIR = (OpKind.SEND, OpKind.RECV)

SUBSTITUTES: dict[OpKind, dict[tuple[OpKind, ...], _Part | None]] = {
    OpKind.ALLREDUCE: {(OpKind.REDUCE, OpKind.BROADCAST): _by_broadcast},
    OpKind.REDUCE: {(OpKind.ALLREDUCE,): _on_all},
    OpKind.BROADCAST: {_PAIR: None},
    OpKind.ALLGATHER: {(OpKind.GATHER, OpKind.BROADCAST): _by_broadcast, _PAIR: None},
    OpKind.GATHER: {(OpKind.ALLGATHER,): _on_all, _PAIR: None},
    OpKind.SCATTER: {_PAIR: None},
    OpKind.REDUCESCATTER: {(OpKind.REDUCE, OpKind.SCATTER): _reducescatter_by_scatter},
    OpKind.ALLTOALL: {_PAIR: None},
    OpKind.BARRIER: {(): lambda request, operands: Template(buffers=(), steps=())},
}
"""Operation that a backend lacks -> the operations that it is made of instead, the best first, and how; None: by the
algorithm of pairs."""


def lower(request: Request, membership: Membership) -> Part:
    """Chooses buffers and kernels for each rank.

    Raises:
        UnsupportedError: The backend can't run the operation, nor anything that could stand in for it.
    """
    write = _writer(request)
    written = [(write or _own)(request, operands) for operands in request.operands]
    part = Part(request=request, templates=(), parts=()).over(written)
    return part if write else by_pairs(part, membership)


def _writer(request: Request) -> _Part | None:
    kind, ops = request.kind, request.group.ops
    if _has(ops, _PAIR if kind is OpKind.SEND else (kind,)):
        return _barrier if kind is OpKind.BARRIER else _own
    for needs, write in SUBSTITUTES.get(kind, {}).items():
        if _has(ops, needs):
            return write
    made = [k.value for k, ways in SUBSTITUTES.items() if any(_has(ops, needs) for needs in ways)]
    found = f"{kind.value}, which backend {request.group.backend!r} does not have"
    expected = f"one of {', '.join(sorted({*ops, *made}))}"
    violation = Violation(kind="unsupported", rank=-1, field="op", found=found, expected=expected)
    raise refusal(kind.value, request.group.name, (violation,))


def _has(ops: Sequence[str], kinds: Sequence[OpKind]) -> bool:
    return all(kind.value in ops for kind in kinds)
