"""Copies and folds between the GPUs of one process, on a fake of cupy, with tensors that are still being written."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from raycollect.backends import across
from raycollect.core.model import ReduceOp
from tests.pure.on_gpu import gpus, pending, read_elsewhere

SEEDS = [0, 1, 2]
SIZES = [0, 1, 7, 1001]
LAYOUTS = ["plain", "offset", "every other", "reversed", "column"]


@pytest.fixture(params=SEEDS)
def fake(request):
    with gpus(3, seed=request.param) as installed:
        for device in range(3):
            with installed.cupy.cuda.Device(device):
                installed.cupy.cuda.Stream(non_blocking=True).use()
        yield installed
        for device in range(3):
            with installed.cupy.cuda.Device(device):
                installed.cupy.cuda.Stream.null.use()


def _values(at, size, dtype="float32"):
    return ((np.arange(size) + 3 * at) % 11 + 1).astype(dtype)


def _written(fake, device, values, how="plain", library="cupy"):
    """A tensor that the caller's stream there has yet to write."""
    with fake.cupy.cuda.Device(device):
        return pending(values, how, library)


def _read(fake, tensor):
    with fake.cupy.cuda.Device(tensor.tensor.device.id if tensor.library == "cupy" else tensor.tensor.array.device.id):
        return read_elsewhere(tensor, fake.cupy.cuda.Stream(non_blocking=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", LAYOUTS)
def test_tensors_of_all_gpus_are_brought_to_one(fake, size, how):
    given = [_written(fake, at, _values(at, size), how) for at in range(3)]
    copies = across.brought([tensor for tensor in given for _ in range(2)], 1)
    across.ended([1])
    assert {tensor.device for tensor in copies} == {"cuda:1"}
    for place, tensor in enumerate(copies):
        np.testing.assert_array_equal(_read(fake, tensor), _values(place // 2, size))


def test_the_fold_of_sums_goes_from_left_to_right(fake):
    values = [np.array([1e8], np.float32), np.array([1.0], np.float32), np.array([-1e8], np.float32)]
    sums = across.folded([[_written(fake, at, value)] for at, value in enumerate(values)], ReduceOp.SUM, 2)
    across.ended([2])
    assert _read(fake, sums[0]) == (values[0] + values[1]) + values[2]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("library", "source", "target"),
    [("cupy", *ways) for ways in itertools.product(LAYOUTS, LAYOUTS)]
    + [("torch", *ways) for ways in itertools.product(["plain", "every other", "column"], repeat=2)],
)
def test_tensors_are_spread_behind_what_is_under_way_on_both_gpus(fake, size, source, target, library):
    given = [_written(fake, 0, _values(at, size), source, library) for at in range(2)]
    for device in (2, 0):
        taken = [_written(fake, device, _values(9, size), target, library) for _ in range(2)]
        across.spread(given, taken)
        across.ended([device])
        for at, tensor in enumerate(taken):
            np.testing.assert_array_equal(_read(fake, tensor), _values(at, size))
            np.testing.assert_array_equal(_read(fake, given[at]), _values(at, size))


@pytest.mark.parametrize(
    ("op", "dtype", "count", "words"),
    [
        (ReduceOp.SUM, "float32", 4, None),
        (ReduceOp.AVG, "int32", 1, "AVG of int32"),
        (ReduceOp.SUM, "bfloat16", 1, None),
        (ReduceOp.SUM, "bfloat16", 2, "cupy lacks this type"),
    ],
)
def test_what_can_not_be_folded(op, dtype, count, words):
    reason = across.objection(op, np.dtype(getattr(ml_dtypes, dtype, dtype)), count)
    assert reason is None if words is None else words in reason
