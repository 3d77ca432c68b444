"""The identities of elements, and the boxes of full tensors in a local tensor of identities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends.elements import Array
from raycollect.planner.boxes import Box, Point
from raycollect.planner.layout import Axes

NOTHING = 0
"""The identity of an element of no full tensor, such as a zero."""


class NotRecordedError(Exception):
    """A loader used an operation that has no meaning for identities; names the operation."""


MOST_BOXES = 4096
"""How many boxes of one full tensor a local tensor may hold. A loader that picks single elements makes more."""


class Full(NamedTuple):
    """A full tensor: its elements are `base`, `base + 1`, ... in C order."""

    name: str
    shape: Point
    base: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def strides(self) -> Point:
        """The difference of identities along each dimension."""
        return tuple(prod(self.shape[d + 1 :]) for d in range(len(self.shape)))


def numbered(shapes: Mapping[str, Point]) -> dict[str, Full]:
    """Assigns identities to all elements of all full tensors."""
    fulls, base = {}, NOTHING + 1
    for name, shape in shapes.items():
        fulls[name] = Full(name, shape, base)
        base += prod(shape)
    return fulls


class TensorPiece(NamedTuple):
    """A box of a full tensor in a local one."""

    full: Full
    at: Point  # in the local tensor
    size: Point  # its extent in the local tensor
    first: Point  # its first element in the full tensor
    along: (
        Point  # for each dimension of the local tensor that of the full one along which it goes; -1: it has one place
    )


def pieces(ids: Array, fulls: Sequence[Full]) -> dict[str, list[TensorPiece]]:
    """Returns all boxes in a local tensor, by the names of their full tensors.

    Raises:
        ValueError: A full tensor has too many boxes; names the full tensor.
    """
    by_name: dict[str, list[TensorPiece]] = {}
    bases = np.array([full.base for full in fulls if full.size])
    solid = [full for full in fulls if full.size]
    todo = (ids > NOTHING) & (ids < max((full.base + full.size for full in fulls), default=0))
    flat, place = todo.reshape(-1), 0
    while True:
        place += int(np.argmax(flat[place:])) if place < flat.size else 0
        if place >= flat.size or not flat[place]:
            return by_name
        at = tuple(map(int, np.unravel_index(place, ids.shape)))
        full = solid[int(np.searchsorted(bases, ids[at], side="right")) - 1]
        piece = _grown(ids, todo, full, at)
        todo[tuple(slice(a, a + n) for a, n in zip(at, piece.size, strict=True))] = False
        some = by_name.setdefault(full.name, [])
        some.append(piece)
        if len(some) > MOST_BOXES:
            raise ValueError(full.name)


def _grown(ids: Array, todo: Array, full: Full, at: Point) -> TensorPiece:
    """Returns the largest box that begins at a point of the local tensor; grows it from the last dimension on."""
    value = int(ids[at])
    first = tuple(map(int, np.unravel_index(value - full.base, full.shape)))
    size, along = [1] * ids.ndim, [-1] * ids.ndim
    expected: Any = np.full((1,) * ids.ndim, value)
    for d in reversed(range(ids.ndim)):
        step = _step(ids, todo, at, d, value)
        line = next(
            (
                axis
                for axis, stride in enumerate(full.strides)
                if stride == step and axis not in along and first[axis] + 1 < full.shape[axis]
            ),
            -1,
        )
        if line < 0:
            continue
        most = min(ids.shape[d] - at[d], full.shape[line] - first[line])
        place = tuple(
            slice(a, a + (most if d == axis else n)) for axis, (a, n) in enumerate(zip(at, size, strict=True))
        )
        there = np.arange(most).reshape([most if axis == d else 1 for axis in range(ids.ndim)]) * step + expected
        same = ((ids[place] == there) & todo[place]).all(axis=tuple(axis for axis in range(ids.ndim) if axis != d))
        count = most if same.all() else int(np.argmin(same))
        if count > 1:
            size[d], along[d] = count, line
            expected = there[tuple(slice(count) if axis == d else slice(None) for axis in range(ids.ndim))]
    return TensorPiece(full, at, tuple(size), first, tuple(along))


def _step(ids: Array, todo: Array, at: Point, d: int, value: int) -> int:
    beside = (*at[:d], at[d] + 1, *at[d + 1 :])
    return int(ids[beside]) - value if beside[d] < ids.shape[d] and todo[beside] else 0


def _split(piece: TensorPiece, d: int) -> Iterator[TensorPiece]:
    """Splits a box into slices of extent 1 along a dimension of the local tensor."""
    axis = piece.along[d]

    def without(point: Point, value: int) -> Point:
        return (*point[:d], value, *point[d + 1 :])

    for nth in range(piece.size[d]):
        first = tuple(place + nth * (e == axis) for e, place in enumerate(piece.first))
        at, size, along = without(piece.at, piece.at[d] + nth), without(piece.size, 1), without(piece.along, -1)
        yield TensorPiece(piece.full, at, size, first, along)


def agreed(recorded: Sequence[TensorPiece]) -> list[TensorPiece] | None:
    """Splits boxes until each dimension of the local tensor goes along one dimension of the full tensors.

    A few elements may lie in a row by chance, so the majority of elements decides. Returns None for too many boxes.
    """
    votes = Counter[tuple[int, int]]()
    for piece in recorded:
        votes.update({line: prod(piece.size) for line in enumerate(piece.along) if line[1] >= 0})
    along: dict[int, int] = {}
    for (d, axis), _ in sorted(votes.items(), key=lambda vote: (-vote[1], vote[0])):
        if d not in along and axis not in along.values():
            along[d] = axis
    pieces = list(recorded)
    for d in range(len(recorded[0].at)):
        agreeing = {-1, along.get(d, -1)}
        counts = [1 if piece.along[d] in agreeing else piece.size[d] for piece in pieces]
        if sum(counts) > max(MOST_BOXES, len(recorded)):
            return None
        pieces = [part for piece in pieces for part in ([piece] if piece.along[d] in agreeing else _split(piece, d))]
    return pieces


def axes_of(local: Point, pieces: Sequence[TensorPiece]) -> Axes | None:
    """Returns which dimensions of a local tensor form each dimension of the full tensors; None if no view fits.

    All full tensors in it have the same number of dimensions, and the boxes agree (`agreed`).
    """
    along = {d: axis for piece in pieces for d, axis in enumerate(piece.along) if axis >= 0}
    axes: list[list[int]] = [[] for _ in pieces[0].full.shape]
    for d, axis in along.items():
        axes[axis].append(d)
    rest = [d for d in range(len(local)) if d not in along]
    for axis, group in enumerate(axes):  # extent 1 on both sides: dimension by dimension
        if not group and rest:
            along[rest[0]] = axis
            group.append(rest.pop(0))
    for d in sorted(rest, reverse=True):  # slots: each is a part of the dimension behind it
        if d + 1 in along:
            along[d] = along[d + 1]
            axes[along[d]].insert(0, d)
        elif local[d] == 1 and d - 1 in along:
            along[d] = along[d - 1]
            axes[along[d]].append(d)
        else:
            return None
    if all(group == [axis] for axis, group in enumerate(axes)) and len(axes) == len(local):
        return ()
    return tuple(tuple((d, 0 if d == group[0] else local[d]) for d in group) for group in axes)


def boxes(axes: Axes, pieces: Sequence[TensorPiece]) -> list[tuple[Box, Point]]:
    """Returns (box of the full tensor, where it begins in the unfolded local tensor) for as few boxes as possible."""
    laid = []
    for piece in pieces:
        at, size = [], []
        for axis, group in enumerate(axes or tuple(((d, 0),) for d in range(len(piece.at)))):
            place = 0
            for d, extent in group:
                place = place * (extent or 1) + piece.at[d]
            at.append(place)
            size.append(next((n for n, line in zip(piece.size, piece.along, strict=True) if line == axis), 1))
        end = tuple(lo + n for lo, n in zip(piece.first, size, strict=True))
        laid.append(((piece.first, end), tuple(at)))
    for d in range(len(laid[0][1])):
        laid = list(_joined(laid, d))
    return laid


def _joined(laid: Sequence[tuple[Box, Point]], d: int) -> Iterator[tuple[Box, Point]]:
    """Joins boxes that follow each other along a dimension, both in the full tensor and in the local one."""
    lines: dict[Any, list[tuple[Box, Point]]] = {}
    for (lo, hi), at in laid:
        rest = tuple((lo[e], hi[e], at[e]) for e in range(len(lo)) if e != d)
        lines.setdefault((rest, lo[d] - at[d]), []).append(((lo, hi), at))
    for line in lines.values():
        line.sort()
        (lo, hi), at = line[0]
        for (other_lo, other_hi), other_at in line[1:]:
            if other_lo[d] == hi[d]:
                hi = other_hi
                continue
            yield (lo, hi), at
            (lo, hi), at = (other_lo, other_hi), other_at
        yield (lo, hi), at
