"""Reshards of tensors of real GPUs, which each rank stages in host memory; the ranks are threads of this process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ml_dtypes", reason="raycollect needs ml_dtypes")
pytest.importorskip("msgpack", reason="raycollect needs msgpack")
pytest.importorskip("hypothesis", reason="the helpers for reshards need it")

import numpy as np

from raycollect.backends import arrays
from raycollect.planner.layout import layout
from tests.pure.engine.convoys import convoy_of
from tests.pure.engine.reshard_runs import must, run
from tests.pure.fleet import FailAt
from tests.pure.resharding import bound

from . import devices
from .cases import LIBRARIES, layouts_of, placed, to_host

WORLD, HOST = 3, "host"
PLACES = (HOST, *LIBRARIES)
DTYPES = ("float32", "int64", "bool", "float16", "complex64", "bfloat16")


def _put(values: np.ndarray, where: str, how: str = "plain") -> Any:
    """A tensor of these values, in host memory or on a GPU."""
    return values.copy() if where == HOST else placed(values.reshape(-1), how, where).reshape(values.shape)


def _held(tensor: Any, dtype: str) -> np.ndarray:
    return tensor.reshape(-1) if isinstance(tensor, np.ndarray) else to_host(tensor, np.dtype(dtype))


def _sides(dtype: str) -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """A reshard from rows to columns, what its ranks give, and what they take."""
    whole = np.random.default_rng(1).integers(0, 50, (6, 9)).astype(dtype)
    mesh = {"r": WORLD}
    src, dst = (layout([6, 9], mesh=mesh, spec=spec, dtype=dtype) for spec in (("r",), (None, "r")))
    reshard = bound({"": src}, {"": dst}, range(WORLD), range(WORLD))
    return reshard, np.split(whole, WORLD), [np.ascontiguousarray(one) for one in np.split(whole, WORLD, axis=1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("src", PLACES)
@pytest.mark.parametrize("dst", [*PLACES, "new"])
def test_tensors_go_from_any_device_to_any_other(src: str, dst: str, dtype: str) -> None:
    for library in {src, dst} & set(LIBRARIES):
        devices.need(library, dtype)
    reshard, given, expected = _sides(dtype)
    gives = {rank: _put(one, src) for rank, one in enumerate(given)}
    taken = None if dst == "new" else {rank: _put(np.zeros_like(one), dst) for rank, one in enumerate(expected)}
    with convoy_of(WORLD) as convoy:
        made = must(run(convoy, reshard, gives, taken))
        assert not any(store.statistics().dirty for store in convoy.stores)
    for rank, one in enumerate(expected):
        found = made[rank][0] if taken is None else taken[rank]
        assert _held(found, dtype).tobytes() == one.tobytes()
        if taken is None:
            assert arrays.describe(found).device == arrays.describe(gives[rank]).device
        assert _held(gives[rank], dtype).tobytes() == given[rank].tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_tensors_with_any_strides(library: str, backend: str) -> None:
    devices.need(library)
    reshard, given, expected = _sides("float32")
    some = [how for how in layouts_of(library) if how != "transposed"]
    for how in some:
        gives = {rank: _put(one, library, how) for rank, one in enumerate(given)}
        taken = {rank: _put(np.zeros_like(one), library, how) for rank, one in enumerate(expected)}
        with convoy_of(WORLD, backend) as convoy:
            must(run(convoy, reshard, gives, taken))
        for rank, one in enumerate(expected):
            assert _held(taken[rank], "float32").tobytes() == one.tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_failure_leaves_the_targets_unchanged(library: str) -> None:
    devices.need(library)
    reshard, given, expected = _sides("float32")
    gives = {rank: _put(one, library) for rank, one in enumerate(given)}
    taken = {rank: _put(np.full_like(one, 7), library) for rank, one in enumerate(expected)}
    with convoy_of(WORLD) as convoy:
        convoy.faults = FailAt(point="after_kernel", rank=0)
        assert run(convoy, reshard, gives, taken)[0].error is not None
        assert not convoy.stores[0].statistics().dirty
        assert (_held(taken[0], "float32") == 7).all()
        convoy.faults = None
        must(run(convoy, reshard, gives, taken))
    for rank, one in enumerate(expected):
        assert _held(taken[rank], "float32").tobytes() == one.tobytes()
