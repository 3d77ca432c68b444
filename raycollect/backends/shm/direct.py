"""Kernels in place: the listing of a rank's arrays, the decision to work in place, and loans.

The listings are written before the agreement, or before a barrier of the kernel; afterwards all ranks read the same
listings and decide alike. If others write into a rank's array, another barrier follows the agreement: only then has
each rank blocked its readers (`Store.writing`). The work itself is in `in_place`.

If a rank fails, ranks that write into its array stop within some blocks, unless their process was stopped. So an array
that was lent for writing in a failed launch is held until all possible writers have left the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raycollect.backends.arrays import Array, Flat, native
from raycollect.backends.kernels import remembered
from raycollect.backends.shm import loans
from raycollect.backends.shm.directory import CAPACITY, GIVES, STAGED, TAKES, ArrayDirectory, Listing, Places
from raycollect.backends.shm.in_place import Blocks, InPlaceRun, root_of
from raycollect.backends.shm.loans import Loans
from raycollect.backends.shm.meeting import Meeting
from raycollect.core.model import BufferRef, Kernel, Launch, OpKind, Segment
from raycollect.core.protocols import SegmentSource

# Kernels work in place if their largest array has this size; below, staging saves a barrier
DIRECT_FROM_NBYTES = 32 << 10
TOGETHER = (CAPACITY - 1) // 2  # The most kernels that run together: each lists one array on each side
# Kernels that can run together: each rank lists equally many arrays for each of them
ALIKE = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND, OpKind.RECV)
_BYTE: np.dtype[Any] = np.dtype(np.uint8)
_NO_BYTES = BufferRef(Segment(0, 0, b"", 0), 0, 0)
_NOWHERE = Places()


@dataclass(frozen=True, slots=True)
class _Seen:
    """The listing of a rank's kernels."""

    flags: int  # of GIVES and TAKES
    places: Places
    largest: int  # the bytes of the largest source array
    lends: bool  # whether others may write to arrays of this rank
    dtypes: tuple[np.dtype[Any], ...]


class InPlaceKernels:
    """One rank's part in kernels that work in place; `segments` locates its arrays in shared memory."""

    def __init__(self, directory: ArrayDirectory, rank: int, segments: SegmentSource) -> None:
        self._directory = directory
        self._rank = rank
        self._segments = segments
        self._loans = Loans()
        self._blocks: Blocks = {}

    def restart(self) -> None:
        """Begins a launch: the next listing is for its first kernel."""
        self._directory.turn = 0
        if self._loans.lent or loans.abandoned:
            self._loans.release_unused()

    def close(self) -> None:
        """Ends it; other communicators of this process hold arrays that may still be written."""
        self._loans.abandon()

    def show(self, launch: Launch, kernels: Sequence[Kernel], flags: int = 0) -> None:
        """Lists this rank's arrays for the kernels that run next, together; a barrier has to follow."""
        if self._directory.is_open:
            seen = self._see(kernels)
            self._directory.write(flags | seen.flags, seen.places, launch.ranks)
        else:
            self._directory.write(flags, _NOWHERE, launch.ranks)

    @staticmethod
    def is_worth(nbytes: int) -> bool:
        """Tells whether kernels on arrays of that size work in place, if possible."""
        return nbytes >= DIRECT_FROM_NBYTES

    def can_give(self, kernel: Kernel) -> bool:
        """Tells whether others can read this rank's source in place, and its size makes that worthwhile."""
        seen = self._see((kernel,))
        return bool(seen.flags & GIVES) and self.is_worth(seen.largest) and self._directory.is_open

    def run(
        self,
        meeting: Meeting,
        launch: Launch,
        kernels: Sequence[Kernel],
        *,
        listed: bool,
        until_s: float,
        begun: int = 0,
    ) -> tuple[bool, bool]:
        """Runs kernels in place if possible: one, or several of a kind in `ALIKE` with one root. Ranks decide alike.

        `listed`: all ranks listed their arrays before the last barrier, which is the agreement. `begun`: see
        `InPlaceRun`.

        Returns:
            Whether the kernels have run; and if not, whether all ranks had staged the first chunk before the
            agreement.
        """
        lent = not listed  # a rank past the barrier may write before this rank has passed it
        try:
            if not listed:
                self.show(launch, kernels)
                meeting.barrier(launch, until_s)
            listings = self._directory.read(launch.ranks, lambda: meeting.barrier(launch, until_s))
            way = _way(kernels[0], launch.ranks, self._rank, listings)
            lent = way == "push"
            if not way:
                return False, all(listing.flags & STAGED for listing in listings)
            if listed and way == "push":
                meeting.barrier(launch, until_s)  # by then all ranks have blocked their readers
            dtypes = self._see(kernels).dtypes
            InPlaceRun(meeting, launch, kernels, dtypes, way, listings, self._rank, self._blocks, until_s, begun).run()
        except BaseException:
            if lent and self._see(kernels).lends:
                self._loans.add([kernel.dst for kernel in kernels], meeting, launch)
            raise
        return True, False

    def _see(self, kernels: Sequence[Kernel]) -> _Seen:
        return remembered(kernels, "direct", self._look_at)

    def _look_at(self, kernels: Sequence[Kernel]) -> _Seen:
        flags, refs = 0, list[BufferRef]()
        shown = [_shown(kernel, self._rank) for kernel in kernels]
        for flag, sides in ((GIVES, [gives for gives, _ in shown]), (TAKES, [takes for _, takes in shown])):
            located = self._locate(None if None in sides else [array for side in sides for array in side or ()])
            if located is not None:
                flags |= flag
                refs += located
        largest = max((array.nbytes for gives, _ in shown for array in gives or ()), default=0)
        lends = flags & TAKES and any(takes for _, takes in shown)
        dtypes = tuple(_BYTE if kernel.sample is None else native(kernel.sample.dtype) for kernel in kernels)
        return _Seen(flags, Places.of(refs), largest, bool(lends), dtypes)

    def _locate(self, arrays: Sequence[Array] | None) -> list[BufferRef] | None:
        # None if an array is not in shared memory, or is not a contiguous row of elements.
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
    # The arrays that others read, and those that others write; None if others must not.
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
        return None, ()  # it would overwrite data that others have yet to read
    return kernel.src if type(kernel.src) is tuple else (kernel.src,), takes


def _is_in_place(kernel: Kernel) -> bool:
    pairs = zip(kernel.src, kernel.dst, strict=True)
    return any(src.size and src.ctypes.data == dst.ctypes.data for src, dst in pairs)


def _way(kernel: Kernel, ranks: Sequence[int], rank: int, listings: Sequence[Listing]) -> str:
    # The receivers copy ("pull"), the senders ("push"), or the kernel can't run in place ("").
    kind, root = kernel.kind, ranks.index(root_of(kernel, rank)) if kernel.peer >= 0 else 0
    gives = [bool(listing.flags & GIVES) for listing in listings]
    takes = [bool(listing.flags & TAKES) for listing in listings]
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
