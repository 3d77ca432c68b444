"""One round of a reshard: boxes packed into messages, one all-to-all of bytes, and boxes unpacked or added up.

If the backend's ranks can read each other's memory (`protocols.Reaching`), no message is sent, and boxes that can be
read in place are not packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from raycollect.backends import folds
from raycollect.backends.array_copies import ArrayCopies
from raycollect.backends.arrays import Array, box_of
from raycollect.backends.elements import convert
from raycollect.core.boxes import BoxRound
from raycollect.core.boxes import Give as GivenBox
from raycollect.core.boxes import Take as TakenBoxes
from raycollect.core.model import Kernel, OpKind, ReduceOp
from raycollect.planner.boxes import Point
from raycollect.planner.layout import Axes, unfolded
from raycollect.planner.reshard.halves import Half, LocalBoxes, aligned

Find = Callable[[int, bool], Array]
"""(index of a name, whether of the targets) -> the local tensor."""


def unfold(array: Array, axes: Axes) -> Array:
    """The local tensor with the dimensions of the global one: a view if possible, otherwise a copy."""
    if not axes:
        return array
    return array.transpose([d for group in axes for d, _ in group]).reshape(unfolded(axes, array.shape))


class PackedBoxes:
    """A kernel that has to be launched between `load` and `unload`, as `FusedKernel`."""

    def __init__(self, half: Half, number: int, ranks: Sequence[int], memory: Array, find: Find) -> None:
        there, here = half.messages(number)
        transfers = half.rounds[number]
        gives: dict[int, list[LocalBoxes]] = {}
        for taker, given in zip(transfers.takers, transfers.gives, strict=True):
            gives.setdefault(taker, []).append(given)
        # Equal messages, as to replicas, are packed once.
        firsts: dict[tuple[LocalBoxes, ...], int] = {}
        same = {peer: firsts.setdefault(tuple(some), peer) for peer, some in gives.items()}
        packed, end = _rows(memory, {peer: there[peer] for peer in firsts.values()}, 0)
        taken, _ = _rows(memory, {rank: here.get(rank, 0) for rank in ranks}, end)
        src = tuple(packed[same[rank]] if rank in same else memory[:0] for rank in ranks)
        self.kernel: Kernel = Kernel(kind=OpKind.ALLTOALL, src=src, dst=tuple(taken.values()), most=transfers.most)
        dtypes = tuple(map(np.dtype, half.dtypes))
        outgoing, incoming = _Cursors(packed), _Cursors(taken)
        self._loads = {
            peer: [
                GivenBox(outgoing.next(peer, box.shape, dtypes[name]), box)
                for give in gives[peer]
                for name, box in _boxes(give, find, is_dst=transfers.passes_on).items()
            ]
            for peer in firsts.values()
        }
        takes = [
            _taken(peers, boxes, find, dtypes) for peers, boxes in zip(transfers.givers, transfers.takes, strict=True)
        ]
        self._unloads: list[tuple[Array, list[Array]]] = []
        for taken_boxes, travelling, peers in takes:
            parts = [
                [incoming.next(peer, box.shape, dtype) for box, dtype in zip(taken_boxes, travelling, strict=True)]
                for peer in peers
            ]
            self._unloads += [(box, [some[at] for some in parts]) for at, box in enumerate(taken_boxes)]
        self.round: BoxRound = BoxRound(
            gives={peer: self._loads[first] for peer, first in same.items()},
            takes=takes,
            passes_on=transfers.passes_on,
        )

    def load(self) -> None:
        """Packs the boxes that this rank sends."""
        self._packing.run()

    def unload(self) -> None:
        """Unpacks the received boxes; sums are folded in the order of their addends, for reproducible results."""
        for _, parts in self._unloads:
            if len(parts) > 1:
                total = parts[0].reshape(-1)
                folds.fold(ReduceOp.SUM, [part.reshape(-1) for part in parts], total)
        self._unpacking.run()

    @cached_property
    def _packing(self) -> ArrayCopies:
        return ArrayCopies([(part, box) for some in self._loads.values() for part, box in some], convert)

    @cached_property
    def _unpacking(self) -> ArrayCopies:
        return ArrayCopies([(box, parts[0]) for box, parts in self._unloads], convert)


def _boxes(local: LocalBoxes, find: Find, *, is_dst: bool) -> dict[int, Array]:
    """The boxes of a transfer in the local tensors, by name."""
    return {
        name: box_of(find(name, is_dst), local.at, local.size) for name in range(local.first, local.first + local.names)
    }


def _taken(peers: tuple[int, ...], local: LocalBoxes, find: Find, dtypes: Sequence[np.dtype[Any]]) -> TakenBoxes:
    boxes = _boxes(local, find, is_dst=True)
    return TakenBoxes(tuple(boxes.values()), tuple(dtypes[name] for name in boxes), peers)


def _rows(memory: Array, sizes: Mapping[int, int], end: int) -> tuple[dict[int, Array], int]:
    rows = {}
    for peer, nbytes in sizes.items():
        rows[peer] = memory[end : end + nbytes]
        end += aligned(nbytes)
    return rows, end


class _Cursors:
    """The parts of messages, one after the other."""

    def __init__(self, rows: dict[int, Any]) -> None:
        self._rows = rows
        self._ends = dict.fromkeys(rows, 0)

    def next(self, peer: int, shape: Point, dtype: np.dtype[Any]) -> Array:
        begin = self._ends[peer]
        self._ends[peer] = begin + prod(shape) * dtype.itemsize
        part: Array = self._rows[peer][begin : self._ends[peer]].view(dtype).reshape(shape)
        return part
