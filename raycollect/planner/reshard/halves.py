"""The work of one rank in a reshard: its half. It names tensors by their places in `Reshard.names`.

A transfer moves one box of some tensors in a row, which have one layout. Sender and receiver have
their transfers of a round in one order, so a message needs no headers. The transfers of a round are columns: replicas
exchange the same boxes with other ranks, and share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

from raycollect.core.codec import MEMORY_PER_BYTE, Codec, Wire
from raycollect.core.weighted_cache import WeightedCache
from raycollect.planner.boxes import Point
from raycollect.planner.reshard.request import LocalTensor

ALIGNED_NBYTES = 16
"""Messages begin at multiples of it in the staging, so that all elements in them are aligned."""


class LocalBoxes(NamedTuple):
    """Boxes of some names in the local tensors of a rank: one object for all transfers of a box at one place."""

    first: int
    names: int  # how many
    at: Point  # where the box begins in each local tensor
    size: Point  # its extent


class Copy(NamedTuple):
    """Boxes that a rank holds and needs itself."""

    src: LocalBoxes
    dst: LocalBoxes


class PlannedBoxRound(NamedTuple):
    """One exchange of messages among all ranks that take part."""

    most: int  # the bytes of the largest message of any rank
    passes_on: bool  # whether this rank sends received boxes, not those that it holds as a source
    takers: tuple[int, ...]  # for each of `gives`, the rank in the group that gets it; it may be this one
    gives: tuple[LocalBoxes, ...]
    givers: tuple[tuple[int, ...], ...]  # for each of `takes`, its sender, or the senders of its addends in order
    takes: tuple[LocalBoxes, ...]


class Half(Wire, frozen=True, kw_only=True):
    """The work of one rank: first its copies, then its rounds."""

    src: tuple[LocalTensor, ...]  # the tensors that it must hold as a source; empty if it is none
    dst: tuple[LocalTensor, ...]  # the same as a target
    src_of: tuple[int, ...]  # for each name, its local tensor in `src`; -1: none
    dst_of: tuple[int, ...]  # the same in `dst`
    itemsizes: tuple[int, ...]  # for each name, of the elements that travel
    dtypes: tuple[str, ...]  # the same, the element type
    copies: tuple[Copy, ...]
    rounds: tuple[PlannedBoxRound, ...]

    def nbytes(self, boxes: LocalBoxes) -> int:
        """The bytes of a transfer of these boxes; of a sum, those of one addend."""
        return prod(boxes.size) * boxes.names * self.itemsizes[boxes.first]

    def messages(self, number: int) -> tuple[dict[int, int], dict[int, int]]:
        """The bytes of the messages of a round: (to each rank, from each rank)."""
        there: dict[int, int] = {}
        here: dict[int, int] = {}
        step = self.rounds[number]
        for taker, boxes in zip(step.takers, step.gives, strict=True):
            there[taker] = there.get(taker, 0) + self.nbytes(boxes)
        for givers, boxes in zip(step.givers, step.takes, strict=True):
            for giver in givers:
                here[giver] = here.get(giver, 0) + self.nbytes(boxes)
        return there, here

    @property
    def staging_nbytes(self) -> int:
        """The bytes of staging that the rank needs, which all rounds share."""
        both = [self.messages(number) for number in range(len(self.rounds))]
        return max((sum(map(aligned, (*there.values(), *here.values()))) for there, here in both), default=0)


def aligned(nbytes: int) -> int:
    """The room that a message takes in the staging."""
    return -(-nbytes // ALIGNED_NBYTES) * ALIGNED_NBYTES


_HALVES = Codec[Half](Half, "half of a reshard")


def encode_halves(halves: Mapping[int, Half]) -> dict[int, bytes]:
    """Writes halves by rank."""
    return {rank: _HALVES.encode(half) for rank, half in halves.items()}


decode_half: Callable[[bytes], Half]
decode_half = WeightedCache[bytes, Half](_HALVES.decode, lambda data, half: MEMORY_PER_BYTE * len(data), 16 << 20)
"""Reads the bytes of `encode_halves`; raises ProtocolError if malformed."""
