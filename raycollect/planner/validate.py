"""Static validation of a request, before shapes are known: of its ranks, operands and arguments."""

from __future__ import annotations

import math
from collections import Counter

from raycollect.core.model import OpKind
from raycollect.core.operations import OPERATIONS, Ranks, has_part
from raycollect.errors import Violation, refusal
from raycollect.errors.text import as_name
from raycollect.planner.ir import Operands, Request, Source
from raycollect.planner.lower_reshard import reshard_violations


def validate(request: Request) -> None:
    """Refuses a request that is invalid for any tensors; RefusedError has all reasons."""
    if request.reshard is not None:
        violations = reshard_violations(request, request.reshard)
    else:
        violations = (*_rank_violations(request), *_argument_violations(request))
    if violations:
        raise refusal(request.name, request.group.name, violations)


def _members(request: Request) -> set[int]:
    return {request.root, request.peer} if request.kind is OpKind.SEND else set(range(request.group.world_size))


def _rank_violations(request: Request) -> list[Violation]:
    world, expected = request.group.world_size, _members(request)
    given = [rank for rank, _, _ in request.operands]
    misplaced = _misplaced(request)
    violations = [
        Violation(kind="missing", rank=rank, field="operand", found="missing", expected="one ref")
        for rank in sorted((expected - set(given)) | _without_operand(request, {side for _, side, _ in misplaced}))
        if 0 <= rank < world
    ]
    violations += [
        Violation(kind="not_member", rank=rank, field="rank", found=str(rank), expected=f"one of {sorted(expected)}")
        for rank in sorted(set(given) - expected)
    ]
    violations += [
        Violation(kind="duplicate", rank=rank, field="operand", found="given twice", expected="one ref")
        for rank, count in sorted(Counter(given).items())
        if count > 1
    ]
    violations += [
        Violation(kind="mismatch", rank=rank, field=side, found=f"kept by rank {rank}", expected=expected)
        for rank, side, expected in misplaced
    ]
    return violations


def _who(request: Request, who: Ranks) -> set[int]:
    return {rank for rank in _members(request) if has_part(who, rank, request.root, request.peer)}


def _placed(request: Request) -> list[Operands]:
    roots = {OpKind.SEND: (request.root, request.peer)}.get(request.kind, (request.root,))
    spec = OPERATIONS.get(request.kind)
    if spec is None or (spec.root and not all(0 <= root < request.group.world_size for root in roots)):
        return []
    members = _members(request)
    return [operands for operands in request.operands if operands[0] in members]


def _without_operand(request: Request, misplaced: set[str]) -> set[int]:
    """Ranks that lack an operand, except if another rank has an operand too many, which is reported instead."""
    if not (placed := _placed(request)):
        return set()
    spec = OPERATIONS[request.kind]
    gives, takes = _who(request, spec.gives), _who(request, "" if spec.makes else spec.outputs)
    return {
        rank
        for rank, src, dst in placed
        if (rank in gives and src is None and "input" not in misplaced)
        or (rank in takes and dst is None and "output" not in misplaced)
    }


def _misplaced(request: Request) -> list[tuple[int, str, str]]:
    if not (placed := _placed(request)):
        return []
    spec, misplaced = OPERATIONS[request.kind], []
    for side, who in (("input", spec.gives), ("output", spec.outputs)):
        allowed = _who(request, who)
        whose = f"rank {min(allowed)}" if len(allowed) == 1 else f"one of {sorted(allowed)}"
        for rank, src, dst in placed:
            key = src if side == "input" else dst
            if key is not None and rank not in allowed:
                misplaced.append((rank, side, f"kept by {whose}" if allowed else "none"))
    return misplaced


def _argument_violations(request: Request) -> list[Violation]:
    world, kind = request.group.world_size, request.kind
    spec = OPERATIONS.get(kind)
    violations = []

    def wrong(field: str, value: object, expected: str) -> None:
        violations.append(Violation(kind="argument", rank=-1, field=field, found=as_name(value), expected=expected))

    if spec is None:
        wrong("op", kind.value, f"one of {', '.join(operation.value for operation in OPERATIONS)}")
        return violations
    if spec.root and not 0 <= request.root < world:
        wrong(spec.root, request.root, f"a rank from 0 to {world - 1}")
    if kind is OpKind.SEND and not 0 <= request.peer < world:
        wrong("destination rank", request.peer, f"a rank from 0 to {world - 1}")
    if kind is OpKind.SEND and request.root == request.peer:
        wrong("destination rank", request.peer, "another rank than the source")
    if spec.folds and request.op is None:
        wrong("op", None, "a ReduceOp")
    if request.snapshot and not (spec.folds and spec.in_place and request.inplace):
        wrong("snapshot", True, "False: what it reads is not overwritten")
    if not 0 < request.timeout_s < math.inf:
        wrong("timeout_s", request.timeout_s, "a positive, finite number of seconds")
    return violations


def complete_operands(request: Request, key: Source) -> tuple[Operands, ...]:
    """The operands of a collective to which every rank gives all operands of its role, each named `key`."""
    spec = OPERATIONS[request.kind]
    gives, takes = _who(request, spec.gives), _who(request, spec.outputs)
    ranks = sorted(_members(request))
    return tuple((rank, key if rank in gives else None, key if rank in takes else None) for rank in ranks)
