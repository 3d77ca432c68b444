"""The identities of elements, and the boxes that lie in a local tensor which is full of them."""

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
"""The identity of an element that comes from no full tensor, such as a zero."""


class NotRecordedError(Exception):
    """A loader did something that has no meaning for identities; has the operation."""


MOST_BOXES = 4096
"""How many boxes of one full tensor a local tensor may hold; a loader that picks single elements makes more."""


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
        """By how much the identity grows along each dimension."""
        return tuple(prod(self.shape[d + 1 :]) for d in range(len(self.shape)))


def numbered(shapes: Mapping[str, Point]) -> dict[str, Full]:
    """Gives all elements of all full tensors identities."""
    found, base = {}, NOTHING + 1
    for name, shape in shapes.items():
        found[name] = Full(name, shape, base)
        base += prod(shape)
    return found


class Piece(NamedTuple):
    """A box of a full tensor in a local one."""

    full: Full
    at: Point  # in the local tensor
    size: Point  # the same
    first: Point  # its first element in the full tensor
    along: (
        Point  # for each dimension of the local tensor that of the full one along which it goes; -1: it has one place
    )


def pieces(ids: Array, fulls: Sequence[Full]) -> dict[str, list[Piece]]:
    """All boxes in a local tensor, by the names of the full tensors that they come from.

    Raises:
        ValueError: There are too many boxes; has the name of the full tensor.
    """
    found: dict[str, list[Piece]] = {}
    bases = np.array([one.base for one in fulls if one.size])
    solid = [one for one in fulls if one.size]
    todo = (ids > NOTHING) & (ids < max((one.base + one.size for one in fulls), default=0))
    flat, place = todo.reshape(-1), 0
    while True:
        place += int(np.argmax(flat[place:])) if place < flat.size else 0
        if place >= flat.size or not flat[place]:
            return found
        at = tuple(map(int, np.unravel_index(place, ids.shape)))
        full = solid[int(np.searchsorted(bases, ids[at], side="right")) - 1]
        one = _grown(ids, todo, full, at)
        todo[tuple(slice(a, a + n) for a, n in zip(at, one.size, strict=True))] = False
        some = found.setdefault(full.name, [])
        some.append(one)
        if len(some) > MOST_BOXES:
            raise ValueError(full.name)


def _grown(ids: Array, todo: Array, full: Full, at: Point) -> Piece:
    """The box that begins at a place of the local tensor, as far as it goes; from the last dimension on."""
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
    return Piece(full, at, tuple(size), first, tuple(along))


def _step(ids: Array, todo: Array, at: Point, d: int, value: int) -> int:
    beside = (*at[:d], at[d] + 1, *at[d + 1 :])
    return int(ids[beside]) - value if beside[d] < ids.shape[d] and todo[beside] else 0


def _split(piece: Piece, d: int) -> Iterator[Piece]:
    """The parts of a box with one place each along a dimension of the local tensor."""
    axis = piece.along[d]

    def without(point: Point, value: int) -> Point:
        return (*point[:d], value, *point[d + 1 :])

    for nth in range(piece.size[d]):
        first = tuple(place + nth * (e == axis) for e, place in enumerate(piece.first))
        at, size, along = without(piece.at, piece.at[d] + nth), without(piece.size, 1), without(piece.along, -1)
        yield Piece(piece.full, at, size, first, along)


def agreed(found: Sequence[Piece]) -> list[Piece] | None:
    """The same boxes, split until each dimension of the local tensor goes along one dimension of the full ones.

    Few elements may lie in a row by chance, in the one as in the other. Most elements decide. None: it takes too many.
    """
    votes = Counter[tuple[int, int]]()
    for piece in found:
        votes.update({line: prod(piece.size) for line in enumerate(piece.along) if line[1] >= 0})
    along: dict[int, int] = {}
    for (d, axis), _ in sorted(votes.items(), key=lambda vote: (-vote[1], vote[0])):
        if d not in along and axis not in along.values():
            along[d] = axis
    pieces = list(found)
    for d in range(len(found[0].at)):
        agreeing = {-1, along.get(d, -1)}
        counts = [1 if piece.along[d] in agreeing else piece.size[d] for piece in pieces]
        if sum(counts) > max(MOST_BOXES, len(found)):
            return None
        pieces = [part for piece in pieces for part in ([piece] if piece.along[d] in agreeing else _split(piece, d))]
    return pieces


def axes_of(local: Point, found: Sequence[Piece]) -> Axes | None:
    """Which dimensions of a local tensor make those of the full ones in it; None: no view of it has all boxes.

    All full tensors in it have the same number of dimensions, and the boxes agree (`agreed`).
    """
    along = {d: axis for piece in found for d, axis in enumerate(piece.along) if axis >= 0}
    axes: list[list[int]] = [[] for _ in found[0].full.shape]
    for d, axis in along.items():
        axes[axis].append(d)
    rest = [d for d in range(len(local)) if d not in along]
    for axis, group in enumerate(axes):  # one place each, on both sides: dimension by dimension
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


def boxes(axes: Axes, found: Sequence[Piece]) -> list[tuple[Box, Point]]:
    """(box of the full tensor, where it begins in the unfolded local tensor), with as few boxes as there can be."""
    laid = []
    for piece in found:
        at, size = [], []
        for axis, group in enumerate(axes or tuple(((d, 0),) for d in range(len(piece.at)))):
            place = 0
            for d, known in group:
                place = place * (known or 1) + piece.at[d]
            at.append(place)
            size.append(next((n for n, one in zip(piece.size, piece.along, strict=True) if one == axis), 1))
        end = tuple(lo + n for lo, n in zip(piece.first, size, strict=True))
        laid.append(((piece.first, end), tuple(at)))
    for d in range(len(laid[0][1])):
        laid = list(_joined(laid, d))
    return laid


def _joined(laid: Sequence[tuple[Box, Point]], d: int) -> Iterator[tuple[Box, Point]]:
    """Joins boxes that lie behind each other along a dimension, both in the full tensor and in the local one."""
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
