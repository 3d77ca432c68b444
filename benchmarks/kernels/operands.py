"""What the ranks of an operation hold: arrays, their first values, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]

OPS = ("allreduce", "broadcast", "allgather", "alltoall", "send")
"""What players may be asked to do. A send goes from rank 0 to rank 1; a broadcast from rank 0."""

_UNIT = 2.0**-100
"""What sums begin with: each in-place sum over n ranks makes it n times as much, and float32 ends at 2 ** 128."""

MOST_RUNS = 50
"""How many in-place sums over up to 16 ranks float32 holds, from `_UNIT` on."""

_BLANK = -1.0
_ROOT = 3.0


@dataclass(frozen=True, slots=True)
class Operands:
    """One rank's arrays for one operation.

    Attributes:
        op: The operation.
        rank: The rank.
        ranks: How many there are.
        src: What it gives.
        dst: What it takes; `src` itself where the operation works in place.
    """

    op: str
    rank: int
    ranks: int
    src: Array
    dst: Array

    @classmethod
    def make(cls, op: str, rank: int, ranks: int, nbytes: int, empty: Callable[[int], Array]) -> Operands:
        """Makes arrays for an operation.

        Args:
            op: The operation.
            rank: The rank.
            ranks: How many there are.
            nbytes: The larger side of what a rank gives and takes: what an allgather brings together.
            empty: Makes an array of so many elements.
        """
        piece = max(1, nbytes // 4 // ranks)
        if op == "allgather":
            return cls(op, rank, ranks, empty(piece), empty(piece * ranks))
        if op == "alltoall":
            return cls(op, rank, ranks, empty(piece * ranks), empty(piece * ranks))
        both = empty(max(1, nbytes // 4))
        return cls(op, rank, ranks, both, both)

    def pieces(self, array: Array) -> tuple[Array, ...]:
        """An array's equal pieces, one per rank."""
        return tuple(array.reshape(self.ranks, -1))

    def fill(self) -> None:
        """Sets all arrays to their first values."""
        if self.op == "allreduce":
            self.src.fill((self.rank + 1) * _UNIT)
        elif self.op in ("broadcast", "send"):
            self.src.fill(_ROOT if self.rank == 0 else _BLANK)
        elif self.op == "allgather":
            self.src.fill(self.rank + 1)
            self.dst.fill(_BLANK)
        else:
            for other, piece in enumerate(self.pieces(self.src)):
                piece.fill(self.rank * self.ranks + other)
            self.dst.fill(_BLANK)

    def check(self, runs: int) -> None:
        """Raises AssertionError unless `dst` holds what so many runs since `fill` must have left."""
        if self.op == "allreduce":
            self._holds(self.dst, self.ranks * (self.ranks + 1) / 2 * float(self.ranks) ** (runs - 1) * _UNIT)
        elif self.op in ("broadcast", "send"):
            self._holds(self.dst, _ROOT)
        else:
            for other, piece in enumerate(self.pieces(self.dst)):
                self._holds(piece, other + 1 if self.op == "allgather" else other * self.ranks + self.rank)

    def _holds(self, array: Array, value: float) -> None:
        low, high = float(array.min()), float(array.max())
        slack = 1e-5 * abs(value)
        if not value - slack <= low <= high <= value + slack:
            raise AssertionError(f"{self.op}, rank {self.rank} of {self.ranks}: {low} to {high}, not {value}")
