"""Descriptions of values for other processes: structure, tensors, and positions of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from raycollect.backends import arrays
from raycollect.core.codec import Codec
from raycollect.core.model import BufferRef, Segment, Structure, TensorInfo
from raycollect.errors import ProtocolError
from raycollect.pos.container import DEEPEST

LONG_NBYTES = 512 << 10
"""The size from which a description is compressed: some thousands of tensors. If the result is still longer, it is not
sent in a message, but before the tensors."""


@dataclass(frozen=True, slots=True)
class Description:
    """The structure of a value, and its tensors.

    Attributes:
        structure: One tensor, or a structure of several.
        infos: The description of each tensor.
        refs: The position of each tensor's bytes in the holder's memory; None: they are sent.
    """

    structure: Structure
    infos: Sequence[TensorInfo]
    refs: Sequence[BufferRef | None]


_Packed = tuple[Segment | None, Structure, tuple[TensorInfo, ...], tuple[int | None, ...]]
# The last item: the offset of each tensor in the segment
_DESCRIPTIONS = Codec[_Packed](_Packed, "description of tensors", long_nbytes=LONG_NBYTES)


def encode(value: Description) -> bytes:
    """Packs a description; all its references are to one segment."""
    segment = next((ref.segment for ref in value.refs if ref), None)
    offsets = tuple(ref.offset if ref else None for ref in value.refs)
    return _DESCRIPTIONS.encode((segment, value.structure, tuple(value.infos), offsets))


def decode(data: bytes) -> Description:
    """Unpacks a description.

    Raises:
        ProtocolError: It is malformed or inconsistent.
    """
    segment, structure, infos, offsets = _DESCRIPTIONS.decode(data)
    try:
        _check(structure, DEEPEST)
        if structure.count != len(infos):
            raise ValueError(f"{len(infos)} tensors for a {structure}"[:200])
        refs = [_ref(segment, info, offset) for info, offset in zip(infos, offsets, strict=True)]
    except (ValueError, TypeError) as exc:
        raise ProtocolError(detail=f"a malformed description of tensors: {exc}") from exc
    return Description(structure, infos, refs)


def _check(structure: Structure, depth: int) -> None:
    if depth < 0:  # the tensor is one level deeper than its container
        raise ValueError(f"containers that are nested more than {DEEPEST} deep")
    if len(structure.names) != (len(structure.items) if structure.kind == "dict" else 0):
        raise ValueError(f"the names of a {structure.kind}")
    if structure.kind == "tensor" and structure.items:
        raise ValueError("items of a tensor")
    for item in structure.items:
        _check(item, depth - 1)


def _ref(segment: Segment | None, info: TensorInfo, offset: int | None) -> BufferRef | None:
    if not _is_element(info.dtype, info.itemsize) or min(info.shape, default=0) < 0:
        raise ValueError(f"no tensor is a {info}"[:200])
    if offset is None:
        return None
    if segment is None or not 0 <= offset <= segment.nbytes - info.nbytes:
        raise ValueError(f"{info.nbytes} bytes from {offset} on, in {segment}")
    return BufferRef(segment, offset, info.nbytes)


@lru_cache(maxsize=64)
def _is_element(dtype: str, itemsize: int) -> bool:
    sample = np.empty(0, dtype)
    return arrays.is_tensor(sample) and sample.itemsize == itemsize
