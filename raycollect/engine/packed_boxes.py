"""One round of a reshard: boxes packed into messages, one all-to-all of bytes, and boxes unpacked or added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from raycollect.backends import folds
from raycollect.backends.arrays import Array
from raycollect.backends.elements import convert
from raycollect.core.model import Kernel, OpKind, ReduceOp
from raycollect.planner.boxes import Point
from raycollect.planner.layout import Axes, unfolded
from raycollect.planner.reshard.halves import Give, Half, Take, aligned

Find = Callable[[int, bool], Array]
"""(place of a name, whether of the targets) -> the local tensor."""


def box_of(array: Array, at: Point, size: Point) -> Array:
    """The box of a local tensor, as a view."""
    place: Any = (*(slice(lo, lo + n) for lo, n in zip(at, size, strict=True)), ...)  # a view where there are none, too
    found: Array = array[place]
    return found


def unfold(array: Array, axes: Axes) -> Array:
    """The local tensor with the dimensions of the global one: a view, or a copy where its memory has no such view."""
    if not axes:
        return array
    return array.transpose([d for group in axes for d, _ in group]).reshape(unfolded(axes, array.shape))


class PackedBoxes:
    """A kernel that is to be launched between `load` and `unload`, as `FusedKernel`."""

    __slots__ = ("_copy", "_dtypes", "_loads", "_sums", "_unloads", "kernel")

    def __init__(self, half: Half, number: int, ranks: Sequence[int], memory: Array, find: Find) -> None:
        there, here = half.messages(number)
        one = half.rounds[number]
        gives: dict[int, list[Give]] = {}
        for give in one.gives:
            gives.setdefault(give.peer, []).append(give)
        firsts: dict[tuple[Any, ...], int] = {}  # messages that are equal, as those to replicas are, are packed once
        same = {peer: firsts.setdefault(tuple(give[1:] for give in some), peer) for peer, some in gives.items()}
        packed, end = _rows(memory, {peer: there[peer] for peer in firsts.values()}, 0)
        taken, _ = _rows(memory, {rank: here.get(rank, 0) for rank in ranks}, end)
        src = tuple(packed[same[rank]] if rank in same else memory[:0] for rank in ranks)
        self.kernel: Kernel = Kernel(kind=OpKind.ALLTOALL, src=src, dst=tuple(taken.values()), most=one.most)
        self._dtypes = tuple(map(np.dtype, half.dtypes))
        self._copy: Callable[[Array, Array], None] = convert if _converts(half) else np.copyto
        self._loads: list[tuple[Array, Array]] = []
        self._unloads: list[tuple[Array, Array]] = []
        self._sums: list[tuple[Array, list[Array]]] = []
        outgoing, incoming = _Cursors(packed), _Cursors(taken)
        for peer in firsts.values():
            for give in gives[peer]:
                for array, dtype in self._boxes(give, find, is_dst=give.passed_on):
                    self._loads.append((outgoing.next(peer, array.shape, dtype), array))
        for take in one.takes:
            self._take(take, incoming, find)

    def _take(self, take: Take, incoming: _Cursors, find: Find) -> None:
        targets = self._boxes(take, find, is_dst=True)
        parts = [[incoming.next(peer, array.shape, dtype) for array, dtype in targets] for peer in take.peers]
        for at, (array, _) in enumerate(targets):
            if len(parts) == 1:
                self._unloads.append((array, parts[0][at]))
            else:
                self._sums.append((array, [some[at] for some in parts]))

    def load(self) -> None:
        """Packs what this rank gives."""
        for part, array in self._loads:
            self._copy(part, array)

    def unload(self) -> None:
        """Unpacks what it has got; sums are folded in the order of their addends, so that all runs give one result."""
        for array, part in self._unloads:
            self._copy(array, part)
        for array, parts in self._sums:
            total = parts[0].reshape(-1)
            folds.fold(ReduceOp.SUM, [part.reshape(-1) for part in parts], total)
            self._copy(array, parts[0])

    def _boxes(self, one: Give | Take, find: Find, *, is_dst: bool) -> list[tuple[Array, np.dtype[Any]]]:
        """The boxes of a transfer in the local tensors, and the element type in which each travels."""
        names = range(one.first, one.first + one.names)
        return [(box_of(find(name, is_dst), one.at, one.size), self._dtypes[name]) for name in names]


def _converts(half: Half) -> bool:
    sides = ((half.src, half.src_of), (half.dst, half.dst_of))
    return any(
        at >= 0 and tensors[at].dtype != dtype
        for tensors, places in sides
        for at, dtype in zip(places, half.dtypes, strict=True)
    )


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
        found: Array = self._rows[peer][begin : self._ends[peer]].view(dtype).reshape(shape)
        return found
