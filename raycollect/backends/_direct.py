"""Kernels in place: what a rank shows of its arrays, how all come to work in them or not, and what is lent.

The listings are written before the door, or before a barrier of the kernel's own; after it all read the same, and
decide alike. One more barrier follows the door where others write into a rank's array: only past the door does each
rank hold off those who read it (`Store.writing`). What the ranks then do is in `_in_place`.

Who writes into a rank's array when that rank fails stops within some blocks, unless its process was stopped: so an
array that was lent for writing in a launch that failed is kept until all who may write have left the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raycollect.contracts import SegmentSource
from raycollect.model import BufferRef, Kernel, Launch, OpKind, Segment

from ._directory import CAPACITY, GIVES, STAGED, TAKES, Directory, Listing, Places
from ._in_place import Blocks, Work, root_of
from ._meeting import Meeting
from .arrays import Array, Flat, native
from .completion import remembered

__all__ = ["ALIKE", "DIRECT_FROM_NBYTES", "TOGETHER", "Direct"]

DIRECT_FROM_NBYTES = 32 << 10
"""From which size of the largest array on kernels work in place; below, staging needs one barrier less."""

TOGETHER = (CAPACITY - 1) // 2
"""How many kernels at most can run together: each lists one array that it gives, and one that it takes."""

ALIKE = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND, OpKind.RECV)
"""The kernels that can run together: each rank lists equally many arrays for each of them."""

_BYTE: np.dtype[Any] = np.dtype(np.uint8)
_NO_BYTES = BufferRef(Segment(0, 0, b"", 0), 0, 0)
_NOWHERE = Places()

_Loan = tuple[Any, dict[int, int], Meeting]
"""What was lent, the words of those who have yet to give it back, and where they say so."""

_forsaken: list[_Loan] = []
"""What communicators that are closed had lent to ranks that have not come back: it may be written yet."""


def _recall() -> None:
    """Lets go of what has come back meanwhile."""
    _forsaken[:] = [loan for loan in _forsaken if loan[2].owing(loan[1])]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a rank can show of one kernel.

    Attributes:
        flags: Of GIVES and TAKES.
        places: Where those arrays lie.
        largest: The bytes of the largest array that it gives.
        lends: Whether others may write arrays of this rank.
        dtypes: The type of each kernel's elements.
    """

    flags: int
    places: Places
    largest: int
    lends: bool
    dtypes: tuple[np.dtype[Any], ...]


class Direct:
    """One rank's part in kernels that work in place.

    Args:
        directory: Where the arrays lie.
        rank: One's own rank.
        segments: Tells whether one's own arrays can be shown.
    """

    def __init__(self, directory: Directory, rank: int, segments: SegmentSource) -> None:
        self._directory = directory
        self._rank = rank
        self._segments = segments
        self._lent: list[_Loan] = []
        self._blocks: Blocks = {}

    def restart(self, meeting: Meeting) -> None:
        """Begins a launch."""
        self._directory.restart()
        if self._lent:
            self._lent = [loan for loan in self._lent if meeting.owing(loan[1])]
        if _forsaken:
            _recall()

    def close(self) -> None:
        """Ends it; what may still be written is kept on, and looked at by the other communicators of this process."""
        _forsaken.extend(self._lent)
        self._lent.clear()
        _recall()

    def show(self, launch: Launch, kernels: Sequence[Kernel], flags: int = 0) -> None:
        """Lists one's own arrays for the kernels that run next, together; a barrier has to follow.

        Args:
            launch: The launch.
            kernels: The kernels; see `run`.
            flags: STAGED, if the first chunk is in the slot already.
        """
        if self._directory.is_open:
            seen = self._see(kernels)
            self._directory.write(flags | seen.flags, seen.places, launch.ranks)
        else:
            self._directory.write(flags, _NOWHERE, launch.ranks)

    @staticmethod
    def is_worth(nbytes: int) -> bool:
        """Whether arrays of that size are worked on in place, where they can be."""
        return nbytes >= DIRECT_FROM_NBYTES

    def can_give(self, kernel: Kernel) -> bool:
        """Whether others can read in place what this rank gives, and that is worth it by its size."""
        seen = self._see((kernel,))
        return bool(seen.flags & GIVES) and self.is_worth(seen.largest) and self._directory.is_open

    def run(
        self, meeting: Meeting, launch: Launch, kernels: Sequence[Kernel], *, listed: bool, until_s: float
    ) -> tuple[bool, bool]:
        """Runs kernels in place if that can be; all ranks come to the same, by what they have listed.

        Args:
            meeting: Where the ranks wait for each other.
            launch: The launch.
            kernels: One kernel; or several, at most `TOGETHER`, of one of the kinds `ALIKE`, with one root.
            listed: Whether all ranks have listed their arrays before the barrier that was passed last, the door.
            until_s: When to give up, by the monotonic clock.

        Returns:
            Whether they have run, and this rank's arrays are its own again; and if not, whether all ranks had staged
            the first chunk before the door.
        """
        lent = not listed  # who has passed the barrier may write, whether or not this rank has
        try:
            if not listed:
                self.show(launch, kernels)
                meeting.barrier(launch, until_s)
            listings = self._directory.read(launch.ranks, lambda: meeting.barrier(launch, until_s))
            way = self._way(launch, kernels[0], listings)
            lent = way == "push"
            if not way:
                return False, all(listing.flags & STAGED for listing in listings)
            if listed and way == "push":
                meeting.barrier(launch, until_s)  # all hold off who reads what others write
            dtypes = self._see(kernels).dtypes
            Work(meeting, launch, kernels, dtypes, way, listings, self._rank, self._blocks, until_s).run()
        except BaseException:
            if lent and self._see(kernels).lends:
                self._lent.append(([kernel.dst for kernel in kernels], meeting.closing(launch), meeting))
            raise
        return True, False

    def _way(self, launch: Launch, kernel: Kernel, listings: Sequence[Listing]) -> str:
        """Who works in whose arrays."""
        gives = [bool(listing.flags & GIVES) for listing in listings]
        takes = [bool(listing.flags & TAKES) for listing in listings]
        root = launch.ranks.index(root_of(kernel, self._rank)) if kernel.peer >= 0 else 0
        return _way(kernel.kind, gives, takes, root)

    def _see(self, kernels: Sequence[Kernel]) -> _Seen:
        """Looks where this rank's arrays lie, once."""
        return remembered(kernels, "direct", self._look_at)

    def _look_at(self, kernels: Sequence[Kernel]) -> _Seen:
        flags, refs = 0, list[BufferRef]()
        shown = [_shown(kernel, self._rank) for kernel in kernels]
        for flag, sides in ((GIVES, [gives for gives, _ in shown]), (TAKES, [takes for _, takes in shown])):
            found = self._locate(None if None in sides else [array for side in sides for array in side or ()])
            if found is not None:
                flags |= flag
                refs += found
        largest = max((array.nbytes for gives, _ in shown for array in gives or ()), default=0)
        lends = flags & TAKES and any(takes for _, takes in shown)
        dtypes = tuple(_BYTE if kernel.sample is None else native(kernel.sample.dtype) for kernel in kernels)
        return _Seen(flags, Places.of(refs), largest, bool(lends), dtypes)

    def _locate(self, arrays: Sequence[Array] | None) -> list[BufferRef] | None:
        """Where arrays lie in shared memory; None where one of them does not, or is no plain row of elements."""
        if arrays is None:
            return None
        refs = []
        for array in arrays:
            flat = Flat(array)
            ref = self._segments.locate(flat.address, array.nbytes) if flat.direct else None
            if ref is None and array.nbytes:
                return None
            refs.append(ref or _NO_BYTES)
        return refs


def _shown(kernel: Kernel, rank: int) -> tuple[Sequence[Array] | None, Sequence[Array] | None]:
    """The arrays that others read, and those that they write; None where they must not."""
    kind, is_root = kernel.kind, rank == kernel.peer
    takes: Sequence[Array] = ()
    if kind is OpKind.BARRIER:
        return (), ()
    if kind in (OpKind.ALLREDUCE, OpKind.RECV) or (kind is OpKind.REDUCE and is_root):
        takes = (kernel.dst,)
    if kind is OpKind.GATHER:
        return ((), kernel.dst) if is_root else ((kernel.src,), ())
    if kind is OpKind.RECV or (kind in (OpKind.BROADCAST, OpKind.SCATTER) and not is_root):
        return (), takes
    if kind is OpKind.BROADCAST:
        return (kernel.dst if kernel.src is None else kernel.src,), ()
    if kind is OpKind.ALLTOALL and _is_in_place(kernel):
        return None, ()  # what others have yet to read would be overwritten
    return kernel.src if type(kernel.src) is tuple else (kernel.src,), takes


def _is_in_place(kernel: Kernel) -> bool:
    pairs = zip(kernel.src, kernel.dst, strict=True)
    return any(src.size and src.ctypes.data == dst.ctypes.data for src, dst in pairs)


def _way(kind: OpKind, gives: Sequence[bool], takes: Sequence[bool], root: int) -> str:
    """Who works in whose arrays: the takers ("pull"), the givers ("push"), or nobody."""
    all_give = all(gives)
    if kind is OpKind.ALLREDUCE:
        return "push" if all_give and all(takes) else ""
    if kind is OpKind.REDUCE and all_give and takes[root]:
        return "push"
    if kind in (OpKind.SEND, OpKind.RECV):
        return "pull" if gives[root] else "push" if takes[1 - root] else ""
    if kind is OpKind.GATHER and takes[root]:
        return "push"
    if kind is OpKind.BROADCAST:
        return "pull" if gives[root] else ""
    return "pull" if all_give else ""
