"""How far a program is, in bytes: worked out by whoever asks, from what its run notes anyhow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from raycollect.meters import LENT
from raycollect.model import Kernel
from raycollect.script import Move, Script
from raycollect.timing import label_of_stretch, nbytes_of

__all__ = ["NOWHERE", "Extent", "Reach"]


class Reach(NamedTuple):
    """How far a participant is in a plan.

    Attributes:
        done: The bytes of its tensors that are done.
        total: The bytes of all of them; 0: not known before all have agreed.
        lent: How many of those that are left others are working on, so that only they know how far these are.
    """

    done: int = 0
    total: int = 0
    lent: int = 0

    @property
    def fraction(self) -> float:
        """How much of it is done, from 0 to 1."""
        return self.done / self.total if self.total else 0.0


NOWHERE = Reach()
"""Before the door."""


class Extent:
    """The bytes of a script, kernel by kernel.

    Each bundle counts with the bytes of its collectives, as timelines count them; kernels of one bundle share these by
    what they read.

    Args:
        script: The script.

    Attributes:
        total: The bytes of all.
    """

    def __init__(self, script: Script) -> None:
        self._before: dict[int, float] = {}  # the id of a move -> the bytes before it
        self._scale: dict[int, float] = {}  # the same -> the bytes of the bundle for each that a kernel reads
        self._sizes: dict[int, Sequence[int]] = {}
        done = 0.0
        for stretch in script.stretches:
            moves = [move for move in stretch.moves if move.kernels]
            read = [sum(map(_nbytes, move.kernels)) for move in moves]
            weight = label_of_stretch(stretch).nbytes if any(read) else 0
            scale = weight / sum(read) if weight else 0.0
            for move, before in zip(moves, accumulate(read, initial=0), strict=False):
                self._place(move, done + before * scale, scale)
            done += weight
        self._script = script  # so that nothing else gets an id of its moves
        self.total: int = int(done)

    def _place(self, move: Move, before: float, scale: float) -> None:
        self._before[id(move)], self._scale[id(move)] = before, scale
        for other in move.instead:
            self._place(other, before, scale)
            before += sum(map(_nbytes, other.kernels)) * scale

    def at(self, move: Move | None, left: int, part: float) -> Reach:
        """How far the script is.

        Args:
            move: The latest that was begun; None: none was.
            left: How many of its kernels have not ended.
            part: How many of these are done, see `Meter.part`.
        """
        if move is None or id(move) not in self._before:
            return Reach(0, self.total)
        sizes = self._sizes.get(id(move))
        if sizes is None:
            sizes = self._sizes[id(move)] = [_nbytes(one) for one in move.kernels]
        first = max(len(sizes) - left, 0)
        scale, ended, rest = self._scale[id(move)], sum(sizes[:first]), sizes[first:]
        under_way, lent = 0.0, 0.0
        if part == LENT:
            lent = sum(rest)
        elif rest:
            whole = min(int(part), len(rest) - 1)
            under_way = sum(rest[:whole]) + rest[whole] * min(part - whole, 1.0)
        done = self._before[id(move)] + (ended + under_way) * scale
        return Reach(min(int(done), self.total), self.total, int(lent * scale))


def _nbytes(kernel: Kernel) -> int:
    """The bytes that a kernel reads, or else writes."""
    return nbytes_of(kernel.dst if kernel.src is None else kernel.src)
