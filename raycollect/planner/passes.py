"""The passes: validate -> lower -> route -> verify for the form of each request, then the schedule of all of them.

Each is a function from value to value. The form of a request is the request without what its operands are: what follows
from it is worked out once, and remembered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from raycollect.errors import RefusedError, Violation, refusal
from raycollect.model import GroupSpec, OpKind
from raycollect.planner.algorithms import STAND_INS, route, stand_in
from raycollect.planner.ir import Operands, Part, Plan, Request, Source
from raycollect.planner.listed import listed, listed_violations
from raycollect.planner.program import STAGING_NBYTES
from raycollect.planner.schedule import schedule
from raycollect.planner.template import Buffer, Local, Role, Step, Template
from raycollect.planner.topology import Roster
from raycollect.planner.verify import verify
from raycollect.planner.verify_order import verify_order

_TIMEOUT_S = 60.0
"""Stands for the time limit in forms, which do not depend on it."""


def plan(requests: Sequence[Request], rosters: Sequence[Roster] = (), *, staging: int = STAGING_NBYTES) -> Plan:
    """Plans the requests of one call, or of a batch.

    Args:
        requests: The requests, bound to ranks, in program order.
        rosters: The group of each; by default what `Roster.alone` says.
        staging: The bytes of staging in which tensors may travel packed; 0: none does.

    Returns:
        A plan of which every part was verified against the postcondition of its operation, and the order against the
        requests.

    Raises:
        RefusedError: A request makes no sense, or its backend can't do it; all reasons are in it.
        InternalError: The plan would be wrong (a bug of ours).
    """
    given = tuple(rosters) or tuple(_unknown(request.group) for request in requests)
    parts = [plan_part(request, roster) for request, roster in zip(requests, given, strict=True)]
    planned = schedule(requests, parts, given, staging)
    verify_order(planned)
    return planned


def plan_part(request: Request, roster: Roster | None = None) -> Part:
    """Plans one request by itself.

    Args:
        request: The request.
        roster: Its group; by default what `Roster.alone` says.

    Returns:
        What every rank does; the same object for all requests of this form.

    Raises:
        RefusedError: The request makes no sense, or the backend can't do it; all reasons are in it.
        InternalError: The plan would be wrong (a bug of ours).
    """
    operands = tuple(
        (rank, None if src is None else 0, None if dst is None else 0) for rank, src, dst in request.operands
    )
    form = replace(request, operands=operands, timeout_s=_TIMEOUT_S if 0 < request.timeout_s < math.inf else -1.0)
    try:
        return _planned(form, roster or _unknown(request.group))
    except RefusedError:
        validate(request)  # says it of the request itself
        raise


@lru_cache(maxsize=1024)
def _planned(form: Request, roster: Roster) -> Part:
    validate(form)
    if form.lists is not None:
        plain = replace(form, lists=None, operands=brought(form, 0), inplace=True, snapshot=False)
        part = listed(route(lower(plain, roster), roster), form)
    else:
        part = route(lower(replace(form, inplace=form.inplace and not form.snapshot), roster), roster)
        part = committed(part, form) if form.snapshot else part
    verify(part, bitwise=roster.bitwise)
    return part


@lru_cache(maxsize=256)
def _unknown(spec: GroupSpec) -> Roster:
    return Roster.alone(spec)


# ---------------------------------------------------------------------------------------------- validate


@dataclass(frozen=True, slots=True)
class _Needs:
    """What an operation takes from its ranks; each of the two is ``"all"``, ``"root"``, ``"others"``, ``"peer"`` or "".

    Attributes:
        src: Who gives.
        dst: Who takes into a tensor that is not what it gives.
        made: Whether that tensor is made where none is given.
        root: What the root is called; empty where there is none.
        reduces: Whether there must be a reduce op.
    """

    src: str = ""
    dst: str = ""
    made: bool = False
    root: str = ""
    reduces: bool = False


_NEEDS: dict[OpKind, _Needs] = {
    OpKind.ALLREDUCE: _Needs("all", reduces=True),
    OpKind.REDUCE: _Needs("all", root="dst_rank", reduces=True),
    OpKind.BROADCAST: _Needs("root", "others", root="src_rank"),
    OpKind.ALLGATHER: _Needs("all", "all", made=True),
    OpKind.REDUCESCATTER: _Needs("all", "all", made=True, reduces=True),
    OpKind.GATHER: _Needs("all", "root", made=True, root="dst_rank"),
    OpKind.SCATTER: _Needs("root", "all", made=True, root="src_rank"),
    OpKind.ALLTOALL: _Needs("all", "all", made=True),
    OpKind.SEND: _Needs("root", "peer", made=True, root="source rank"),
    OpKind.BARRIER: _Needs(),
}


def validate(request: Request) -> None:
    """Refuses what can be seen to be wrong without any tensor.

    Raises:
        RefusedError: All reasons.
    """
    violations = (*_rank_violations(request), *_argument_violations(request), *listed_violations(request))
    if violations:
        raise refusal(request.kind.value, request.group.name, violations)


def _members(request: Request) -> set[int]:
    """The ranks that must take part."""
    return {request.root, request.peer} if request.kind is OpKind.SEND else set(range(request.group.world_size))


def _rank_violations(request: Request) -> list[Violation]:
    world, expected = request.group.world_size, _members(request)
    given = [rank for rank, _, _ in request.operands]
    misplaced = _misplaced(request)
    found = [
        Violation(kind="missing", rank=rank, field="operand", found="missing", expected="one ref")
        for rank in sorted((expected - set(given)) | _without_operand(request, {side for _, side, _ in misplaced}))
        if 0 <= rank < world
    ]
    found += [
        Violation(kind="not_member", rank=rank, field="rank", found=str(rank), expected=f"one of {sorted(expected)}")
        for rank in sorted(set(given) - expected)
    ]
    found += [
        Violation(kind="duplicate", rank=rank, field="operand", found="given twice", expected="one ref")
        for rank, count in sorted(Counter(given).items())
        if count > 1
    ]
    found += [
        Violation(kind="mismatch", rank=rank, field=side, found=f"kept by rank {rank}", expected=expected)
        for rank, side, expected in misplaced
    ]
    return found


def _who(request: Request, who: str) -> set[int]:
    members = _members(request)
    return {
        "all": members,
        "root": {request.root},
        "others": members - {request.root},
        "peer": {request.peer},
        "": set(),
    }[who]


def _placed(request: Request) -> list[Operands]:
    """The operands that are, or are not, where they belong: those of members, around roots that exist."""
    roots = {OpKind.SEND: (request.root, request.peer)}.get(request.kind, (request.root,))
    needs = _NEEDS.get(request.kind)
    if needs is None or (needs.root and not all(0 <= root < request.group.world_size for root in roots)):
        return []
    members = _members(request)
    return [operands for operands in request.operands if operands[0] in members]


def _without_operand(request: Request, misplaced: set[str]) -> set[int]:
    """Ranks that bring nothing where something is needed; not where it was brought by another one, as that is said."""
    needs = _NEEDS.get(request.kind, _Needs())
    gives, takes = _who(request, needs.src), set() if needs.made else _who(request, needs.dst)
    return {
        rank
        for rank, src, dst in _placed(request)
        if (rank in gives and src is None and "input" not in misplaced)
        or (rank in takes and dst is None and "output" not in misplaced)
    }


def _misplaced(request: Request) -> list[tuple[int, str, str]]:
    """(rank, what, who should bring it) for what a rank brings and has no part in the operation."""
    needs = _NEEDS.get(request.kind, _Needs())
    found = []
    for side, who in (("src", needs.src), ("dst", needs.dst)):
        allowed = _who(request, who)
        whose = f"rank {min(allowed)}" if len(allowed) == 1 else f"one of {sorted(allowed)}"
        for rank, src, dst in _placed(request):
            key = src if side == "src" else dst
            if key is not None and rank not in allowed:
                found.append((rank, "input" if side == "src" else "output", f"kept by {whose}" if allowed else "none"))
    return found


def _argument_violations(request: Request) -> list[Violation]:
    world, kind = request.group.world_size, request.kind
    needs = _NEEDS.get(kind)
    found = []

    def wrong(field: str, value: object, expected: str) -> None:
        found.append(Violation(kind="argument", rank=-1, field=field, found=str(value), expected=expected))

    if needs is None:
        wrong("op", kind.value, f"one of {', '.join(known.value for known in _NEEDS)}")
        return found
    if needs.root and not 0 <= request.root < world:
        wrong(needs.root, request.root, f"a rank from 0 to {world - 1}")
    if kind is OpKind.SEND and not 0 <= request.peer < world:
        wrong("destination rank", request.peer, f"a rank from 0 to {world - 1}")
    if kind is OpKind.SEND and request.root == request.peer:
        wrong("destination rank", request.peer, "another rank than the source")
    if needs.reduces and request.op is None:
        wrong("op", None, "a ReduceOp")
    if request.snapshot and not (needs.reduces and not needs.dst and request.inplace):
        wrong("snapshot", True, "False: what it reads is not overwritten")
    if not 0 < request.timeout_s < math.inf:
        wrong("timeout_s", request.timeout_s, "a positive, finite number of seconds")
    return found


def brought(request: Request, key: Source) -> tuple[Operands, ...]:
    """The operands of a collective to which every rank brings all that it can, as in imperative calls.

    Args:
        request: The collective; its operands are not looked at.
        key: Stands for whatever is brought.
    """
    needs = _NEEDS[request.kind]
    gives, takes = _who(request, needs.src), _who(request, needs.dst)
    ranks = sorted(_members(request))
    return tuple((rank, key if rank in gives else None, key if rank in takes else None) for rank in ranks)


# ---------------------------------------------------------------------------------------------- lower

_OPERAND = Buffer(role=Role.OPERAND)
_LEARNED = Buffer(role=Role.LEARNED)

_Part = Callable[[Request, Operands], Template]
"""Writes the part of one rank."""


def _allreduce(request: Request, operands: Operands) -> Template:
    buffers = (_OPERAND,) if request.inplace else (_OPERAND, Buffer(role=Role.LIKE, source=0))
    dst = len(buffers) - 1
    step = Step(kind=OpKind.ALLREDUCE, src=0, dst=dst, op=request.op)
    return Template(buffers=buffers, steps=(step,), src=0, result=dst)


def _reduce(request: Request, operands: Operands) -> Template:
    """Only the root writes: what the others hold stays as it is."""
    if operands[0] != request.root:
        step = Step(kind=OpKind.REDUCE, src=0, op=request.op, peer=request.root)
        return Template(buffers=(_OPERAND,), steps=(step,), src=0)
    buffers = (_OPERAND,) if request.inplace else (_OPERAND, Buffer(role=Role.LIKE, source=0))
    dst = len(buffers) - 1
    step = Step(kind=OpKind.REDUCE, src=0, dst=dst, op=request.op, peer=request.root)
    return Template(buffers=buffers, steps=(step,), src=0, result=dst)


def _broadcast(request: Request, operands: Operands) -> Template:
    """The root only reads, the others only write: what they held may be read-only there, or half-written here."""
    if operands[0] == request.root:
        step = Step(kind=OpKind.BROADCAST, src=0, peer=request.root)
        return Template(buffers=(_OPERAND,), steps=(step,), src=0, result=0)
    step = Step(kind=OpKind.BROADCAST, dst=0, peer=request.root)
    return Template(buffers=(_OPERAND,), steps=(step,), dst=0, result=0)


def _barrier(request: Request, operands: Operands) -> Template:
    return Template(buffers=(), steps=(Step(kind=OpKind.BARRIER),))


def _send(request: Request, operands: Operands) -> Template:
    rank, _, dst = operands
    if rank == request.root:
        step = Step(kind=OpKind.SEND, src=0, peer=request.peer)
        return Template(buffers=(_OPERAND,), steps=(step,), src=0, result=0)
    step = Step(kind=OpKind.RECV, dst=0, peer=request.root)
    return Template(buffers=(_landing(dst),), steps=(step,), dst=0, result=0)


def _exchange(request: Request, operands: Operands) -> Template:
    """Allgather and all-to-all: every rank gives one buffer and takes into another."""
    step = Step(kind=request.kind, src=0, dst=1)
    return Template(buffers=(_OPERAND, _landing(operands[2])), steps=(step,), src=0, dst=1, result=1)


def _gather(request: Request, operands: Operands) -> Template:
    rank, _, dst = operands
    if rank != request.root:
        step = Step(kind=OpKind.GATHER, src=0, peer=request.root)
        return Template(buffers=(_OPERAND,), steps=(step,), src=0)
    step = Step(kind=OpKind.GATHER, src=0, dst=1, peer=request.root)
    return Template(buffers=(_OPERAND, _landing(dst)), steps=(step,), src=0, dst=1, result=1)


def _scatter(request: Request, operands: Operands) -> Template:
    rank, _, dst = operands
    if rank != request.root:
        step = Step(kind=OpKind.SCATTER, dst=0, peer=request.root)
        return Template(buffers=(_landing(dst),), steps=(step,), dst=0, result=0)
    step = Step(kind=OpKind.SCATTER, src=0, dst=1, peer=request.root)
    return Template(buffers=(_OPERAND, _own_piece(dst)), steps=(step,), src=0, dst=1, result=1)


def _reducescatter(request: Request, operands: Operands) -> Template:
    step = Step(kind=OpKind.REDUCESCATTER, src=0, dst=1, op=request.op)
    return Template(buffers=(_OPERAND, _own_piece(operands[2])), steps=(step,), src=0, dst=1, result=1)


def _landing(dst: Source | None) -> Buffer:
    return _LEARNED if dst is None else _OPERAND


def _own_piece(dst: Source | None) -> Buffer:
    return Buffer(role=Role.PIECE, source=0) if dst is None else _OPERAND


_LOWER: dict[OpKind, _Part] = {
    OpKind.ALLREDUCE: _allreduce,
    OpKind.REDUCE: _reduce,
    OpKind.BROADCAST: _broadcast,
    OpKind.ALLGATHER: _exchange,
    OpKind.REDUCESCATTER: _reducescatter,
    OpKind.GATHER: _gather,
    OpKind.SCATTER: _scatter,
    OpKind.ALLTOALL: _exchange,
    OpKind.SEND: _send,
    OpKind.BARRIER: _barrier,
}


def committed(part: Part, request: Request) -> Part:
    """What ranks do that keep what they have until all have come to their results.

    Args:
        part: What they do to make new tensors of their results.
        request: The same request, in place.
    """
    return replace(part, request=request, templates=tuple(map(_committed, part.templates)))


def _committed(template: Template) -> Template:
    """The results go into scratch, and from there to their places once all ranks have theirs."""
    made = next((index for index, buffer in enumerate(template.buffers) if buffer.is_output), -1)
    buffers = tuple(replace(one, scratch=one.scratch or one.is_output) for one in template.buffers)
    ways = []
    for way in template.ways:
        at = way[-1].at if way else 0
        back = (Step(kind=Local.COPY, src=made, dst=template.src, at=at),) if made >= 0 else ()
        ways.append((*way, Step(kind=Local.COMMIT, at=at), *back))
    result = template.src if made >= 0 else template.result
    return replace(template, buffers=buffers, steps=ways[0], others=tuple(ways[1:]), result=result)


# ---------------------------------------------------------------------------------------------- substitutes


def _allreduce_by_broadcast(request: Request, operands: Operands) -> Template:
    """Reduce to rank 0, then broadcast."""
    made = _allreduce(request, operands)
    root, dst = operands[0] == 0, made.result
    steps = (
        Step(kind=OpKind.REDUCE, src=0, dst=dst if root else -1, op=request.op, peer=0),
        Step(kind=OpKind.BROADCAST, src=dst if root else -1, dst=-1 if root else dst, peer=0),
    )
    return Template(buffers=made.buffers, steps=steps, src=0, result=dst)


def _reduce_by_allreduce(request: Request, operands: Operands) -> Template:
    """Allreduce, on other ranks than the root into scratch."""
    made = _reduce(request, operands)
    root = operands[0] == request.root
    buffers = made.buffers if root else (_OPERAND, Buffer(role=Role.LIKE, source=0, scratch=True))
    step = Step(kind=OpKind.ALLREDUCE, src=0, dst=made.result if root else 1, op=request.op)
    return Template(buffers=buffers, steps=(step,), src=0, result=made.result)


def _allgather_by_broadcast(request: Request, operands: Operands) -> Template:
    """Gather to rank 0, then broadcast all pieces."""
    made = _exchange(request, operands)
    root = operands[0] == 0
    steps = (
        Step(kind=OpKind.GATHER, src=0, dst=1 if root else -1, peer=0),
        Step(kind=OpKind.BROADCAST, src=1 if root else -1, dst=-1 if root else 1, peer=0),
    )
    return Template(buffers=made.buffers, steps=steps, src=0, dst=1, result=1)


def _gather_by_allgather(request: Request, operands: Operands) -> Template:
    """Allgather, on other ranks than the root into scratch."""
    made = _gather(request, operands)
    root = operands[0] == request.root
    buffers = made.buffers if root else (_OPERAND, Buffer(role=Role.LEARNED, scratch=True))
    step = Step(kind=OpKind.ALLGATHER, src=0, dst=1)
    return Template(buffers=buffers, steps=(step,), src=0, dst=made.dst, result=made.result)


def _reducescatter_by_scatter(request: Request, operands: Operands) -> Template:
    """Reduce all pieces to rank 0, into scratch, then scatter them."""
    made = _reducescatter(request, operands)
    scratch = (Buffer(role=Role.LIKE, source=0, scratch=True),) if operands[0] == 0 else ()
    at = 2 if scratch else -1
    steps = (
        Step(kind=OpKind.REDUCE, src=0, dst=at, op=request.op, peer=0),
        Step(kind=OpKind.SCATTER, src=at, dst=1, peer=0),
    )
    return Template(buffers=(*made.buffers, *scratch), steps=steps, src=0, dst=1, result=1)


def _barrier_by_door(request: Request, operands: Operands) -> Template:
    """Nothing: nobody leaves the door before all have come."""
    return Template(buffers=(), steps=())


SUBSTITUTES: dict[OpKind, tuple[tuple[OpKind, ...], _Part]] = {
    OpKind.ALLREDUCE: ((OpKind.REDUCE, OpKind.BROADCAST), _allreduce_by_broadcast),
    OpKind.REDUCE: ((OpKind.ALLREDUCE,), _reduce_by_allreduce),
    OpKind.ALLGATHER: ((OpKind.GATHER, OpKind.BROADCAST), _allgather_by_broadcast),
    OpKind.GATHER: ((OpKind.ALLGATHER,), _gather_by_allgather),
    OpKind.REDUCESCATTER: ((OpKind.REDUCE, OpKind.SCATTER), _reducescatter_by_scatter),
    OpKind.BARRIER: ((), _barrier_by_door),
}
"""What a backend lacks -> the operations that it is made of instead, and how."""


def lower(request: Request, roster: Roster) -> Part:
    """Chooses buffers and kernels for each rank.

    Raises:
        UnsupportedError: The backend can't run the operation, nor what could stand for it.
    """
    write = _writer(request)
    written = [(write or _LOWER[request.kind])(request, operands) for operands in request.operands]
    known = {template: at for at, template in enumerate(dict.fromkeys(written))}
    part = Part(request=request, templates=tuple(known), parts=tuple(known[template] for template in written))
    return part if write else stand_in(part, roster)


def _writer(request: Request) -> _Part | None:
    """What writes the part of a rank; None where sends and receives have to stand for the operation."""
    kind, ops = request.kind, request.group.ops
    if _has(ops, (OpKind.SEND, OpKind.RECV) if kind is OpKind.SEND else (kind,)):
        return _LOWER[kind]
    if kind in SUBSTITUTES and _has(ops, SUBSTITUTES[kind][0]):
        return SUBSTITUTES[kind][1]
    if kind in STAND_INS and _has(ops, STAND_INS[kind].needs):
        return None
    made = {k for k, (parts, _) in SUBSTITUTES.items() if _has(ops, parts)}
    made |= {k for k, algorithm in STAND_INS.items() if _has(ops, algorithm.needs)}
    can = sorted({*ops, *(k.value for k in made)})
    found = f"{kind.value}, which backend {request.group.backend!r} does not have"
    violation = Violation(kind="unsupported", rank=-1, field="op", found=found, expected=f"one of {', '.join(can)}")
    raise refusal(kind.value, request.group.name, (violation,))


def _has(ops: Sequence[str], kinds: Sequence[OpKind]) -> bool:
    return all(kind.value in ops for kind in kinds)
