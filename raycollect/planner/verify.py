"""Proves a plan before it is sent.

A collective is a precondition and a postcondition over what each buffer holds (the idea of msccl-tools): an operand of
rank r holds the symbol r; kernels move and fold symbols; afterwards each result must be what the operation means. The
run also proves that sends pair with receives and that no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from raycollect.errors import InternalError
from raycollect.model import OpKind
from raycollect.planner.ir import Plan, Step, Template

Symbol = tuple[int, ...]
"""The ranks whose operands were folded into a value, in the order of the fold."""
Memory = list[list[Symbol | None]]


def verify(plan: Plan) -> None:
    """Runs the plan on symbols.

    The outcome depends only on the plan's form, so each form is run once and remembered.

    Raises:
        InternalError: The plan deadlocks, or its result is not what the operation means.
    """
    request = plan.request
    problem = _run(request.kind, plan.ranks, request.root, request.peer, plan.templates, plan.parts)
    if problem:
        raise InternalError(detail=f"the plan for {request.kind.value} over ranks {plan.ranks} {problem}")


@lru_cache(maxsize=1024)
def _run(
    kind: OpKind,
    ranks: tuple[int, ...],
    root: int,
    peer: int,
    templates: tuple[Template, ...],
    parts: tuple[int, ...],
) -> str:
    """Runs one form of plan; returns what is wrong with it, or nothing."""
    programs = [templates[part] for part in parts]
    memory: Memory = [
        [None if buffer.is_output else (rank,) for buffer in program.buffers]
        for rank, program in zip(ranks, programs, strict=True)
    ]
    at = [0] * len(ranks)
    while any(at[i] < len(program.steps) for i, program in enumerate(programs)):
        ready = [program.steps[at[i]] if at[i] < len(program.steps) else None for i, program in enumerate(programs)]
        moved = _fire(ranks, ready, memory)
        if not moved:
            return f"deadlocks at {[step.kind.value if step else 'end' for step in ready]}"
        for i in moved:
            at[i] += 1
    for i, (rank, program) in enumerate(zip(ranks, programs, strict=True)):
        expected = _POSTCONDITIONS[kind](rank, ranks, root, peer)
        found = memory[i][program.result] if program.result >= 0 else None
        if found != expected:
            return f"leaves {found} on rank {rank} where {expected} is meant"
    return ""


def _fire(ranks: tuple[int, ...], ready: list[Step | None], memory: Memory) -> list[int]:
    """Runs the steps that can run now; returns the positions of the ranks that moved."""
    for i, step in enumerate(ready):
        if step is None or step.kind not in (OpKind.SEND, OpKind.RECV):
            continue
        j = ranks.index(step.peer) if step.peer in ranks else -1
        other = ready[j] if j >= 0 else None
        if step.kind is OpKind.SEND and other and other.kind is OpKind.RECV and other.peer == ranks[i]:
            memory[j][other.dst] = memory[i][step.src]
            return [i, j]
    first = ready[0]
    if first is None or first.kind not in _EFFECTS:
        return []
    if any(step is None or (step.kind, step.op, step.peer) != (first.kind, first.op, first.peer) for step in ready):
        return []
    _EFFECTS[first.kind](ranks, [step for step in ready if step], memory)
    return list(range(len(ranks)))


def _allreduce(ranks: tuple[int, ...], steps: list[Step], memory: Memory) -> None:
    parts = [memory[i][step.src] for i, step in enumerate(steps)]
    folded = None if None in parts else tuple(rank for part in parts if part for rank in part)
    for i, step in enumerate(steps):
        memory[i][step.dst] = folded


def _broadcast(ranks: tuple[int, ...], steps: list[Step], memory: Memory) -> None:
    root = ranks.index(steps[0].peer)
    value = memory[root][steps[root].src]
    for i, step in enumerate(steps):
        if step.dst >= 0:
            memory[i][step.dst] = value


def _barrier(ranks: tuple[int, ...], steps: list[Step], memory: Memory) -> None:
    """A barrier moves nothing."""


_EFFECTS: dict[OpKind, Callable[[tuple[int, ...], list[Step], Memory], None]] = {
    OpKind.ALLREDUCE: _allreduce,
    OpKind.BROADCAST: _broadcast,
    OpKind.BARRIER: _barrier,
}
"""What a kernel in which all ranks take part does to the symbols."""

_POSTCONDITIONS: dict[OpKind, Callable[[int, tuple[int, ...], int, int], Symbol | None]] = {
    OpKind.ALLREDUCE: lambda rank, ranks, root, peer: ranks,
    OpKind.BROADCAST: lambda rank, ranks, root, peer: (root,),
    OpKind.BARRIER: lambda rank, ranks, root, peer: None,
    OpKind.SEND: lambda rank, ranks, root, peer: (root,),
}
"""What the result of a rank means: (rank, ranks, root, peer) -> symbol."""
