"""Kernels on ordinary arrays of several processes: staged by chunks through slots in shared memory.

A kernel comes here if it is a SCAN or EXSCAN, if its array or largest piece is smaller than
`direct.DIRECT_FROM_NBYTES`, or if the ranks' arrays are not contiguous and in shared memory as `in_place` needs them.

Theory. Each rank has two slots of `CHUNK_NBYTES`. A kernel runs in chunks: each source rank copies a chunk to its slot;
a barrier; then the ranks read what they need from each other's slots. The slots alternate, so that the copy of the next
chunk overlaps with slower readers, and a kernel of k chunks has k barriers (the first of them is the agreement, before
which the chunk was staged). Extra memory: 2 x `CHUNK_NBYTES` per rank (P8).

An allreduce of n bytes over w ranks: either every rank folds all w slots straight into its own array ("redundant": one
barrier, w reads and w - 1 writes per byte and rank), or each rank folds its w-th of the chunk in place and, after
a second barrier, copies the whole result out ("sliced": two barriers, 2 reads and 1 + 1/w writes). A reduce is the same
with one rank that folds or copies out. Either way each element is the left fold in rank order, so the bits do not
depend on chunks, algorithm or rank (P7).

Moves. A copy is one read and one write of a byte; n is the size of a piece in bytes:

=============  ==============================  ===========  ==================================
kernel         copies per rank                 at a root    barriers
=============  ==============================  ===========  ==================================
BROADCAST      n                               n            n / chunk
ALLGATHER      n to the slot, (w - 1) n out                 largest n / chunk
GATHER         n                               (w - 1) n    largest n / chunk
SCATTER        n                               (w - 1) n    largest n / (chunk / w)
ALLTOALL       (w - 1) n in, (w - 1) n out                  largest n / (chunk / w)
REDUCESCATTER  w n to the slot, w n read                    largest n / (chunk / w)
SCAN           n to the slot, up to w n read                n / chunk
=============  ==============================  ===========  ==================================

In SCATTER, ALLTOALL and REDUCESCATTER a rank sends different data to each other rank: its slot is cut into w parts. A
rank's own piece is copied from array to array. All ranks have the same number of chunks, by the largest piece
(`Kernel.most`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from raycollect.backends.arrays import Array, Flat
from raycollect.backends.folds import READ_FIRST, fold, ignoring_errors, is_widened
from raycollect.backends.kernels import (
    clipped,
    keep_own,
    metered,
    movement,
    pieces,
    reduce_op,
    reduction,
    scattered_reduction,
    source,
    transfers,
)
from raycollect.backends.shm.coalesced import CoalescedRow
from raycollect.backends.shm.direct import DIRECT_FROM_NBYTES
from raycollect.backends.shm.meeting import Meeting
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.operations import OPERATIONS, PARTIAL_FOLDS

CHUNK_NBYTES = 1 << 20  # The bytes of one staging slot; a multiple of every item size
# (world size, chunk bytes) from which slices beat the redundant fold, as measured; smaller groups never slice
SLICED_FROM_NBYTES: tuple[tuple[int, int], ...] = ((3, 512 << 10),)
# The same for elements folded in float32, where the fold itself dominates
SLICED_WIDE_FROM_NBYTES: tuple[tuple[int, int], ...] = ((2, 32 << 10),)
# Kernels in which a rank sends different data to each other rank
CUT = (OpKind.SCATTER, OpKind.REDUCESCATTER, OpKind.ALLTOALL)
# Kernels in which a rank sends the same data to all others
_WHOLE = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.ALLGATHER, *PARTIAL_FOLDS)
_SLOTS = 2
_VIEWS_KEPT = 64
_LINE_NBYTES = 64


def slots_nbytes(world_size: int) -> int:
    """Returns the shared memory that the slots of `world_size` ranks take."""
    return world_size * _SLOTS * CHUNK_NBYTES


class _Once(NamedTuple):
    """A repeated small redundant allreduce: the common case in few steps.

    Its arrays are rows of native elements. Larger arrays are excluded: their next run may be in place.
    """

    ranks: tuple[int, ...]
    op: ReduceOp
    dtype: np.dtype[np.generic]
    size: int


class StagedKernels:
    """One rank's part in staged kernels; `memory` has `slots_nbytes` bytes."""

    def __init__(self, memory: Array, rank: int, world_size: int) -> None:
        self._rank = rank
        self._slots = memory.reshape(world_size, _SLOTS, CHUNK_NBYTES)
        self.turn: int = 0  # the number of staged chunks of the launch
        self._first: tuple[int, list[Array]] = 0, []  # the last launch that `stage_again` staged, and its slots
        self._views: dict[tuple[int, np.dtype[np.generic], int], list[Array]] = {}
        self._ignoring_errors = ignoring_errors()

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """Copies the first chunk to this rank's slot, so that the agreement is also the kernel's first barrier."""
        if kernel.kind in _WHOLE:
            src = source(kernel)
            width = min(src.size, CHUNK_NBYTES // src.dtype.itemsize)
            src.fill(self._staging(src.dtype, width)[self._rank], 0, width)
        elif outgoing := self._outgoing(launch, kernel):
            dtype, parts = next(iter(outgoing.values())).dtype, _parts(kernel, launch)
            step = _step(dtype, parts)
            _fill(self._staging(dtype, parts * step)[self._rank], outgoing, 0, step, step)

    def stage_again(self, launch: Launch, kernel: Kernel) -> bool:
        """Stages a kernel that `fold_again` can run; returns False for any other."""
        once: _Once | None = kernel.form.get("once")
        if once is None or once.ranks != launch.ranks:
            return False
        staging = self._staging(once.dtype, once.size)
        staging[self._rank][...] = kernel.src.reshape(-1)
        self._first = launch.seq, staging
        return True

    def fold_again(self, launch: Launch, kernel: Kernel) -> bool:
        """Runs a repeated small allreduce; returns False for any other kernel."""
        once: _Once | None = kernel.form.get("once")
        if once is None or once.ranks != launch.ranks:
            return False
        seq, staging = self._first
        if seq == launch.seq:
            self.turn = 1
        else:
            staging = self._staging(once.dtype, once.size)
        parts = staging if len(once.ranks) == len(staging) else [staging[rank] for rank in once.ranks]
        self._ignoring_errors(fold, once.op, parts, kernel.dst.reshape(-1))
        return True

    def run(self, meeting: Meeting, launch: Launch, kernel: Kernel, *, staged: bool, until_s: float) -> None:
        """Runs a kernel; `staged`: all ranks staged their first chunk before the last barrier."""
        _KERNELS[kernel.kind](self, meeting, launch, kernel, staged, until_s)

    def _staging(self, dtype: np.dtype[np.generic], width: int) -> list[Array]:
        # The slots of the next chunk, by rank, [width] each.
        self.turn += 1
        key = self.turn % _SLOTS, dtype, width
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _VIEWS_KEPT:
                self._views.clear()
            views = self._views[key] = list(self._slots[:, key[0], : width * dtype.itemsize].view(dtype))
        return views

    def _outgoing(self, launch: Launch, kernel: Kernel) -> dict[int, Flat]:
        # The arrays that this rank copies to its slot, by part: one for all other ranks, or one for each.
        kind = kernel.kind
        if kind in _WHOLE:
            return {0: source(kernel)}
        if kind is OpKind.BARRIER:
            return {}
        if kind is OpKind.GATHER:
            return {0: Flat(kernel.src)} if self._rank != kernel.peer else {}
        if kind not in CUT:
            src = movement(kernel, is_root=self._rank == self._root(kernel))[0]
            return {0: src} if src is not None else {}
        if kind is OpKind.SCATTER and self._rank != kernel.peer:
            return {}
        # A reduction stages its own part, too: it is folded in rank order, and `dst` may be its storage.
        own = -1 if kind is OpKind.REDUCESCATTER else launch.ranks.index(self._rank)
        return {part: src for part, src in enumerate(pieces(kernel, kernel.src, launch.ranks)) if part != own}

    def _root(self, kernel: Kernel) -> int:
        return self._rank if kernel.kind is OpKind.SEND else kernel.peer

    def _barrier(self, meeting: Meeting, launch: Launch, kernel: Kernel, staged: bool, until_s: float) -> None:
        if not staged:
            meeting.barrier(launch, until_s)

    def _allreduce(self, meeting: Meeting, launch: Launch, kernel: Kernel, staged: bool, until_s: float) -> None:
        if staged and self._fold_once(launch, kernel):
            return
        is_taker = kernel.kind is not OpKind.REDUCE or self._rank == kernel.peer
        src, dst = reduction(kernel) if is_taker else (source(kernel), None)
        op, ranks = reduce_op(kernel), launch.ranks
        me, step = ranks.index(self._rank), CHUNK_NBYTES // src.dtype.itemsize
        all_alike = kernel.kind not in PARTIAL_FOLDS
        givers = () if all_alike else OPERATIONS[kernel.kind].sources(me, len(ranks))
        # Reading its own memory instead of its slot takes a quarter less time. `dst` may be that memory.
        reads_own = src.direct and (me < READ_FIRST if all_alike else me in givers[:READ_FIRST])
        for lo, hi in metered(src.size, step):
            width = hi - lo
            staging = self._staging(src.dtype, width)
            parts = [staging[rank] for rank in ranks]
            if lo or not staged:
                src.fill(parts[me], lo, hi)
                meeting.barrier(launch, until_s)
            # A coalesced row is sliced at any size: ranks fold whole chunks, not single arrays.
            if all_alike and (isinstance(src, CoalescedRow) or _is_sliced(len(ranks), src.dtype, width)):
                mine = slice(me * width // len(ranks), (me + 1) * width // len(ranks))
                fold(op, [part[mine] for part in parts], parts[0][mine])
                meeting.barrier(launch, until_s)
                if dst is not None:
                    dst.write(lo, hi, parts[0])
            elif dst is not None:
                if reads_own:
                    parts[me] = src.read(lo, hi)
                out = dst.target(lo, hi)
                fold(op, parts if all_alike else [parts[giver] for giver in givers], out)
                dst.commit(lo, hi, out)

    def _fold_once(self, launch: Launch, kernel: Kernel) -> bool:
        if kernel.kind is not OpKind.ALLREDUCE:
            return False
        src, dst = reduction(kernel)
        ranks, size = launch.ranks, src.size
        nbytes = size * src.dtype.itemsize
        is_small = nbytes < DIRECT_FROM_NBYTES and nbytes <= CHUNK_NBYTES
        # An empty kernel takes no slots, on any rank.
        if not (size and src.direct and dst.direct and is_small) or _is_sliced(len(ranks), src.dtype, size):
            return False
        kernel.form["once"] = _Once(ranks, reduce_op(kernel), src.dtype, size)
        return self.fold_again(launch, kernel)

    def _reducescatter(self, meeting: Meeting, launch: Launch, kernel: Kernel, staged: bool, until_s: float) -> None:
        ranks = launch.ranks
        src, dst = scattered_reduction(kernel, ranks, self._rank)
        op, me, step = reduce_op(kernel), ranks.index(self._rank), _step(dst.dtype, len(ranks))
        outgoing = dict(enumerate(src))
        for lo, hi in metered(max(piece.size for piece in src), step):
            staging = self._staging(dst.dtype, len(ranks) * step)
            if lo or not staged:
                _fill(staging[self._rank], outgoing, lo, hi, step)
                meeting.barrier(launch, until_s)
            first, last = clipped(dst, lo, hi)
            out = dst.target(first, last)
            fold(op, [staging[rank][me * step : me * step + last - first] for rank in ranks], out)
            dst.commit(first, last, out)

    def _copy(self, meeting: Meeting, launch: Launch, kernel: Kernel, staged: bool, until_s: float) -> None:
        root = self._root(kernel)
        src, dst, whole = movement(kernel, is_root=self._rank == root)
        for lo, hi in metered(whole.size, CHUNK_NBYTES // whole.dtype.itemsize):
            slot = self._staging(whole.dtype, hi - lo)[root]
            if lo or not staged:
                if src is not None:
                    src.fill(slot, lo, hi)
                meeting.barrier(launch, until_s)
            if dst is not None:
                dst.write(lo, hi, slot)

    def _move(self, meeting: Meeting, launch: Launch, kernel: Kernel, staged: bool, until_s: float) -> None:
        ranks = launch.ranks
        give, take = transfers(kernel, ranks, self._rank)
        dtype, parts = next(iter((give or take).values())).dtype, _parts(kernel, launch)
        step, outgoing = _step(dtype, parts), self._outgoing(launch, kernel)
        at = ranks.index(self._rank) * step if parts > 1 else 0
        for lo, hi in metered(kernel.most, step):
            staging = self._staging(dtype, parts * step)
            if lo or not staged:
                _fill(staging[self._rank], outgoing, lo, hi, step)
                meeting.barrier(launch, until_s)
            for rank, dst in take.items():
                if rank != self._rank:
                    first, last = clipped(dst, lo, hi)
                    dst.write(first, last, staging[rank][at : at + last - first])
        keep_own(give, take, self._rank, step)


_KERNELS: dict[OpKind, Callable[[StagedKernels, Meeting, Launch, Kernel, bool, float], None]] = {
    OpKind.ALLREDUCE: StagedKernels._allreduce,
    OpKind.REDUCE: StagedKernels._allreduce,
    OpKind.BROADCAST: StagedKernels._copy,
    OpKind.ALLGATHER: StagedKernels._move,
    OpKind.GATHER: StagedKernels._move,
    OpKind.SCATTER: StagedKernels._move,
    OpKind.REDUCESCATTER: StagedKernels._reducescatter,
    OpKind.ALLTOALL: StagedKernels._move,
    OpKind.SCAN: StagedKernels._allreduce,
    OpKind.EXSCAN: StagedKernels._allreduce,
    OpKind.SEND: StagedKernels._copy,
    OpKind.RECV: StagedKernels._copy,
    OpKind.BARRIER: StagedKernels._barrier,
}


def _parts(kernel: Kernel, launch: Launch) -> int:
    return len(launch.ranks) if kernel.kind in CUT else 1


def _step(dtype: np.dtype[np.generic], parts: int) -> int:
    # Each part begins on a cache line.
    return CHUNK_NBYTES // parts // _LINE_NBYTES * _LINE_NBYTES // dtype.itemsize


def _fill(slot: Array, outgoing: dict[int, Flat], lo: int, hi: int, step: int) -> None:
    for part, src in outgoing.items():
        first, last = clipped(src, lo, hi)
        slot[part * step : part * step + last - first] = src.read(first, last)


def _is_sliced(world_size: int, dtype: np.dtype[np.generic], width: int) -> bool:
    table = SLICED_WIDE_FROM_NBYTES if is_widened(dtype) else SLICED_FROM_NBYTES
    nbytes = width * dtype.itemsize
    return any(world_size >= least and nbytes >= from_nbytes for least, from_nbytes in table)
