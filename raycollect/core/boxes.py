"""Boxes of tensors that ranks exchange without messages, as a communicator sees them.

Pure: the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Give(NamedTuple):
    """A box that another rank reads."""

    part: Any  # its part of the staging buffer: contiguous, of native elements of the dtype in which it travels
    box: Any  # the box of this rank's tensor


class Take(NamedTuple):
    """Boxes that this rank writes."""

    boxes: Sequence[Any]  # of its tensors
    dtypes: Sequence[Any]  # in which they travel, as in `Give.part`
    peers: tuple[int, ...]  # the senders of these boxes; several: their boxes are summed in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRound:
    """One rank's part of a round, which all ranks end before any begins the next one.

    All boxes that two ranks exchange are of one shape at both ends, and in one order.
    """

    gives: Mapping[int, Sequence[Give]]  # by rank of the group; ranks that get the same boxes share one sequence
    takes: Sequence[Take]
    passes_on: bool  # whether it sends data that an earlier round has written


@dataclass(frozen=True, kw_only=True, eq=False)
class BoxExchange:
    """All rounds of one rank.

    Attributes:
        rounds: Equally many on all ranks.
        table: Memory for the communicator's table, uint8 with `table_nbytes` bytes; it is in the memory of the
            staging buffer.
        memo: The communicator's cache for these arrays. It must not refer to a communicator.
    """

    rounds: Sequence[BoxRound]
    table: Any
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


WORD_NBYTES = 8


def table_nbytes(rounds: int, ranks: int, boxes: int, words: int) -> int:
    """The bytes of a table, given the number of rounds, ranks and boxes, and the total of the boxes' dimensions."""
    return WORD_NBYTES * (rounds * (1 + ranks) + boxes + words)
