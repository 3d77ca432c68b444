"""Many copies from array to array, prepared once and run often."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from raycollect.backends.arrays import Array, as_bytes
from raycollect.core.memory_vectors import MemoryVectors

# Vectors take less time for so many copies, of at most so many bytes on average
_MANY = 128
_SMALL_NBYTES = 256
_MOST_NBYTES = 4 << 20  # of one step: other threads and aborts get a turn

_Pairs = Sequence[tuple[Array, Array]]


class ArrayCopies:
    """Copies between arrays. Where one side is contiguous from array to array, a system call makes many small copies.

    Args:
        pairs: (to, from) of each copy, of equal shapes.
        copy: Makes a copy that needs a conversion, or has gaps.

    Attributes:
        steps: The steps, each with the bytes that it writes.
    """

    __slots__ = ("steps",)

    def __init__(self, pairs: _Pairs, copy: Callable[[Array, Array], Any] = np.copyto) -> None:
        self.steps: list[tuple[Callable[[], Any], int]] = []
        addresses = [(target.ctypes.data, source.ctypes.data) for target, source in pairs]
        for begin, end, side in _runs(pairs, addresses):
            some = pairs[begin:end]
            step = _Each(some, copy) if side < 0 else _Vectors(some, addresses[begin:end], side)
            self.steps.append((step, sum(target.nbytes for target, _ in some)))

    def run(self) -> None:
        """Makes all copies."""
        for step, _ in self.steps:
            step()


class _Each:
    """Copies one after the other."""

    __slots__ = ("_bytes", "_copy", "_others")

    def __init__(self, pairs: _Pairs, copy: Callable[[Array, Array], Any]) -> None:
        self._copy = copy
        # Bytes to bytes takes a third of numpy's time for a few KiB
        self._bytes = [
            (as_bytes(target).data, as_bytes(source).data) for target, source in pairs if _is_plain(target, source)
        ]
        self._others = [(target, source) for target, source in pairs if not _is_plain(target, source)]

    def __call__(self) -> None:
        for into, given in self._bytes:
            into[:] = given
        for target, source in self._others:
            self._copy(target, source)


class _Vectors:
    """Copies of plain arrays, whose targets or sources lie one after the other."""

    __slots__ = ("_address", "_gathers", "_pairs", "_vectors")

    def __init__(self, pairs: _Pairs, addresses: Sequence[tuple[int, int]], side: int) -> None:
        self._pairs = pairs  # keeps the memory
        self._gathers = side == 0
        self._address = addresses[0][side]
        places = zip(addresses, pairs, strict=True)
        self._vectors = MemoryVectors([(address[1 - side], target.nbytes) for address, (target, _) in places])

    def __call__(self) -> None:
        vectors = self._vectors
        if not (vectors.gather(self._address) if self._gathers else vectors.scatter(self._address)):
            for target, source in self._pairs:
                np.copyto(target, source)


def _runs(pairs: _Pairs, addresses: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Cuts copies into runs that one step makes: (begin, end, the side that is contiguous, or -1)."""
    begin = at = nbytes = 0  # in [begin, at) no side is contiguous
    while at < len(pairs):
        end, side = max((max(_reach(pairs, addresses, at, side), at + 1), side) for side in (0, 1))
        total = sum(target.nbytes for target, _ in pairs[at:end])
        if end - at >= _MANY and total <= (end - at) * _SMALL_NBYTES:
            if at > begin:
                yield begin, at, -1
            yield at, end, side
            begin, nbytes = end, 0
        else:
            nbytes += total
            if nbytes > _MOST_NBYTES:
                yield begin, end, -1
                begin, nbytes = end, 0
        at = end
    if at > begin:
        yield begin, at, -1


def _reach(pairs: _Pairs, addresses: Sequence[tuple[int, int]], at: int, side: int) -> int:
    """The end of the plain arrays that lie one after the other on that side, from a copy on."""
    nbytes, begin = 0, addresses[at][side]
    while at < len(pairs) and addresses[at][side] == begin + nbytes and _is_plain(*pairs[at]):
        nbytes += pairs[at][0].nbytes
        at += 1
        if nbytes > _MOST_NBYTES:
            break
    return at


def _is_plain(target: Array, source: Array) -> bool:
    flags = target.flags.c_contiguous and source.flags.c_contiguous
    return flags and target.dtype == source.dtype and target.size == source.size > 0
