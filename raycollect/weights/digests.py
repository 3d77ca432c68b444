"""Digests of tensors: xxh3, 128 bits, of the elements in C order.

Digests are computed while the elements are in the cache; 100 MB take 4 ms of a core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from raycollect.backends.arrays import Array, as_bytes
from raycollect.backends.elements import convert
from raycollect.weights.cut import DIGEST_NBYTES

_CHUNK_NBYTES = 512 << 10


def digest(array: Array) -> bytes:
    """Returns the digest of an array."""
    state = xxhash.xxh3_128()
    if array.flags.c_contiguous:
        state.update(as_bytes(array).data)
    else:
        for part in _chunks(array):
            state.update(as_bytes(array[part]).data)
    return bytes(state.digest())


def copied(into: Array, array: Array) -> bytes:
    """Copies an array, converted if the element types differ, and returns the digest of the copy."""
    state = xxhash.xxh3_128()
    if into.nbytes <= _CHUNK_NBYTES:
        convert(into, array)
        state.update(as_bytes(into).data)
    else:
        for part in _chunks(into):
            target = into[part]
            convert(target, array[part])
            state.update(as_bytes(target).data)
    return bytes(state.digest())


def of_bucket(bucket: Array, members: Iterable[slice]) -> bytes:
    """Returns the digests of the members of a bucket, and then that of all of it; `members` are slices of its bytes."""
    memory = as_bytes(bucket).data
    return b"".join([*(xxhash.xxh3_128_digest(memory[member]) for member in members), xxhash.xxh3_128_digest(memory)])


def of_whole(digest: bytes) -> bytes:
    """Returns the digest of all elements, given that of an atom or bucket."""
    return digest[-DIGEST_NBYTES:]


def of_parts(digest: bytes) -> bytes:
    """Returns the digests of the members, given that of a bucket; that of another atom as it is."""
    return digest[:-DIGEST_NBYTES] or digest


def differing(some: bytes, other: bytes) -> list[bool]:
    """Returns for each member of a bucket whether its digests differ."""
    words = np.frombuffer(of_parts(some), np.uint64) != np.frombuffer(of_parts(other), np.uint64)
    differ: list[bool] = words.reshape(-1, 2).any(axis=1).tolist()
    return differ


def join(into: Array, boxes: Sequence[Array]) -> None:
    """Copies arrays with one dimension side by side into a bucket, converted if the element types differ."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # as `convert`
        np.concatenate(boxes, out=into, casting="unsafe")


def is_same(some: Array, other: Array) -> bool:
    """Returns whether two arrays of one shape and element type have the same bits; ends at the first difference."""
    if some.size and some.item(0) != other.item(0):
        return False
    if some.flags.c_contiguous and other.flags.c_contiguous and some.dtype == other.dtype:
        return bool(_memcmp()(some.ctypes.data, other.ctypes.data, some.nbytes) == 0)
    return all(np.array_equal(as_bytes(some[part]), as_bytes(other[part])) for part in _chunks(some))


@lru_cache(maxsize=1)
def _memcmp() -> Any:
    memcmp = ctypes.CDLL(None).memcmp  # without the GIL
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return memcmp


def _chunks(array: Array) -> Iterator[Any]:
    if not array.ndim:
        yield ...
        return
    rows = max(1, _CHUNK_NBYTES * len(array) // max(array.nbytes, 1))
    for lo in range(0, len(array), rows):
        yield slice(lo, lo + rows)
