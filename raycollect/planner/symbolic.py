"""Runs the steps of all ranks on symbols: yields the contents of each buffer, or the reason of a deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from raycollect.core.model import OpKind
from raycollect.core.operations import OPERATIONS, OperationSpec
from raycollect.planner.template import Local, TemplateStep

Symbol = tuple[Any, ...]
"""The operands of a fold, in order: atoms (rank, piece), with piece -1 if a rank gives one value, and the symbols of
folds before it."""
Cell = Sequence[Symbol | None]
"""The contents of a buffer: one symbol, or one per piece; None: undefined. A list where pieces are written one by one.
"""
Memory = list[dict[int, Cell]]
"""For each rank: buffer -> its contents; a missing buffer is undefined."""


class _Launch:
    """The ranks that run kernels together, as places among those of the part."""

    __slots__ = ("members", "of", "places", "waiting")

    def __init__(self, of: dict[int, int], only: tuple[int, ...]) -> None:
        self.of = of  # rank in the group of the launch -> place; all ranks of the group
        self.places = tuple(of[rank] for rank in only or sorted(of))  # of the participating ranks, by rank
        self.members = frozenset(self.places)
        self.waiting = 0  # the number of ranks that have reached a kernel of all


class SymbolicRun:
    """One run of one algorithm on symbols; `memory` has the buffers of each rank."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        steps: Sequence[tuple[TemplateStep, ...]],
        folds: Folds,
    ) -> None:
        self.memory: Memory = [{} for _ in ranks]
        self._ranks = ranks
        self._steps = steps
        self._folds = folds
        self._at = [0] * len(ranks)
        self._launches: dict[object, _Launch] = {}
        self._now: list[tuple[int, _Launch | None]] = [(-1, None)] * len(ranks)  # the launch that each is in
        self._places = {rank: at for at, rank in enumerate(ranks)}

    def run(self) -> str:
        """Runs all ranks to their ends; returns the reason if they can't end, or an empty text."""
        ready = list(range(len(self._ranks)))
        try:
            while ready:
                place = ready.pop()
                if self._at[place] < len(self._steps[place]):
                    moved = self._try(place)
                    for mover in moved:
                        self._at[mover] += 1
                    ready += moved
        except _WrongError as exc:
            return str(exc)
        left = [self._ready(place) for place in range(len(self._ranks))]
        if any(left):
            return f"deadlocks at {[step.kind.value if step else 'end' for step in left]}"
        return ""

    def _ready(self, place: int) -> TemplateStep | None:
        steps, at = self._steps[place], self._at[place]
        return steps[at] if at < len(steps) else None

    def _try(self, place: int) -> Sequence[int]:
        """Runs the kernel that a rank has just reached, if all its ranks have; returns those that completed it."""
        step = self._steps[place][self._at[place]]
        if step.kind is Local.COMMIT:
            return (place,)
        if step.kind is Local.COPY:
            self._write(place, step.dst, step.dst_piece, self._read(place, step.src, step.src_piece))
            return (place,)
        launch = self._enter(place, step)
        if step.kind in (OpKind.SEND, OpKind.RECV):
            return self._pair(place, step, launch)
        launch.waiting += 1
        if launch.waiting < len(launch.places):
            return ()
        launch.waiting = 0
        return self._together(launch)

    def _enter(self, place: int, step: TemplateStep) -> _Launch:
        """The launch of a step; a rank is in one at a time."""
        rank, of = self._ranks[place], self._places
        key = (step.at, step.ranks)
        launch = self._launches.get(key)
        if launch is None:
            if not set(step.ranks) <= set(of) or list(step.ranks) != sorted(set(step.ranks)):
                raise _WrongError(f"deadlocks: rank {rank} waits for ranks {step.ranks}")
            launch = self._launches[key] = _Launch(of, step.ranks)
        at, entered = self._now[place]
        if at == step.at and entered is not launch:
            raise _WrongError(f"deadlocks: rank {rank} is in two launches at once")
        if entered is not launch and place not in launch.members:
            raise _WrongError(f"deadlocks: rank {rank} has no part in a launch of ranks {step.ranks}")
        self._now[place] = step.at, launch
        return launch

    def _pair(self, place: int, step: TemplateStep, launch: _Launch) -> Sequence[int]:
        there = launch.of.get(step.peer, -1)
        other = self._ready(there) if there >= 0 and there != place else None
        if other is None or {step.kind, other.kind} != {OpKind.SEND, OpKind.RECV}:
            return ()
        is_same = (other.at, other.ranks) == (step.at, step.ranks)
        if not is_same or self._now[there] != (step.at, launch):
            return ()
        if launch.of.get(other.peer, -1) != place:
            return ()
        (giver, give), (taker, take) = sorted(
            ((place, step), (there, other)), key=lambda end: end[1].kind is OpKind.RECV
        )
        self._write(taker, take.dst, take.dst_piece, self._read(giver, give.src, give.src_piece))
        return place, there

    def _together(self, launch: _Launch) -> Sequence[int]:
        places = launch.places
        steps = [self._steps[place][self._at[place]] for place in places]
        first = steps[0]
        spec = OPERATIONS.get(first.kind) if isinstance(first.kind, OpKind) else None
        if spec is None or len({(step.kind, step.op, step.peer) for step in steps}) > 1:
            return ()
        root = launch.of.get(first.peer, -1)
        if spec.root and root not in places:
            return ()
        if spec.gives_pieces != spec.takes_pieces and any(step.src == step.dst for step in steps):
            return ()  # one buffer can't be one value and one per rank
        read = [self._read(place, step.src, step.src_piece) for place, step in zip(places, steps, strict=True)]
        at = places.index(root) if root in places else -1
        written = _effect(spec, self._folds, read, at)
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
    """A step makes no sense."""


@dataclass(frozen=True, slots=True)
class Folds:
    """How values are folded."""

    bitwise: bool  # whether a fold keeps how its values were folded before
    averages: bool  # an average's result can't be folded again

    def symbol(self, symbols: Sequence[Symbol | None]) -> Symbol | None:
        """Folds values from left to right."""
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
        """Folds piece by piece; an invalid result where the cells differ in form."""
        if len({len(cell) for cell in cells}) > 1:
            return ()
        return tuple(self.symbol(symbols) for symbols in zip(*cells, strict=True))


def _effect(spec: OperationSpec, folds: Folds, read: Sequence[Cell], root: int) -> list[Cell]:
    """The outputs of all ranks in a kernel, by their inputs and the root's place."""
    count = len(read)
    if spec.gives_pieces:
        return _of_pieces(spec, folds, read, root)
    cells: dict[Sequence[int], Cell] = {}  # many ranks get the same
    written: list[Cell] = []
    for place in range(count):
        givers = spec.givers(place, count, root)
        if not spec.takes or (spec.takes == "root" and place != root):
            written.append(())
            continue
        if givers not in cells:
            given = [read[giver] for giver in givers]
            cells[givers] = folds.cells(given) if spec.folds else tuple(chain.from_iterable(given))
        written.append(cells[givers])
    return written


def _of_pieces(spec: OperationSpec, folds: Folds, read: Sequence[Cell], root: int) -> list[Cell]:
    """The same where each giver has a piece for each rank; undefined where one has not."""
    count = len(read)
    if any(len(cell) != count for cell in ([read[root]] if spec.gives == "root" else read)):
        return [()] * count
    given = [[read[giver][place] for giver in spec.givers(place, count, root)] for place in range(count)]
    return [(folds.symbol(symbols),) if spec.folds else tuple(symbols) for symbols in given]
