"""Boxes of tensors that ranks exchange, as a communicator sees them that can do it without messages.

Pure: the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Give(NamedTuple):
    """A box that another rank reads."""

    part: Any  # its place in the staging: contiguous, of native elements of the dtype in which it travels
    box: Any  # the box of this rank's tensor


class Take(NamedTuple):
    """Boxes that this rank writes."""

    boxes: Sequence[Any]  # of its tensors
    dtypes: Sequence[Any]  # in which they travel; what is given is of the same
    peers: tuple[int, ...]  # whose next boxes they are; several: the sums of those of each, added up in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRound:
    """What one rank does in a round, which all ranks end before any begins the next one.

    All boxes that two ranks exchange are of one shape at both ends, and in one order.
    """

    gives: Mapping[int, Sequence[Give]]  # by rank of the group; those that get the same share one sequence
    takes: Sequence[Take]
    passes_on: bool  # whether it gives what an earlier round has written


@dataclass(frozen=True, kw_only=True, eq=False)
class BoxExchange:
    """All rounds of one rank.

    Attributes:
        rounds: As many on all ranks.
        table: Memory for what the communicator tells other ranks, uint8 with `table_nbytes` bytes; it lies with the
            staging.
        memo: What the communicator remembers of these arrays. Nothing in it may keep a communicator.
    """

    rounds: Sequence[BoxRound]
    table: Any
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


WORD_NBYTES = 8


def table_nbytes(rounds: int, ranks: int, boxes: int, words: int) -> int:
    """The bytes of a table: of so many rounds and ranks, and of boxes with so many dimensions in all."""
    return WORD_NBYTES * (rounds * (1 + ranks) + boxes + words)
