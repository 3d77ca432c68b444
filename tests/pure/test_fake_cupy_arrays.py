"""The fake of cupy: memory and arrays."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.fake_cupy import installed

SEEDS = range(12)


@pytest.fixture
def fake():
    with installed(2) as made:
        yield made


# -------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_another_stream_still_reads_must_not_be_freed(seed):
    with installed(seed=seed) as fake:
        cupy = fake.cupy
        value, seen = cupy.ones(1000), cupy.zeros(1000)
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.Stream.null.record())
        fake.hold(stream)
        with stream:
            cupy.copyto(seen, value)
        del value
        assert len(fake.violations) == 1
        assert "freed while work" in fake.violations[0]
        cupy.cuda.Stream.null.synchronize()
        fake.release(stream)
        stream.synchronize()
        assert "was freed" in fake.violations[1]
        fake.violations.clear()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", ["event", "host", "default"])
def test_memory_may_be_freed_once_its_own_stream_comes_after_what_reads_it(seed, waits):
    with installed(seed=seed) as fake:
        cupy = fake.cupy
        value, seen = cupy.ones(1000), cupy.zeros(1000)
        cupy.cuda.runtime.deviceSynchronize()
        stream = cupy.cuda.Stream(non_blocking=waits != "default")
        with stream:
            cupy.copyto(seen, value)
        if waits == "event":
            cupy.cuda.Stream.null.wait_event(stream.record())
        elif waits == "host":
            stream.synchronize()
        del value
        assert seen.get(stream).sum() == 1000


def test_violations_fail_the_test_that_makes_them():
    with pytest.raises(AssertionError, match="goes 1 bytes beyond"), installed() as fake:
        value = fake.cupy.zeros(8, np.uint8)
        fake.cupy.cuda.runtime.memsetAsync(value.data.ptr, 0, 9, 0)
    with pytest.raises(KeyError), installed() as fake:
        fake.violations.append("hides nothing")
        raise KeyError


def test_freed_memory_is_poisoned_and_known(fake):
    cupy = fake.cupy
    value = cupy.zeros(100, np.uint8)
    pointer, seen = value.data.ptr, value._host()
    del value
    cupy.cuda.Stream.null.synchronize()
    assert set(seen.tolist()) == {0xCB}
    cupy.cuda.runtime.memsetAsync(pointer, 0, 100, 0)
    cupy.cuda.Stream.null.synchronize()
    assert all("was freed" in line for line in fake.violations)
    assert len(fake.violations) == 2
    fake.violations.clear()


def test_memory_is_counted_and_can_run_out(fake):
    cupy = fake.cupy
    kept = cupy.zeros(100, np.uint8)
    fake.limit(1000)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="901 bytes"):
        cupy.cuda.alloc(901)
    view = kept[10:20]
    assert cupy.zeros(900, np.uint8).size == 900
    assert fake.allocated() == 100
    del kept
    assert fake.allocated() == 100
    del view
    gc.collect()
    assert fake.allocated() == 0
    assert cupy.empty((0, 3)).data.ptr == 0


# -------------------------------------------------------------------------------------------------- arrays


def test_nothing_comes_to_the_host_by_itself(fake):
    cupy = fake.cupy
    value = cupy.ones(3)
    for wrong in (np.asarray, hash, lambda a: a + np.ones(3), lambda a: np.ones(3) * a):
        with pytest.raises(TypeError):
            wrong(value)
    with cupy.cuda.Device(1), pytest.raises(ValueError, match="current device"):
        value + 1
    with cupy.cuda.Device(1):
        copied = value.copy()
        assert (copied.device.id, copied.get().sum()) == (1, 3)
        assert value.get().tolist() == [1.0] * 3


class Lent:
    """Somebody else's array."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.array = array


def test_what_others_describe_is_looked_at_without_a_copy(fake):
    cupy = fake.cupy
    value = cupy.arange(12.0).reshape(3, 4)
    lent = Lent(value[1:, ::2])
    described = lent.__cuda_array_interface__
    assert (described["version"], described["stream"]) == (3, 1)
    seen = cupy.asarray(lent)
    seen *= 2
    taken = cupy.from_dlpack(value)
    assert value.__dlpack_device__() == (2, 0)
    assert taken.data.ptr == value.data.ptr
    del value, lent
    assert taken.get().tolist() == [[0, 1, 2, 3], [8, 5, 12, 7], [16, 9, 20, 11]]
    assert seen.get().tolist() == [[8, 12], [16, 20]]
    host = np.arange(4, dtype=np.float32)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    shown = cupy.ndarray((2,), np.float32, memptr=cupy.cuda.MemoryPointer(memory, 8))
    shown += 1
    assert shown.get().tolist() == [3.0, 4.0]
    assert host.tolist() == [0.0, 1.0, 3.0, 4.0]
