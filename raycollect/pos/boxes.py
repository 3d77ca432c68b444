"""Boxes of tensors that another process reads: their positions in memory, or their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends.arrays import Array, box_of
from raycollect.core.model import Segment
from raycollect.errors import ProtocolError
from raycollect.pos.segments import Segments

MOST_BOXES = 1024
"""The most boxes of one request: a message is bounded."""


class Box(NamedTuple):
    """A box of one of the tensors of a key."""

    tensor: int  # its index
    at: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str


def views(arrays: Sequence[Any], boxes: Sequence[Any]) -> list[Array]:
    """The boxes as views; raises ProtocolError for boxes that are out of range."""
    try:
        return [_view(arrays[tensor], at, size) for tensor, at, size in boxes]
    except (TypeError, ValueError, IndexError) as exc:
        raise ProtocolError(detail=f"slice out of range of the held tensor: {exc}") from exc


def _view(array: Any, at: Sequence[int], size: Sequence[int]) -> Array:
    for lo, count, most in zip(at, size, array.shape, strict=True):
        if lo < 0 or count < 0 or lo + count > most:
            raise ValueError(f"{count} from {lo} on, of {most}")
    return array if tuple(size) == array.shape else box_of(array, at, size)


def located(arrays: Sequence[Array]) -> tuple[Segment, list[list[int]]] | None:
    """The arena of the boxes, and the offset and strides of each; None if a box is elsewhere."""
    source = Segments.current()
    rows = []
    segment = None
    for view in arrays:
        ref = source.locate(view.ctypes.data, 0) if view.dtype.isnative else None
        if ref is None:
            return None
        segment = ref.segment
        rows.append([ref.offset, *view.strides])
    return None if segment is None else (segment, rows)


def mapped(memory: Array, rows: Sequence[Sequence[int]], boxes: Sequence[Box]) -> list[Array]:
    """Boxes in another process's arena, given the result of `located`; raises ProtocolError if they leave the arena."""
    try:
        return [_mapped(memory, *row, box=box) for row, box in zip(rows, boxes, strict=True)]
    except (TypeError, ValueError) as exc:
        raise ProtocolError(detail=f"box out of range of the lent memory: {exc}") from exc


def _mapped(memory: Array, offset: int, *strides: int, box: Box) -> Array:
    dtype = np.dtype(box.dtype)
    if min(offset, *strides, 0) < 0:
        raise ValueError("negative offset or stride")
    view: Array = np.ndarray(box.size, dtype, memory.data, offset, strides)  # checks the range
    return view
