"""Staging buffers for tensors on another device than the backend's, and the copies to and from them.

Each rank stages its own tensors, unknown to the other ranks. A staging buffer has the size of its tensor, without
gaps. Inputs of a kernel are copied into staging buffers before it, and outputs are copied out after it, so the tensors
themselves are not touched in between. In-place operands share a staging buffer.

Copies from and to a GPU follow all work that the caller has enqueued (`streams`), and have ended when the call returns.
They run on a separate stream and wait for no other work on the device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from raycollect.backends import arrays
from raycollect.backends.arrays import Array, DeviceArray, native
from raycollect.backends.device_arrays import bits_view, device_id
from raycollect.backends.elements import convert
from raycollect.backends.experimental import warn_once
from raycollect.backends.streams import GroupStream, on_device, on_stream, wait
from raycollect.core.model import TensorInfo
from raycollect.errors import CollectiveTimeoutError, KernelError, PlanAbortedError, RaycollectError
from raycollect.planner import Domain

CPU, CUDA = "cpu", "cuda"

Check = Callable[[], None]  # called repeatedly during a wait for a device; raises to end the wait


@dataclass(slots=True, eq=False)
class Patience:
    """Ends a wait for a device on an abort, or `limit_s` after the first call."""

    reason: Callable[[], str | None]
    limit_s: float
    _until_s: float = 0.0

    def __call__(self) -> None:
        """Raises PlanAbortedError or CollectiveTimeoutError to end the wait."""
        reason, now_s = self.reason(), time.monotonic()
        if reason is not None:
            raise PlanAbortedError(detail=reason)
        self._until_s = self._until_s or now_s + self.limit_s
        if now_s > self._until_s:
            detail = f"timed out after {self.limit_s:g} s waiting for a device before a copy"
            raise CollectiveTimeoutError(timeout_s=self.limit_s, detail=detail)


def home_of(memory: str, communicator: object) -> str:
    """The device of a communicator: ``"cpu"``, ``"cuda:0"``; empty if it takes tensors on any device."""
    if memory != CUDA:
        return memory
    said = getattr(communicator, "device", "")
    return said or f"{CUDA}:{import_module('cupy').cuda.runtime.getDevice()}"


def is_home(array: Array | DeviceArray, home: str) -> bool:
    """Whether an array is on the backend's device."""
    if type(array) is not DeviceArray:
        return home in ("", CPU)
    return home in ("", array.device)


class StagingCopies(NamedTuple):
    """The copies around the kernels of one step."""

    loads: Sequence[tuple[Any, Any]]  # (staging buffer, tensor)
    unloads: Sequence[tuple[Any, Any]]  # (tensor, staging buffer)
    is_whole: bool  # kernels write only staging buffers

    def load(self, check: Check) -> None:
        """Copies the inputs of the kernels into the staging buffers."""
        for target, source in self.loads:
            transfer(target, source, check)

    def unload(self, check: Check) -> None:
        """Copies the outputs of the kernels into the tensors."""
        for target, source in self.unloads:
            transfer(target, source, check)


class StagingBuffers:
    """The staging buffers of one run; `homes` has the device of each group, as `home_of` returns it."""

    def __init__(self, homes: Mapping[Domain, str]) -> None:
        self._homes = homes
        self._buffers: dict[tuple[Any, ...], Any] = {}  # by address and layout, so that aliases share a buffer
        self._real: dict[int, Any] = {}  # id of a staging buffer -> its tensor
        self._sides: dict[tuple[int, str], tuple[Any, Any]] = {}  # so that equal pieces are one object

    def __len__(self) -> int:
        return len(self._buffers)

    def side(self, side: Any, domain: Domain) -> Any:
        """One side of a kernel, with staging buffers for tensors on other devices; raises MemoryError."""
        home = self._homes.get(domain, "")
        if side is None or not home:
            return side
        if type(side) is not tuple:
            return self.of(side, home)
        if all(is_home(array, home) for array in side):
            return side
        cached = self._sides.get((id(side), home))
        if cached is None:
            cached = self._sides[id(side), home] = side, tuple([self.of(array, home) for array in side])
        return cached[1]

    def staging_copies(self, sides: Sequence[tuple[Any, Any]]) -> StagingCopies | None:
        """The copies around kernels of these (read, written) sides; None if no side has staging buffers."""
        reads = _distinct(src for src, _ in sides)
        writes = _distinct(dst for _, dst in sides)
        loads = [(array, self._real[id(array)]) for array in reads if id(array) in self._real]
        unloads = [(self._real[id(array)], array) for array in writes if id(array) in self._real]
        return StagingCopies(loads, unloads, len(unloads) == len(writes)) if loads or unloads else None

    def of(self, array: Any, home: str) -> Any:
        """The staging buffer of an array on a device; the array itself if it is there. Raises MemoryError."""
        if is_home(array, home):
            return array
        device = array.device if type(array) is DeviceArray else CPU
        key = (home, device, *arrays.place(array)[:4])
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = _make_buffer(array, home)
            self._real[id(buffer)] = array
        return buffer


def _distinct(sides: Iterator[Any]) -> list[Any]:
    distinct = [array for side in sides for array in (side if type(side) is tuple else (side,)) if array is not None]
    return list({id(array): array for array in distinct}.values())


def _make_buffer(array: Array | DeviceArray, home: str) -> Any:
    if home == CPU:
        return np.empty(array.shape, native(array.dtype))
    info = arrays.info(array)
    wanted = TensorInfo(shape=info.shape, dtype=info.dtype, itemsize=info.itemsize, device=home, library="cupy")
    with _lent(import_module("cupy"), home) as stream, stream.entered():
        return arrays.memory(arrays.empty(wanted))


def transfer(target: Array | DeviceArray, source: Array | DeviceArray, check: Check) -> None:
    """Copies a tensor to another one of the same size and dtype, on any devices.

    In host memory the dtypes may differ.

    The copy follows all work that the caller has enqueued, and has ended when the call returns. `check` is called
    during waits for a device.

    Raises:
        KernelError: The device has failed.
        Exception: The exception of `check`.
    """
    if type(target) is not DeviceArray and type(source) is not DeviceArray:
        there = cast("Array", source)
        convert(cast("Array", target), there.reshape(target.shape))
        return
    if not target.size:
        return
    try:
        if type(target) is DeviceArray and type(source) is DeviceArray and target.device == source.device:
            _moved(target, source, check)
            return
        host = _fetched(source, check) if type(source) is DeviceArray else cast("Array", source)
        if type(target) is DeviceArray:
            _put(target, host.reshape(target.shape), check)
        else:
            np.copyto(cast("Array", target), host.reshape(target.shape))
    except (RaycollectError, MemoryError):
        raise
    except Exception as exc:
        raise KernelError(detail=f"a copy from {_place(source)} to {_place(target)} failed: {exc}") from exc


def _moved(target: DeviceArray, source: DeviceArray, check: Check) -> None:
    cupy = _cupy_for(target)
    if cupy is None:
        target.take(source)
        return
    with _lent(cupy, target.device) as stream:
        with stream.entered():
            bits_view(target)[...] = bits_view(source).reshape(target.shape)
        wait(stream.has_ended, check)


def _place(array: Array | DeviceArray) -> str:
    return array.device if isinstance(array, DeviceArray) else "the host"


def _fetched(source: DeviceArray, check: Check) -> Array:
    cupy = _cupy_for(source)
    if cupy is None:
        return arrays.copy_to_host(source)
    host = np.empty(source.shape, source.dtype)
    with _lent(cupy, source.device) as stream:
        with stream.entered():
            pass
        wait(stream.has_ended, check)  # for the caller's enqueued work: the copy itself can't be interrupted
        number = device_id(source.device)
        with on_device(number), on_stream(stream.stream, number):
            view = bits_view(source)
            view.get(stream=stream.stream, out=host.view(view.dtype))
    return host


def _put(target: DeviceArray, host: Array, check: Check) -> None:
    line = np.ascontiguousarray(host, native(host.dtype)).reshape(host.shape)  # which makes a scalar a row
    cupy = _cupy_for(target)
    if cupy is None:
        target.tensor.copy_(arrays.restore(line if line.flags.writeable else line.copy(), "torch"))
        if target.device.startswith(CUDA):
            import_module("torch").cuda.current_stream(target.device).synchronize()
        return
    with _lent(cupy, target.device) as stream:
        with stream.entered():
            view = bits_view(target)
            bits = line.view(view.dtype)
            if target.shadow.flags.c_contiguous:
                view.set(bits, stream=stream.stream)
            else:
                view[...] = cupy.asarray(bits)
        wait(stream.has_ended, check)


# Device -> idle streams. Appending and popping are atomic.
_idle: dict[int, list[GroupStream]] = defaultdict(list)


@contextmanager
def _lent(cupy: ModuleType, device: str) -> Iterator[GroupStream]:
    # A stream whose wait has failed is not used again.
    warn_once("staging of tensors on GPUs")
    number = device_id(device)
    try:
        stream = _idle[number].pop()
    except IndexError:
        stream = GroupStream(number)
    yield stream
    _idle[number].append(stream)


def _cupy_for(array: DeviceArray) -> ModuleType | None:
    # None if the array is not on a GPU, or cupy is missing: then torch copies.
    if not array.device.startswith(CUDA):
        return None
    try:
        return import_module("cupy")
    except ImportError:
        return None
