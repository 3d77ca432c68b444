"""What makes sense of a request before any tensor is known: its ranks, its operands and its arguments."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from raycollect.core.model import OpKind
from raycollect.errors import Violation, refusal
from raycollect.errors.text import as_name
from raycollect.planner.ir import Operands, Request, Source
from raycollect.planner.reshard.lowering import reshard_violations


@dataclass(frozen=True, slots=True)
class _Needs:
    """Which ranks bring operands; `src` and `dst` are each ``"all"``, ``"root"``, ``"others"``, ``"peer"`` or ""."""

    src: str = ""  # who gives
    dst: str = ""  # who takes into a tensor that is not the one it gives
    made: bool = False  # whether that tensor is made where none is given
    root: str = ""  # what the root is called; empty where there is none
    reduces: bool = False  # whether there must be a reduce op


_NEEDS: dict[OpKind, _Needs] = {
    OpKind.ALLREDUCE: _Needs("all", reduces=True),
    OpKind.REDUCE: _Needs("all", root="dst_rank", reduces=True),
    OpKind.BROADCAST: _Needs("root", "others", root="src_rank"),
    OpKind.ALLGATHER: _Needs("all", "all", made=True),
    OpKind.REDUCESCATTER: _Needs("all", "all", made=True, reduces=True),
    OpKind.GATHER: _Needs("all", "root", made=True, root="dst_rank"),
    OpKind.SCATTER: _Needs("root", "all", made=True, root="src_rank"),
    OpKind.ALLTOALL: _Needs("all", "all", made=True),
    OpKind.SCAN: _Needs("all", reduces=True),
    OpKind.EXSCAN: _Needs("all", reduces=True),
    OpKind.SEND: _Needs("root", "peer", made=True, root="source rank"),
    OpKind.BARRIER: _Needs(),
}


def root_parameter(kind: OpKind) -> str:
    """The name of an operation's root parameter; empty where it has none."""
    return _NEEDS[kind].root


def validate(request: Request) -> None:
    """Refuses a request that is wrong whatever its tensors; RefusedError: has all reasons."""
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
    roots = {OpKind.SEND: (request.root, request.peer)}.get(request.kind, (request.root,))
    needs = _NEEDS.get(request.kind)
    if needs is None or (needs.root and not all(0 <= root < request.group.world_size for root in roots)):
        return []
    members = _members(request)
    return [operands for operands in request.operands if operands[0] in members]


def _without_operand(request: Request, misplaced: set[str]) -> set[int]:
    """Ranks that lack an operand; not those whose operand another rank brought, as that is reported itself."""
    needs = _NEEDS.get(request.kind, _Needs())
    gives, takes = _who(request, needs.src), set() if needs.made else _who(request, needs.dst)
    return {
        rank
        for rank, src, dst in _placed(request)
        if (rank in gives and src is None and "input" not in misplaced)
        or (rank in takes and dst is None and "output" not in misplaced)
    }


def _misplaced(request: Request) -> list[tuple[int, str, str]]:
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
        found.append(Violation(kind="argument", rank=-1, field=field, found=as_name(value), expected=expected))

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
    """The operands of a collective to which every rank brings all that it can, each named `key`."""
    needs = _NEEDS[request.kind]
    gives, takes = _who(request, needs.src), _who(request, needs.dst)
    ranks = sorted(_members(request))
    return tuple((rank, key if rank in gives else None, key if rank in takes else None) for rank in ranks)
