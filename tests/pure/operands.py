"""Operands of every dtype, and what a reduction of them is, written independently of the backends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from raycollect.core.model import ReduceOp

NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def operand(rank: int, dtype: str, size: int, seed: int = 0) -> np.ndarray:
    """A rank's operand: any bits for whole numbers; values around 1 for the others, some subnormal. Not to be written.

    Processors for graphics and those in a fast mode take subnormal numbers for 0.
    """
    with LOCK:
        return _operand(rank, dtype, size, seed)


LOCK = threading.RLock()  # threads of a team want the same at once


@lru_cache(maxsize=24)
def _operand(rank: int, dtype: str, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, rank])
    found = np.dtype(dtype)
    if found.kind == "b":
        values = rng.integers(0, 2, size).astype(bool)
    elif found.kind in "iu":
        values = rng.integers(0, 256, size * found.itemsize, np.uint8).view(found)
    elif found.kind == "c":
        values = (rng.uniform(0.5, 1.5, size) + 1j * rng.uniform(-1, 1, size)).astype(found)
    else:
        values = (rng.uniform(0.5, 1.5, size) * rng.choice([-1, 1], size)).astype(found)
    if found.kind == "c" or found.kind == "f" or dtype in NARROW:
        _make_some_tiny(values, rng)
    values.flags.writeable = False
    return values


def _make_some_tiny(values: np.ndarray, rng: np.random.Generator) -> None:
    """Makes elements, the same on all ranks, subnormal, and others so small that the product of two of them is."""
    parts = values.view(values.real.dtype) if values.dtype.kind == "c" else values
    known = ml_dtypes.finfo(parts.dtype)
    parts[5::11] *= np.sqrt(np.float64(known.smallest_normal) / 16).astype(parts.dtype)
    few = int(known.smallest_normal / known.smallest_subnormal)
    tiny = parts[3::7]
    steps = rng.integers(1, max(2, min(few // 16, 1 << 20)), tiny.size)  # of eight ranks, the sum is subnormal, too
    tiny[...] = (steps * np.float64(known.smallest_subnormal) * rng.choice([-1, 1], tiny.size)).astype(parts.dtype)


def left_fold(op: ReduceOp, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The meaning of a reduction, written independently of the backends."""
    dtype = parts[0].dtype
    wide = np.float32 if dtype.name in (*NARROW, "float16") else dtype
    times = _complex_product if dtype.kind == "c" else np.multiply
    combine: Callable[..., Any] = {
        ReduceOp.SUM: np.logical_or if dtype.kind == "b" else np.add,
        ReduceOp.PRODUCT: np.logical_and if dtype.kind == "b" else times,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.AVG: np.add,
        ReduceOp.BAND: np.bitwise_and,
        ReduceOp.BOR: np.bitwise_or,
        ReduceOp.BXOR: np.bitwise_xor,
    }[op]
    with np.errstate(all="ignore"):
        result = parts[0].astype(wide)
        for part in parts[1:]:
            result = combine(result, part.astype(wide))
        if op is ReduceOp.AVG:
            result = (result.view(result.real.dtype) / len(parts)).view(wide)
        return np.asarray(result, dtype)


def _complex_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By the book: numpy may fuse a product and a sum, and then rounds once less."""
    result = np.empty_like(a)
    result.real = a.real * b.real - a.imag * b.imag
    result.imag = a.real * b.imag + a.imag * b.real
    return result
