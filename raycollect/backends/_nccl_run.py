"""Kernels as calls of NCCL: which of its operations each is, on which pointers, and what is copied around them.

A kernel becomes a `Script`: copies, calls of NCCL, and copies and folds to go behind them, all on one stream. The calls
of all scripts that run together stand in one group of NCCL, so that the GPU is given one piece of work. A script can be
enqueued again as long as the arrays of its kernel lie where they did; one that has no memory of its own may be kept for
that, or be recorded in a CUDA graph (`_nccl_again`).

Every rank has to make the same calls. So what is chosen here follows from what all ranks know alike: the kind, the op,
the dtype and the sizes; never from where a rank's arrays lie. Those that don't lie as NCCL wants them are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from raycollect.errors import InternalError
from raycollect.model import Kernel, OpKind, ReduceOp

from ._nccl_ops import BYTES, Reduction, combiner, fold, reduction_of
from .completion import chunks, reduce_op
from .device_arrays import DeviceArray, bits_view, cupy_view

__all__ = ["FOLD_NBYTES", "Script", "enqueue", "write"]

FOLD_NBYTES = 8 << 20
"""How much of all ranks together is gathered at a time where NCCL can't reduce, and cupy folds."""


@dataclass(slots=True)
class Script:
    """What one kernel does on its stream.

    Attributes:
        before: Copies of what is given.
        calls: Calls of NCCL.
        after: Copies and folds of what has come.
        kept: Memory that is used until the end.
        is_bare: Whether that is the kernel's alone, and nothing that is enqueued allocates any.
    """

    before: list[Callable[[], object]] = field(default_factory=list)
    calls: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    is_bare: bool = True


def enqueue(scripts: Sequence[Script]) -> None:
    """Puts scripts on their stream, which is current: their calls in one group of NCCL."""
    nccl = import_module("cupy.cuda.nccl")
    for script in scripts:
        for copy in script.before:
            copy()
    nccl.groupStart()
    try:
        for script in scripts:
            for call in script.calls:
                call()
    finally:
        nccl.groupEnd()
    for script in scripts:
        for copy in script.after:
            copy()


def write(kernel: Kernel, communicator: Any, rank: int, world_size: int, version: int, stream: int) -> list[Script]:
    """What a kernel does: scripts to be enqueued one after the other, of which all but folds have one.

    Called with the stream current: memory is allocated on it.

    Args:
        kernel: The kernel; its arrays lie on the communicator's device.
        communicator: cupy's.
        rank: One's own.
        world_size: The number of ranks; all take part, unless it is a send or a receive.
        version: NCCL's.
        stream: The pointer of the current stream.
    """
    return _KERNELS[kernel.kind](_Writer(communicator, rank, world_size, version, stream), kernel)


class _Writer:
    """Writes the scripts of one kernel. These don't refer to it: their memory goes with them."""

    def __init__(self, communicator: Any, rank: int, world_size: int, version: int, stream: int) -> None:
        self._cupy = import_module("cupy")
        self._nccl = communicator
        self._rank = rank
        self._ranks = range(world_size)
        self._version = version
        self._stream = stream
        self._script = Script()
        self._back: list[tuple[Any, Any]] = []  # targets of folds, and from where they are copied

    def barrier(self, kernel: Kernel) -> list[Script]:
        """A reduction of one byte."""
        word = self._own_memory(self._cupy.zeros(1, np.uint8)).data.ptr
        self._call("allReduce", word, word, 1, BYTES, 0)
        return [self._script]

    # ------------------------------------------------------------------------------------------ reductions

    def allreduce(self, kernel: Kernel) -> list[Script]:
        """NCCL's, or a fold of everybody's."""
        op = reduce_op(kernel)
        how = self._reduction(op, kernel.src)
        if how is None:
            return self._folded(op, kernel.src, kernel.dst)
        src, dst = self._both(kernel.src, kernel.dst)
        self._call("allReduce", src, dst, kernel.src.size * how.width, how.code, how.op)
        return [self._script]

    def reduce(self, kernel: Kernel) -> list[Script]:
        """NCCL's, or a fold on the root."""
        op, is_root = reduce_op(kernel), self._rank == kernel.peer
        how = self._reduction(op, kernel.src)
        if how is None:
            return self._folded(op, kernel.src, kernel.dst if is_root else None)
        src, dst = self._both(kernel.src, kernel.dst) if is_root else (self._read(kernel.src),) * 2
        self._call("reduce", src, dst, kernel.src.size * how.width, how.code, how.op, kernel.peer)
        return [self._script]

    def reducescatter(self, kernel: Kernel) -> list[Script]:
        """NCCL's where all pieces are of one size, else a reduction to each rank; or a fold of what each is given."""
        op, pieces = reduce_op(kernel), self._pieces(kernel.src)
        how = self._reduction(op, pieces[0])
        if how is None:
            return self._folded_pieces(op, pieces, kernel.dst)
        sizes = [piece.size for piece in pieces]
        if len(set(sizes)) == 1:
            row = self._row(pieces, is_read=True)
            dst = self._written(kernel.dst)
            self._call("reduceScatter", row, dst, sizes[0] * how.width, how.code, how.op)
            return [self._script]
        for root, piece in enumerate(pieces):
            if root == self._rank:
                src, dst = self._both(piece, kernel.dst)
            else:
                src = dst = self._read(piece)
            if piece.size:
                self._call("reduce", src, dst, piece.size * how.width, how.code, how.op, root)
        return [self._script]

    def _reduction(self, op: ReduceOp, array: DeviceArray) -> Reduction | None:
        return reduction_of(op, array.dtype.name, self._version)

    def _folded(self, op: ReduceOp, src: DeviceArray, dst: DeviceArray | None) -> list[Script]:
        """Gathers a chunk of everybody's at a time, and folds it in rank order."""
        scripts: list[Script] = []
        line, itemsize, combine = self._line(src), src.dtype.itemsize, combiner(op, src.dtype)
        target = None if dst is None else self._folded_into(dst)
        step = self._step(src.size, itemsize)
        size = len(self._ranks) * step
        everyone = self._own_memory(self._cupy.empty(size, src.dtype))  # for all chunks: they come one by one
        for lo, hi in chunks(src.size, step):
            script = self._next(scripts)
            nbytes = (hi - lo) * itemsize
            self._call("allGather", line.data.ptr + lo * itemsize, everyone.data.ptr, nbytes, BYTES)
            if target is not None:
                rows = everyone[: len(self._ranks) * (hi - lo)].reshape(len(self._ranks), hi - lo)
                script.after.append(partial(fold, combine, rows, target[lo:hi]))
        return self._copied_back(scripts)

    def _folded_pieces(self, op: ReduceOp, pieces: Sequence[DeviceArray], dst: DeviceArray) -> list[Script]:
        """Gives each rank its piece of everybody's, a chunk at a time, and folds that in rank order."""
        scripts: list[Script] = []
        lines, itemsize, most = [self._line(one) for one in pieces], dst.dtype.itemsize, max(one.size for one in pieces)
        target, combine = self._folded_into(dst), combiner(op, dst.dtype)
        step = self._step(most, itemsize)
        everyone = self._own_memory(self._cupy.empty(len(self._ranks) * min(step, dst.size), dst.dtype))
        for lo, hi in chunks(most, step):
            script = self._next(scripts)
            first, last = _part(dst.size, lo, hi)
            rows = everyone[: len(self._ranks) * (last - first)].reshape(len(self._ranks), last - first)
            nbytes = (last - first) * itemsize
            for peer, line in enumerate(lines):
                start, stop = _part(line.size, lo, hi)
                if peer != self._rank:
                    give = line.data.ptr + start * itemsize, (stop - start) * itemsize
                    self._swap(peer, give, (everyone.data.ptr + peer * nbytes, nbytes))
            if nbytes:
                script.after.append(partial(_assign, rows[self._rank], lines[self._rank][first:last].view(dst.dtype)))
                script.after.append(partial(fold, combine, rows, target[first:last]))
        return self._copied_back(scripts)

    def _step(self, size: int, itemsize: int) -> int:
        """How many elements of each rank are folded at a time."""
        return max(1, min(size, FOLD_NBYTES // len(self._ranks) // itemsize))

    def _next(self, scripts: list[Script]) -> Script:
        """Begins the next of a kernel's scripts; the first one is there."""
        if scripts:
            self._script = Script()
        scripts.append(self._script)
        return self._script

    def _folded_into(self, dst: DeviceArray) -> Any:
        """Where elements are folded: in their array as one row, or in memory from which they are copied."""
        if dst.shadow.flags.c_contiguous:
            return cupy_view(dst).reshape(-1)
        room = self._cupy.empty(dst.size, dst.dtype)
        self._back.append((cupy_view(dst), room))
        return room

    def _copied_back(self, scripts: list[Script]) -> list[Script]:
        """Lets what was folded elsewhere be copied behind the last script."""
        for target, room in self._back if scripts else ():
            scripts[-1].after.append(partial(_assign, target, room))
        return scripts

    # ------------------------------------------------------------------------------------------ movements

    def broadcast(self, kernel: Kernel) -> list[Script]:
        """NCCL's, of bytes."""
        src = kernel.dst if kernel.src is None else kernel.src
        dst = kernel.src if kernel.dst is None else kernel.dst
        if self._rank == kernel.peer:
            give, take = self._both(src, dst) if dst is not src else (self._read(src),) * 2
        else:
            give = take = self._written(dst)
        self._call("broadcast", give, take, (src if self._rank == kernel.peer else dst).nbytes, BYTES, kernel.peer)
        return [self._script]

    def allgather(self, kernel: Kernel) -> list[Script]:
        """NCCL's where all pieces are of one size, else a broadcast from each rank."""
        pieces = self._pieces(kernel.dst)
        sizes = [piece.nbytes for piece in pieces]
        if len(set(sizes)) == 1:
            row = self._row(pieces, is_read=False)
            src = self._read(kernel.src)
            self._call("allGather", src, row, sizes[0], BYTES)
            return [self._script]
        for root, piece in enumerate(pieces):
            if root == self._rank:
                give, take = self._both(kernel.src, piece)
            else:
                give = take = self._written(piece)
            if piece.size:
                self._call("broadcast", give, take, piece.nbytes, BYTES, root)
        return [self._script]

    def gather(self, kernel: Kernel) -> list[Script]:
        """A send from each rank to the root."""
        if self._rank != kernel.peer:
            self._swap(kernel.peer, (self._read(kernel.src), kernel.src.nbytes), (0, 0))
            return [self._script]
        for peer, piece in enumerate(self._pieces(kernel.dst)):
            if peer == self._rank:
                self._own(kernel.src, piece)
            else:
                self._swap(peer, (0, 0), (self._written(piece), piece.nbytes))
        return [self._script]

    def scatter(self, kernel: Kernel) -> list[Script]:
        """A send from the root to each rank."""
        if self._rank != kernel.peer:
            self._swap(kernel.peer, (0, 0), (self._written(kernel.dst), kernel.dst.nbytes))
            return [self._script]
        for peer, piece in enumerate(self._pieces(kernel.src)):
            if peer == self._rank:
                self._own(piece, kernel.dst)
            else:
                self._swap(peer, (self._read(piece), piece.nbytes), (0, 0))
        return [self._script]

    def alltoall(self, kernel: Kernel) -> list[Script]:
        """A send and a receive between each two ranks; what is in place is received beside it, and copied."""
        for peer, (src, dst) in enumerate(zip(self._pieces(kernel.src), self._pieces(kernel.dst), strict=True)):
            if peer == self._rank:
                self._own(src, dst)
                continue
            take = self._room(dst) if src.address == dst.address else self._written(dst)
            self._swap(peer, (self._read(src), src.nbytes), (take, dst.nbytes))
        return [self._script]

    def send(self, kernel: Kernel) -> list[Script]:
        """Gives another rank bytes."""
        self._swap(kernel.peer, (self._read(kernel.src), kernel.src.nbytes), (0, 0))
        return [self._script]

    def recv(self, kernel: Kernel) -> list[Script]:
        """Takes bytes of another rank."""
        self._swap(kernel.peer, (0, 0), (self._written(kernel.dst), kernel.dst.nbytes))
        return [self._script]

    def _swap(self, peer: int, give: tuple[int, int], take: tuple[int, int]) -> None:
        """Gives a rank bytes and takes some of it: (pointer, count) each; both know where there are none."""
        if give[1]:
            self._call("send", give[0], give[1], BYTES, peer)
        if take[1]:
            self._call("recv", take[0], take[1], BYTES, peer)

    def _own(self, src: DeviceArray, dst: DeviceArray) -> None:
        """What a rank gives itself."""
        if not src.size or src.address == dst.address:
            return
        self._script.before.append(partial(_assign, bits_view(dst), bits_view(src)))
        if not (src.shadow.flags.c_contiguous and dst.shadow.flags.c_contiguous):
            self._script.is_bare = False  # cupy may take memory to bring one into the other's shape

    # ------------------------------------------------------------------------------------------ where arrays lie

    def _read(self, array: DeviceArray) -> int:
        """Where NCCL shall read an array: where it lies, or in a copy without gaps."""
        return int(self._line(array).data.ptr)

    def _written(self, array: DeviceArray) -> int:
        """Where NCCL shall write an array: where it lies, or in memory from which it is copied."""
        if array.shadow.flags.c_contiguous:
            return array.address
        return self._room(array)

    def _both(self, src: DeviceArray, dst: DeviceArray) -> tuple[int, int]:
        """Where an array is read, and where one is written that may be the same."""
        read = self._read(src)
        if src.address == dst.address and not src.shadow.flags.c_contiguous:  # in place: in the copy, too
            line, target = self._script.kept[-1], bits_view(dst)
            self._script.after.append(lambda: _assign(target, line))
            return read, read
        return read, self._written(dst)

    def _room(self, array: DeviceArray) -> int:
        """Memory for as many elements, which are copied to an array behind the calls."""
        target = bits_view(array)
        room = self._own_memory(self._cupy.empty(array.size, target.dtype))
        self._script.after.append(lambda: _assign(target, room))
        return int(room.data.ptr)

    def _row(self, pieces: Sequence[DeviceArray], *, is_read: bool) -> int:
        """Pieces of one size as one row: where they lie one behind the other, or a copy of them."""
        ends = [(piece.address, piece.address + piece.nbytes) for piece in pieces]
        whole = all(piece.shadow.flags.c_contiguous for piece in pieces)
        if whole and all(before[1] == behind[0] for before, behind in pairwise(ends)):
            return pieces[0].address
        size, views = pieces[0].size, [bits_view(piece) for piece in pieces]
        row = self._own_memory(self._cupy.empty(size * len(pieces), views[0].dtype))
        for at, view in enumerate(views):
            part = row[at * size : (at + 1) * size]
            if is_read:
                self._script.before.append(partial(_assign, part.reshape(view.shape), view))
            else:
                self._script.after.append(partial(_assign, view, part))
        return int(row.data.ptr)

    def _line(self, array: DeviceArray) -> Any:
        """The bits of an array as one row without gaps: a view of it where it has none, else a copy to be made."""
        view = bits_view(array)
        if array.shadow.flags.c_contiguous:
            return self._keep(view.reshape(-1))
        line = self._own_memory(self._cupy.empty(array.size, view.dtype))
        self._script.before.append(partial(_assign, line.reshape(view.shape), view))
        return line

    def _pieces(self, side: Any) -> tuple[DeviceArray, ...]:
        if type(side) is not tuple or len(side) != len(self._ranks):
            raise InternalError(detail=f"a kernel among {len(self._ranks)} ranks without a piece for each")
        return side

    def _own_memory(self, memory: Any) -> Any:
        """Memory that the kernel's arrays are not."""
        self._script.is_bare = False
        return self._keep(memory)

    def _keep(self, memory: Any) -> Any:
        self._script.kept.append(memory)
        return memory

    def _call(self, name: str, *arguments: int) -> None:
        self._script.calls.append(partial(getattr(self._nccl, name), *arguments, self._stream))


_KERNELS: dict[OpKind, Callable[[_Writer, Kernel], list[Script]]] = {
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


def _assign(target: Any, source: Any) -> None:
    target[...] = source.reshape(target.shape)


def _part(size: int, lo: int, hi: int) -> tuple[int, int]:
    """Of a range, the part that there is of a row of that size."""
    hi = min(hi, size)
    return min(lo, hi), hi
