"""The fake of cupy: streams and events, captured graphs, memory, arrays."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.fake_cupy import Fake, installed

SEEDS = range(12)
WAIT_S = 20.0


@pytest.fixture
def fake():
    with installed(2) as made:
        yield made


def elsewhere(function: Any) -> Any:
    """What a function gives in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(WAIT_S)
    return found[0]


@contextmanager
def refused(fake: Fake, status: int) -> Iterator[None]:
    with pytest.raises(fake.cupy.cuda.runtime.CUDARuntimeError) as caught:
        yield
    assert caught.value.status == status


# ---------------------------------------------------------------------------------------------- the module


def test_it_takes_the_place_of_cupy_and_leaves_nothing_behind():
    before = threading.active_count()
    with installed() as fake:
        import cupy
        from cupy.cuda import nccl

        assert cupy is fake.cupy is sys.modules["cupy"]
        assert nccl is sys.modules["cupy.cuda.nccl"] is cupy.cuda.nccl
        assert cupy.arange(3).get().tolist() == [0, 1, 2]
        with pytest.raises(AssertionError, match="installed already"), installed():
            pass
    assert not [name for name in sys.modules if name.split(".")[0] == "cupy"]
    assert threading.active_count() == before
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
    with installed(seed=seed) as fake:
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


def test_what_was_made_is_counted_and_gone_with_its_objects(fake):
    cuda = fake.cupy.cuda
    stream, event = cuda.Stream(non_blocking=True), cuda.Event()
    pointers = stream.ptr, event.ptr
    assert (fake.streams, fake.events) == (1, 1)
    event.record(stream)
    cuda.Device(0).synchronize()
    del stream, event
    assert (fake.streams, fake.events) == (0, 0)
    assert fake.counts["eventCreateWithFlags"] == fake.counts["eventRecord"] == fake.counts["deviceSynchronize"] == 1
    for call in (cuda.runtime.streamSynchronize, cuda.runtime.eventQuery):
        for pointer in pointers:
            with refused(fake, 400):
                call(pointer)


# -------------------------------------------------------------------------------------------------- graphs


def test_a_captured_graph_runs_when_it_is_launched(fake):
    cupy = fake.cupy
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    value = cupy.zeros(4)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        assert stream.is_capturing()
        value += 1
        event = stream.record()
        other.wait_event(event)
        assert other.is_capturing()
        with other:
            value *= 2
        for wrong, status in ((stream.synchronize, 900), (lambda: stream.done, 900), (value.get, 900)):
            with refused(fake, status):
                wrong()
        with refused(fake, 900):
            cupy.cuda.runtime.deviceSynchronize()
        with refused(fake, 907):
            event.synchronize()
        stream.wait_event(other.record())
        graph = stream.end_capture()
    assert not stream.is_capturing()
    assert not other.is_capturing()
    assert value.get().tolist() == [0.0] * 4
    for expected in (2.0, 6.0, 14.0):
        graph.launch(stream)
        stream.synchronize()
        assert value.get().tolist() == [expected] * 4


def test_what_a_capture_forbids(fake):
    cuda = fake.cupy.cuda
    stream, other = cuda.Stream(), cuda.Stream(non_blocking=True)
    outside = other.record()
    with pytest.raises(RuntimeError, match="default"):
        cuda.Stream.null.begin_capture()
    with refused(fake, 401):
        stream.end_capture()
    stream.begin_capture()
    with refused(fake, 905):
        stream.wait_event(outside)
    with refused(fake, 906):
        fake.cupy.zeros(3)  # on the default stream, which a blocking stream waits for
    other.wait_event(stream.record())
    with other:
        fake.cupy.zeros(3)
    with refused(fake, 904):
        stream.end_capture()


def test_a_graph_does_not_keep_memory(fake):
    cupy = fake.cupy
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        value = cupy.zeros(100)
        stream.synchronize()
        stream.begin_capture()
        value += 1
        graph = stream.end_capture()
    del value
    graph.launch(stream)
    stream.synchronize()
    assert "was freed" in fake.violations.pop()
    assert not fake.violations


# ------------------------------------------------------------------------------------------------- runtime


def test_the_runtime_by_pointers(fake):
    cupy, runtime = fake.cupy, fake.cupy.cuda.runtime
    source, target = cupy.arange(6, dtype=np.uint8), cupy.zeros(6, np.uint8)
    runtime.memcpyAsync(target.data.ptr + 2, source.data.ptr, 3, runtime.memcpyDeviceToDevice, 0)
    runtime.memsetAsync(target.data.ptr + 5, 9, 1, 0)
    runtime.streamSynchronize(0)
    assert target.get().tolist() == [0, 0, 0, 1, 2, 9]
    assert runtime.getDeviceCount() == 2
    assert runtime.deviceGetPCIBusId(0) != runtime.deviceGetPCIBusId(1)
    with refused(fake, 101):
        runtime.setDevice(2)
    with refused(fake, 1):
        runtime.memcpyAsync(target.data.ptr, 0, 3, 3, 0)
    with refused(fake, 1):
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, 3, 5, 0)
    assert runtime.pointerGetAttributes(target.data.ptr + 1).device == 0


def test_handles_of_memory(fake):
    cupy, runtime = fake.cupy, fake.cupy.cuda.runtime
    value = cupy.arange(8)
    handle = runtime.ipcGetMemHandle(value[3:].data.ptr)
    assert type(handle) is bytes
    opened = runtime.ipcOpenMemHandle(handle)
    assert opened == value.data.ptr  # the allocation's, as the real one
    runtime.ipcCloseMemHandle(opened)
    with refused(fake, 1):
        runtime.ipcCloseMemHandle(opened)
    del value
    for wrong in (handle, bytes(64), b""):
        with refused(fake, 1):
            runtime.ipcOpenMemHandle(wrong)
