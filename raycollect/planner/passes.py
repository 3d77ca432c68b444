"""The passes: validate -> lower -> verify, each a function from value to value."""

from __future__ import annotations

import math
from collections.abc import Callable

from raycollect.errors import Violation, refusal
from raycollect.model import OpKind
from raycollect.planner.ir import Buffer, Plan, Request, Role, Step, Template
from raycollect.planner.verify import verify


def plan(request: Request) -> Plan:
    """Plans one request.

    Args:
        request: The request, bound to ranks.

    Returns:
        A plan that was verified against the postcondition of its operation.

    Raises:
        RefusedError: The request makes no sense; all reasons are in it.
        InternalError: The plan would be wrong (a bug of ours).
    """
    validate(request)
    lowered = lower(request)
    verify(lowered)
    return lowered


# ---------------------------------------------------------------------------------------------- validate


def validate(request: Request) -> None:
    """Refuses what can be seen to be wrong without any tensor.

    Raises:
        RefusedError: All reasons.
    """
    violations = (*_rank_violations(request), *_argument_violations(request))
    if violations:
        raise refusal(request.kind.value, request.group.name, violations)


def _rank_violations(request: Request) -> list[Violation]:
    world = request.group.world_size
    given = [rank for rank, _ in request.operands]
    expected = {request.root, request.peer} if request.kind is OpKind.SEND else set(range(world))
    found = [
        Violation(kind="missing", rank=rank, field="operand", found="missing", expected="one ref")
        for rank in sorted((expected - set(given)) | _without_key(request))
        if 0 <= rank < world
    ]
    found += [
        Violation(kind="not_member", rank=rank, field="rank", found=str(rank), expected=f"one of {sorted(expected)}")
        for rank in sorted(set(given) - expected)
    ]
    found += [
        Violation(kind="duplicate", rank=rank, field="operand", found="given twice", expected="one ref")
        for rank in sorted({rank for rank in given if given.count(rank) > 1})
    ]
    return found


def _without_key(request: Request) -> set[int]:
    """Ranks that ask for an output where an operand is needed: only the destination of a send may."""
    if request.kind is OpKind.BARRIER:
        return set()
    outputs = {request.peer} if request.kind is OpKind.SEND else set()
    return {rank for rank, key in request.operands if key is None} - outputs


def _argument_violations(request: Request) -> list[Violation]:
    world, kind = request.group.world_size, request.kind
    found = []

    def wrong(field: str, value: object, expected: str) -> None:
        found.append(Violation(kind="unsupported", rank=-1, field=field, found=str(value), expected=expected))

    roots = {OpKind.BROADCAST: ("src_rank", request.root), OpKind.SEND: ("source rank", request.root)}
    if kind in roots and not 0 <= roots[kind][1] < world:
        wrong(*roots[kind], f"a rank from 0 to {world - 1}")
    if kind is OpKind.SEND and not 0 <= request.peer < world:
        wrong("destination rank", request.peer, f"a rank from 0 to {world - 1}")
    if kind is OpKind.SEND and request.root == request.peer:
        wrong("destination rank", request.peer, "another rank than the source")
    if kind not in _LOWER:
        wrong("op", kind.value, f"one of {', '.join(known.value for known in _LOWER)}")
    if kind is OpKind.ALLREDUCE and request.op is None:
        wrong("op", None, "a ReduceOp")
    if not 0 < request.timeout_s < math.inf:
        wrong("timeout_s", request.timeout_s, "a positive, finite number of seconds")
    return found


# ---------------------------------------------------------------------------------------------- lower

_OPERAND = Buffer(role=Role.OPERAND)


def _allreduce(request: Request) -> Plan:
    buffers = (_OPERAND,) if request.inplace else (_OPERAND, Buffer(role=Role.OUTPUT_LIKE, source=0))
    dst = len(buffers) - 1
    step = Step(kind=OpKind.ALLREDUCE, src=0, dst=dst, op=request.op)
    return _same_on_all(request, Template(buffers=buffers, steps=(step,), result=dst))


def _broadcast(request: Request) -> Plan:
    """The root only reads, the others only write: what they held may be read-only there, or half-written here."""
    reads = Step(kind=OpKind.BROADCAST, src=0, peer=request.root)
    writes = Step(kind=OpKind.BROADCAST, dst=0, peer=request.root)
    templates = tuple(Template(buffers=(_OPERAND,), steps=(step,), result=0) for step in (reads, writes))
    parts = tuple(0 if rank == request.root else 1 for rank, _ in request.operands)
    return Plan(request=request, templates=templates, parts=parts)


def _barrier(request: Request) -> Plan:
    return _same_on_all(request, Template(buffers=(), steps=(Step(kind=OpKind.BARRIER),)))


def _send(request: Request) -> Plan:
    given = dict(request.operands)[request.peer] is not None
    landing = _OPERAND if given else Buffer(role=Role.OUTPUT_LEARNED, source=request.root)
    source = Template(buffers=(_OPERAND,), steps=(Step(kind=OpKind.SEND, src=0, peer=request.peer),), result=0)
    target = Template(buffers=(landing,), steps=(Step(kind=OpKind.RECV, dst=0, peer=request.root),), result=0)
    parts = tuple(0 if rank == request.root else 1 for rank, _ in request.operands)
    return Plan(request=request, templates=(source, target), parts=parts)


def _same_on_all(request: Request, template: Template) -> Plan:
    return Plan(request=request, templates=(template,), parts=(0,) * len(request.operands))


_LOWER: dict[OpKind, Callable[[Request], Plan]] = {
    OpKind.ALLREDUCE: _allreduce,
    OpKind.BROADCAST: _broadcast,
    OpKind.BARRIER: _barrier,
    OpKind.SEND: _send,
}


def lower(request: Request) -> Plan:
    """Chooses buffers and kernels for each rank."""
    return _LOWER[request.kind](request)
