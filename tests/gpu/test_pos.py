"""Tensors that stay on real GPUs: kept, looked at, worked on by whole programs, and copied to the host once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("ml_dtypes", reason="raycollect needs ml_dtypes")
pytest.importorskip("msgpack", reason="raycollect needs msgpack")

import numpy as np

from raycollect.backends import arrays
from raycollect.core.model import GroupSpec, OpKind, ReduceOp
from raycollect.errors import ReadOnlyError, RefusedError
from raycollect.pos.store import weak
from tests.pure.communicators import Team
from tests.pure.fleet import FailAt, Fleet, contain

from . import devices
from .cases import LIBRARIES, layouts_of, placed, seen, to_host
from .work import WORK, Busy, Work, must_be_busy

TeamOf = Callable[[int], Team]

FLOAT = np.dtype(np.float32)
DTYPES = ("float32", "int64", "bool", "float16", "complex64", "bfloat16")


def _values(dtype: str, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, size).astype(dtype)


class GpuFleet(Fleet):
    """Ranks that run programs over NCCL; in threads of this process, so there is one, or a fake."""

    def __init__(self, team: Team) -> None:
        super().__init__(team.world_size)
        self.spec = GroupSpec(name="fleet", group_id="4567", backend="nccl", world_size=team.world_size)
        self.communicators = list(team.communicators)  # type: ignore[attr-defined]
        self._count = devices.count()

    def run_one(self, *args: Any, **kwargs: Any) -> Any:
        with import_module("cupy").cuda.Device(args[1] % self._count):
            return super().run_one(*args, **kwargs)


@pytest.fixture
def gpu_fleet(fresh_team_of: TeamOf) -> Iterator[Fleet]:
    """A fleet of one rank."""
    made = GpuFleet(fresh_team_of(1))
    yield made
    made.close()


# ------------------------------------------------------------------------------- what is seen of them


@pytest.mark.parametrize(("library", "layout"), [(one, how) for one in LIBRARIES for how in layouts_of(one)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_seen_where_it_is(library: str, layout: str, dtype: str) -> None:
    devices.need(library, dtype)
    values = _values(dtype, 105, 1)
    tensor = placed(values, layout, library)
    view = seen(tensor)
    address = tensor.data.ptr if library == "cupy" else tensor.data_ptr()
    assert (view.address, view.device, view.library, view.dtype) == (address, "cuda:0", library, values.dtype)
    told = arrays.describe(tensor)
    assert (told.shape, told.dtype, told.device, told.library) == (tuple(tensor.shape), dtype, "cuda:0", library)
    start, stop = arrays.byte_range(view)
    assert start <= address < stop
    assert stop - start >= values.nbytes
    host = np.asarray(arrays.copy_to_host(view))
    assert host.reshape(-1).tobytes() == values.tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_overlap_is_found_on_the_device(library: str) -> None:
    devices.need(library)
    whole = placed(_values("float32", 100, 2), "plain", library)
    even, odd, head, tail = whole[::2], whole[1::2], whole[:50], whole[50:]
    assert arrays.overlap(seen(whole), seen(even))
    assert not arrays.overlap(seen(even), seen(odd))
    assert not arrays.overlap(seen(head), seen(tail))
    assert arrays.overlap(seen(head), seen(odd))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_like_others_are_made_on_their_device(library: str, dtype: str) -> None:
    devices.need(library, dtype)
    tensor = placed(_values(dtype, 12, 3), "plain", library).reshape(3, 4)
    made = arrays.empty(arrays.describe(tensor))
    assert type(made) is type(tensor)
    assert arrays.describe(made) == arrays.describe(tensor)
    assert not arrays.overlap(seen(made), seen(tensor))


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_tensor_is_copied_into_another(library: str) -> None:
    devices.need(library)
    values = _values("float32", 105, 4)
    target, source = placed(np.zeros_like(values), "every other", library), placed(values, "transposed", library)
    seen(target).take(seen(source))
    np.testing.assert_array_equal(to_host(target, FLOAT), values)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_copy_to_the_host_waits_for_the_callers_stream(library: str) -> None:
    devices.need(library)
    work: Work = WORK[library]()
    tensor = work.zeros(1000)
    work.host(tensor)
    busy, mine = Busy(work), work.stream()
    with work.on(mine):
        busy.start()
        tensor += 3
        must_be_busy(work, mine)
        assert (arrays.copy_to_host(seen(tensor)) == 3).all()


# ------------------------------------------------------------------------------- whole programs


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_kept_tensor_is_reduced_where_it_is(gpu_fleet: Fleet, library: str) -> None:
    devices.need(library)
    values = _values("float32", 1001, 5)
    tensor = placed(values, "plain", library)
    address = seen(tensor).address
    for _ in range(3):  # from the second on, on what is remembered
        (outcome,) = gpu_fleet.must(OpKind.ALLREDUCE, [gpu_fleet.keep(0, tensor)])
        assert outcome.outputs == ()
    assert seen(tensor).address == address
    np.testing.assert_array_equal(to_host(tensor, FLOAT), values)


@pytest.mark.parametrize("library", LIBRARIES)
def test_outputs_are_made_on_the_device_by_the_same_library(gpu_fleet: Fleet, library: str) -> None:
    devices.need(library)
    values = _values("float32", 1001, 6)
    tensor = placed(values, "plain", library)
    key = gpu_fleet.keep(0, tensor)
    for _ in range(2):
        (outcome,) = gpu_fleet.must(OpKind.ALLREDUCE, [key], inplace=False, op=ReduceOp.MAX)
        (made,) = outcome.outputs
        assert type(made.value) is type(tensor)
        assert arrays.describe(made.value) == arrays.describe(tensor)
        assert not arrays.overlap(seen(made.value), seen(tensor))
        np.testing.assert_array_equal(to_host(made.value, FLOAT), values)


@pytest.mark.parametrize("library", LIBRARIES)
def test_values_that_hold_several_tensors(gpu_fleet: Fleet, library: str) -> None:
    devices.need(library)
    values = {name: _values("float32", size, size) for name, size in (("weights", 3000), ("bias", 7), ("none", 0))}
    held = {name: placed(one, "plain", library) for name, one in values.items()}
    assert contain(held).tensors == tuple(held.values())
    gpu_fleet.must(OpKind.ALLREDUCE, [gpu_fleet.keep(0, held)])
    for name, tensor in held.items():
        np.testing.assert_array_equal(to_host(tensor, FLOAT), values[name])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_program_follows_what_its_tensor_waits_for(gpu_fleet: Fleet, library: str) -> None:
    """The rank's thread has streams of its own: what another thread left on the default stream comes first."""
    devices.need(library)
    work: Work = WORK[library]()
    tensor = work.zeros(1000)
    work.host(tensor)
    Busy(work).start()
    tensor += 3
    (outcome,) = gpu_fleet.must(OpKind.ALLREDUCE, [gpu_fleet.keep(0, tensor)], inplace=False)
    assert (to_host(outcome.outputs[0].value, FLOAT) == 3).all()


def test_arrays_of_the_gpu_that_share_memory_are_refused(gpu_fleet: Fleet) -> None:
    whole = placed(_values("float32", 100, 7), "plain", "cupy")
    (outcome,) = gpu_fleet.run(OpKind.ALLREDUCE, [gpu_fleet.keep(0, [whole[:60], whole[40:]])])
    assert isinstance(outcome.error, RefusedError)
    gpu_fleet.must(OpKind.ALLREDUCE, [gpu_fleet.keep(0, [whole[:40], whole[40:]])])


class ReadOnly:
    """An array of another library that nobody may write to, as JAX's are."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        found = self._array.__cuda_array_interface__
        return {**found, "data": (found["data"][0], True)}


def test_read_only_memory_is_read_and_never_written(gpu_fleet: Fleet) -> None:
    values = _values("float32", 101, 8)
    own = placed(values, "plain", "cupy")
    key = gpu_fleet.keep(0, ReadOnly(own))
    (outcome,) = gpu_fleet.run(OpKind.ALLREDUCE, [key])
    assert isinstance(outcome.error, ReadOnlyError)
    (made,) = gpu_fleet.must(OpKind.ALLREDUCE, [key], inplace=False)[0].outputs
    np.testing.assert_array_equal(to_host(made.value, FLOAT), values)
    np.testing.assert_array_equal(to_host(own, FLOAT), values)


def test_a_failed_program_keeps_no_memory_on_the_gpu(gpu_fleet: Fleet) -> None:
    """What it may have half-written counts as dirty as long as it is there, and no longer."""
    tensor = placed(_values("float32", 1001, 9), "plain", "cupy")
    owner, key = weak(arrays.owner(tensor)), gpu_fleet.keep(0, tensor)
    gpu_fleet.faults = FailAt(point="before_kernel", rank=0)
    (outcome,) = gpu_fleet.run(OpKind.ALLREDUCE, [key])
    assert outcome.error is not None
    gpu_fleet.faults = None
    assert gpu_fleet.dirty == [1]
    gpu_fleet.stores[0].free([key])
    del tensor
    assert owner() is None
    assert gpu_fleet.dirty == [0]
