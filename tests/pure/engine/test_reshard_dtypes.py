"""Conversions on the way of a reshard, to the bit: as numpy and torch round, wherever the conversion takes place."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.backends.elements import convert
from raycollect.planner.layout import Layout, layout
from tests.pure.engine.convoys import convoy_of
from tests.pure.engine.reshard_runs import must, run
from tests.pure.resharding import bound

DTYPES = ("float64", "float32", "float16", "bfloat16")

SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e38, -3.4e38, 65504.0, 65520.0, 1e-41, 1.00390625, 1.01171875, 1 / 3]
"""Also halves between two numbers of 8 bits of mantissa, and what is too large or too small for narrow types."""


def values(dtype: str) -> Any:
    """A tensor of [6, 4] with all that may go wrong."""
    some = np.resize(np.array(SPECIAL), 24)
    some[len(SPECIAL) :] = np.random.default_rng(3).standard_normal(24 - len(SPECIAL))
    with np.errstate(all="ignore"):
        return some.astype(dtype).reshape(6, 4)


def same_bits(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.ascontiguousarray(found)[number].view(np.uint8), expected[number].view(np.uint8))


def moved(src: Layout, dst: Layout, held: dict[int, Any], hosts: Any = ()) -> list[Any]:
    """What three targets hold: rank 0 is a source as well, and the rest are on hosts of their own."""
    with convoy_of(4) as convoy:
        sources = tuple(range(src.world_size))
        made = must(run(convoy, bound({"": src}, {"": dst}, sources, (0, 2, 3)), held, None, hosts))
    return [made[rank][0] for rank in (0, 2, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_targets_have_what_numpy_and_torch_make_of_it(dtype: str, wanted: str) -> None:
    """By a copy, by a message, and passed on by another reader of the host, all of them have the same bits."""
    whole = values(dtype)
    src = layout([6, 4], mesh={"r": 1}, dtype=dtype)
    found = moved(src, layout([6, 4], mesh={"r": 3}, dtype=wanted), {0: whole}, (0, 0, 1, 1))
    with np.errstate(all="ignore"):
        expected = whole.astype(wanted)
    for one in found:
        same_bits(one, expected)
    if (dtype, wanted) != ("float64", "float16"):  # which torch rounds twice, and numpy once
        torch = pytest.importorskip("torch")
        bits = {8: np.int64, 4: np.int32, 2: np.int16}[whole.itemsize]
        tensor = torch.from_numpy(whole.view(bits)).view(getattr(torch, dtype)).to(getattr(torch, wanted))
        same_bits(found[0], tensor.view(torch.int16).numpy().view(wanted) if tensor.itemsize == 2 else tensor.numpy())


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_bfloat16_rounds_to_the_nearest_even_and_keeps_nan(some: list[float]) -> None:
    given_ = np.array(some, np.float32)
    found = np.zeros(len(some), ml_dtypes.bfloat16)
    convert(found, given_)
    bits = given_.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    is_nan = np.isnan(given_)
    assert (np.isnan(found.astype(np.float32)) == is_nan).all()
    assert (found.view(np.uint16)[~is_nan] == rounded[~is_nan]).all()
