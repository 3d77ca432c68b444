"""Copies of staging between real GPUs and the host: their bits, what they follow, and their end after an abort."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("ml_dtypes", reason="raycollect needs ml_dtypes")
pytest.importorskip("msgspec", reason="raycollect needs msgspec")

import numpy as np

from raycollect.backends import arrays
from raycollect.engine.device_staging import BOUNCE_NBYTES, CHUNK_NBYTES, StagingBuffers, transfer
from raycollect.errors import PlanAbortedError
from raycollect.planner import Domain

from . import devices
from .cases import LIBRARIES, placed, seen, to_host
from .work import WORK, Busy, Work, must_be_busy

SIZES = (1, 1000, BOUNCE_NBYTES + 1) if devices.FAKE else (1, 1000, BOUNCE_NBYTES + 1, CHUNK_NBYTES + 1)
SIZE = 100_003
BYTE = np.dtype(np.uint8)


def staging_buffer(tensor: arrays.DeviceArray) -> Any:
    domain = Domain.of("x", 0, (0, 1), "cpu")
    return StagingBuffers({domain: "cpu"}).side(tensor, domain)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("layout", ["plain", "every other"])
@pytest.mark.parametrize("is_buffer", [True, False], ids=["staging buffer", "other memory"])
@pytest.mark.parametrize("size", SIZES)
def test_copies_keep_every_bit(size: int, is_buffer: bool, layout: str, library: str) -> None:
    devices.need(library)
    values = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    source, target = (placed(given, layout, library) for given in (values, np.zeros_like(values)))
    host = staging_buffer(seen(source)) if is_buffer else np.zeros(size, np.uint8)
    transfer(host, seen(source), lambda: None)
    np.testing.assert_array_equal(host, values)
    transfer(seen(target), host, lambda: None)
    np.testing.assert_array_equal(to_host(target, BYTE), values)


@pytest.mark.parametrize("is_buffer", [True, False], ids=["staging buffer", "other memory"])
def test_where_memory_is_page_locked(is_buffer: bool) -> None:
    tensor = seen(placed(np.zeros(1000, np.uint8), "plain", "cupy"))
    host = staging_buffer(tensor) if is_buffer else np.zeros(1000, np.uint8)
    attributes = import_module("cupy").cuda.runtime.pointerGetAttributes(host.ctypes.data)
    assert attributes.type == int(is_buffer)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("aborts", [False, True])
def test_a_copy_follows_its_callers_stream_unless_it_is_aborted(aborts: bool, library: str) -> None:
    devices.need(library)
    if devices.FAKE and aborts:
        pytest.skip("the fake's kernels take no time")
    work: Work = WORK[library]()
    source, target = work.zeros(SIZE), work.zeros(SIZE)
    work.host(source), work.host(target)
    busy, mine = Busy(work), work.stream()
    host = staging_buffer(seen(source))
    host[...] = 0

    def check() -> None:
        if aborts:
            raise PlanAbortedError(detail="at once")

    with work.on(mine):
        busy.start()
        source += 7
        must_be_busy(work, mine)
        for to, given in ((host, seen(source)), (seen(target), np.full(SIZE, 7, np.float32))):
            with pytest.raises(PlanAbortedError) if aborts else nullcontext():
                transfer(to, given, check)
        work.host(source)  # now no work is left that a late copy could follow
        for found in (host, work.host(target)):
            np.testing.assert_array_equal(found, np.full(SIZE, 0 if aborts else 7))
