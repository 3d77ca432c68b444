"""The fake of cupy: streams and events, captured graphs, memory, arrays."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.fake_cupy import installed
from tests.pure.two_gpus import SEEDS, elsewhere, fake, refused

__all__ = ["fake"]  # a fixture


# ---------------------------------------------------------------------------------------------- the module


def test_it_takes_the_place_of_cupy_and_leaves_nothing_behind():
    before = set(threading.enumerate())
    with installed() as fake:
        import cupy
        from cupy.cuda import nccl

        assert cupy is fake.cupy is sys.modules["cupy"]
        assert nccl is sys.modules["cupy.cuda.nccl"] is cupy.cuda.nccl
        assert cupy.arange(3).get().tolist() == [0, 1, 2]
        with pytest.raises(AssertionError, match="installed already"), installed():
            pass
    assert not [name for name in sys.modules if name.split(".")[0] == "cupy"]
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="Unloading"):
        cupy.zeros(3)


def test_no_devices():
    with installed(0) as fake:
        with refused(fake, 100):
            fake.cupy.cuda.runtime.getDeviceCount()
        assert not fake.cupy.cuda.is_available()


# ------------------------------------------------------------------------------------------------- streams


def _handed_over(seed: int, **how: Any) -> bool:
    """Whether what one stream writes is what another one reads, which waits for it or doesn't."""
    with installed(seed=seed) as fake, fake.alone():
        cupy = fake.cupy
        first = cupy.cuda.Stream(non_blocking=how.get("first_non_blocking", True))
        second = cupy.cuda.Stream.null if how.get("null") else cupy.cuda.Stream(non_blocking=True)
        value, seen = cupy.zeros(5), cupy.zeros(5)
        cupy.cuda.runtime.deviceSynchronize()
        with first:
            for _ in range(3):
                value += 1
        if how.get("wait"):
            second.wait_event(first.record())
        with second:
            cupy.copyto(seen, value)
            found = seen.get()
        cupy.cuda.runtime.deviceSynchronize()
        assert value.get().tolist() == [3.0] * 5
        return bool((found == 3).all())


def test_streams_know_nothing_of_each_other_unless_they_wait():
    assert all(_handed_over(seed, wait=True) for seed in SEEDS)
    assert not all(_handed_over(seed) for seed in SEEDS)


def test_the_default_stream_waits_for_blocking_streams_only():
    assert all(_handed_over(seed, null=True, first_non_blocking=False) for seed in SEEDS)
    assert not all(_handed_over(seed, null=True) for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocking_streams_wait_for_the_default_stream(seed):
    with installed(seed=seed) as fake:
        cupy = fake.cupy
        stream = cupy.cuda.Stream()
        value = cupy.zeros(3)
        for _ in range(3):
            value += 1
        with stream:
            assert value.get().tolist() == [3.0] * 3


def test_an_event_is_done_when_what_came_before_it_is(fake):
    cupy, runtime = fake.cupy, fake.cupy.cuda.runtime
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
    assert event.done
    assert runtime.eventQuery(event.ptr) == 0
    fake.hold(stream)
    with stream:
        value = cupy.full(4, 7)
    event.record(stream)
    assert not event.done
    assert not stream.done
    assert runtime.eventQuery(event.ptr) == 600
    fake.release(stream)
    event.synchronize()
    assert event.done
    assert stream.done
    assert value.get(stream).tolist() == [7] * 4


def test_a_wait_stays_as_it_was_when_the_event_is_recorded_again(fake):
    cuda = fake.cupy.cuda
    first, second, waiting = (cuda.Stream(non_blocking=True) for _ in range(3))
    event = cuda.Event()
    fake.hold(first)
    fake.hold(second)
    with first:
        first_value = fake.cupy.ones(3)
    waiting.wait_event(first.record(event))
    with second:
        second_value = fake.cupy.ones(3)
    event.record(second)
    assert not waiting.done
    fake.release(first)
    waiting.synchronize()
    assert not event.done
    fake.release(second)
    event.synchronize()
    assert first_value.get().sum() == second_value.get().sum() == 3


def test_streams_belong_to_devices_and_the_current_ones_to_threads(fake):
    cuda = fake.cupy.cuda
    with cuda.Device(1):
        stream, event = cuda.Stream(non_blocking=True), cuda.Event()
    assert stream.device_id == 1
    with pytest.raises(RuntimeError, match="does not match"), stream:
        pass
    with pytest.raises(RuntimeError, match="does not match"):
        stream.use()
    with refused(fake, 400):
        cuda.Stream(non_blocking=True).record(event)
    with refused(fake, 400), cuda.ExternalStream(stream.ptr):
        fake.cupy.zeros(3)
    with cuda.Device(1), stream:
        assert cuda.get_current_stream() is cuda.get_current_stream(1) is stream
        assert cuda.get_current_stream(0) is cuda.Stream.null
        assert fake.cupy.zeros(3).device.id == 1
        assert elsewhere(lambda: (cuda.runtime.getDevice(), cuda.get_current_stream(1))) == (0, cuda.Stream.null)
    assert cuda.runtime.getDevice() == 0
    assert cuda.get_current_stream(1) is cuda.Stream.null
    assert fake.contexts == {0, 1}


# ------------------------------------------------------------------------------------------------- runtime


def test_handles_of_memory(fake):
    """Handles are of allocations. Only other processes open them, and have them at other addresses."""
    cupy, runtime = fake.cupy, fake.cupy.cuda.runtime
    value = cupy.arange(8)
    handle = runtime.ipcGetMemHandle(value[3:].data.ptr)
    assert type(handle) is bytes
    with refused(fake, 201):
        runtime.ipcOpenMemHandle(handle)
    with fake.as_process(1):
        opened = runtime.ipcOpenMemHandle(handle)
        assert opened != value.data.ptr
        assert runtime.ipcOpenMemHandle(handle) == opened
        memory = cupy.cuda.UnownedMemory(opened, value.nbytes, None, 0)
        seen = cupy.ndarray((8,), value.dtype, cupy.cuda.MemoryPointer(memory, 0))
        seen[6:][...] = 0
        assert seen[2:].reshape(3, 2).T[1].get().tolist() == [3, 5, 0]
    assert fake.opened == 2
    with refused(fake, 1):
        runtime.ipcCloseMemHandle(opened)  # of another process
    with fake.as_process(1):
        for _ in range(2):
            runtime.ipcCloseMemHandle(opened)
        with refused(fake, 1):
            runtime.ipcCloseMemHandle(opened)
    assert value.get().tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    del value
    assert not fake.violations
    for wrong in (handle, bytes(64), b""):
        with refused(fake, 1), fake.as_process(1):
            runtime.ipcOpenMemHandle(wrong)


def test_memory_of_another_process_is_reached_where_it_is_open_and_nowhere_else(fake):
    cupy, runtime = fake.cupy, fake.cupy.cuda.runtime
    value = cupy.arange(8)
    handle = runtime.ipcGetMemHandle(value.data.ptr)
    with fake.as_process(1):
        mine = cupy.zeros(8, value.dtype)
        opened = runtime.ipcOpenMemHandle(handle)
        cases = [("at an address of process 0", value.data.ptr, 64), ("goes 8 bytes beyond", opened + 8, 64)]
        runtime.memcpyAsync(mine.data.ptr, opened, 64, runtime.memcpyDeviceToDevice, 0)
        assert not fake.violations
        for told, source, nbytes in cases:
            runtime.memcpyAsync(mine.data.ptr, source, nbytes, runtime.memcpyDeviceToDevice, 0)
            assert told in fake.violations.pop()
    with fake.as_process(2):
        runtime.memcpyAsync(opened, opened, 8, runtime.memcpyDeviceToDevice, 0)
        assert "at an address of process 1" in fake.violations.pop()
        fake.violations.clear()
    with fake.as_process(1):
        runtime.ipcCloseMemHandle(opened)
        runtime.memcpyAsync(mine.data.ptr, opened, 8, runtime.memcpyDeviceToDevice, 0)
        assert "which was closed" in fake.violations.pop()
        opened = runtime.ipcOpenMemHandle(handle)
    runtime.deviceSynchronize()
    del value
    assert "was freed while process 1 has it open" in fake.violations.pop()
    with fake.as_process(1):
        runtime.memcpyAsync(mine.data.ptr, opened, 8, runtime.memcpyDeviceToDevice, 0)
        assert "which was freed" in fake.violations.pop()
    runtime.deviceSynchronize()
    fake.violations.clear()
    with fake.without_handles():
        bare = cupy.zeros(3)
    with refused(fake, 1):
        runtime.ipcGetMemHandle(bare.data.ptr)


# ------------------------------------------------------------------------------- kernels of one's own


LOOP = (
    "for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < n;"
    " i += (unsigned long long)gridDim.x * blockDim.x) {"
)


def module(*functions: str, steps: str, takes: str = "const int* a, int* o") -> str:
    head = f'extern "C" __global__ void it({takes}, unsigned long long n) {{'
    return "\n".join([*functions, head, LOOP, *steps.splitlines(), "}", "}"])


@pytest.mark.parametrize(("instruction", "is_kept"), [("a[i] + b[i]", False), ("sum(a[i], b[i])", True)])
def test_operators_take_subnormal_numbers_for_zeros_and_ptx_does_not(fake, instruction, is_kept):
    cupy = fake.cupy
    asm = 'float c; asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;'
    code = module(
        f"__device__ float sum(float a, float b) {{ {asm} }}",
        takes="const float* a, const float* b, float* o",
        steps=f"o[i] = {instruction};",
    )
    a, o = cupy.asarray(np.full(3, 1e-40, np.float32)), cupy.empty(3, np.float32)
    cupy.RawModule(code=code).get_function("it")((1,), (256,), (a.data.ptr, a.data.ptr, o.data.ptr, 3))
    assert (o.get() != 0).all() == is_kept
    assert (cupy.add(a, a).get() == 0).all()  # as everything that cupy compiles
    assert (cupy.minimum(a, cupy.zeros(3, np.float32)).get() == 0).all()
    assert (cupy.add(a.astype(np.float64), 0.0).get() != 0).all()


@pytest.mark.parametrize(
    "value",
    [
        *("a[i] and a[i]", "'x'.join(a)", "a[i] ? a[i] ? a[i] : a[i] : a[i]", "[a[i]]"),
        *("a[i] & a[i] != a[i]", "a[i] < a[i] || a[i] < a[i]", "a[i] < a[i] | a[i]"),  # C++ reads these differently
        "a[i] < a[i] < a[i]",
    ],
)
def test_kernels_that_are_not_read_are_refused(fake, value):
    with pytest.raises((ValueError, SyntaxError)):
        fake.cupy.RawModule(code=module(steps=f"o[i] = {value};"))


def test_kernels_take_addresses_and_stay_in_their_memory(fake):
    cupy = fake.cupy
    kernel = cupy.RawModule(code=module(steps="o[i] = a[i];")).get_function("it")
    given, into = cupy.zeros(3, np.int32), cupy.zeros(3, np.int32)
    with pytest.raises(TypeError, match="takes 2 addresses"):
        kernel((1,), (256,), (given.data.ptr, 3))
    with pytest.raises(TypeError, match="takes 2 addresses"):
        kernel((1,), (256,), (given, into, 3))
    with pytest.raises(ValueError, match="can't be launched"):
        kernel((0,), (256,), (given.data.ptr, into.data.ptr, 3))
    with pytest.raises(ValueError, match="no kernel other"):
        cupy.RawModule(code=module(steps="o[i] = a[i];")).get_function("other")((1,), (1,), ())
    for functions, steps in ((["int x;"], "o[i] = a[i];"), ([], "return;")):
        with pytest.raises(ValueError, match="can't read"):
            cupy.RawModule(code=module(*functions, steps=steps))
    kernel((1,), (256,), (given.data.ptr, into.data.ptr, 4))
    cupy.RawModule(code=module(steps="o[i] = a[i] / a[i];")).get_function("it")(
        (1,), (256,), (given.data.ptr, into.data.ptr, 3)
    )
    cupy.cuda.runtime.deviceSynchronize()
    assert "a division of int32" in fake.violations.pop()
    assert "out of bounds" in fake.violations.pop()
