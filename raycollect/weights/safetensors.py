"""`map_safetensors`: the tensors of safetensors files, mapped into memory and not read.

The format (https://github.com/huggingface/safetensors): 8 bytes, little endian, with the length of the header; the
header in JSON, with the dtype, shape and byte range of each tensor; the bytes of all tensors in C order, without gaps.
A large model consists of several files, and an index that maps tensors to files.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from raycollect.backends.elements import Array
from raycollect.errors import refusal, wrong_argument
from raycollect.errors.text import is_path, is_unicode, listed, shown
from raycollect.pos.tensors import MOST_DIMENSIONS

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
    **{
        kind: np.dtype(getattr(ml_dtypes, name))
        for kind, name in (
            ("F8_E8M0", "float8_e8m0fnu"),
            ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
            ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
        )
        if hasattr(ml_dtypes, name)  # the oldest version lacks one
    },
}


def map_safetensors(path: str | Path) -> dict[str, Array]:
    """Maps the tensors of safetensors files into memory. Bytes are read when they are first used.

    A method of an actor that returns this dict, or a part of it, is a source for `publish`, `broadcast_refs` and
    `reshard_refs`. The arrays are read-only. Don't write to the file while they are in use; replace the file by another
    one of the same name (``os.replace``) instead.

    Args:
        path: A file, an index of files (``*.index.json``), or a folder: then its index, or else all its
            ``*.safetensors``.

    Returns:
        The tensors by name, as numpy arrays; bfloat16 and float8 are types of `ml_dtypes`. Tensors of other dtypes,
        such as those of 4 bits, are left out, and a UserWarning names them.

    Raises:
        InvalidArgumentError: The path, or the header or length of a file is invalid; or a tensor is in several files,
            or not in the file that the index names.
        OSError: A file can't be read.
    """
    if not is_path(path):
        raise refusal("map_safetensors", "", (wrong_argument("path", shown(path), "that of a file or a folder"),))
    mapped: dict[str, Array | str] = {}
    for file, names in _files(Path(path)).items():
        tensors = _of_file(file)
        for name in tensors if names is None else names:
            if name not in tensors:
                raise _wrong(file, f"without {shown(name)}", "with all tensors that the index says are there")
            if name in mapped:
                raise _wrong(file, f"with {shown(name)}, as another file", "each tensor in one file")
            mapped[name] = tensors[name]
    left_out = [f"{shown(name)} ({shown(kind)})" for name, kind in mapped.items() if isinstance(kind, str)]
    if left_out:
        warnings.warn(f"left out of {path}, as numpy has no such dtype: {listed(left_out)}", UserWarning, stacklevel=2)
    return {name: tensor for name, tensor in mapped.items() if not isinstance(tensor, str)}


def _files(path: Path) -> dict[Path, list[str] | None]:
    """Returns the files, and the names of the tensors to map from each; None for all."""
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
        if not is_path(file) or Path(file).name != file or file in ("", ".."):
            raise _wrong(path, f"an index that names the file {shown(file)}", "names of files in its own folder")
        names = files_of.setdefault(path.parent / file, [])
        assert names is not None
        names.append(name)
    return files_of


def _of_file(path: Path) -> dict[str, Array | str]:
    """Returns the tensors of a file; for a tensor without a numpy dtype, the name of its dtype."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size  # the path may name another file by now
        if not 2 <= length <= min(size - 8, MOST_HEADER_NBYTES):
            expected = f"a header of at most {MOST_HEADER_NBYTES} bytes"
            raise _wrong(path, f"a file of {size} bytes whose header has {length}", expected)
        header = _json(path, file.read(length))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors: dict[str, Array | str] = {}
    ends: dict[int, int] = {}  # where a tensor begins -> where it ends
    for name, entry in header.items():
        dtype, shape, (lo, hi) = _entry(path, name, entry)
        if hi > size - begin:
            raise _wrong(path, f"{size} bytes, of which {shown(name)} ends behind the last", "a whole file")
        try:
            tensors[name] = (
                dtype if isinstance(dtype, str) else np.ndarray(shape, dtype, buffer=mapped, offset=begin + lo)
            )
        except ValueError as exc:  # too many dimensions, or a dimension next to a 0 that is too long
            raise _wrong(path, f"{shown(name)} of shape {shown(shape)}: {exc}", "a shape that numpy takes") from None
        if lo < hi:
            if lo in ends:
                raise _wrong(path, f"with {shown(name)} where another tensor is", "each tensor in bytes of its own")
            ends[lo] = hi
    at = 0
    while at in ends:
        at = ends.pop(at)
    if ends or at != size - begin:
        raise _wrong(path, f"tensors with a gap or an overlap at byte {begin + at}", "tensors one after the other")
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[np.dtype[Any] | str, list[int], tuple[int, int]]:
    """Returns a tensor's dtype (or the name of a dtype that numpy lacks), its shape and its byte range."""
    try:
        kind, shape, (lo, hi) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        expected = "'dtype', 'shape' and two 'data_offsets'"
        raise _wrong(path, f"a header with {shown(entry)} for {shown(name)}", expected) from None
    if not isinstance(kind, str) or not isinstance(shape, list) or not is_unicode(name):
        expected = "names in Unicode, and a list of extents"
    elif len(shape) > MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, lo, hi)):
        expected = f"a shape that numpy takes: at most {MOST_DIMENSIONS} extents below 2**63"
    else:
        dtype = _DTYPES.get(kind)
        if lo <= hi and (dtype is None or hi - lo == prod(shape) * dtype.itemsize):
            return kind if dtype is None else dtype, shape, (lo, hi)
        expected = f"as many bytes as {shown(kind)} takes"
    actual = f"{shown(name)} of dtype {shown(kind)} and shape {shown(shape)} in bytes {shown(lo)} to {shown(hi)}"
    raise _wrong(path, actual, expected)


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _wrong(path, f"no JSON: {str(exc)[:80]}", "a header or an index in JSON") from None
    if not isinstance(value, Mapping):
        raise _wrong(path, f"a {type(value).__name__} in JSON", "an object")
    return dict(value)


def _wrong(path: Path, actual: str, expected: str) -> Exception:
    return refusal("map_safetensors", "", (wrong_argument(str(path), actual, expected),))
