"""Kernels in memory that ranks of one GPU export to each other: what each exports, and what it does then.

Theory, for w ranks and arrays of n bytes. A reduction is cut into w slices; each rank folds its slice of all arrays and
writes it to all targets: together w reads and w writes of n bytes in an allreduce. Everything else is one copy per
byte, made by the receiver straight from the sender's memory.

=============  =====================================  ==============================
kernel         exported                               who copies or folds
=============  =====================================  ==============================
ALLREDUCE      all src, and all dst to be written     each rank its slice
REDUCE         all src, and the root's dst            each rank its slice
REDUCESCATTER  all pieces of src                      each rank its piece
BROADCAST      the root's src                         the others
SCATTER        the root's pieces                      each rank its piece
SEND           the sender's src                       the receiver
others         all src                                each rank what it takes
=============  =====================================  ==============================

Exported memory has no gaps, and its own rank does not write to it while others read: an in-place ALLTOALL exports
copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raycollect.backends.device_arrays import DeviceArray, bits_view
from raycollect.backends.kernels import one_each, reduce_op
from raycollect.backends.nccl.ipc_fold import Folder
from raycollect.backends.nccl.ipc_memory import Exports, Shown, Span
from raycollect.backends.shm.in_place import root_of
from raycollect.core.model import Kernel, OpKind
from raycollect.errors import InternalError

_LINE_NBYTES = 256  # Slices begin at multiples of this
_PIECES = (OpKind.SCATTER, OpKind.REDUCESCATTER, OpKind.ALLTOALL)  # Kernels with a source piece for each rank


class Part:
    """One rank's part in one kernel: `show`, `work` when all have exported theirs, `settle` when all have worked.

    Each of these enqueues on cupy's current stream, and is done when that is.
    """

    def __init__(self, kernel: Kernel, rank: int, ranks: Sequence[int], exports: Exports, folder: Folder) -> None:
        self._kernel = kernel
        self._ranks = ranks
        self._me = ranks.index(rank)
        self._root = ranks.index(root_of(kernel, rank)) if kernel.peer >= 0 else -1
        self._exports = exports
        self._folder = folder
        self._back: list[tuple[DeviceArray, int]] = []  # what is copied behind, and from where

    @property
    def is_unsettled(self) -> bool:
        """Whether `settle` has something to do."""
        return bool(self._back)

    def show(self) -> Shown:
        """Exports what others will read and write, and tells where that is."""
        kernel, kind, is_root = self._kernel, self._kernel.kind, self._me == self._root
        gives: Sequence[DeviceArray] = ()
        takes: Sequence[DeviceArray] = ()
        if kind in _PIECES:
            gives = self._pieces(kernel.src) if is_root or kind is not OpKind.SCATTER else ()
        elif kind is OpKind.BROADCAST:
            gives = (self._one(),) if is_root else ()
        elif kind not in (OpKind.RECV, OpKind.BARRIER):
            gives = (kernel.src,)
        if kind is OpKind.ALLREDUCE or (kind is OpKind.REDUCE and is_root):
            takes = (kernel.dst,)
        written = {one.address for one in self._pieces(kernel.dst)} if kind is OpKind.ALLTOALL else set()
        copied = [at != self._me and one.address in written for at, one in enumerate(gives)]
        return Shown(tuple(map(self._given, gives, copied)), tuple(map(self._taken, takes)))

    def _given(self, array: DeviceArray, is_copied: bool) -> Span:
        # Where others may read an array: in place, or in a copy.
        nbytes = array.nbytes
        if not nbytes or (not is_copied and self._can_show(array)):
            return array.address, nbytes
        room = self._exports.room(nbytes)
        view = bits_view(array)
        self._folder.row(room, nbytes, view.dtype).reshape(view.shape)[...] = view
        return room, nbytes

    def _taken(self, array: DeviceArray) -> Span:
        # Where others may write an array: in place, or in temporary memory.
        if not array.nbytes or self._can_show(array):
            return array.address, array.nbytes
        room = self._exports.room(array.nbytes)
        self._back.append((array, room))
        return room, array.nbytes

    def _can_show(self, array: DeviceArray) -> bool:
        return array.shadow.flags.c_contiguous and self._exports.can_show(array.address, array.nbytes)

    def work(self, shown: Sequence[Shown]) -> None:
        """Does this rank's part; `shown` has each rank's exports, by position in the launch."""
        kind = self._kernel.kind
        if kind in (OpKind.ALLREDUCE, OpKind.REDUCE):
            self._reduce(shown)
        elif kind is OpKind.REDUCESCATTER:
            self._reduce_piece(shown)
        else:
            self._pull(shown)

    def settle(self) -> None:
        """Copies what others have written to temporary memory to its array."""
        for array, room in self._back:
            self._copy((room, array.nbytes), array)

    def _reduce(self, shown: Sequence[Shown]) -> None:
        src = self._kernel.src
        sources = [self._span(one.gives, 0, src.nbytes) for one in shown]
        targets = [self._span(one.takes, 0, src.nbytes) for one in shown if one.takes]
        lo, hi = _slice(self._me, len(self._ranks), src.nbytes)
        self._fold([one + lo for one in sources], [one + lo for one in targets], hi - lo)

    def _reduce_piece(self, shown: Sequence[Shown]) -> None:
        dst: DeviceArray = self._kernel.dst
        sources = [self._span(one.gives, self._me, dst.nbytes) for one in shown]
        if dst.shadow.flags.c_contiguous:
            self._fold(sources, [dst.address], dst.nbytes)
            return
        room = self._exports.room(dst.nbytes)
        self._fold(sources, [room], dst.nbytes)
        self._copy((room, dst.nbytes), dst)

    def _fold(self, sources: Sequence[int], targets: Sequence[int], nbytes: int) -> None:
        self._folder.fold(reduce_op(self._kernel), self._kernel.sample.dtype, sources, targets, nbytes)

    def _pull(self, shown: Sequence[Shown]) -> None:
        kernel, kind, is_root = self._kernel, self._kernel.kind, self._me == self._root
        if kind in (OpKind.SEND, OpKind.BARRIER) or (kind is OpKind.GATHER and not is_root):
            return
        if kind is OpKind.BROADCAST:
            source = self._one()
            into = kernel.src if kernel.dst is None else kernel.dst
            if not is_root or into.address != source.address:
                self._copy(shown[self._root].gives[0], into)
        elif kind is OpKind.RECV:
            self._copy(shown[self._root].gives[0], kernel.dst)
        elif kind is OpKind.SCATTER:
            if not is_root or kernel.src[self._me].address != kernel.dst.address:
                self._copy(shown[self._root].gives[self._me], kernel.dst)
        else:
            self._pull_pieces(shown)

    def _pull_pieces(self, shown: Sequence[Shown]) -> None:
        kernel, has_pieces = self._kernel, self._kernel.kind is OpKind.ALLTOALL
        own: DeviceArray = self._pieces(kernel.src)[self._me] if has_pieces else kernel.src
        for at, (one, into) in enumerate(zip(shown, self._pieces(kernel.dst), strict=True)):
            if at != self._me or own.address != into.address:
                self._copy(one.gives[self._me if has_pieces else 0], into)

    def _one(self) -> DeviceArray:
        found: DeviceArray = self._kernel.dst if self._kernel.src is None else self._kernel.src
        return found

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
            found = [one[1] for one in spans]
            detail = f"{self._kernel.kind.value} of {nbytes} bytes, and a rank shows {found}"
            raise InternalError(detail=detail)
        return spans[at][0]

    def _pieces(self, side: Any) -> Sequence[DeviceArray]:
        return one_each(self._kernel, side, self._ranks)


def _slice(at: int, count: int, nbytes: int) -> tuple[int, int]:
    step = -(-nbytes // (count * _LINE_NBYTES)) * _LINE_NBYTES
    return min(at * step, nbytes), min((at + 1) * step, nbytes)


assert _LINE_NBYTES % np.dtype(np.complex128).itemsize == 0
