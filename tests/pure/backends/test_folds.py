"""Folds of tensors: which reduce ops have a meaning for which dtype, and the bits of what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from raycollect.backends import folds
from raycollect.core.model import ReduceOp
from tests.pure.conformance import DTYPES, allowed, bits
from tests.pure.operands import left_fold, operand


@pytest.mark.parametrize(("op", "dtype"), list(product(ReduceOp, (*DTYPES, "object", "str", "datetime64[s]"))))
def test_refusals_name_op_and_dtype(op: ReduceOp, dtype: str) -> None:
    reason = folds.refusal_reason(op, dtype)
    assert (reason is None) == (dtype in DTYPES and allowed(op, dtype))
    assert reason is None or (op.name in reason and dtype in reason)


@pytest.mark.parametrize(("op", "dtype"), [pair for pair in product(ReduceOp, DTYPES) if allowed(*pair)])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_fold_is_the_left_fold_bit_for_bit_wherever_it_is_cut(op: ReduceOp, dtype: str, world: int) -> None:
    size = 70_001  # more than two blocks
    parts = [operand(rank, dtype, size) for rank in range(world)]
    expected = left_fold(op, parts)
    whole, pieces, own = np.empty_like(parts[0]), np.empty_like(parts[0]), [part.copy() for part in parts]
    with np.errstate(all="ignore"):
        folds.fold(op, parts, whole)
        for lo, hi in ((0, 1), (1, 33_000), (33_000, size)):
            folds.fold(op, [part[lo:hi] for part in parts], pieces[lo:hi])
        folds.fold(op, own, own[0])
    for result in (whole, pieces, own[0]):
        assert bits(result) == bits(expected)


@pytest.mark.parametrize("version", [np.__version__, "1.26.4"])
def test_who_ignores_errors_is_not_warned_and_the_caller_is(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", version)
    largest = np.full(3, np.finfo(np.float32).max)
    out = np.empty_like(largest)
    with np.errstate(over="raise"):
        folds.ignoring_errors()(folds.fold, ReduceOp.SUM, [largest, largest], out)
        assert np.isinf(out).all()
        with pytest.raises(FloatingPointError):
            folds.fold(ReduceOp.SUM, [largest, largest], out)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_product_of_complex_numbers_is_numpys_but_for_the_last_bits(dtype: str) -> None:
    parts: Sequence[np.ndarray] = [operand(rank, dtype, 1000) for rank in range(4)]
    out = np.empty_like(parts[0])
    folds.fold(ReduceOp.PRODUCT, parts, out)
    np.testing.assert_allclose(out, parts[0] * parts[1] * parts[2] * parts[3], rtol=8 * np.finfo(dtype).eps)


def test_short_floats_are_rounded_once() -> None:
    """256 + 1 + 1 in steps of bfloat16, whose next number after 256 is 258, would be 256."""
    for dtype, large, small, total in (
        ("bfloat16", 256, 1, 258),
        ("float16", 2048, 1, 2050),
        ("float8_e4m3fn", 16, 1, 18),
    ):
        parts = [np.array([value], dtype) for value in (large, small, small)]
        out = np.empty(1, dtype)
        folds.fold(ReduceOp.SUM, parts, out)
        assert out.astype(np.float32).item() == total
        assert (parts[0] + parts[1] + parts[2]).astype(np.float32).item() == large
