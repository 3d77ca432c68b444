"""Boxes of tensors that another process reads: where they lie, or their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends.arrays import Array
from raycollect.core.model import Segment
from raycollect.errors import ProtocolError
from raycollect.pos.segments import Segments

MOST_BOXES = 1024
"""How many boxes one request asks for: a message is bounded."""


class Box(NamedTuple):
    """A box of one of the tensors of a key."""

    tensor: int  # its place among them
    at: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str


def views(arrays: Sequence[Array], boxes: Sequence[Any]) -> list[Array]:
    """The boxes as views; ProtocolError where there is no such box."""
    found = []
    for tensor, at, size in boxes:
        if not 0 <= tensor < len(arrays) or not len(at) == len(size) == arrays[tensor].ndim:
            raise ProtocolError(detail="a box of no tensor that is held")
        if any(lo < 0 or n < 0 or lo + n > most for lo, n, most in zip(at, size, arrays[tensor].shape, strict=True)):
            raise ProtocolError(detail="a box beyond its tensor")
        found.append(arrays[tensor][(*(slice(lo, lo + n) for lo, n in zip(at, size, strict=True)), ...)])
    return found


def located(found: Sequence[Array]) -> tuple[Segment, list[list[int]]] | None:
    """The arena in which boxes lie, and for each its offset and strides; None where one lies elsewhere."""
    source = Segments.current()
    rows = []
    segment = None
    for view in found:
        ref = source.locate(view.ctypes.data, 0) if view.dtype.isnative else None
        if ref is None:
            return None
        segment = ref.segment
        rows.append([ref.offset, *view.strides])
    return None if segment is None else (segment, rows)


def mapped(memory: Array, rows: Sequence[Sequence[int]], boxes: Sequence[Box]) -> list[Array]:
    """Boxes of another process's arena, as `located` told them; ProtocolError where they would leave it."""
    return list(starmap(lambda row, box: _mapped(memory, row, box), zip(rows, boxes, strict=True)))


def _mapped(memory: Array, row: Sequence[int], box: Box) -> Array:
    offset, *strides = row
    dtype = np.dtype(box.dtype)
    last = offset + dtype.itemsize + sum(max(n - 1, 0) * step for n, step in zip(box.size, strides, strict=True))
    if offset < 0 or min(strides, default=0) < 0 or last > memory.nbytes:
        raise ProtocolError(detail="a box beyond the memory that is lent")
    found: Array = np.ndarray(box.size, dtype, memory, offset, strides)
    return found
