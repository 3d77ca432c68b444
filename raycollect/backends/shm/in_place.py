"""The work of kernels in place: a rank's folds and copies, and its waits for other ranks afterwards.

A kernel comes here if its array or largest piece has at least `direct.DIRECT_FROM_NBYTES`, and the arrays listed below
are contiguous and in shared memory; kernels that are launched together count as one. SCAN, EXSCAN and all other kernels
are staged (`staged`). `communicator._is_for_direct` has the rule.

Theory, for w ranks and arrays of n bytes. A reduction is cut into w slices; each rank folds its slice of all arrays, in
rank order, a cache-sized block at a time, and writes the block to all targets: w reads and w writes of n / w bytes per
rank, the minimum of memory traffic. Everything else is one copy per byte, made by the receiver straight from the
sender's array ("pull"); or, where only the receiver's array is in shared memory, by the sender ("push").

=============  ===========================================  =========================================
kernel         works in place if                            copied or folded by
=============  ===========================================  =========================================
ALLREDUCE      all src and all dst are shown                each rank its slice, into all dst
REDUCE         all src and the root's dst are shown         each rank its slice, into the root's dst
               all src are shown                            the root
BROADCAST      the root's src is shown                      the others
SEND           the sender's src is shown                    the receiver
               the receiver's dst is shown                  the sender
GATHER         the root's dst is shown                      the others, each its piece
               all src are shown                            the root
others         all src are shown                            each rank its outputs
=============  ===========================================  =========================================

The bits equal those of staged kernels (P7): the same fold in the same order.

Afterwards only ranks that lent an array wait, until no rank uses it. Before a receiver reports that it is done, it
checks whether its sender has left the launch: then the data that it read may be stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends.arrays import Array, Flat
from raycollect.backends.folds import fold
from raycollect.backends.kernels import chunks, keep_own, metered, movement, reduce_op, transfers
from raycollect.backends.shm.directory import Listing
from raycollect.backends.shm.meeting import Meeting
from raycollect.core.kernel_progress import LENT, here
from raycollect.core.model import Kernel, Launch, OpKind

# The bytes of one array that are folded at a time: the blocks of a few ranks stay in a core's cache
FOLD_NBYTES = 256 << 10
COPY_NBYTES = 4 << 20  # How much is copied between two checks of the launch
FOLDS_PER_LOOK = 4  # How many blocks are folded between two checks of the launch
_LINE_NBYTES = 64
_FOLDS_KEPT = 64
# (kind, way) -> the side that lends its arrays; otherwise all ranks work in all arrays
_LENDERS: dict[tuple[OpKind, str], str] = {
    (OpKind.REDUCE, "pull"): "others",
    (OpKind.BROADCAST, "pull"): "root",
    (OpKind.SEND, "pull"): "root",
    (OpKind.SEND, "push"): "others",
    (OpKind.GATHER, "push"): "root",
    (OpKind.GATHER, "pull"): "others",
    (OpKind.SCATTER, "pull"): "root",
}


class _FoldBlock(NamedTuple):
    """A block of all ranks' arrays, folded at once."""

    parts: list[Array]  # in rank order
    out: Array
    later: int  # the index of `out` among the parts, if it is not the first
    copies: list[Array]


Blocks = dict[Any, list[_FoldBlock]]  # Blocks by all values that they depend on; cached across launches


Shown = Sequence[Sequence[Array]]  # By rank position: the bytes of the arrays listed for one kernel


class InPlaceRun:
    """One kernel in progress on one rank, or several independent kernels of one kind in `direct.ALIKE`.

    The listings have the sources of all kernels first, then the targets; `way` is "pull" or "push"; `begun` counts
    earlier kernels of the launch.
    """

    def __init__(
        self,
        meeting: Meeting,
        launch: Launch,
        kernels: Sequence[Kernel],
        dtypes: tuple[np.dtype[Any], ...],
        way: str,
        listings: Sequence[Listing],
        rank: int,
        folds: Blocks,
        until_s: float,
        begun: int = 0,
    ) -> None:
        self._meeting = meeting
        self._launch = launch
        self._kernels = kernels
        self._dtypes = dtypes
        self._way = way
        self._listings = listings
        self._rank = rank
        self._folds = folds
        self._until_s = until_s
        self._meter = here()
        self._begun = self._at = begun  # `_at`: the index of the current kernel, if kernels run one by one
        self._me = launch.ranks.index(rank)
        self._kernel = kernels[0]
        self._root = root_of(kernels[0], rank)

    def run(self) -> None:
        """Does this rank's part, and waits for the ranks that work in its arrays."""
        kind = self._kernel.kind
        if kind in (OpKind.ALLREDUCE, OpKind.REDUCE) and self._way == "push":
            self._reduce()
        else:
            for at, kernel in enumerate(self._kernels):
                self._kernel, self._at = kernel, self._begun + at
                self._meter.cover(self._at)
                self._run_kernel([listing.arrays[at :: len(self._kernels)] for listing in self._listings])
        lenders, waiting, waits_for = _loan(_paired(kind), self._way, self._root, self._launch.ranks, self._rank)
        if lenders:
            self._meeting.check(self._launch, lenders, self._until_s)  # they have not left, so their data was valid
        if waits_for and not waiting:
            self._meter.part = LENT
        self._meeting.barrier(self._launch, self._until_s, waiting=waiting, waits_for=waits_for)

    def _run_kernel(self, shown: Shown) -> None:
        kernel = self._kernel
        if kernel.kind is OpKind.REDUCE:
            if self._rank == self._root:
                dst = Flat(kernel.dst)
                self._fold_into(dst, [arrays[0].view(dst.dtype) for arrays in shown])
        elif kernel.kind is OpKind.REDUCESCATTER:
            dst = Flat(kernel.dst)
            self._fold_into(dst, [arrays[self._me].view(dst.dtype) for arrays in shown])
        elif self._way == "pull":
            self._pull(shown)
        else:
            self._push(shown)

    def _reduce(self) -> None:
        kernel = self._kernel
        key = (kernel.kind, kernel.peer, self._dtypes, self._launch.ranks, *self._listings)
        blocks = self._folds.get(key)
        if blocks is None:
            if len(self._folds) >= _FOLDS_KEPT:
                self._folds.clear()
            blocks = self._folds[key] = list(self._cut())
        op, each = reduce_op(kernel), len(self._kernels) / max(len(blocks), 1)
        for at, block in enumerate(blocks):
            if at % FOLDS_PER_LOOK == FOLDS_PER_LOOK - 1:
                self._look()
                self._meter.part = self._begun + at * each
            parts = block.parts
            if block.later:
                parts = [part.copy() if i == block.later else part for i, part in enumerate(parts)]
            fold(op, parts, block.out)
            for copy in block.copies:
                np.copyto(copy, block.out)

    def _cut(self) -> Iterator[_FoldBlock]:
        count, ranks = len(self._kernels), self._launch.ranks
        takers = ranks if self._kernel.kind is OpKind.ALLREDUCE else (self._root,)
        into = [self._listings[ranks.index(rank)].arrays for rank in takers]
        sizes = [into[0][count + at].size for at in range(count)]  # bytes
        for at, (start, stop) in enumerate(_slices(self._me, len(ranks), sizes, self._dtypes)):
            dtype = self._dtypes[at]
            srcs = [listing.arrays[at].view(dtype) for listing in self._listings]
            dst, *others = (arrays[count + at].view(dtype) for arrays in into)
            later = _later(srcs, dst.ctypes.data)
            for lo, hi in chunks(stop - start, FOLD_NBYTES // dtype.itemsize):
                block = slice(start + lo, start + hi)
                yield _FoldBlock([src[block] for src in srcs], dst[block], later, [other[block] for other in others])

    def _fold_into(self, dst: Flat, srcs: Sequence[Array]) -> None:
        op, later = reduce_op(self._kernel), _later(srcs, dst.address)
        for lo, hi in metered(dst.size, FOLD_NBYTES // dst.dtype.itemsize):
            if lo:
                self._look()
            out = dst.target(lo, hi)
            fold(op, [src[lo:hi].copy() if later and i == later else src[lo:hi] for i, src in enumerate(srcs)], out)
            dst.commit(lo, hi, out)

    def _look(self) -> None:
        self._meeting.check(self._launch, self._launch.ranks, self._until_s)

    def _pull(self, shown: Shown) -> None:
        kernel, ranks = self._kernel, self._launch.ranks
        if _paired(kernel.kind) in (OpKind.BROADCAST, OpKind.SEND):
            src, dst, _ = movement(kernel, is_root=self._rank == self._root)
            if src is not None and dst is not None:
                self._copy(src.read(0, src.size), dst)
            elif dst is not None:
                self._copy(shown[ranks.index(self._root)][0], dst)
            return
        give, take = transfers(kernel, ranks, self._rank)
        others = {rank: dst for rank, dst in take.items() if rank != self._rank}
        for at, (rank, dst) in enumerate(others.items()):
            arrays = shown[ranks.index(rank)]
            self._meter.cover(self._at + at / len(others), 1.0 / len(others))
            self._copy(arrays[self._me if kernel.kind in _CUT else 0], dst)
        keep_own(give, take, self._rank, COPY_NBYTES)

    def _push(self, shown: Shown) -> None:
        kernel, ranks = self._kernel, self._launch.ranks
        if kernel.kind is OpKind.GATHER:
            give, take = transfers(kernel, ranks, self._rank)
            if self._rank == self._root:
                keep_own(give, take, self._rank, COPY_NBYTES)
            else:
                src = give[self._root]
                self._copy(src, Flat(shown[ranks.index(self._root)][self._me].view(src.dtype)))
        elif kernel.kind is OpKind.SEND:
            src = Flat(kernel.src)
            self._copy(src, Flat(shown[1 - self._me][0].view(src.dtype)))

    def _copy(self, src: Array | Flat, dst: Flat) -> None:
        source = src if isinstance(src, Flat) else Flat(src.view(dst.dtype))
        for lo, hi in metered(dst.size, COPY_NBYTES // dst.dtype.itemsize):
            if lo:
                self._look()
            dst.write(lo, hi, source.read(lo, hi))


_CUT = (OpKind.SCATTER, OpKind.ALLTOALL)


@lru_cache(maxsize=256)
def _loan(
    kind: OpKind, way: str, root: int, ranks: tuple[int, ...], rank: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    # Returns the lenders whose arrays this rank has used without lending its own; the ranks that wait for it; the ranks
    # for which it waits.
    side = _LENDERS.get((kind, way))
    if side is None:
        return (), ranks, ranks
    lenders = tuple(lender for lender in ranks if (lender == root) == (side == "root"))
    users = tuple(user for user in ranks if user not in lenders)
    return ((), (), users) if rank in lenders else (lenders, lenders, ())


def _slices(at: int, count: int, sizes: Sequence[int], dtypes: Sequence[np.dtype[Any]]) -> Iterator[tuple[int, int]]:
    # The elements [start, stop) of each array (sizes in bytes) in the `at`-th of `count` slices. The arrays are cut as
    # one row, so that a rank gets few whole arrays instead of a part of each; within an array, cuts are on cache
    # lines.
    total, before = sum(sizes), 0
    for nbytes, dtype in zip(sizes, dtypes, strict=True):
        size, line = nbytes // dtype.itemsize, max(1, _LINE_NBYTES // dtype.itemsize)
        ends = []
        for part in (at, at + 1):
            elements = -(-max(total * part - before * count, 0) // (count * dtype.itemsize * line)) * line
            ends.append(size if part == count else min(elements, size))
        before += nbytes
        yield ends[0], ends[1]


def _later(srcs: Sequence[Array], address: int) -> int:
    # The index of the array at that address, if it is not the first; else 0.
    return next((i for i, src in enumerate(srcs) if i and src.ctypes.data == address), 0)


def _paired(kind: OpKind) -> OpKind:
    return OpKind.SEND if kind is OpKind.RECV else kind


def root_of(kernel: Kernel, rank: int) -> int:
    """Returns the root of a kernel; the sender of a send."""
    return rank if kernel.kind is OpKind.SEND else kernel.peer
