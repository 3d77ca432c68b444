"""Boxes of tensors that another process reads: their positions in memory, or their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends.arrays import Array, as_bytes, box_of
from raycollect.channel import DataClient
from raycollect.channel.messages import Copied
from raycollect.core.codec import Codec
from raycollect.core.model import Segment, TensorInfo
from raycollect.errors import ProtocolError
from raycollect.pos import delta, tensors
from raycollect.pos.segments import Segments

MOST_BOXES = 1024
"""The most boxes of one request: a message is bounded."""


class Box(NamedTuple):
    """A box of one of the tensors of a key."""

    tensor: int  # its index
    at: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str


class OutOfReach(Exception):
    """Memory of the holder could not be read, or not in time."""


_Lent = tuple[Segment, list[list[int]], bool] | None
LENT = Codec[_Lent](_Lent, "place of boxes")
"""Where lent boxes lie, as from `located`, and whether the value is frozen; None: the bytes follow."""

DELTAS = Codec[tuple[int | None, ...]](tuple[int | None, ...], "sizes of deltas")
"""How many words the delta of each box has; None: it has none, and nothing follows for it."""


class Borrowed:
    """Elements of boxes, which stay as they are until `close`; for one thread at a time.

    Args:
        elements: The elements of each box.
        release: Ends the holder's promise not to write them; None: they are copies.

    Attributes:
        arrays: The elements of each box.
        is_lent: Whether they lie in the holder's memory; they stay readable if the holder dies.
    """

    def __init__(self, elements: list[Array], release: Callable[[], None] | None = None) -> None:
        self.arrays: list[Array] = elements
        self.is_lent: bool = release is not None
        self._release = release

    def close(self) -> None:
        """Gives the elements back. May be called twice."""
        release, self._release = self._release, None
        if release is not None:
            release()


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


def take(
    client: DataClient,
    description: bytes,
    wanted: Sequence[Box],
    give_back: Callable[[], None],
    *,
    in_arena: bool = False,
) -> Borrowed:
    """Reads the answer to a request for boxes.

    Args:
        client: The connection.
        description: That of the answer.
        wanted: The boxes.
        give_back: Called when boxes that the holder lends are closed.
        in_arena: Whether boxes that are sent are kept in shared memory, so that this process can lend them.

    Raises:
        OutOfReach: This process can't map what the holder lends.
        ProtocolError: The answer does not fit.
    """
    lent = LENT.decode(description)
    if lent is not None:
        segment, rows, is_frozen = lent
        try:
            memory = Segments.current().open(segment)
        except (OSError, TypeError, ValueError) as exc:
            raise OutOfReach from exc
        views = mapped(memory, rows, wanted)
        if is_frozen:
            return Borrowed(views, give_back)
        copies = [np.array(view) for view in views]  # the holder may write them after `lending_s`
        client.tell(Copied())
        return Borrowed(copies)
    received = [empty(box.size, box.dtype, in_arena=in_arena) for box in wanted]
    _receive(client, [as_bytes(array).data for array in received])
    return Borrowed(received)


def describe_deltas(deltas: Sequence[delta.Delta | None]) -> tuple[bytes, list[memoryview]]:
    """Returns the description of the deltas of boxes, and their bytes."""
    counts = tuple(None if some is None else len(some.words) for some in deltas)
    return DELTAS.encode(counts), [blob for some in deltas if some is not None for blob in some.blobs]


def take_deltas(client: DataClient, description: bytes, into: Sequence[Array]) -> list[bool]:
    """Reads the answer to a request for deltas from `into`, which become the boxes; raises ProtocolError.

    Returns which of them have become the boxes. The others have no delta.
    """
    counts = DELTAS.decode(description)
    if len(counts) != len(into):
        raise ProtocolError(detail=f"{len(counts)} deltas for {len(into)} boxes")
    encoded = [None if count is None else delta.empty(box, count) for box, count in zip(into, counts, strict=True)]
    _receive(client, [blob for some in encoded if some is not None for blob in some.blobs])
    for some, box in zip(encoded, into, strict=True):
        if some is not None:
            delta.apply(some, box)
    return [some is not None for some in encoded]


def empty(shape: tuple[int, ...], dtype: Any, *, in_arena: bool) -> Array:
    """Allocates an array, in shared memory so that this process can lend it, or not."""
    if not in_arena:
        return np.empty(shape, dtype)
    element = np.dtype(dtype)
    into: Array = tensors.allocate(TensorInfo(shape=shape, dtype=element.name, itemsize=element.itemsize))
    return into


def _receive(client: DataClient, into: Sequence[memoryview]) -> None:
    client.receive_blob(*into)
    if client.blob_left:
        raise ProtocolError(detail="the announced bytes are not those of the boxes")
