"""Kernels as calls of NCCL: the NCCL operations of each, their pointers, and the copies around them.

A kernel becomes a `Script`: copies, calls of NCCL, and copies and folds after them, all on one stream. The calls of all
scripts that run together form one NCCL group, so that the GPU gets one piece of work. A script can be enqueued again as
long as the arrays of its kernel stay in place; a script without temporary memory may be cached for that.

Every rank has to make the same calls. So each choice depends only on values that are equal on all ranks: the kind, the
op, the dtype and the sizes; never on a rank's memory layout. Arrays with an unsuitable layout are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from raycollect.backends.device_arrays import DeviceArray, cupy_view
from raycollect.backends.kernels import chunks, clipped, moved, one_each, reduce_op
from raycollect.backends.nccl.ops import BYTES, Reduction, combiner, fold, reduction_of
from raycollect.backends.nccl.scripts import Script, ScriptBuilder, assign
from raycollect.core.model import Kernel, OpKind, ReduceOp

FOLD_NBYTES = 8 << 20  # The bytes of all ranks together that are gathered at a time if cupy folds instead of NCCL


def write(kernel: Kernel, rank: int, world_size: int, version: int) -> list[Script]:
    """Returns the scripts of a kernel, to be enqueued in order; all kernels but folds have one.

    Called with the stream of the group current, on which memory is allocated. All ranks take part, except in a send or
    a receive.
    """
    writer = _Writer(rank, world_size, version)
    _KERNELS[kernel.kind](writer, kernel)
    return writer.scripts


class _Writer:
    """Writes the scripts of one kernel, which don't refer to the writer: their memory is freed with them."""

    def __init__(self, rank: int, world_size: int, version: int) -> None:
        self._cupy = import_module("cupy")
        self._builder = ScriptBuilder()
        self.scripts = [self._builder.script]
        self._rank = rank
        self._ranks = range(world_size)
        self._version = version
        self._back: list[tuple[Any, Any]] = []  # targets of folds, and the memory to copy from

    def barrier(self, kernel: Kernel) -> None:
        # A reduction of one byte.
        word = self._builder.temporary(self._cupy.zeros(1, np.uint8)).data.ptr
        self._builder.call("allReduce", word, word, 1, BYTES, 0)

    def allreduce(self, kernel: Kernel) -> None:
        op = reduce_op(kernel)
        how = self._reduction(op, kernel.src)
        if how is None:
            self._fold(op, kernel.src, kernel.dst)
            return
        src, dst = self._builder.both(kernel.src, kernel.dst)
        self._builder.call("allReduce", src, dst, kernel.src.size * how.width, how.code, how.op)

    def reduce(self, kernel: Kernel) -> None:
        op, is_root = reduce_op(kernel), self._rank == kernel.peer
        how = self._reduction(op, kernel.src)
        if how is None:
            self._fold(op, kernel.src, kernel.dst if is_root else None)
            return
        src, dst = self._builder.both(kernel.src, kernel.dst) if is_root else (self._builder.read(kernel.src),) * 2
        self._builder.call("reduce", src, dst, kernel.src.size * how.width, how.code, how.op, kernel.peer)

    def reducescatter(self, kernel: Kernel) -> None:
        # NCCL's if all pieces have one size, else a reduction to each rank; or a fold.
        op, pieces = reduce_op(kernel), one_each(kernel, kernel.src, self._ranks)
        how = self._reduction(op, pieces[0])
        if how is None:
            self._fold_pieces(op, pieces, kernel.dst)
            return
        sizes = [piece.size for piece in pieces]
        if len(set(sizes)) == 1:
            row = self._builder.row(pieces, is_read=True)
            dst = self._builder.written(kernel.dst)
            self._builder.call("reduceScatter", row, dst, sizes[0] * how.width, how.code, how.op)
            return
        for root, piece in enumerate(pieces):
            if root == self._rank:
                src, dst = self._builder.both(piece, kernel.dst)
            else:
                src = dst = self._builder.read(piece)
            if piece.size:
                self._builder.call("reduce", src, dst, piece.size * how.width, how.code, how.op, root)

    def _reduction(self, op: ReduceOp, array: DeviceArray) -> Reduction | None:
        if op is ReduceOp.AVG and len(self._ranks) == 1:
            op = ReduceOp.SUM  # equal for one rank; NCCL refuses an average of 8-bit floats
        return reduction_of(op, array.dtype.name, self._version)

    def _fold(self, op: ReduceOp, src: DeviceArray, dst: DeviceArray | None) -> None:
        # Gathers one chunk of all ranks at a time, and folds it in rank order.
        self.scripts = []
        line, itemsize, combine = self._builder.line(src), src.dtype.itemsize, combiner(op, src.dtype)
        target = None if dst is None else self._folded_into(dst)
        step = self._step(src.size, itemsize)
        size = len(self._ranks) * step
        everyone = self._builder.temporary(self._cupy.empty(size, src.dtype))  # reused by all chunks
        for lo, hi in chunks(src.size, step):
            script = self._next()
            nbytes = (hi - lo) * itemsize
            self._builder.call("allGather", line.data.ptr + lo * itemsize, everyone.data.ptr, nbytes, BYTES)
            if target is not None:
                rows = everyone[: len(self._ranks) * (hi - lo)].reshape(len(self._ranks), hi - lo)
                script.after.append(partial(fold, combine, rows, target[lo:hi]))
        self._copy_back()

    def _fold_pieces(self, op: ReduceOp, pieces: Sequence[DeviceArray], dst: DeviceArray) -> None:
        # Sends each rank its piece, a chunk at a time, and folds that in rank order.
        self.scripts = []
        lines, itemsize, most = (
            [self._builder.line(piece) for piece in pieces],
            dst.dtype.itemsize,
            max(piece.size for piece in pieces),
        )
        target, combine = self._folded_into(dst), combiner(op, dst.dtype)
        step = self._step(most, itemsize)
        everyone = self._builder.temporary(self._cupy.empty(len(self._ranks) * min(step, dst.size), dst.dtype))
        for lo, hi in chunks(most, step):
            script = self._next()
            first, last = clipped(dst, lo, hi)
            rows = everyone[: len(self._ranks) * (last - first)].reshape(len(self._ranks), last - first)
            nbytes = (last - first) * itemsize
            for peer, line in enumerate(lines):
                start, stop = clipped(line, lo, hi)
                if peer != self._rank:
                    give = line.data.ptr + start * itemsize, (stop - start) * itemsize
                    self._builder.swap(peer, give, (everyone.data.ptr + peer * nbytes, nbytes))
            if nbytes:
                script.after.append(partial(assign, rows[self._rank], lines[self._rank][first:last].view(dst.dtype)))
                script.after.append(partial(fold, combine, rows, target[first:last]))
        self._copy_back()

    def _step(self, size: int, itemsize: int) -> int:
        return max(1, min(size, FOLD_NBYTES // len(self._ranks) // itemsize))

    def _next(self) -> Script:
        if self.scripts:
            self._builder.script = Script()
        self.scripts.append(self._builder.script)
        return self._builder.script

    def _folded_into(self, dst: DeviceArray) -> Any:
        # The array itself as one row, or temporary memory that is copied to it.
        if dst.shadow.flags.c_contiguous:
            return cupy_view(dst).reshape(-1)
        room = self._cupy.empty(dst.size, dst.dtype)
        self._back.append((cupy_view(dst), room))
        return room

    def _copy_back(self) -> None:
        for target, room in self._back if self.scripts else ():
            self.scripts[-1].after.append(partial(assign, target, room))

    def broadcast(self, kernel: Kernel) -> None:
        src, dst = moved(kernel, is_root=self._rank == kernel.peer)
        if src is None:
            give = take = self._builder.written(dst)
        else:
            give, take = (self._builder.read(src),) * 2 if dst is None else self._builder.both(src, dst)
        self._builder.call("broadcast", give, take, (dst if src is None else src).nbytes, BYTES, kernel.peer)

    def allgather(self, kernel: Kernel) -> None:
        # NCCL's if all pieces have one size, else a broadcast from each rank.
        pieces = one_each(kernel, kernel.dst, self._ranks)
        sizes = [piece.nbytes for piece in pieces]
        if len(set(sizes)) == 1:
            row = self._builder.row(pieces, is_read=False)
            src = self._builder.read(kernel.src)
            self._builder.call("allGather", src, row, sizes[0], BYTES)
            return
        for root, piece in enumerate(pieces):
            if root == self._rank:
                give, take = self._builder.both(kernel.src, piece)
            else:
                give = take = self._builder.written(piece)
            if piece.size:
                self._builder.call("broadcast", give, take, piece.nbytes, BYTES, root)

    def gather(self, kernel: Kernel) -> None:
        if self._rank != kernel.peer:
            self.send(kernel)
            return
        for peer, piece in enumerate(one_each(kernel, kernel.dst, self._ranks)):
            if peer == self._rank:
                self._builder.copy_own(kernel.src, piece)
            else:
                self._builder.swap(peer, (0, 0), (self._builder.written(piece), piece.nbytes))

    def scatter(self, kernel: Kernel) -> None:
        if self._rank != kernel.peer:
            self.recv(kernel)
            return
        for peer, piece in enumerate(one_each(kernel, kernel.src, self._ranks)):
            if peer == self._rank:
                self._builder.copy_own(piece, kernel.dst)
            else:
                self._builder.swap(peer, (self._builder.read(piece), piece.nbytes), (0, 0))

    def alltoall(self, kernel: Kernel) -> None:
        # In place, data is received in temporary memory and copied.
        gives, takes = (one_each(kernel, side, self._ranks) for side in (kernel.src, kernel.dst))
        for peer, (src, dst) in enumerate(zip(gives, takes, strict=True)):
            if peer == self._rank:
                self._builder.copy_own(src, dst)
                continue
            is_in_place = dst.size and src.address == dst.address
            take = self._builder.room(dst) if is_in_place else self._builder.written(dst)
            self._builder.swap(peer, (self._builder.read(src), src.nbytes), (take, dst.nbytes))

    def send(self, kernel: Kernel) -> None:
        self._builder.swap(kernel.peer, (self._builder.read(kernel.src), kernel.src.nbytes), (0, 0))

    def recv(self, kernel: Kernel) -> None:
        self._builder.swap(kernel.peer, (0, 0), (self._builder.written(kernel.dst), kernel.dst.nbytes))


_KERNELS: dict[OpKind, Callable[[_Writer, Kernel], None]] = {
    OpKind.ALLREDUCE: _Writer.allreduce,
    OpKind.REDUCE: _Writer.reduce,
    OpKind.BROADCAST: _Writer.broadcast,
    OpKind.ALLGATHER: _Writer.allgather,
    OpKind.REDUCESCATTER: _Writer.reducescatter,
    OpKind.GATHER: _Writer.gather,
    OpKind.SCATTER: _Writer.scatter,
    OpKind.ALLTOALL: _Writer.alltoall,
    OpKind.SEND: _Writer.send,
    OpKind.RECV: _Writer.recv,
    OpKind.BARRIER: _Writer.barrier,
}
