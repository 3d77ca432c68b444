"""The reductions of NCCL, and cupy's fold for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from raycollect.backends.folds import FOLDS, product_by_parts, refusal_reason
from raycollect.core.model import ReduceOp

BYTES = 1  # NCCL's uint8: data is moved as bytes
# numpy's name of an element type -> NCCL's
_CODES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}

# Element type -> the first NCCL that reduces it, if older ones don't
_SINCE = {"bfloat16": 21000, "float8_e4m3fn": 22400, "float8_e5m2": 22400}
_OPS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.AVG: 4}
# Reduce op on bools -> NCCL's on their bytes, which are 0 or 1
_BOOL_OPS = {
    ReduceOp.SUM: 2,
    ReduceOp.PRODUCT: 3,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
    ReduceOp.BOR: 2,
    ReduceOp.BAND: 3,
}

_COMPLEX = {"complex64": "float32", "complex128": "float64"}  # Complex types, whose sums are those of pairs of floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How NCCL reduces elements of some type."""

    code: int  # NCCL's element type
    op: int  # NCCL's reduce op
    width: int = 1  # NCCL's elements for each of ours


@lru_cache(maxsize=256)
def reduction_of(op: ReduceOp, dtype: str, version: int) -> Reduction | None:
    """Returns how NCCL reduces elements of that type; None if it can't. `version` is as 22803 for 2.28.3."""
    if dtype == "bool":
        bool_op = _BOOL_OPS.get(op)
        return None if bool_op is None else Reduction(code=BYTES, op=bool_op)
    if dtype in _COMPLEX:
        sums = op in (ReduceOp.SUM, ReduceOp.AVG)
        return Reduction(code=_CODES[_COMPLEX[dtype]], op=_OPS[op], width=2) if sums else None
    if op not in _OPS or dtype not in _CODES or version < _SINCE.get(dtype, 0):
        return None
    return Reduction(code=_CODES[dtype], op=_OPS[op])


def folds(op: ReduceOp, dtype: str) -> bool:
    """Tells whether cupy can fold elements of that type."""
    return op is not ReduceOp.AVG and np.dtype(dtype).kind in "biuc" and refusal_reason(op, dtype) is None


def combiner(op: ReduceOp, dtype: np.dtype[Any]) -> Callable[..., object]:
    """Returns the function that combines two ranks' elements, if NCCL can't reduce them."""
    if op is ReduceOp.PRODUCT and dtype.kind == "c":
        return product_by_parts
    function: Callable[..., object] = getattr(import_module("cupy"), FOLDS[op].__name__)
    return function


def fold(combine: Callable[..., object], rows: Any, target: Any) -> None:
    """Folds rows, [ranks, n], in rank order into [n], which may be the source of one of them."""
    if len(rows) == 1:
        target[...] = rows[0]
        return
    combine(rows[0], rows[1], out=target)
    for row in rows[2:]:
        combine(target, row, out=target)
