"""Kernels in memory that ranks of one GPU export to each other: the exports of each rank, and its work.

Theory, for w ranks and arrays of n bytes. A reduction is cut into w slices; each rank folds its slice of all arrays and
writes it to all targets: together w reads and w writes of n bytes in an allreduce. Everything else is one copy per
byte, made by the receiver straight from the sender's memory.

=============  =====================================  ==============================
kernel         exported                               copied or folded by
=============  =====================================  ==============================
ALLREDUCE      all src, and all dst to be written     each rank its slice
REDUCE         all src, and the root's dst            each rank its slice
REDUCESCATTER  all pieces of src                      each rank its piece
BROADCAST      the root's src                         the others
SCATTER        the root's pieces                      each rank its piece
SEND           the sender's src                       the receiver
others         all src                                each rank its outputs
=============  =====================================  ==============================

Exported memory has no gaps, and its own rank does not write to it while others read: an in-place ALLTOALL exports
copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raycollect.backends.device_arrays import DeviceArray, bits_view
from raycollect.backends.kernels import moved, one_each, reduce_op
from raycollect.backends.nccl.ipc_fold import Folder
from raycollect.backends.nccl.ipc_memory import ExportedSpans, Exports, Span
from raycollect.backends.shm.in_place import root_of
from raycollect.core.model import Kernel, OpKind
from raycollect.errors import InternalError

_LINE_NBYTES = 256  # Slices begin at multiples of this
_PIECES = (OpKind.SCATTER, OpKind.REDUCESCATTER, OpKind.ALLTOALL)  # Kernels with a source piece for each rank


class IpcKernel:
    """One rank's part in one kernel: `show`, `work` when all ranks have exported, `settle` when all have worked.

    Each of these enqueues on cupy's current stream.
    """

    def __init__(self, kernel: Kernel, rank: int, ranks: Sequence[int], exports: Exports, folder: Folder) -> None:
        self._kernel = kernel
        self._ranks = ranks
        self._me = ranks.index(rank)
        self._root = ranks.index(root_of(kernel, rank)) if kernel.peer >= 0 else -1
        self._exports = exports
        self._folder = folder
        self._back: list[tuple[DeviceArray, int]] = []  # arrays to fill after the kernel, and the sources

    @property
    def is_unsettled(self) -> bool:
        """Whether `settle` has arrays to copy."""
        return bool(self._back)

    def show(self) -> ExportedSpans:
        """Exports the memory that others will read and write, and returns its spans."""
        kernel, kind, is_root = self._kernel, self._kernel.kind, self._me == self._root
        gives: Sequence[DeviceArray] = ()
        takes: Sequence[DeviceArray] = ()
        if kind in _PIECES:
            gives = self._pieces(kernel.src) if is_root or kind is not OpKind.SCATTER else ()
        elif kind is OpKind.BROADCAST:
            gives = (moved(kernel, is_root=True)[0],) if is_root else ()
        elif kind not in (OpKind.RECV, OpKind.BARRIER):
            gives = (kernel.src,)
        if kind is OpKind.ALLREDUCE or (kind is OpKind.REDUCE and is_root):
            takes = (kernel.dst,)
        written = {array.address for array in self._pieces(kernel.dst)} if kind is OpKind.ALLTOALL else set()
        copied = [at != self._me and array.address in written for at, array in enumerate(gives)]
        return ExportedSpans(tuple(map(self._given, gives, copied)), tuple(map(self._taken, takes)))

    def _given(self, array: DeviceArray, is_copied: bool) -> Span:
        # The span in which others read an array: in place, or in a copy.
        nbytes = array.nbytes
        if not nbytes or (not is_copied and self._can_show(array)):
            return array.address, nbytes
        room = self._exports.room(nbytes)
        view = bits_view(array)
        self._folder.row(room, nbytes, view.dtype).reshape(view.shape)[...] = view
        return room, nbytes

    def _taken(self, array: DeviceArray) -> Span:
        # The span in which others write an array: in place, or in temporary memory.
        if not array.nbytes or self._can_show(array):
            return array.address, array.nbytes
        room = self._exports.room(array.nbytes)
        self._back.append((array, room))
        return room, array.nbytes

    def _can_show(self, array: DeviceArray) -> bool:
        return array.shadow.flags.c_contiguous and self._exports.can_show(array.address, array.nbytes)

    def work(self, shown: Sequence[ExportedSpans]) -> None:
        """Does this rank's part; `shown` has each rank's exports, by position in the launch."""
        kind = self._kernel.kind
        if kind in (OpKind.ALLREDUCE, OpKind.REDUCE):
            self._reduce(shown)
        elif kind is OpKind.REDUCESCATTER:
            self._reduce_piece(shown)
        else:
            self._pull(shown)

    def settle(self) -> None:
        """Copies the results in temporary memory to their arrays."""
        for array, room in self._back:
            self._copy((room, array.nbytes), array)

    def _reduce(self, shown: Sequence[ExportedSpans]) -> None:
        src = self._kernel.src
        sources = [self._span(exported.gives, 0, src.nbytes) for exported in shown]
        targets = [self._span(exported.takes, 0, src.nbytes) for exported in shown if exported.takes]
        lo, hi = _slice(self._me, len(self._ranks), src.nbytes)
        self._fold([address + lo for address in sources], [address + lo for address in targets], hi - lo)

    def _reduce_piece(self, shown: Sequence[ExportedSpans]) -> None:
        dst: DeviceArray = self._kernel.dst
        sources = [self._span(exported.gives, self._me, dst.nbytes) for exported in shown]
        if dst.shadow.flags.c_contiguous:
            self._fold(sources, [dst.address], dst.nbytes)
            return
        room = self._exports.room(dst.nbytes)
        self._fold(sources, [room], dst.nbytes)
        self._copy((room, dst.nbytes), dst)

    def _fold(self, sources: Sequence[int], targets: Sequence[int], nbytes: int) -> None:
        self._folder.fold(reduce_op(self._kernel), self._kernel.sample.dtype, sources, targets, nbytes)

    def _pull(self, shown: Sequence[ExportedSpans]) -> None:
        kernel, kind, is_root = self._kernel, self._kernel.kind, self._me == self._root
        if kind in (OpKind.SEND, OpKind.BARRIER) or (kind is OpKind.GATHER and not is_root):
            return
        if kind is OpKind.BROADCAST:
            source, into = moved(kernel, is_root=is_root)
            if into is not None and (source is None or into.address != source.address):
                self._copy(shown[self._root].gives[0], into)
        elif kind is OpKind.RECV:
            self._copy(shown[self._root].gives[0], kernel.dst)
        elif kind is OpKind.SCATTER:
            if not is_root or kernel.src[self._me].address != kernel.dst.address:
                self._copy(shown[self._root].gives[self._me], kernel.dst)
        else:
            self._pull_pieces(shown)

    def _pull_pieces(self, shown: Sequence[ExportedSpans]) -> None:
        kernel, has_pieces = self._kernel, self._kernel.kind is OpKind.ALLTOALL
        own: DeviceArray = self._pieces(kernel.src)[self._me] if has_pieces else kernel.src
        for at, (exported, into) in enumerate(zip(shown, self._pieces(kernel.dst), strict=True)):
            if at != self._me or own.address != into.address:
                self._copy(exported.gives[self._me if has_pieces else 0], into)

    def _copy(self, source: Span, into: DeviceArray) -> None:
        if not into.nbytes and not source[1]:
            return
        start = self._span((source,), 0, into.nbytes)
        if into.shadow.flags.c_contiguous:
            self._folder.copy(into.address, start, into.nbytes)
        else:
            view = bits_view(into)
            view[...] = self._folder.row(start, into.nbytes, view.dtype).reshape(view.shape)

    def _span(self, spans: Sequence[Span], at: int, nbytes: int) -> int:
        # The address of one of the spans of a rank; checks its length, or memory would be overrun.
        if at >= len(spans) or spans[at][1] != nbytes:
            lengths = [span[1] for span in spans]
            detail = f"{self._kernel.kind.value} of {nbytes} bytes, and a rank shows {lengths}"
            raise InternalError(detail=detail)
        return spans[at][0]

    def _pieces(self, side: Any) -> Sequence[DeviceArray]:
        return one_each(self._kernel, side, self._ranks)


def _slice(at: int, count: int, nbytes: int) -> tuple[int, int]:
    step = -(-nbytes // (count * _LINE_NBYTES)) * _LINE_NBYTES
    return min(at * step, nbytes), min((at + 1) * step, nbytes)


assert _LINE_NBYTES % np.dtype(np.complex128).itemsize == 0
