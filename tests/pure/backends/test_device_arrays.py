"""Tensors on a GPU: what is known of them without touching them, and how they come and go. On the fake of cupy."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.backends.device_arrays import DeviceArray, bits_view, cupy_view, put_on_gpu
from raycollect.core.model import TENSOR, Address, Structure, TensorInfo, task_key
from raycollect.pos.handle import Handle
from tests.fake_cupy import Fake, installed


@pytest.fixture(params=[0, 1])
def fake(request: pytest.FixtureRequest) -> Iterator[Fake]:
    with installed(2, seed=request.param) as fake_cupy:
        yield fake_cupy


LAYOUTS = {
    "plain": lambda a: a,
    "every other": lambda a: a[::2],
    "reversed": lambda a: a[::-1],
    "transposed": lambda a: a.reshape(3, -1).T,
    "column": lambda a: a.reshape(-1, 3)[:, 1],
    "0-d": lambda a: a[5:6].reshape(()),
    "empty": lambda a: a[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex128"])
def test_everything_about_where_it_lies_is_as_of_the_same_array_of_numpy(fake: Fake, layout: str, dtype: str) -> None:
    plain = np.arange(33).astype(dtype)
    here, there = LAYOUTS[layout](plain), LAYOUTS[layout](fake.cupy.asarray(plain))
    seen = arrays.view(there)
    assert isinstance(seen, DeviceArray)
    assert (seen.shape, seen.dtype, seen.size, seen.nbytes) == (here.shape, here.dtype, here.size, here.nbytes)
    assert seen.shadow.strides == here.strides
    assert (seen.library, seen.device) == ("cupy", "cuda:0")
    assert arrays.library(there) == arrays.library(seen) == "cupy"
    assert arrays.is_tensor(there)
    start, stop = arrays.byte_range(seen)
    assert stop - start == np.subtract(*arrays.byte_range(here)[::-1])
    assert arrays.describe(there) == TensorInfo(
        shape=here.shape, dtype=dtype, itemsize=here.itemsize, device="cuda:0", library="cupy"
    )
    copy = arrays.copy_to_host(seen)
    np.testing.assert_array_equal(copy, here)
    assert copy.shape == here.shape
    np.testing.assert_array_equal(bits_view(seen).view(here.dtype).get(), here)


def test_views_overlap_and_share_their_owner(fake: Fake) -> None:
    whole = fake.cupy.zeros(12, np.float32)
    even, odd, first = (DeviceArray(view) for view in (whole[::2], whole[1::2], whole[:3]))
    assert not arrays.overlap(even, odd)
    assert arrays.overlap(even, first)
    assert arrays.owner(whole[2:]) is arrays.owner(whole)
    assert arrays.owner(fake.cupy.zeros(12)) is not arrays.owner(whole)


class ReadOnly:
    """An array of another library that nobody may write to, as JAX's, by the interface or by DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array


class ByInterface(ReadOnly):
    @property
    def __cuda_array_interface__(self) -> Any:
        interface = self.array.__cuda_array_interface__
        return interface | {"data": (interface["data"][0], True)}


class ByDlpack(ReadOnly):
    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        if max_version is None:
            return self.array.__dlpack__(stream=stream)
        shown = np.zeros(1)  # of the same flags
        shown.setflags(write=False)
        return shown.__dlpack__(max_version=max_version)


@pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
def test_memory_that_is_read_only_stays_so(fake: Fake, kind: type[ReadOnly]) -> None:
    """cupy forgets it."""
    if kind is ByDlpack and not hasattr(np, "unstack"):
        pytest.skip("numpy exports no read-only arrays before 2.1")
    array = fake.cupy.zeros((4, 3), dtype=np.float32)
    seen = arrays.view(kind(array))
    assert isinstance(seen, DeviceArray)
    assert seen.address == array.data.ptr
    assert not arrays.is_writeable(seen)
    assert not any(map(arrays.is_writeable, arrays.split(seen, 2) or ()))
    assert arrays.is_writeable(arrays.view(array))
    assert arrays.place(seen) != arrays.place(arrays.view(array))


def test_what_says_nothing_of_its_memory_is_no_tensor(fake: Fake) -> None:
    class Broken:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("no memory any more")

    assert arrays.view(Broken()) is None
    assert arrays.view(fake.cupy.ndarray) is None


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("complex64")])
def test_an_output_is_made_on_its_device(fake: Fake, device: int, dtype: np.dtype[Any]) -> None:
    info = TensorInfo(shape=(3, 5), dtype=dtype.name, itemsize=dtype.itemsize, device=f"cuda:{device}", library="cupy")
    output = arrays.empty(info)
    assert arrays.describe(output) == info
    fake.limit(fake.allocated(device) + 10, device)
    with pytest.raises(MemoryError):
        arrays.empty(info)


def test_one_takes_what_another_holds(fake: Fake) -> None:
    source = fake.cupy.arange(12, dtype=np.float32).reshape(3, 4)
    target = fake.cupy.zeros((4, 6), np.float32)[:, ::2]
    DeviceArray(target).take(DeviceArray(source))
    np.testing.assert_array_equal(target.get(), np.arange(12).reshape(4, 3))
    assert cupy_view(DeviceArray(target)) is target


def test_what_a_method_is_given_lies_on_its_gpu(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels through the host's memory, and what lay there stays there."""
    there, here = np.arange(6, dtype=np.float32), np.arange(3)
    infos = (arrays.describe(fake.cupy.asarray(there)), arrays.describe(here))
    handle = Handle(
        key=task_key(bytes(24), 1),
        actor_id="a",
        actor="W(a)",
        address=Address(host="127.0.0.1", port=1, secret=bytes(32)),
        structure=Structure("list", (), (TENSOR, TENSOR)),
        infos=infos,
    )
    monkeypatch.setattr("raycollect.pos.fetch.fetch", lambda *_, **__: [there, here])
    with fake.cupy.cuda.Device(1):
        first, second = handle.fetch_for_use()
    assert arrays.describe(first).device == "cuda:1"
    np.testing.assert_array_equal(first.get(), there)
    assert second is here
    assert handle.fetch()[0] is there, "who only looks gets it in the host's memory"


def test_where_there_is_no_gpu_it_stays_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(3)
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    assert put_on_gpu(array, "cupy") is array
    assert put_on_gpu(array, "torch") is array
    runtime = SimpleNamespace(getDeviceCount=lambda: 0)
    monkeypatch.setitem(__import__("sys").modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert put_on_gpu(array, "cupy") is array
