"""`map_safetensors`: the tensors of safetensors files, mapped into memory and not read.

The format (https://github.com/huggingface/safetensors): 8 bytes, little endian, with the length of the header; the
header, which is JSON and says of each tensor its dtype, its shape, and where its bytes lie behind the header; the bytes
of all tensors in C order, without gaps. Large models are several files, and an index that says which tensor is where.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from raycollect.backends.elements import Array
from raycollect.errors import refusal, wrong_argument
from raycollect.errors.text import shown

__all__ = ["map_safetensors"]

INDEX = "model.safetensors.index.json"
"""The index of a folder, as Hugging Face's libraries name it."""

MOST_HEADER_NBYTES = 100_000_000
"""The longest header, as in the library of the format."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}


def map_safetensors(path: str | Path) -> dict[str, Array]:
    """Maps the tensors of safetensors files into memory. Only what is used of them is read, when it is used.

    A method of an actor that returns this dict, or a part of it, is a source for `publish`, `broadcast_refs` and
    `reshard_refs` like any other. The arrays can't be written. While they are in use, nobody may write the file;
    replace it by another one of the same name (``os.replace``) instead.

    Args:
        path: A file, an index of files (``*.index.json``), or a folder: then its index, or else all its
            ``*.safetensors``.

    Returns:
        The tensors by name, as arrays of numpy; bfloat16 and float8 are types of `ml_dtypes`.

    Raises:
        InvalidArgumentError: Something is wrong with a file: its header, its length, a dtype that numpy does not have;
            or a tensor is in several files, or not in the one that the index names.
        OSError: A file can't be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise refusal("map_safetensors", "", (wrong_argument("path", shown(path), "that of a file or a folder"),))
    found: dict[str, Array] = {}
    for file, names in _files(Path(path)).items():
        tensors = _of_file(file)
        for name in tensors if names is None else names:
            if name not in tensors:
                raise _wrong(file, f"without {name!r}", "with all tensors that the index says are there")
            if name in found:
                raise _wrong(file, f"with {name!r}, as another file", "each tensor in one file")
            found[name] = tensors[name]
    return found


def _files(path: Path) -> dict[Path, list[str] | None]:
    """The files, and the tensors that are to be taken of each; None: all."""
    if path.is_dir():
        if not (path / INDEX).exists():
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise _wrong(path, "a folder without any", f"a folder with {INDEX}, or with *.safetensors")
            return dict.fromkeys(files)
        path = path / INDEX
    if path.suffix != ".json":
        return {path: None}
    files_of: dict[Path, list[str] | None] = {}
    weight_map = _json(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _wrong(path, "an index without 'weight_map'", "one that says which tensor is in which file")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise _wrong(path, f"an index that names the file {file!r}", "names of files in its own folder")
        names = files_of.setdefault(path.parent / file, [])
        assert names is not None
        names.append(name)
    return files_of


def _of_file(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size  # the path may have another file by now
        if not 2 <= length <= min(size - 8, MOST_HEADER_NBYTES):
            expected = f"a header of at most {MOST_HEADER_NBYTES} bytes"
            raise _wrong(path, f"a file of {size} bytes whose header has {length}", expected)
        header = _json(path, file.read(length))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors: dict[str, Array] = {}
    ends: dict[int, int] = {}  # where a tensor begins -> where it ends
    for name, entry in header.items():
        dtype, shape, (lo, hi) = _entry(path, name, entry)
        if hi > size - begin:
            raise _wrong(path, f"{size} bytes, of which {name!r} ends behind the last", "a whole file")
        try:
            tensors[name] = np.ndarray(shape, dtype, buffer=mapped, offset=begin + lo)
        except ValueError as exc:  # too many dimensions, or one beside a 0 that is too long
            raise _wrong(path, f"{name!r} of shape {list(shape)!s:.80}: {exc}", "a shape that numpy takes") from None
        if lo < hi:
            if lo in ends:
                raise _wrong(path, f"with {name!r} where another tensor is", "each tensor in bytes of its own")
            ends[lo] = hi
    at = 0
    while at in ends:
        at = ends.pop(at)
    if ends or at != size - begin:
        raise _wrong(path, f"tensors with a gap or an overlap at byte {begin + at}", "tensors one after the other")
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], tuple[int, int]]:
    """What the header says of a tensor."""
    try:
        kind, shape, (lo, hi) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        expected = "'dtype', 'shape' and two 'data_offsets'"
        raise _wrong(path, f"a header that says {entry!r:.80} of {name!r}", expected) from None
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise _wrong(path, f"{name!r} of dtype {kind!r}", f"one of {', '.join(_DTYPES)}")
    if any(type(one) is not int or one < 0 for one in (*shape, lo, hi)) or hi - lo != prod(shape) * dtype.itemsize:
        raise _wrong(path, f"{name!r} of shape {list(shape)} in bytes {lo} to {hi}", f"as many as {kind} takes")
    return dtype, shape, (lo, hi)


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _wrong(path, f"no JSON: {exc}", "a header or an index in JSON") from None
    if not isinstance(found, Mapping):
        raise _wrong(path, f"a {type(found).__name__} in JSON", "an object")
    return dict(found)


def _wrong(path: Path, found: str, expected: str) -> Exception:
    return refusal("map_safetensors", "", (wrong_argument(str(path), found, expected),))
