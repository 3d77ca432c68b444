"""Copies and folds between the GPUs of one process, on a fake of cupy, with tensors that are still being written."""

from __future__ import annotations

import gc
import itertools

import ml_dtypes
import numpy as np
import pytest

from raycollect.backends import across, arrays, streams
from raycollect.backends.device_arrays import DeviceArray
from raycollect.core.model import ReduceOp
from tests.pure.on_gpu import TorchLike, cupy_of, gpus, pending, read_elsewhere

SEEDS = [0, 1, 2]
SIZES = [0, 1, 7, 1001]
LAYOUTS = ["plain", "offset", "every other", "reversed", "column"]


@pytest.fixture(params=SEEDS)
def fake(request):
    with gpus(3, seed=request.param) as made:
        for device in range(3):
            with made.cupy.cuda.Device(device):
                made.cupy.cuda.Stream(non_blocking=True).use()
        yield made
        for device in range(3):
            with made.cupy.cuda.Device(device):
                made.cupy.cuda.Stream.null.use()


def _values(at, size, dtype="float32"):
    return ((np.arange(size) + 3 * at) % 11 + 1).astype(dtype)


def _written(fake, device, values, how="plain", library="cupy"):
    """A tensor that the caller's stream there has yet to write."""
    with fake.cupy.cuda.Device(device):
        return pending(values, how, library)


def _read(fake, one):
    with fake.cupy.cuda.Device(one.tensor.device.id if one.library == "cupy" else one.tensor.array.device.id):
        return read_elsewhere(one, fake.cupy.cuda.Stream(non_blocking=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", LAYOUTS)
def test_tensors_of_all_gpus_are_brought_to_one(fake, size, how):
    given = [_written(fake, at, _values(at, size), how) for at in range(3)]
    made = across.brought([one for one in given for _ in range(2)], 1)
    across.ended([1])
    assert {one.device for one in made} == {"cuda:1"}
    for place, one in enumerate(made):
        np.testing.assert_array_equal(_read(fake, one), _values(place // 2, size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "rule"), [("SUM", np.add), ("MAX", np.maximum), ("BXOR", np.bitwise_xor)])
def test_tensors_are_folded_in_the_order_of_the_gpus(fake, size, op, rule):
    dtype = "int64" if op == "BXOR" else "float32"
    lists = [[_written(fake, at, _values(at + 5 * k, size, dtype)) for k in range(2)] for at in (2, 0, 1)]
    made = across.folded(lists, ReduceOp[op], 0)
    across.ended([0])
    for k, one in enumerate(made):
        first, second, third = (_values(at + 5 * k, size, dtype) for at in (2, 0, 1))
        wanted = rule(rule(first, second), third)
        np.testing.assert_array_equal(_read(fake, one), wanted)
    for at, row in zip((2, 0, 1), lists, strict=True):
        for k, one in enumerate(row):
            np.testing.assert_array_equal(_read(fake, one), _values(at + 5 * k, size, dtype))


def test_the_fold_of_sums_goes_from_left_to_right(fake):
    values = [np.array([1e8], np.float32), np.array([1.0], np.float32), np.array([-1e8], np.float32)]
    made = across.folded([[_written(fake, at, one)] for at, one in enumerate(values)], ReduceOp.SUM, 2)
    across.ended([2])
    assert _read(fake, made[0]) == (values[0] + values[1]) + values[2]


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
        for at, one in enumerate(taken):
            np.testing.assert_array_equal(_read(fake, one), _values(at, size))
            np.testing.assert_array_equal(_read(fake, given[at]), _values(at, size))


@pytest.mark.parametrize("how", ["plain", "every other"])
def test_what_is_written_on_the_default_stream_is_followed_too(fake, how):
    """The default stream does not wait for the current one, nor that for it; here it comes last."""
    given = [_written(fake, at, _values(9, 501), how) for at in range(3)]
    taken = [_written(fake, at, _values(9, 501), how) for at in range(3)]
    across.ended(range(3))
    for at, one in enumerate(given):
        with fake.cupy.cuda.Device(at), fake.cupy.cuda.Stream.null as null:
            values = fake.cupy.asarray(_values(at, 501))
            fake.hold(null)
            one.tensor[...] = values
    across.spread([given[0]], [taken[1]])
    made = [*across.brought(given, 1), *across.folded([[one] for one in given], ReduceOp.SUM, 0)]
    for at in range(3):
        with fake.cupy.cuda.Device(at):
            fake.drain()
            fake.release(fake.cupy.cuda.Stream.null)
    across.ended(range(3))
    found = [_read(fake, one) for one in (taken[1], *made)]
    wanted = [_values(0, 501), *(_values(at, 501) for at in range(3)), sum(_values(at, 501) for at in range(3))]
    for one, values in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, values)


def test_the_events_of_a_mark_that_is_in_a_cycle_are_used_again(fake):
    """As in the traceback of a refusal, which is collected with all that it holds."""
    info = arrays.info(_written(fake, 0, _values(0, 5)))
    for _ in range(3):
        cycle = [streams.mark([info])]
        cycle.append(cycle)
        del cycle
        gc.collect()
        streams.follow(0, [0, 1])
    assert streams._free[0]


def test_copies_that_nobody_awaits_may_be_let_go_of(fake):
    """As after a refusal, without any wait: the fake finds memory that is used while it is somebody else's."""
    given = [[_written(fake, at, _values(at, 1001))] for at in range(3)]
    for _ in range(3):
        across.folded(given, ReduceOp.SUM, 0)
        across.brought([one for (one,) in given], 2)
        across.spread([given[0][0]], [given[1][0]])
    across.ended(range(3))
    np.testing.assert_array_equal(_read(fake, given[1][0]), _values(0, 1001))
    assert not fake.violations


def test_what_torch_has_is_read_where_it_is(fake, monkeypatch):
    """The copies are cupy's here, because this torch can make none."""
    given = [_written(fake, at, _values(at, 7), library="torch") for at in range(2)]
    assert {one.library for one in given} == {"torch"}

    def empty(info):
        with fake.cupy.cuda.Device(0):
            return fake.cupy.empty(info.shape, info.dtype)

    monkeypatch.setattr(arrays, "empty", empty)
    (made,) = across.folded([[one] for one in given], ReduceOp.SUM, 0)
    across.ended([0])
    np.testing.assert_array_equal(_read(fake, made), _values(0, 7) + _values(1, 7))
    assert isinstance(given[0].tensor, TorchLike)
    assert type(cupy_of(made)) is fake.cupy.ndarray
    assert isinstance(made, DeviceArray)


@pytest.mark.parametrize(
    ("op", "dtype", "count", "words"),
    [
        (ReduceOp.SUM, "float32", 4, None),
        (ReduceOp.AVG, "int32", 1, "AVG of int32"),
        (ReduceOp.SUM, "bfloat16", 1, None),
        (ReduceOp.SUM, "bfloat16", 2, "cupy has no such type"),
    ],
)
def test_what_can_not_be_folded(op, dtype, count, words):
    reason = across.objection(op, np.dtype(getattr(ml_dtypes, dtype, dtype)), count)
    assert reason is None if words is None else words in reason
