"""How the holder of a value describes it to another process: its structure, its tensors, where their bytes lie.

A description is a list of rows in the order of the structure, a container before its items. Rows travel in chunks, as
no list in a message is long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import chain, repeat
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.channel.packing import pack, unpack
from raycollect.core.model import TENSOR, BufferRef, Segment, Structure, TensorInfo
from raycollect.errors import ProtocolError
from raycollect.pos.container import DEEPEST

_CHUNK = 4096
_NOWHERE = Segment(0, 0, b"", 0)
_Row = list[Any]


@dataclass(frozen=True, slots=True)
class Description:
    """A value: how it is put together, and its tensors.

    Attributes:
        structure: One tensor, or how several are put together.
        infos: What each tensor is.
        refs: Where the bytes of each can be read; None: they are sent.
    """

    structure: Structure
    infos: Sequence[TensorInfo]
    refs: Sequence[BufferRef | None]


def encode(value: Description) -> bytes:
    """Packs a description; the memory that it names lies in one segment."""
    segment = next((ref.segment for ref in value.refs if ref), _NOWHERE)
    rows = list(_rows(None, value.structure, zip(value.infos, value.refs, strict=True)))
    return pack([list(astuple(segment)), [rows[at : at + _CHUNK] for at in range(0, len(rows), _CHUNK)]])


def decode(found: bytes) -> Description:
    """Unpacks a description.

    Raises:
        ProtocolError: It is none, or one that can't be.
    """
    try:
        where, chunks = unpack(found)
        segment, rows = Segment(*where), chain.from_iterable(chunks)
        infos: list[TensorInfo] = []
        refs: list[BufferRef | None] = []
        _, structure = _read(rows, segment, infos, refs, DEEPEST)
        if next(rows, None) is not None:
            raise ValueError("rows that belong to nothing")
    except StopIteration:
        raise ProtocolError(detail="a description of tensors that ends early") from None
    except (ValueError, TypeError, LookupError) as exc:
        raise ProtocolError(detail=f"a malformed description of tensors: {exc}") from exc
    return Description(structure, infos, refs)


def _rows(name: str | int | None, structure: Structure, leaves: Iterator[Any]) -> Iterator[_Row]:
    if structure.kind == "tensor":
        info, ref = next(leaves)
        yield [name, info.shape, info.dtype, info.itemsize, info.library, ref.offset if ref else None]
        return
    yield [name, structure.kind, len(structure.items)]
    for item_name, item in zip(structure.names or repeat(None), structure.items, strict=False):
        yield from _rows(item_name, item, leaves)


def _read(
    rows: Iterator[_Row], segment: Segment, infos: list[TensorInfo], refs: list[BufferRef | None], depth: int
) -> tuple[Any, Structure]:
    name, *row = next(rows)
    if len(row) != 2:
        info, ref = _tensor(segment, *row)
        infos.append(info)
        refs.append(ref)
        return name, TENSOR
    kind, count = row
    if kind not in ("list", "tuple", "dict") or not depth:
        raise ValueError(f"no structure is made of {str(kind)[:80]!r} here")
    pairs = [_read(rows, segment, infos, refs, depth - 1) for _ in range(count)]
    names = tuple(item_name for item_name, _ in pairs if item_name is not None)
    if len(names) != (count if kind == "dict" else 0) or not {str, int}.issuperset(map(type, names)):
        raise ValueError(f"the names of a {kind}")
    return name, Structure(kind, names, tuple(item for _, item in pairs))


def _tensor(
    segment: Segment, shape: Sequence[int], dtype: str, itemsize: int, library: str, offset: int | None
) -> tuple[TensorInfo, BufferRef | None]:
    info = TensorInfo(shape=tuple(shape), dtype=dtype, itemsize=itemsize, library=library)
    if not _is_element(dtype, itemsize) or min(info.shape, default=0) < 0:
        raise ValueError(f"no tensor is a {info}"[:200])
    if offset is None:
        return info, None
    if not 0 <= offset <= segment.nbytes - info.nbytes:
        raise ValueError(f"{info.nbytes} bytes from {offset} on, in a segment of {segment.nbytes}")
    return info, BufferRef(segment, offset, info.nbytes)


@lru_cache(maxsize=64)
def _is_element(dtype: str, itemsize: int) -> bool:
    sample = np.empty(0, dtype)
    return arrays.is_tensor(sample) and sample.itemsize == itemsize
