"""Sets of integers of few long ranges, such as the free bytes of a segment, or its pages with memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Extents:
    """A set of integers as disjoint half-open ranges, ascending; adjacent ones are merged. `total` counts integers."""

    __slots__ = ("_his", "_los", "total")

    def __init__(self, *ranges: tuple[int, int]) -> None:
        los: list[int] = []
        his: list[int] = []
        for lo, hi in sorted(ranges):
            if his and lo <= his[-1]:
                his[-1] = max(his[-1], hi)
            elif lo < hi:
                los.append(lo)
                his.append(hi)
        self._los, self._his = los, his
        self.total: int = sum(his) - sum(los)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._los, self._his, strict=True)

    def __len__(self) -> int:
        return len(self._los)

    def __repr__(self) -> str:
        return f"Extents({', '.join(f'({lo}, {hi})' for lo, hi in self)})"

    def add(self, lo: int, hi: int) -> None:
        """Adds [lo, hi), parts of which may be in the set already."""
        if lo >= hi:
            return
        first, last = bisect_left(self._his, lo), bisect_right(self._los, hi)  # ranges that overlap or touch it
        if first < last:
            lo, hi = min(lo, self._los[first]), max(hi, self._his[last - 1])
        self._put(first, last, [(lo, hi)])

    def remove(self, lo: int, hi: int) -> None:
        """Removes [lo, hi), parts of which may be missing."""
        first, last = bisect_right(self._his, lo), bisect_left(self._los, hi)  # ranges that overlap it
        if lo >= hi or first >= last:
            return
        edges = ((self._los[first], lo), (hi, self._his[last - 1]))
        self._put(first, last, [(start, stop) for start, stop in edges if start < stop])

    def has_some(self, lo: int, hi: int) -> bool:
        """Whether any integer of [lo, hi) is in the set."""
        at = bisect_left(self._los, hi) - 1  # the last range that begins before `hi`
        return lo < hi and at >= 0 and self._his[at] > lo

    def within(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """The ranges of the set inside [lo, hi), ascending."""
        first, last = bisect_right(self._his, lo), bisect_left(self._los, hi)
        pairs = zip(self._los[first:last], self._his[first:last], strict=True)
        return [(max(lo, start), min(hi, stop)) for start, stop in pairs] if lo < hi else []

    def gaps(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """The ranges of [lo, hi) that are not in the set, ascending."""
        missing = []
        for start, stop in self.within(lo, hi):
            if lo < start:
                missing.append((lo, start))
            lo = stop
        return [*missing, (lo, hi)] if lo < hi else missing

    def best_fit(self, nbytes: int, align: int = 1) -> int | None:
        """The aligned start in the smallest, then lowest range with enough room; None without such a range."""
        best: tuple[int, int] | None = None
        for lo, hi in self:
            start = -(-lo // align) * align
            if start + nbytes <= hi and (best is None or hi - lo < best[0]):
                best = hi - lo, start
        return best[1] if best else None

    def _put(self, first: int, last: int, ranges: list[tuple[int, int]]) -> None:
        self.total += sum(hi - lo for lo, hi in ranges) - sum(self._his[first:last]) + sum(self._los[first:last])
        self._los[first:last] = [lo for lo, _ in ranges]
        self._his[first:last] = [hi for _, hi in ranges]
