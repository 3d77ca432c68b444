"""Proves a plan before it is sent.

A collective is a precondition and a postcondition over what each buffer holds (the idea of msccl-tools): what rank r
gives holds the atom (r, piece); kernels move and fold atoms; afterwards each result must be what the operation means,
and what a rank gave must be as it was unless it is the result. The run also proves that sends pair with receives and
that no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from raycollect.errors import InternalError
from raycollect.model import PIECES, OpKind
from raycollect.planner.ir import Plan, Role, Step, Template

Symbol = tuple[tuple[int, int], ...]
"""What was folded into a value, in the order of the fold: (rank, piece) each; piece -1 where a rank gives one value."""
Cell = tuple[Symbol | None, ...]
"""What a buffer holds: one symbol, or one per piece; None: undefined."""
Memory = list[dict[int, Cell]]
"""For each rank: buffer -> what it holds; a buffer that is not there is undefined."""


def verify(plan: Plan) -> None:
    """Runs the plan on symbols.

    The outcome depends only on the plan's form, so each form is run once and remembered.

    Raises:
        InternalError: The plan deadlocks, or its result is not what the operation means.
    """
    request = plan.request
    problem = _run(request.kind, plan.ranks, request.root, plan.templates, plan.parts)
    ops = {step.op for template in plan.templates for step in template.steps if step.kind in _REDUCTIONS}
    if not problem and ops - {request.op}:
        problem = f"reduces by {ops} where {request.op} is meant"
    if problem:
        raise InternalError(detail=f"the plan for {request.kind.value} over ranks {plan.ranks} {problem}")


@lru_cache(maxsize=1024)
def _run(
    kind: OpKind, ranks: tuple[int, ...], root: int, templates: tuple[Template, ...], parts: tuple[int, ...]
) -> str:
    """Runs one form of plan; returns what is wrong with it, or nothing."""
    programs = [templates[part] for part in parts]
    given = [_given(kind, rank, len(ranks)) for rank in ranks]
    memory: Memory = [
        {p.src: cell} if p.src >= 0 and p.buffers[p.src].role is Role.OPERAND else {}
        for p, cell in zip(programs, given, strict=True)
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
        expected = _POSTCONDITIONS[kind](i, ranks, root)
        found = memory[i].get(program.result)
        if found != expected:
            return f"leaves {found} on rank {rank} where {expected} is meant"
        if program.src >= 0 and program.src != program.result and memory[i].get(program.src) != given[i]:
            return f"overwrites what rank {rank} gives"
    return ""


def _given(kind: OpKind, rank: int, count: int) -> Cell:
    """What a rank gives, before the plan."""
    in_pieces = PIECES.get(kind, (False, False))[0]
    return tuple(((rank, piece),) for piece in range(count)) if in_pieces else (((rank, -1),),)


def _fire(ranks: tuple[int, ...], ready: list[Step | None], memory: Memory) -> list[int]:
    """Runs the steps that can run now; returns the positions of the ranks that moved."""
    for i, step in enumerate(ready):
        if step is None or step.kind not in (OpKind.SEND, OpKind.RECV):
            continue
        j = ranks.index(step.peer) if step.peer in ranks else -1
        other = ready[j] if j >= 0 else None
        if step.kind is OpKind.SEND and other and other.kind is OpKind.RECV and other.peer == ranks[i]:
            memory[j][other.dst] = memory[i].get(step.src, ())
            return [i, j]
    first = ready[0]
    if first is None or first.kind not in _EFFECTS:
        return []
    if any(step is None or (step.kind, step.op, step.peer) != (first.kind, first.op, first.peer) for step in ready):
        return []
    if first.kind in _ROOTED and first.peer not in ranks:
        return []
    gives, takes = PIECES.get(first.kind, (False, False))
    if gives != takes and any(step and step.src == step.dst for step in ready):
        return []  # one buffer can't be one value and one per rank
    read = [memory[i].get(step.src, ()) for i, step in enumerate(ready) if step]
    written = _EFFECTS[first.kind](read, ranks.index(first.peer) if first.peer in ranks else -1)
    for i, step in enumerate(ready):
        if step and step.dst >= 0:
            memory[i][step.dst] = written[i]
    return list(range(len(ranks)))


# ---------------------------------------------------------------------------------------------- effects


def _fold(symbols: list[Symbol | None]) -> Symbol | None:
    return None if None in symbols else tuple(atom for symbol in symbols if symbol for atom in symbol)


def _fold_cells(cells: list[Cell]) -> Cell:
    """Folds piece by piece; nothing sensible where the cells differ in form."""
    if len({len(cell) for cell in cells}) > 1:
        return ()
    return tuple(_fold(list(symbols)) for symbols in zip(*cells, strict=True))


def _everywhere(cell: Cell, read: list[Cell]) -> list[Cell]:
    return [cell] * len(read)


def _at(root: int, cell: Cell, read: list[Cell]) -> list[Cell]:
    return [cell if i == root else () for i in range(len(read))]


def _turned(read: list[Cell]) -> list[Cell]:
    """Gives each rank the pieces meant for it, by who gave them; nothing sensible where one has not one per rank."""
    count = len(read)
    if any(len(cell) != count for cell in read):
        return [()] * count
    return [tuple(cell[i] for cell in read) for i in range(count)]


_EFFECTS: dict[OpKind, Callable[[list[Cell], int], list[Cell]]] = {
    OpKind.ALLREDUCE: lambda read, root: _everywhere(_fold_cells(read), read),
    OpKind.REDUCE: lambda read, root: _at(root, _fold_cells(read), read),
    OpKind.BROADCAST: lambda read, root: _everywhere(read[root], read),
    OpKind.ALLGATHER: lambda read, root: _everywhere(tuple(symbol for cell in read for symbol in cell), read),
    OpKind.GATHER: lambda read, root: _at(root, tuple(symbol for cell in read for symbol in cell), read),
    OpKind.SCATTER: lambda read, root: (
        [(symbol,) for symbol in read[root]] if len(read[root]) == len(read) else [()] * len(read)
    ),
    OpKind.REDUCESCATTER: lambda read, root: [(_fold(list(cell)),) for cell in _turned(read)],
    OpKind.ALLTOALL: lambda read, root: _turned(read),
    OpKind.BARRIER: lambda read, root: _everywhere((), read),
}
"""A kernel in which all ranks take part: (what each reads, the root's position) -> what each that writes then holds."""

_REDUCTIONS = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCESCATTER)
_ROOTED = (OpKind.REDUCE, OpKind.BROADCAST, OpKind.GATHER, OpKind.SCATTER)

_Post = Callable[[int, tuple[int, ...], int], Cell | None]


def _whole(ranks: tuple[int, ...], piece: int = -1) -> Symbol:
    return tuple((rank, piece) for rank in ranks)


def _on_root(meant: _Post) -> _Post:
    return lambda i, ranks, root: meant(i, ranks, root) if ranks[i] == root else None


_POSTCONDITIONS: dict[OpKind, _Post] = {
    OpKind.ALLREDUCE: lambda i, ranks, root: (_whole(ranks),),
    OpKind.REDUCE: _on_root(lambda i, ranks, root: (_whole(ranks),)),
    OpKind.BROADCAST: lambda i, ranks, root: (((root, -1),),),
    OpKind.ALLGATHER: lambda i, ranks, root: tuple(((rank, -1),) for rank in ranks),
    OpKind.GATHER: _on_root(lambda i, ranks, root: tuple(((rank, -1),) for rank in ranks)),
    OpKind.SCATTER: lambda i, ranks, root: (((root, i),),),
    OpKind.REDUCESCATTER: lambda i, ranks, root: (_whole(ranks, i),),
    OpKind.ALLTOALL: lambda i, ranks, root: tuple(((rank, i),) for rank in ranks),
    OpKind.SEND: lambda i, ranks, root: (((root, -1),),),
    OpKind.BARRIER: lambda i, ranks, root: None,
}
"""What the result of a rank means: (its position, ranks, root) -> what its result buffer holds; None: no result."""
