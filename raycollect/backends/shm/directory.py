"""The positions of the ranks' arrays in shared memory: each rank writes a listing before a barrier; all read it later.

A rank has two areas of the group's memory, which the kernels of a launch use in turn: no rank writes listing k + 2
before all ranks have passed the barrier of kernel k + 1, and so have read listing k. An area holds flags, the rank's
segment, and the offset and length of each array.

A rank that lists a segment for the first time to some rank sets a flag. Then each rank tries to map the new segments,
and reports the result at another barrier: either all ranks work in place, or none does. One mapping per rank is cached:
a rank that lists another segment no longer uses the previous one.

While others may read, a rank writes single 8-byte words only, each by one store: its answer must not tear its listing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add

import numpy as np

from raycollect.backends.arrays import Array
from raycollect.core.codec import Codec
from raycollect.core.model import BufferRef, Segment
from raycollect.core.protocols import SegmentSource
from raycollect.errors import InternalError

# Flags: the first chunk is in the rank's slot; others can read all its sources; they can write all its targets; it
# lists its segment for the first time; it makes all ranks meet between rounds of boxes
STAGED, GIVES, TAKES, _NEW, ROUNDS_MEET = 1, 2, 4, 8, 16

CAPACITY = 511  # How many arrays a listing has room for, at least
_FLAGS_BITS = 8  # of the word; the other bits are the length of the listing
_WORDS_NBYTES = 16  # the word, and whether the rank has mapped all listed segments
_HEAD_NBYTES, _PLACE_NBYTES = 80, 18  # The longest encoding of a segment, and of a position in it
_LINE_NBYTES = 64
_PARITIES = 2
_LISTINGS_KEPT = 64
_NOTHING: Array = np.empty(0, np.uint8)

_Listed = tuple[Segment, tuple[int, ...]]  # offset and length of each array, one after the other
_LISTINGS = Codec[_Listed](_Listed, "listing")


def _area_nbytes(world_size: int) -> int:
    entries = max(CAPACITY, world_size + 1)  # a piece for each rank, and one array
    nbytes = _WORDS_NBYTES + _HEAD_NBYTES + entries * _PLACE_NBYTES
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES


def directory_nbytes(world_size: int) -> int:
    """Returns the shared memory that the listings of `world_size` ranks take; a multiple of the cache line."""
    return world_size * _PARITIES * _area_nbytes(world_size)


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """One rank's listing of its arrays in one kernel; equal listings are one object."""

    flags: int  # some of STAGED, GIVES, TAKES and ROUNDS_MEET
    arrays: tuple[Array, ...] = ()  # their bytes, mapped here: sources if GIVES, then targets if TAKES


@dataclass(frozen=True, slots=True)
class Places:
    """The positions of arrays, as a listing encodes them."""

    segment: Segment | None = None  # the one that holds all of them; None if none of them has bytes
    packed: bytes = b""  # the segment, and offset and length of each array

    @classmethod
    def of(cls, refs: Sequence[BufferRef]) -> Places:
        """Packs references; those of no bytes may name any segment."""
        segment = next((ref.segment for ref in refs if ref.nbytes), None)
        places = tuple([number for ref in refs for number in (ref.offset, ref.nbytes)])
        return cls(segment, _LISTINGS.encode((segment or Segment(0, 0, b"", 0), places)))


class ArrayDirectory:
    """The listings of all ranks, as one rank sees them; `memory` has `directory_nbytes` bytes, zero at first."""

    def __init__(self, memory: memoryview, rank: int, world_size: int, segments: SegmentSource) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._rank = rank
        self._area = _area_nbytes(world_size)
        self._segments = segments
        self._shown: dict[int, Segment] = {}  # rank -> the segment of this rank that it has mapped
        self._offered: Segment | None = None
        self._mapped: dict[int, tuple[Segment, Array]] = {}  # by rank
        self._cached: dict[tuple[int, int, bytes], Listing] = {}  # by rank, flags and encoded listing
        self.turn: int = 0  # selects the area of the next kernel
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether arrays can be listed: False after a rank could not map them."""
        return not self._closed

    def write(self, flags: int, places: Places, ranks: Sequence[int]) -> None:
        """Writes this rank's listing for the next kernel of `ranks`."""
        at = self._at(self._rank)
        segment = places.segment
        self._offered = None  # an offer of a failed launch, or to other ranks, may not have been mapped
        if segment is not None and any(self._shown.get(rank) is not segment for rank in ranks if rank != self._rank):
            flags |= _NEW
            self._offered = segment
        start = at + _WORDS_NBYTES
        self._memory[start : start + len(places.packed)] = places.packed
        self._words[at // 8] = flags | len(places.packed) << _FLAGS_BITS
        self._words[at // 8 + 1] = 0

    def read(self, ranks: Sequence[int], barrier: Callable[[], None]) -> list[Listing]:
        """Reads the listings of `ranks`, after the barrier that follows their writing; may call `barrier` once more."""
        words = [self._words[self._at(rank) // 8] for rank in ranks]
        is_new = any(word & _NEW for word in words)
        if is_new and not self._meet(ranks, words, barrier):
            self._closed = True
            listings = [Listing(word & STAGED) for word in words]
        else:
            if is_new and self._offered is not None:
                self._shown.update(dict.fromkeys(ranks, self._offered))
            listings = [self._listing(rank, word) for rank, word in zip(ranks, words, strict=True)]
        self.turn = (self.turn + 1) % _PARITIES
        return listings

    def segment(self, rank: int) -> Array:
        """The segment of a rank's last listing, mapped here: all of its bytes."""
        return self._mapped[rank][1]

    def _meet(self, ranks: Sequence[int], words: Sequence[int], barrier: Callable[[], None]) -> bool:
        try:
            for rank, word in zip(ranks, words, strict=True):
                self._listing(rank, word)
        except OSError:
            pass
        else:
            self._words[self._at(self._rank) // 8 + 1] = 1
        barrier()
        return all(self._words[self._at(rank) // 8 + 1] for rank in ranks)

    def _listing(self, rank: int, word: int) -> Listing:
        flags, nbytes = word & ((1 << _FLAGS_BITS) - 1) & ~_NEW, word >> _FLAGS_BITS
        if not flags & (GIVES | TAKES):
            return Listing(flags)
        start = self._at(rank) + _WORDS_NBYTES
        written = bytes(self._memory[start : start + nbytes])
        listing = self._cached.get((rank, flags, written))
        if listing is None:
            arrays = self._map(rank, written)
            if len(self._cached) >= _LISTINGS_KEPT:
                self._cached.clear()
            listing = self._cached[rank, flags, written] = Listing(flags, arrays)
        return listing

    def _map(self, rank: int, written: bytes) -> tuple[Array, ...]:
        segment, numbers = _LISTINGS.decode(written)
        offsets, lengths = numbers[::2], numbers[1::2]
        if not any(lengths):
            return (_NOTHING,) * len(lengths)
        mapped = self._mapped.get(rank)
        if mapped is None or mapped[0] != segment:
            self._cached = {key: listing for key, listing in self._cached.items() if key[0] != rank}
            mapped = self._mapped[rank] = segment, self._segments.open(segment)
        if min(numbers) < 0 or max(map(add, offsets, lengths)) > segment.nbytes:
            raise InternalError(detail=f"rank {rank} names memory beyond the end of its segment")
        memory = mapped[1]
        return tuple([memory[at : at + nbytes] for at, nbytes in zip(offsets, lengths, strict=True)])

    def _at(self, rank: int) -> int:
        return (rank * _PARITIES + self.turn) * self._area
