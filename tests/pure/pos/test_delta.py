"""Deltas between two arrays, bit by bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.errors import ProtocolError
from raycollect.pos import delta

DTYPES = ["bool", "int8", "uint16", "float16", "float32", "float64", "complex64", "complex128"]
DTYPES += ["bfloat16", "float8_e4m3fn", "int4", ">f4"]
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 4095, 4096, 5003, 20_011]))


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _random(rng: np.random.Generator, count: int, dtype: np.dtype[Any]) -> Any:
    """Any bits: NaNs of all kinds, too."""
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()


def _received(base: Any, sent: delta.Delta) -> delta.Delta:
    """The delta as another process gets it."""
    into = delta.empty(base, len(sent.words))
    for target, blob in zip(into.blobs, sent.blobs, strict=True):
        target[:] = blob
    return into


def _applied(base: Any, some: delta.Delta) -> Any:
    array = np.array(base, order="C")
    delta.apply(some, array)
    return array


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DTYPES), SIZES, st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.6, 1.0]), st.integers(0, 1 << 32))
def test_a_delta_leads_to_the_same_bits(name: str, size: int, share: float, seed: int) -> None:
    rng, dtype = np.random.default_rng(seed), _dtype(name)
    base, other = _random(rng, size, dtype), _random(rng, size, dtype)
    array = np.where(rng.random(size) < share, other, base).astype(dtype)
    some = delta.encode(base, array)
    if some is None:
        assert array.nbytes < delta.LEAST_NBYTES or share > 0.1
        return
    assert sum(blob.nbytes for blob in some.blobs) <= array.nbytes / 2
    assert _bits(_applied(base, _received(base, some))) == _bits(array)


@pytest.mark.parametrize("name", DTYPES)
def test_one_word_in_fifty_takes_a_small_part_of_the_array(name: str) -> None:
    rng, dtype = np.random.default_rng(1), _dtype(name)
    base = _random(rng, 50_000, dtype)
    array = base.copy()
    array[::50] = _random(rng, 1000, dtype)
    some = delta.encode(base, array)
    assert some is not None
    assert sum(blob.nbytes for blob in some.blobs) < array.nbytes * (0.08 if dtype.itemsize == 1 else 0.04)


def test_a_box_with_strides_is_compared_as_its_elements() -> None:
    whole, other = np.zeros((2, 90, 70), np.float32)
    other[::7, ::9] = 1.0
    base, array = whole[3:80, 5:60], other[3:80, 5:60]
    some = delta.encode(base, array)
    assert some is not None
    np.testing.assert_array_equal(_applied(base, some), array)


def test_zeros_of_two_signs_differ_and_a_nan_is_itself() -> None:
    base = np.full(4096, np.nan, np.float32)
    base[1] = 0.0
    array = base.copy()
    array[1] = -0.0
    some = delta.encode(base, array)
    assert some is not None
    assert len(some.words) == 1
    assert np.signbit(_applied(base, some)[1])


def test_arrays_of_other_types_have_no_delta() -> None:
    assert delta.encode(np.zeros(4096, np.float32), np.zeros(4096, np.float64)) is None


@pytest.mark.parametrize("count", [-1, 4097])
def test_a_delta_of_more_words_than_there_are_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError):
        delta.empty(np.zeros(4096, np.float32), count)


@pytest.mark.parametrize(("counts", "position"), [([0] * 16, 0), ([0] * 16 + [1], 200)])
def test_a_delta_that_does_not_fit_is_refused(counts: list[int], position: int) -> None:
    base = np.zeros(4096 if len(counts) == 16 else 4100, np.float32)
    wrong = delta.Delta(np.array(counts, np.uint16), np.array([position], np.uint8), np.ones(1, np.uint32))
    with pytest.raises(ProtocolError):
        _applied(base, wrong)
