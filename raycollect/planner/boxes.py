"""Boxes: rectangular parts of a tensor, and an index that finds those of many that overlap one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from math import prod
from operator import add, le, lt, sub

Point = tuple[int, ...]
"""A place in a tensor: an index for each dimension."""

Box = tuple[Point, Point]
"""The first element, and the place behind the last one, in each dimension."""


def extent(box: Box) -> Point:
    """The size in each dimension."""
    return tuple(map(sub, box[1], box[0]))


def volume(box: Box) -> int:
    """The number of elements; 1 for a tensor without dimensions."""
    return prod(map(sub, box[1], box[0]))


def common(a: Box, b: Box) -> Box | None:
    """The elements of both boxes; None where there are none."""
    lo, hi = tuple(map(max, a[0], b[0])), tuple(map(min, a[1], b[1]))
    return (lo, hi) if all(map(lt, lo, hi)) else None


def is_inside(inner: Box, outer: Box) -> bool:
    """Whether all of a box lies in another one."""
    return all(map(le, outer[0], inner[0])) and all(map(le, inner[1], outer[1]))


def moved(box: Box, origin: Point, to: Point) -> Box:
    """The box where `origin` becomes `to`."""
    by = tuple(map(sub, to, origin))
    return tuple(map(add, box[0], by)), tuple(map(add, box[1], by))


def chunk(lo: int, hi: int, count: int, at: int) -> tuple[int, int]:
    """One of `count` chunks of the indices from `lo` to `hi`, as torch makes them: the last ones may be shorter."""
    each = -(-(hi - lo) // count)
    begin = min(lo + at * each, hi)
    return begin, min(begin + each, hi)


def words(box: Box) -> str:
    """The box as a slice: ``[0:4, 8:16]``."""
    return f"[{', '.join(f'{lo}:{hi}' for lo, hi in zip(*box, strict=True))}]"


def without(box: Box, others: Iterable[Box]) -> list[Box]:
    """The parts of a box that none of the others has."""
    left = [box]
    for other in others:
        left = [part for rest in left for part in _difference(rest, other)]
    return left


def _difference(box: Box, other: Box) -> list[Box]:
    shared = common(box, other)
    if shared is None:
        return [box]
    parts = []
    lo, hi = box
    for d in range(len(lo)):
        for first, last in ((lo[d], shared[0][d]), (shared[1][d], hi[d])):
            if first < last:
                parts.append(((*lo[:d], first, *lo[d + 1 :]), (*hi[:d], last, *hi[d + 1 :])))
        lo, hi = (*lo[:d], shared[0][d], *lo[d + 1 :]), (*hi[:d], shared[1][d], *hi[d + 1 :])
    return parts


def halved(box: Box, count: int) -> list[Box]:
    """Cuts a box along its longest dimension into at most `count` parts of about equal size."""
    sizes = extent(box)
    longest = max(sizes, default=1)
    count = min(count, longest)
    if count < 2:
        return [box]
    d = sizes.index(longest)
    lo, hi = box
    edges = [lo[d] + longest * at // count for at in range(count + 1)]
    return [((*lo[:d], a, *lo[d + 1 :]), (*hi[:d], b, *hi[d + 1 :])) for a, b in pairwise(edges)]


class BoxIndex:
    """Finds which of many boxes overlap one, by a tree of intervals with a level per dimension."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._root = _Level(boxes, range(len(boxes)), 0) if boxes and boxes[0][0] else None

    def over(self, box: Box) -> list[int]:
        """The places of the boxes that share an element with this one, which has some, ascending."""
        if self._root is None:
            return list(range(len(self._boxes)))
        matches: list[int] = []
        self._root.find(box, matches)
        return sorted(matches)

    def clash(self) -> tuple[int, int] | None:
        """The places of two boxes that share an element; None where no two do."""
        for at, box in enumerate(self._boxes):
            for other in self.over(box):
                if other != at:
                    return at, other
        return None


class _Level:
    __slots__ = ("_d", "_intervals", "_los", "_places", "_widest")

    def __init__(self, boxes: Sequence[Box], places: Iterable[int], d: int) -> None:
        groups: dict[tuple[int, int], list[int]] = {}
        for at in places:
            groups.setdefault((boxes[at][0][d], boxes[at][1][d]), []).append(at)
        self._d = d
        self._intervals = sorted(groups)
        self._los = [lo for lo, _ in self._intervals]
        self._widest = max(hi - lo for lo, hi in self._intervals)
        is_last = d + 1 == len(boxes[0][0])
        self._places: list[list[int] | _Level] = [
            groups[interval] if is_last else _Level(boxes, groups[interval], d + 1) for interval in self._intervals
        ]

    def find(self, box: Box, matches: list[int]) -> None:
        first, last = box[0][self._d], box[1][self._d]
        for at in range(bisect_left(self._los, first - self._widest + 1), len(self._los)):
            lo, hi = self._intervals[at]
            if lo >= last:
                break
            if hi > first:
                below = self._places[at]
                if isinstance(below, _Level):
                    below.find(box, matches)
                else:
                    matches += below


def atoms(boxes: Sequence[Box]) -> list[tuple[Box, list[int]]]:
    """Cuts boxes into parts that do not overlap, each with the places of the boxes that have it; empty ones have none.

    Where no two different boxes overlap, which is the rule, the parts are the boxes; else they are cut at all edges.
    """
    same: dict[Box, list[int]] = {}
    for at, box in enumerate(boxes):
        if volume(box):
            same.setdefault(box, []).append(at)
    distinct = list(same)
    if BoxIndex(distinct).clash() is None:
        return list(same.items())
    cut: dict[Box, list[int]] = {}
    edges = [sorted({edge[d] for box in distinct for edge in box}) for d in range(len(distinct[0][0]))]
    for box, places in same.items():
        sides = [
            [(a, b) for a, b in pairwise(line) if lo <= a and b <= hi] for line, lo, hi in zip(edges, *box, strict=True)
        ]
        for cell in product(*sides):
            cut.setdefault((tuple(a for a, _ in cell), tuple(b for _, b in cell)), []).extend(places)
    return sorted((box, sorted(places)) for box, places in cut.items())
