"""The memory segment that the co-located members of a group share, and how they map it.

Rank 0 makes sealed anonymous memory (`core.shared_memory`), and publishes its descriptor. The others open it by /proc,
which admits processes of the same user only, and report whether they have mapped it. Rank 0 then closes its descriptor,
and the kernel frees the memory with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from raycollect.backends.joining import gathered
from raycollect.core import shared_memory
from raycollect.core.codec import Codec, Wire
from raycollect.core.model import GroupSpec, Segment
from raycollect.core.protocols import Rendezvous
from raycollect.errors import BackendUnavailableError
from raycollect.errors.text import listed

JOIN_TIMEOUT_S = 45.0  # Less than the minute of a declaration, which can then report the missing ranks
HEAD_NBYTES = mmap.PAGESIZE  # For the token of the segment; the group's memory begins on a page
_NAME = "raycollect-group"
_OFFER, _ANSWER = "shm.segment", "shm.mapped"


class _SegmentOffer(Wire, frozen=True):
    """The segment that rank 0 publishes."""

    segment: Segment | None
    error: str  # why there is no segment


_OFFERS = Codec[_SegmentOffer](_SegmentOffer, "offer of a segment")
_ANSWERS = Codec[str](str, "answer to an offer")  # why a rank can't map the segment, or ""


def client_segment(spec: GroupSpec, rank: int, rendezvous: Rendezvous, nbytes: int) -> memoryview:
    """Maps rank 0's segment, on every other rank.

    Raises:
        BackendUnavailableError: Rank 0 has no segment, or this rank can't map it.
        CollectiveTimeoutError: Rank 0 did not publish it in time.
    """
    offer = gathered(_OFFERS, rendezvous, spec, _OFFER, (0,), JOIN_TIMEOUT_S)[0]
    if offer.segment is None:
        raise _unavailable(spec, offer.error)
    try:
        if offer.segment.nbytes != HEAD_NBYTES + nbytes:
            raise OSError("its size differs: are the versions of raycollect equal?")
        with shared_memory.opened(offer.segment, _NAME, os.O_RDWR) as fd:
            mapped = mmap.mmap(fd, offer.segment.nbytes)
    except OSError as exc:
        text = f"rank {rank} can't map the segment of rank 0: {exc}"
        rendezvous.put(f"{_ANSWER}.{rank}", _ANSWERS.encode(text))
        raise _unavailable(spec, text) from exc
    rendezvous.put(f"{_ANSWER}.{rank}", _ANSWERS.encode(""))
    return memoryview(mapped)[HEAD_NBYTES:]


def server_segment(
    spec: GroupSpec, rendezvous: Rendezvous, nbytes: int, prepare: Callable[[memoryview], None]
) -> memoryview:
    """Makes the segment on rank 0, and returns when all other ranks have mapped it; `prepare` sets it up before that.

    Raises:
        BackendUnavailableError: The system lacks memfd, memory or a descriptor, or a member can't map the segment.
        CollectiveTimeoutError: A member did not map it in time.
    """
    others = range(1, spec.world_size)
    try:
        own = shared_memory.OwnSegment(_NAME, HEAD_NBYTES + nbytes)
    except OSError as exc:
        text = f"rank 0 can't make {nbytes} bytes of shared memory: {exc}"
        if others:
            rendezvous.put(f"{_OFFER}.0", _OFFERS.encode(_SegmentOffer(None, text)))
        raise _unavailable(spec, text) from exc
    try:
        memory = memoryview(own.mapped)[HEAD_NBYTES:]
        prepare(memory)
        if others:
            rendezvous.put(f"{_OFFER}.0", _OFFERS.encode(_SegmentOffer(own.segment, "")))
            answers = gathered(_ANSWERS, rendezvous, spec, _ANSWER, others, JOIN_TIMEOUT_S)
            if any(answers.values()):
                raise _unavailable(spec, listed(filter(None, answers.values()), "; "))
    finally:
        own.close()
    return memory


def _unavailable(spec: GroupSpec, detail: str) -> BackendUnavailableError:
    return BackendUnavailableError(group_name=spec.name, detail=f"backend 'shm': {detail}")
