"""Copies between a GPU and the host: through page-locked memory, by chunks, beside a capture, until an abort."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays, streams
from raycollect.core.model import OpKind
from raycollect.engine.device_staging import BOUNCE_NBYTES, CHUNK_NBYTES, StagingBuffers, transfer
from raycollect.errors import PlanAbortedError
from raycollect.planner import Domain
from tests.fake_cupy import Fake
from tests.pure.fleet import WAIT_S
from tests.pure.mixed import WORLD, Mixed, same, seeds

LOCKED = 1  # cudaMemoryTypeHost
SIDES = ("GPU", "GPU, with gaps", "another GPU", "staging buffer", "host", "host, with gaps")


def side_of(fake: Fake, where: str, values: np.ndarray) -> Any:
    """A tensor of these values, [n], where a copy begins or ends."""
    wide = np.repeat(values, 2) if "gaps" in where else values
    if "GPU" in where:
        with fake.cupy.cuda.Device(1 if where == "another GPU" else 0):
            made = fake.cupy.asarray(wide)
        return arrays.memory(made[::2] if "gaps" in where else made)
    if where == "staging buffer":
        buffer = staging_buffer(fake, values)
        buffer[...] = values
        return buffer
    return wide[::2] if "gaps" in where else wide.copy()


def staging_buffer(fake: Fake, values: np.ndarray) -> Any:
    """The buffer in host memory of a tensor like these values on a GPU."""
    return staged(arrays.memory(fake.cupy.asarray(values)))


def staged(tensor: arrays.DeviceArray) -> Any:
    domain = Domain.of("x", 0, (0, 1), "cpu")
    return StagingBuffers({domain: "cpu"}).side(tensor, domain)


def held(side: Any) -> np.ndarray:
    return side if isinstance(side, np.ndarray) else side.tensor.get()


WAYS = [(here, there) for here in SIDES for there in SIDES if "GPU" in here + there]
BETWEEN = [way for way in WAYS if sum("GPU" in side for side in way) == 1]
"""Those between a GPU and the host."""


@seeds
@pytest.mark.parametrize(("source", "target"), WAYS)
def test_copies_of_every_way_and_of_several_chunks(fake: Fake, source: str, target: str) -> None:
    nbytes = 2 * BOUNCE_NBYTES + 3
    values = np.random.default_rng(0).integers(0, 256, nbytes).astype(np.uint8)
    given, taken = side_of(fake, source, values), side_of(fake, target, np.zeros_like(values))
    transfer(taken, given, lambda: None)
    same(held(taken), values)
    assert not fake.counts["pageable"]


def test_a_chunk_of_page_locked_memory_ends_before_the_next(fake: Fake) -> None:
    values = np.arange((CHUNK_NBYTES >> 3) + 1000.0)
    buffer, tensor = staging_buffer(fake, values), arrays.memory(fake.cupy.asarray(values))
    fake.counts.clear()
    transfer(buffer, tensor, lambda: None)
    same(buffer, values)
    assert fake.counts["memcpyAsync"] == 2


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5)])
@pytest.mark.parametrize("dtype", ["bool", "float16", "complex64"])
def test_staging_buffers_in_host_memory_are_page_locked(fake: Fake, shape: tuple[int, ...], dtype: str) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    buffer = staging_buffer(fake, values)
    assert (buffer.shape, buffer.dtype) == (shape, values.dtype)
    assert fake.cupy.cuda.runtime.pointerGetAttributes(buffer.ctypes.data).type == LOCKED


def test_where_no_more_memory_can_be_locked_staging_buffers_are_pageable(
    fake: Fake, mixed: Callable[[str], Mixed]
) -> None:
    fake.limit(BOUNCE_NBYTES, device=-1)
    values = np.ones((BOUNCE_NBYTES >> 3) + 1000)
    one = mixed("local")
    tensors = [one.put(values * (rank + 1), 0 if rank == 0 else None) for rank in range(WORLD)]
    one.fleet.must(OpKind.ALLREDUCE, one.fleet.keep_all(tensors))
    same(tensors[0], values * sum(range(1, WORLD + 1)))


@seeds
@pytest.mark.parametrize(("source", "target"), BETWEEN)
def test_an_aborted_copy_leaves_nothing_behind(fake: Fake, source: str, target: str) -> None:
    values, aborted = np.arange(1000.0), 0
    given, taken = side_of(fake, source, values), side_of(fake, target, np.zeros_like(values))
    tensor = (given if isinstance(taken, np.ndarray) else taken).tensor

    def check() -> None:
        if fake.counts["memcpyAsync"]:
            raise PlanAbortedError(detail="in the middle of a copy")

    for _ in range(5):
        with tensor.device, fake.alone():
            stream, other = (fake.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            with other:
                elsewhere = fake.cupy.zeros(1)
                for _ in range(100):
                    elsewhere += 1  # for the device to do in between
            fake.counts.clear()
            try:
                with stream:
                    transfer(taken, given, check)
            except PlanAbortedError:
                aborted += 1
            before = held(taken).copy()
            fake.drain()
            same(held(taken), before)
    assert aborted


@pytest.mark.parametrize(("source", "target"), BETWEEN)
def test_no_copy_follows_work_for_which_nobody_waits_any_more(fake: Fake, source: str, target: str) -> None:
    values = np.arange(1000.0)
    given, taken = side_of(fake, source, values), side_of(fake, target, np.zeros_like(values))
    tensor = (given if isinstance(taken, np.ndarray) else taken).tensor
    with tensor.device, fake.cupy.cuda.Stream(non_blocking=True) as stream:
        fake.hold(stream)
        tensor *= 1
        with pytest.raises(PlanAbortedError):
            transfer(taken, given, _abort)
        fake.release(stream)
        fake.drain()
        assert not held(taken).any()


def _abort() -> None:
    raise PlanAbortedError(detail="at once")


@seeds
@pytest.mark.parametrize(("source", "target"), WAYS)
def test_copies_beside_a_capture_of_another_thread(fake: Fake, source: str, target: str) -> None:
    values = np.arange(300.0)
    given, taken = side_of(fake, source, values), side_of(fake, target, np.zeros_like(values))
    on_gpu = [one for one in (given, taken) if not isinstance(one, np.ndarray)]
    mark = streams.mark([arrays.describe(one.tensor) for one in on_gpu])

    def copy() -> None:
        with streams.after(mark):
            transfer(taken, given, lambda: None)
            staged(on_gpu[0])

    with fake.capturing(), ThreadPoolExecutor(1) as thread:
        thread.submit(copy).result(WAIT_S)
    same(held(taken), values)
