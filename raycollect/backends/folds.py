"""Reductions on the host: the meaning of each reduce op, its dtypes, and the fold that defines the bits.

Narrow floats are folded in float32 and rounded once. Complex numbers are folded by parts, so that strides and position
do not change the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

import numpy as np

from raycollect.backends.arrays import NARROW, Array, is_number
from raycollect.core.model import ReduceOp

# Reduced in float32 and rounded once: eight terms summed in 3 bits of mantissa would be noise
WIDENED: frozenset[np.dtype[Any]] = NARROW | {np.dtype(np.float16)}
# The function that combines two elements. On bool numpy's add is a logical or, its multiply a logical and.
FOLDS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.AVG: np.add,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}

_NO_ORDER = "complex numbers have no order"
_NO_BITS = "only bool and whole numbers have bits to combine"
# Reduce op -> the kinds for which it is undefined, and the reason
REFUSED: dict[ReduceOp, tuple[str, str]] = {
    ReduceOp.AVG: ("biu", "an average of whole numbers is not a whole number"),
    ReduceOp.MIN: ("c", _NO_ORDER),
    ReduceOp.MAX: ("c", _NO_ORDER),
    ReduceOp.BAND: ("fc", _NO_BITS),
    ReduceOp.BOR: ("fc", _NO_BITS),
    ReduceOp.BXOR: ("fc", _NO_BITS),
}

READ_FIRST = 2  # How many of the parts `fold` reads before it first writes
_FLOAT32_NBYTES = 4
_BLOCK = 1 << 15  # Elements that are reduced in float32 at a time: they stay in the cache


def refusal_reason(op: ReduceOp, dtype: str) -> str | None:
    """Says why `op` is undefined for elements of that dtype, or returns None."""
    element_type = np.dtype(dtype)
    if not is_number(element_type):
        return f"{op.name} of {dtype}: elements are not numbers"
    kinds, why = REFUSED.get(op, ("", ""))
    return f"{op.name} of {dtype}: {why}" if ("f" if element_type in NARROW else element_type.kind) in kinds else None


def fold(op: ReduceOp, parts: Sequence[Array], out: Array) -> None:
    """Left-folds the ranks' parts in rank order into `out`, which may be the storage of ``parts[0]``.

    This function defines the bits of a reduction (P7). `parts` has one array per rank; all are native, contiguous and
    [n]. AVG is the sum of `parts` over their number. Floats of 16 and 8 bits are folded in float32 and rounded once, at
    the end.
    """
    dtype, combine = out.dtype, FOLDS[op]
    if dtype.kind == "c":
        if op is not ReduceOp.PRODUCT:  # a sum or an average: of real and imaginary parts
            fold(op, [_as_real(part) for part in parts], _as_real(out))
            return
        combine = product_by_parts
    if len(parts) == 1:
        np.copyto(out, parts[0])
    elif combine is product_by_parts or dtype in WIDENED:
        wide = np.float32 if dtype in WIDENED else dtype
        for lo in range(0, out.size, _BLOCK):
            block = slice(lo, lo + _BLOCK)
            total = parts[0][block].astype(wide)
            for part in parts[1:]:
                combine(total, part[block].astype(wide, copy=False), out=total)
            finish(op, total, len(parts))
            out[block] = total
    else:
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)
        if op is ReduceOp.AVG:
            finish(op, out, len(parts))


def fold_with(op: ReduceOp, others: Sequence[Array], place: int, own: Array, out: Array) -> None:
    """Folds `own` at its position among other parts. `out` may be `own`; ``others[0]`` may be overwritten."""
    parts = [*others[:place], own, *others[place:]]
    if place < READ_FIRST or not np.may_share_memory(own, out):
        fold(op, parts, out)
    else:
        fold(op, parts, parts[0])
        out[...] = parts[0]


def ignoring_errors() -> Callable[..., None]:
    """Returns a callable that runs a function as in `np.errstate(all="ignore")`, for one thread at a time.

    numpy 2 keeps that state in a context variable. Entering a context that has it calls no Python code.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return _ignoring_errors
    context = Context()
    context.run(np.seterr, all="ignore")
    return context.run


def _ignoring_errors(function: Callable[..., None], *args: Any) -> None:
    with np.errstate(all="ignore"):
        function(*args)


def is_widened(dtype: np.dtype[Any]) -> bool:
    """Tells whether elements are reduced in float32, which costs several times a copy."""
    return dtype.itemsize < _FLOAT32_NBYTES and dtype in WIDENED


def finish(op: ReduceOp, out: Array, world_size: int) -> None:
    """Turns the sum into the average, for AVG only."""
    if op is ReduceOp.AVG:
        np.divide(out, world_size, out=out)


def _as_real(array: Array) -> Array:
    return array.view(array.real.dtype)


def product_by_parts(a: Any, b: Any, out: Any) -> None:
    """Multiplies arrays of complex numbers, of numpy or cupy, with one rounding per step; `out` may be `a`.

    The libraries' own products depend on strides, overlap and processor (fused multiply-add or not).
    """
    real, imag = a.real * b.real, a.real * b.imag
    real -= a.imag * b.imag
    imag += a.imag * b.real
    out.real, out.imag = real, imag
