"""The operations, and the actors between which they are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import raycollect as col

HIGHEST = 1000  # operands are integers up to this: float32 holds the sum of 16,000 of them
ELEMENT_NBYTES = np.dtype(np.float32).itemsize

Array = NDArray[np.float32]
Refs = Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """How to call an operation, and its expected result."""

    # The driver's operation, of what the ranks give, what they take, and the group
    refs: Callable[[Refs, Refs, str], object]
    member: Callable[[Rank, int, str], object]  # a rank's half of it, of its tensors, its rank, and the group
    # A rank's result, from its rank, the number of ranks, and what each rank gives, in rank order; None where it has
    # none
    expected: Callable[[int, int, Iterator[Array]], Array | None]
    gives_piece: bool = False  # whether a rank gives a piece, instead of the whole
    takes: str = "same"  # "whole", "piece", or "same": it works in place


def _send_or_receive(tensors: Rank, rank: int, group: str) -> None:
    if rank == 0:
        col.send(tensors.given, 1, group)
    elif rank == 1:
        col.recv(tensors.taken, 0, group)


def _sum(given: Iterator[Array]) -> Array:
    total = next(given)
    for one in given:
        total += one
    return total


def _piece(whole: Array, rank: int, ranks: int) -> Array:
    # A copy, which does not keep the whole alive.
    count = len(whole) // ranks
    return whole[rank * count : (rank + 1) * count].copy()


# Operation -> how it is called. What is in pieces is one contiguous tensor.
OPERATIONS: Mapping[str, Operation] = {
    "allreduce": Operation(
        refs=lambda given, _, group: col.allreduce_refs(given, group),
        member=lambda tensors, _, group: col.allreduce(tensors.given, group),
        expected=lambda rank, ranks, given: _sum(given),
    ),
    "broadcast": Operation(
        refs=lambda given, _, group: col.broadcast_refs(given, 0, group),
        member=lambda tensors, _, group: col.broadcast(tensors.given, 0, group),
        expected=lambda rank, ranks, given: next(given),
    ),
    "allgather": Operation(
        refs=lambda given, taken, group: col.allgather_refs(taken, given, group),
        member=lambda tensors, _, group: col.allgather(tensors.taken, tensors.given, group),
        expected=lambda rank, ranks, given: np.concatenate(list(given)),
        gives_piece=True,
        takes="whole",
    ),
    "reducescatter": Operation(
        refs=lambda given, taken, group: col.reducescatter_refs(taken, given, group),
        member=lambda tensors, _, group: col.reducescatter(tensors.taken, tensors.given, group),
        expected=lambda rank, ranks, given: _piece(_sum(given), rank, ranks),
        takes="piece",
    ),
    "alltoall": Operation(
        refs=lambda given, taken, group: col.alltoall_refs(taken, given, group),
        member=lambda tensors, _, group: col.alltoall(tensors.taken, tensors.given, group),
        expected=lambda rank, ranks, given: np.concatenate([_piece(one, rank, ranks) for one in given]),
        takes="whole",
    ),
    "send": Operation(
        refs=lambda given, taken, group: col.send_ref(given[0], taken[1], group),
        member=_send_or_receive,
        expected=lambda rank, ranks, given: next(given) if rank == 1 else None,
        takes="whole",
    ),
}


def whole_of(operation: str, ranks: int, nbytes: int) -> int:
    """Converts bytes to elements: at least one for each rank, where there are pieces."""
    kind = OPERATIONS[operation]
    pieces = ranks if kind.gives_piece or kind.takes == "piece" or operation == "alltoall" else 1
    return max(1, nbytes // (pieces * ELEMENT_NBYTES)) * pieces


class Rank(col.CollectiveParticipant):
    """Holds what one rank gives and takes, and makes calls of its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.given: Any = None
        self.taken: Any = None
        self._rank, self._ranks = rank, ranks

    def prepare(self, operation: str, whole: int) -> None:
        """Makes the tensors of an operation and a size, in the arena, in place of the last."""
        self.given = self.taken = None
        self._operation = OPERATIONS[operation]
        lengths = {"whole": whole, "piece": whole // self._ranks}
        self.given = col.zeros(lengths["piece" if self._operation.gives_piece else "whole"], np.float32)
        takes = lengths.get(self._operation.takes)
        self.taken = self.given if takes is None else col.zeros(takes, np.float32)

    def get_given(self) -> Any:
        """Returns what this rank gives."""
        return self.given

    def get_taken(self) -> Any:
        """Returns where its result goes."""
        return self.taken

    def fill(self, seed: int) -> None:
        """Draws what this rank gives, and forgets its result."""
        self.taken.fill(np.nan)
        self.given[:] = self._drawn(seed, self._rank)

    def clear(self) -> None:
        """Sets everything to zero."""
        self.taken.fill(0)
        self.given.fill(0)

    def wrong(self, seed: int) -> int:
        """Counts the elements of this rank's result that are not what numpy says."""
        given = (self._drawn(seed, rank) for rank in range(self._ranks))
        expected = self._operation.expected(self._rank, self._ranks, given)
        return 0 if expected is None else int(np.count_nonzero(self.taken != expected))

    def times(self, count: int, group: str) -> list[float]:
        """Makes this rank's half of the call so many times, after all ranks have come; returns the seconds of each."""
        col.barrier(group)
        return timed(lambda: self._operation.member(self, self._rank, group), count)

    def _drawn(self, seed: int, rank: int) -> Array:
        draw = np.random.default_rng([seed, rank])
        return draw.integers(-HIGHEST, HIGHEST, len(self.given), np.int16, endpoint=True).astype(np.float32)


def timed(run: Callable[[], object], count: int) -> list[float]:
    """Runs something so many times, and returns the seconds of each run."""
    spent_s = []
    for _ in range(count):
        began_s = perf_counter()
        run()
        spent_s.append(perf_counter() - began_s)
    return spent_s
