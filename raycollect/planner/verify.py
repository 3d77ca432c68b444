"""Proves a plan before it is sent.

A collective is a precondition and a postcondition over what each buffer holds (the idea of msccl-tools): what rank r
gives holds the atom (r, piece); kernels move and fold atoms; afterwards each result must be what the operation means,
and what a rank gave must be as it was unless it is the result. The run also proves that sends pair with receives and
that no rank waits for ever. It is made for each of a part's algorithms.

A list with tensors of each GPU of a rank (`gpu_lists`) holds what it stands for: one value, or one per rank. That it is
folded, brought and spread as the request says is looked at in the steps.

Where every element must be the left fold in rank order (P7), a folded value remembers how it was folded:
``((a + b) + c)`` is the symbol (a, b, c), and ``(a + (b + c))`` is (a, (b, c)), which is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from raycollect.errors import InternalError
from raycollect.model import PIECES, OpKind, ReduceOp
from raycollect.planner.ir import Part, Request
from raycollect.planner.listed import crossing_of
from raycollect.planner.template import CROSSINGS, Local, Role, Step, Template

__all__ = ["verify"]

Symbol = tuple[Any, ...]
"""What was folded into a value, in the order of the fold: atoms (rank, piece), piece -1 where a rank gives one value,
and symbols of what was folded by itself before."""
Cell = Sequence[Symbol | None]
"""What a buffer holds: one symbol, or one per piece; None: undefined. A list where pieces are written one by one."""
Memory = list[dict[int, Cell]]
"""For each rank: buffer -> what it holds; a buffer that is not there is undefined."""


def verify(part: Part, *, bitwise: bool = True) -> None:
    """Runs a part on symbols, by each of its algorithms.

    The outcome depends only on the part's form, so each form is run once and remembered.

    Args:
        part: The part.
        bitwise: Whether values must be folded one by one in rank order; else any order and grouping will do.

    Raises:
        InternalError: It deadlocks, or its result is not what the operation means.
    """
    request = part.request
    levels = tuple(tuple(ranks for _, ranks in level) for level in part.levels)
    averages = request.op is ReduceOp.AVG
    problem = (
        _unfit(part)
        or _astray(part)
        or _run(request.kind, part.ranks, request.root, part.templates, part.parts, levels, bitwise, averages)
        or _otherwise(part)
        or _too_early(part)
    )
    if problem:
        raise InternalError(detail=f"the plan for {request.kind.value} over ranks {part.ranks} {problem}")


def _unfit(part: Part) -> str:
    """Whether the templates have as many ways and launches as they should; what is wrong, or nothing."""
    for template in part.templates:
        if len(template.ways) != len(part.choices):
            return f"has {len(template.ways)} ways for {len(part.choices)} choices"
        for choice, way in zip(part.choices, template.ways, strict=True):
            launches = [step.at for step in way]
            if launches != sorted(launches) or (launches and not 0 <= launches[0] <= launches[-1] < choice.width):
                return f"has steps in launches {launches} of {choice.width}"
    return ""


def _otherwise(part: Part) -> str:
    """Whether anything is reduced by another op than that which is meant."""
    steps = (step for template in part.templates for way in template.ways for step in way)
    wrong = {step.op for step in steps if step.kind in (*_REDUCTIONS, Local.FOLD)} - {part.request.op}
    return f"reduces by {wrong} where {part.request.op} is meant" if wrong else ""


def _too_early(part: Part) -> str:
    """Whether anything that ranks gave is overwritten before all have their results, where that is to be kept."""
    for template in part.templates:
        for way in template.ways:
            commits = [at for at, step in enumerate(way) if step.kind is Local.COMMIT]
            if len(commits) != part.request.snapshot:
                return f"commits {len(commits)} times"
            early = [step.dst for step in way[: commits[0] if commits else 0] if step.dst >= 0]
            if any(template.buffers[index].role is Role.OPERAND for index in early):
                return "overwrites an operand before it commits"
    return ""


def _astray(part: Part) -> str:
    """Whether lists are not brought to the GPU of the group and spread as they should be; what is wrong, or nothing."""
    if part.request.lists is None:
        steps = (step for template in part.templates for way in template.ways for step in way)
        return next(
            (f"does {step.kind.value} where there are no lists" for step in steps if step.kind in CROSSINGS), ""
        )
    for rank, index in zip(part.ranks, part.parts, strict=True):
        template = part.templates[index]
        meant = _crossings(part.request, rank, template)
        for way in template.ways:
            found = []
            for step in way:
                lists = [at for at in (step.src, step.dst) if at >= 0 and not template.buffers[at].scratch]
                if step.kind in CROSSINGS:
                    found.append((step.kind, lists, (step.src_piece, step.dst_piece)))
                elif lists:
                    return f"runs {step.kind.value} on a list of rank {rank}"
            if found != meant:
                return f"does {found} with the lists of rank {rank} where {meant} is meant"
    return ""


def _crossings(request: Request, rank: int, template: Template) -> list[tuple[Local, list[int], tuple[int, int]]]:
    """What a rank does between its GPUs: (what, the list, the tensors of it that are named)."""
    come, source, target = crossing_of(request, rank)
    gives, takes = template.src >= 0, template.result >= 0 and (request.kind is not OpKind.SEND or rank == request.peer)
    first = [(come, [template.src], (source, -1))] if gives else []
    return [*first, *([(Local.SPREAD, [template.result], (source if gives else -1, target))] if takes else [])]


@lru_cache(maxsize=1024)
def _run(
    kind: OpKind,
    ranks: tuple[int, ...],
    root: int,
    templates: tuple[Template, ...],
    parts: tuple[int, ...],
    levels: tuple[tuple[tuple[int, ...], ...], ...] = (),
    bitwise: bool = True,
    averages: bool = False,
) -> str:
    """Runs one form of part by each of its ways; returns what is wrong with it, or nothing."""
    programs = [templates[index] for index in parts]
    for way in range(len(programs[0].ways)):
        given = [_given(kind, rank, len(ranks)) for rank in ranks]
        steps = [program.ways[way] for program in programs]
        run = _Run(ranks, levels, steps, _Folds(bitwise, averages))
        for memory, program, cell in zip(run.memory, programs, given, strict=True):
            if program.src >= 0 and program.buffers[program.src].role is Role.OPERAND:
                memory[program.src] = cell
        problem = run.run() or _outcome(kind, ranks, root, programs, run.memory, given, bitwise)
        if problem:
            return problem
    return ""


def _outcome(
    kind: OpKind,
    ranks: tuple[int, ...],
    root: int,
    programs: Sequence[Template],
    memory: Memory,
    given: Sequence[Cell],
    bitwise: bool,
) -> str:
    """What is wrong with what the ranks hold in the end, or nothing."""
    for i, (rank, program) in enumerate(zip(ranks, programs, strict=True)):
        expected = _POSTCONDITIONS[kind](i, ranks, root)
        found = memory[i].get(program.result)
        if not _is_same(found, expected, bitwise):
            return f"leaves {None if found is None else tuple(found)} on rank {rank} where {expected} is meant"
        if program.src >= 0 and program.src != program.result and memory[i].get(program.src) != given[i]:
            return f"overwrites what rank {rank} gives"
    return ""


def _is_same(found: Cell | None, expected: Cell | None, bitwise: bool) -> bool:
    """Whether two cells are equal: in every fold, or only in what was folded."""
    if found is None or expected is None:
        return found is expected
    if tuple(found) == expected:
        return True
    if bitwise or len(found) != len(expected) or None in found:
        return False
    return all(sorted(a or ()) == sorted(b or ()) for a, b in zip(found, expected, strict=True))


def _given(kind: OpKind, rank: int, count: int) -> Cell:
    """What a rank gives, before the plan."""
    in_pieces = PIECES.get(kind, (False, False))[0]
    return tuple(((rank, piece),) for piece in range(count)) if in_pieces else (((rank, -1),),)


# ---------------------------------------------------------------------------------------------- the run


class _Launch:
    """The ranks that run kernels together, as places among those of the part.

    Attributes:
        places: The places of those who take part, in the order of their ranks.
        members: The same, in no order.
        of: Rank in the group of the launch -> place; all ranks of the group.
        waiting: How many of them are at a kernel in which all take part.
    """

    __slots__ = ("members", "of", "places", "waiting")

    def __init__(self, of: dict[int, int], only: tuple[int, ...]) -> None:
        self.of = of
        self.places = tuple(of[rank] for rank in only or sorted(of))
        self.members = frozenset(self.places)
        self.waiting = 0


class _Run:
    """One run of one algorithm.

    Attributes:
        memory: What each rank holds.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        levels: tuple[tuple[tuple[int, ...], ...], ...],
        steps: Sequence[tuple[Step, ...]],
        folds: _Folds,
    ) -> None:
        self.memory: Memory = [{} for _ in ranks]
        self._ranks = ranks
        self._steps = steps
        self._folds = folds
        self._at = [0] * len(ranks)
        self._launches: dict[object, _Launch] = {}
        self._now: list[tuple[int, _Launch | None]] = [(-1, None)] * len(ranks)  # the launch that each is in
        place = {rank: at for at, rank in enumerate(ranks)}
        outer = dict.fromkeys(ranks, (0, place))
        self._groups: list[dict[int, tuple[int, dict[int, int]]]] = [outer]
        for level in levels:
            inner: dict[int, tuple[int, dict[int, int]]] = {}
            for number, members in enumerate(level):
                of = {at: place[rank] for at, rank in enumerate(members)}
                inner.update(dict.fromkeys(members, (number, of)))
            self._groups.append(inner)

    def run(self) -> str:
        """Runs all ranks to their ends; returns why it can't, or nothing."""
        ready = list(range(len(self._ranks)))
        try:
            while ready:
                place = ready.pop()
                if self._at[place] < len(self._steps[place]):
                    moved = self._try(place)
                    for one in moved:
                        self._at[one] += 1
                    ready += moved
        except _WrongError as exc:
            return str(exc)
        left = [self._ready(place) for place in range(len(self._ranks))]
        if any(left):
            return f"deadlocks at {[step.kind.value if step else 'end' for step in left]}"
        return ""

    def _ready(self, place: int) -> Step | None:
        steps, at = self._steps[place], self._at[place]
        return steps[at] if at < len(steps) else None

    def _try(self, place: int) -> Sequence[int]:
        """Runs the kernel at which a rank has just arrived, if all are there; returns who has moved."""
        step = self._steps[place][self._at[place]]
        if step.kind is Local.COMMIT:
            return (place,)
        if step.kind is Local.COPY:
            self._write(place, step.dst, step.dst_piece, self._read(place, step.src, step.src_piece))
            return (place,)
        if step.kind in CROSSINGS:
            self._write(place, step.dst, -1, self._read(place, step.src, -1))
            return (place,)
        launch = self._enter(place, step)
        if step.kind in (OpKind.SEND, OpKind.RECV):
            return self._pair(place, step, launch)
        launch.waiting += 1
        if launch.waiting < len(launch.places):
            return ()
        launch.waiting = 0
        return self._together(launch)

    def _enter(self, place: int, step: Step) -> _Launch:
        """The launch of a step; a rank is in one at a time."""
        level, rank = step.level, self._ranks[place]
        number, of = self._groups[level].get(rank, (-1, {})) if 0 <= level < len(self._groups) else (-1, {})
        key = (step.at, level, number, step.ranks)
        launch = self._launches.get(key)
        if launch is None:
            if not set(step.ranks) <= set(of) or list(step.ranks) != sorted(set(step.ranks)):
                raise _WrongError(f"deadlocks: rank {rank} waits for ranks {step.ranks} at level {level}")
            launch = self._launches[key] = _Launch(of, step.ranks)
        at, entered = self._now[place]
        if at == step.at and entered is not launch:
            raise _WrongError(f"deadlocks: rank {rank} is in two launches at once")
        if entered is not launch and place not in launch.members:
            raise _WrongError(f"deadlocks: rank {rank} has no part in a launch of ranks {step.ranks}")
        self._now[place] = step.at, launch
        return launch

    def _pair(self, place: int, step: Step, launch: _Launch) -> Sequence[int]:
        """A send whose receive is there, or the other way round."""
        there = launch.of.get(step.peer, -1)
        other = self._ready(there) if there >= 0 and there != place else None
        if other is None or {step.kind, other.kind} != {OpKind.SEND, OpKind.RECV}:
            return ()
        is_same = (other.at, other.level, other.ranks) == (step.at, step.level, step.ranks)
        if not is_same or self._now[there] != (step.at, launch):
            return ()
        if launch.of.get(other.peer, -1) != place:
            return ()
        (giver, give), (taker, take) = sorted(
            ((place, step), (there, other)), key=lambda one: one[1].kind is OpKind.RECV
        )
        self._write(taker, take.dst, take.dst_piece, self._read(giver, give.src, give.src_piece))
        return place, there

    def _together(self, launch: _Launch) -> Sequence[int]:
        """A kernel in which all ranks of a launch take part, and at which all are."""
        places = launch.places
        steps = [self._steps[place][self._at[place]] for place in places]
        first = steps[0]
        if first.kind not in _EFFECTS or len({(step.kind, step.op, step.peer) for step in steps}) > 1:
            return ()
        root = launch.of.get(first.peer, -1)
        if first.kind in _ROOTED and root not in places:
            return ()
        gives, takes = PIECES.get(first.kind, (False, False))
        if gives != takes and any(step.src == step.dst for step in steps):
            return ()  # one buffer can't be one value and one per rank
        read = [self._read(place, step.src, step.src_piece) for place, step in zip(places, steps, strict=True)]
        at = places.index(root) if root in places else -1
        written = _EFFECTS[first.kind](self._folds, read, at)
        for place, step, cell in zip(places, steps, written, strict=True):
            self._write(place, step.dst, step.dst_piece, cell)
        return places

    def _read(self, place: int, buffer: int, piece: int) -> Cell:
        cell = self.memory[place].get(buffer, ())
        if piece >= 0:
            return (cell[piece],) if piece < len(cell) else ()
        return tuple(cell)

    def _write(self, place: int, buffer: int, piece: int, cell: Cell) -> None:
        if buffer < 0:
            return
        if piece < 0:
            self.memory[place][buffer] = cell
            return
        count = len(self._ranks)
        held = self.memory[place].get(buffer)
        if not isinstance(held, list):
            held = list(held) if held is not None and len(held) == count else [None] * count
            self.memory[place][buffer] = held
        if not piece < count:
            raise _WrongError(f"writes piece {piece} of {count}")
        held[piece] = cell[0] if len(cell) == 1 else None


class _WrongError(Exception):
    """A rank does what makes no sense."""


# ---------------------------------------------------------------------------------------------- effects


class _Folds:
    """How values are folded.

    Attributes:
        bitwise: Whether a fold keeps how its values were folded before.
        averages: Whether it is an average, so that what was folded before can't be folded again.
    """

    __slots__ = ("averages", "bitwise")

    def __init__(self, bitwise: bool, averages: bool) -> None:
        self.bitwise = bitwise
        self.averages = averages

    def symbol(self, symbols: Sequence[Symbol | None]) -> Symbol | None:
        """Folds values, from the left to the right."""
        folded: list[Any] = []
        for at, symbol in enumerate(symbols):
            if symbol is None or (self.averages and len(symbol) > 1):
                return None
            if at == 0 or len(symbol) == 1 or not self.bitwise:
                folded += symbol
            else:
                folded.append(symbol)
        return tuple(folded)

    def cells(self, cells: Sequence[Cell]) -> Cell:
        """Folds piece by piece; nothing sensible where the cells differ in form."""
        if len({len(cell) for cell in cells}) > 1:
            return ()
        return tuple(self.symbol(symbols) for symbols in zip(*cells, strict=True))


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


_EFFECTS: dict[OpKind, Callable[[_Folds, list[Cell], int], list[Cell]]] = {
    OpKind.ALLREDUCE: lambda folds, read, root: _everywhere(folds.cells(read), read),
    OpKind.REDUCE: lambda folds, read, root: _at(root, folds.cells(read), read),
    OpKind.BROADCAST: lambda folds, read, root: _everywhere(read[root], read),
    OpKind.ALLGATHER: lambda folds, read, root: _everywhere(tuple(symbol for cell in read for symbol in cell), read),
    OpKind.GATHER: lambda folds, read, root: _at(root, tuple(symbol for cell in read for symbol in cell), read),
    OpKind.SCATTER: lambda folds, read, root: (
        [(symbol,) for symbol in read[root]] if len(read[root]) == len(read) else [()] * len(read)
    ),
    OpKind.REDUCESCATTER: lambda folds, read, root: [(folds.symbol(cell),) for cell in _turned(read)],
    OpKind.ALLTOALL: lambda folds, read, root: _turned(read),
    OpKind.BARRIER: lambda folds, read, root: _everywhere((), read),
}
"""A kernel in which all ranks take part: (how to fold, what each reads, the root's place) -> what each writes."""

_REDUCTIONS = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCESCATTER)
_ROOTED = (OpKind.REDUCE, OpKind.BROADCAST, OpKind.GATHER, OpKind.SCATTER)

_Post = Callable[[int, tuple[int, ...], int], Cell | None]


@lru_cache(maxsize=64)
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
