"""Proves a plan before it is sent.

A collective is a precondition and a postcondition over the contents of buffers (the idea of msccl-tools): the input of
rank r holds the atom (r, piece); kernels move and fold atoms; afterwards each result must have the operation's atoms,
and operands that are not the result must be unchanged. The run also proves that sends pair with receives and that no
rank waits forever. Each of a part's algorithms is run (`symbolic`).

Where every element must be the left fold in rank order (P7), a folded value remembers how it was folded:
``((a + b) + c)`` is the symbol (a, b, c), and ``(a + (b + c))`` is (a, (b, c)), a different one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import FOLDS, OPERATIONS, OperationSpec
from raycollect.errors import InternalError
from raycollect.planner.ir import Part
from raycollect.planner.symbolic import Cell, Folds, Memory, Symbol, SymbolicRun
from raycollect.planner.template import Local, Role, Template


def verify(part: Part, *, bitwise: bool = True) -> None:
    """Proves all algorithms of a part; each form is run once and remembered.

    With `bitwise`, values must be folded one by one in rank order; else any order and grouping will do.

    Raises:
        InternalError: It deadlocks, or has a wrong result.
    """
    request = part.request
    averages = request.op is ReduceOp.AVG
    problem = (
        _shape_problem(part)
        or _run(request.kind, part.ranks, request.root, part.templates, part.parts, bitwise, averages)
        or _op_problem(part)
        or _commit_problem(part)
    )
    if problem:
        raise InternalError(detail=f"the plan for {request.kind.value} over ranks {part.ranks} {problem}")


def _shape_problem(part: Part) -> str:
    for template in part.templates:
        if len(template.ways) != len(part.choices):
            return f"has {len(template.ways)} ways for {len(part.choices)} choices"
        for choice, way in zip(part.choices, template.ways, strict=True):
            launches = [step.at for step in way]
            if launches != sorted(launches) or (launches and not 0 <= launches[0] <= launches[-1] < choice.width):
                return f"has steps in launches {launches} of {choice.width}"
    return ""


def _op_problem(part: Part) -> str:
    steps = (step for template in part.templates for way in template.ways for step in way)
    wrong = {step.op for step in steps if step.kind in FOLDS} - {part.request.op}
    return f"reduces by {wrong} where {part.request.op} is meant" if wrong else ""


def _commit_problem(part: Part) -> str:
    for template in part.templates:
        for way in template.ways:
            commits = [at for at, step in enumerate(way) if step.kind is Local.COMMIT]
            if len(commits) != part.request.snapshot:
                return f"commits {len(commits)} times"
            early = [step.dst for step in way[: commits[0] if commits else 0] if step.dst >= 0]
            if any(template.buffers[index].role is Role.OPERAND for index in early):
                return "overwrites an operand before it commits"
    return ""


@lru_cache(maxsize=1024)
def _run(
    kind: OpKind,
    ranks: tuple[int, ...],
    root: int,
    templates: tuple[Template, ...],
    parts: tuple[int, ...],
    bitwise: bool = True,
    averages: bool = False,
) -> str:
    programs = [templates[index] for index in parts]
    for way in range(len(programs[0].ways)):
        given = [_given(kind, rank, len(ranks)) for rank in ranks]
        steps = [program.ways[way] for program in programs]
        run = SymbolicRun(ranks, steps, Folds(bitwise, averages))
        for memory, program, cell in zip(run.memory, programs, given, strict=True):
            if program.src >= 0 and program.buffers[program.src].role is Role.OPERAND:
                memory[program.src] = cell
        problem = run.run() or _outcome_problem(kind, ranks, root, programs, run.memory, given, bitwise)
        if problem:
            return problem
    return ""


def _outcome_problem(
    kind: OpKind,
    ranks: tuple[int, ...],
    root: int,
    programs: Sequence[Template],
    memory: Memory,
    given: Sequence[Cell],
    bitwise: bool,
) -> str:
    spec, at_root = OPERATIONS[kind], ranks.index(root) if root in ranks else -1
    for i, (rank, program) in enumerate(zip(ranks, programs, strict=True)):
        expected = _meant(spec, i, ranks, at_root)
        actual = memory[i].get(program.result)
        if not _is_same(actual, expected, bitwise):
            return f"leaves {None if actual is None else tuple(actual)} on rank {rank} where {expected} is meant"
        if program.src >= 0 and program.src != program.result and memory[i].get(program.src) != given[i]:
            return f"overwrites what rank {rank} gives"
    return ""


def _is_same(actual: Cell | None, expected: Cell | None, bitwise: bool) -> bool:
    if actual is None or expected is None:
        return actual is expected
    if tuple(actual) == expected:
        return True
    if bitwise or len(actual) != len(expected) or None in actual:
        return False
    return all(sorted(a or ()) == sorted(b or ()) for a, b in zip(actual, expected, strict=True))


def _given(kind: OpKind, rank: int, count: int) -> Cell:
    pieces = range(count) if OPERATIONS[kind].gives_pieces else (-1,)
    return tuple(((rank, piece),) for piece in pieces)


def _meant(spec: OperationSpec, i: int, ranks: tuple[int, ...], root: int) -> Cell | None:
    """The result of the rank at position i, where `root` is the root's position; None if it has none."""
    if not spec.takes or (spec.takes == "root" and i != root):
        return None
    atoms = _atoms(ranks, spec.givers(i, len(ranks), root), i if spec.gives_pieces else -1)
    return (atoms,) if spec.folds else tuple((atom,) for atom in atoms)


@lru_cache(maxsize=64)
def _atoms(ranks: tuple[int, ...], givers: Sequence[int], piece: int) -> Symbol:
    return tuple((ranks[giver], piece) for giver in givers)
