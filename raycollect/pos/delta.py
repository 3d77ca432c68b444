"""Deltas: what differs between two arrays of one shape and element type.

An array is a row of words, in blocks of 256. A delta has the number of words that differ in each block, their positions
in the block, of a byte each, and their new bits. If 2 % of the elements differ, it has 2.7 % of the bytes of an array
of float32, and 3.4 % of one of bfloat16. Bits are compared, so a NaN equals itself, and 0.0 differs from -0.0.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np

from raycollect.backends.arrays import Array
from raycollect.errors import ProtocolError

LEAST_NBYTES = 4 << 10
"""The smallest array of which there are deltas; a smaller one is sent sooner than compared."""

_BLOCK = 256
_SAMPLE = 32, 64  # that many rows of words are compared first: in most trainings either few elements change, or all


class Delta(NamedTuple):
    """The words of an array that differ from another one."""

    counts: Array  # their number in each block
    positions: Array  # in their blocks
    words: Array

    @property
    def blobs(self) -> list[memoryview]:
        """The bytes, in order."""
        return [part.view(np.uint8).data for part in self]


def encode(base: Array, array: Array) -> Delta | None:
    """Returns the delta from `base` to `array`; None if it has more than half of the bytes, or there is none."""
    if array.nbytes < LEAST_NBYTES or base.dtype != array.dtype:
        return None
    old, new = _words(base), _words(array)
    differs = np.zeros(-(-len(new) // 8) * 8, bool)
    for some, other in ((_sample(old), _sample(new)), (old, new)):
        among = np.not_equal(some, other, out=differs[: other.size].reshape(other.shape))
        if not _is_smaller(int(np.count_nonzero(among)), other):
            return None
    at = _where(differs)
    counts = np.bincount(at // _BLOCK, minlength=_blocks(new)).astype(np.uint16)
    return Delta(counts, at.astype(np.uint8), new[at])


def empty(like: Array, count: int) -> Delta:
    """Allocates a delta of `count` words to arrays such as `like`; raises ProtocolError if it can't have so many."""
    word = _word(like)
    size = like.nbytes // word.itemsize
    if not 0 <= count <= size:
        raise ProtocolError(detail=f"a delta of {count} words of {size}")
    return Delta(np.empty(-(-size // _BLOCK), np.uint16), np.empty(count, np.uint8), np.empty(count, word))


def apply(delta: Delta, array: Array) -> None:
    """Makes an array, in C order, the one to which a delta leads from it; raises ProtocolError for another size."""
    words = _words(array)
    if int(delta.counts.sum(dtype=np.int64)) != len(delta.positions):
        raise ProtocolError(detail="the blocks of a delta have other words than those that are there")
    try:
        words[np.repeat(np.arange(len(delta.counts)) * _BLOCK, delta.counts) + delta.positions] = delta.words
    except IndexError as exc:
        raise ProtocolError(detail="a delta leaves its array") from exc


def _where(differs: Array) -> Array:
    """As `np.flatnonzero`, and faster for a few of very many: eight of them are looked at together."""
    eights = differs.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights[some].view(bool))
    return np.asarray((some[within >> 3] << 3) + (within & 7))


def _is_smaller(count: int, words: Array) -> bool:
    return count * (1 + words.itemsize) + 2 * _blocks(words) <= words.nbytes // 2


def _blocks(words: Array) -> int:
    return -(-words.size // _BLOCK)


def _sample(words: Array) -> Array:
    rows, width = _SAMPLE
    return words[: len(words) // rows * rows].reshape(rows, -1)[:, :width]


def _word(array: Array) -> np.dtype[np.generic]:
    return np.dtype(f"u{gcd(array.dtype.itemsize, 8)}")


def _words(array: Array) -> Array:
    contiguous = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return contiguous.reshape(-1).view(_word(array))
