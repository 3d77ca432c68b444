"""Which rank has mapped which segment of another one: the listings of shm, without kernels."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from raycollect.backends.arrays import Array
from raycollect.backends.shm.directory import GIVES, ArrayDirectory, Listing, Places, directory_nbytes
from raycollect.core import threads
from raycollect.core.model import BufferRef, Segment

WAIT_S = 10.0
NBYTES = 4096


class Source:
    """A `SegmentSource` that can't map some segments."""

    def __init__(self) -> None:
        self.refused: set[Segment] = set()

    def open(self, segment: Segment) -> Array:
        if segment in self.refused:
            raise OSError("no more descriptors")
        return np.zeros(NBYTES, np.uint8)


class Ranks:
    """The directories of some ranks over the same memory."""

    def __init__(self, world_size: int) -> None:
        memory = memoryview(bytearray(directory_nbytes(world_size)))
        self.sources = [Source() for _ in range(world_size)]
        self.all = [
            ArrayDirectory(memory, rank, world_size, source)  # type: ignore[arg-type]
            for rank, source in enumerate(self.sources)
        ]

    def write(self, ranks: Sequence[int], segments: Sequence[Segment | None]) -> None:
        for rank, segment in zip(ranks, segments, strict=True):
            places = Places() if segment is None else Places.of([BufferRef(segment, 0, 8)])
            self.all[rank].write(0 if segment is None else GIVES, places, ranks)

    def read(self, ranks: Sequence[int]) -> list[list[Listing]]:
        barrier = threading.Barrier(len(ranks))
        reading = [threads.call_in_helper(self.all[rank].read, ranks, partial(met, barrier)) for rank in ranks]
        return [future.result(WAIT_S) for future in reading]


def met(barrier: threading.Barrier) -> None:
    barrier.wait(WAIT_S)


def segment(number: int) -> Segment:
    return Segment(number, number, bytes([number]), NBYTES)


@pytest.mark.parametrize("failed", [True, False], ids=["in a launch that failed", "to another rank"])
def test_what_was_offered_otherwise_counts_for_nobody(failed: bool) -> None:
    """A rank that can't map it says so at the barrier, and all ranks go another way."""
    ranks, mine, other = Ranks(3), segment(1), segment(2)
    if failed:
        ranks.write((0, 1), (mine, None))  # nobody reads it
    else:
        ranks.write((0, 2), (mine, None))
        ranks.read((0, 2))
        ranks.all[1].turn = ranks.all[0].turn
    ranks.write((0, 1), (None, other))
    ranks.read((0, 1))
    ranks.sources[1].refused.add(mine)
    ranks.write((0, 1), (mine, None))
    assert [[listing.arrays for listing in listings] for listings in ranks.read((0, 1))] == [[(), ()], [(), ()]]
    assert not ranks.all[0].is_open
    assert not ranks.all[1].is_open
