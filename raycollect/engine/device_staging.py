"""Staging buffers for tensors on another device than the backend's, and the copies to and from them.

Each rank stages its own tensors, unknown to the other ranks. A staging buffer has the size of its tensor, without
gaps. Inputs of a kernel are copied into staging buffers before it, and outputs are copied out after it, so the tensors
themselves are not touched in between. In-place operands share a staging buffer.

Copies from and to a GPU follow all work that the caller has enqueued (`streams`), and have ended when the call returns.
They run on a separate stream and wait for no other work on the device. Another thread may capture a CUDA graph.

A GPU copies from and to page-locked memory only: such a copy runs beside the host, which can stop waiting for it.
Staging buffers are page-locked, in cupy's pool; other host memory is copied through a small page-locked buffer. Without
cupy, torch copies, through pageable memory.

Staging buffers are private memory, which `shm` stages by chunks, page-locked or not. They are not in the arena, as it
can't be page-locked: the arena is sparse, and locking would fill it; and it returns free pages to the system, while the
GPU would go on with the old ones.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from raycollect.backends import arrays
from raycollect.backends.arrays import Array, DeviceArray, native
from raycollect.backends.cuda_driver import RelaxedCapture
from raycollect.backends.device_arrays import bits_view, device_id
from raycollect.backends.elements import convert
from raycollect.backends.experimental import warn_once
from raycollect.backends.kernels import chunks
from raycollect.backends.streams import GroupStream, has_drained, on_device, wait
from raycollect.core.model import TensorInfo
from raycollect.errors import CollectiveTimeoutError, KernelError, PlanAbortedError, RaycollectError
from raycollect.planner import Domain

CPU, CUDA = "cpu", "cuda"

# Larger staging buffers are pageable: cupy's pool rounds up to a power of two, and keeps its memory locked
_MOST_LOCKED_NBYTES = 256 << 20
BOUNCE_NBYTES = 4 << 20  # The buffer for pageable memory; it fits the cache of a CPU
CHUNK_NBYTES = 64 << 20  # Copies of page-locked memory; an abort ends a copy after the current chunk
_DRAIN_S = 5.0  # How long a chunk may take to end after an abort
_HOST = 1  # cudaMemoryTypeHost: page-locked memory

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
        return _empty_on_host(array)
    info = arrays.info(array)
    wanted = TensorInfo(shape=info.shape, dtype=info.dtype, itemsize=info.itemsize, device=home, library="cupy")
    with _lent(import_module("cupy"), home) as stream, stream.entered():
        return arrays.memory(arrays.empty(wanted))


def _empty_on_host(array: Array | DeviceArray) -> Array:
    cupy = _cupy_for(array) if isinstance(array, DeviceArray) and 0 < array.nbytes <= _MOST_LOCKED_NBYTES else None
    if cupy is not None:
        with suppress(cupy.cuda.runtime.CUDARuntimeError), on_device(device_id(array.device)):  # no more can be locked
            return _page_locked(cupy, array.nbytes).view(native(array.dtype)).reshape(array.shape)
    return np.empty(array.shape, native(array.dtype))


def _page_locked(cupy: ModuleType, nbytes: int) -> Array:
    with RelaxedCapture():
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


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
        with RelaxedCapture():
            if type(target) is not DeviceArray:
                _fetch(cast("Array", target), cast("DeviceArray", source), check)
            elif type(source) is not DeviceArray:
                _put(target, cast("Array", source), check)
            elif target.device == source.device:
                _move(target, source, check)
            else:
                host = _empty_on_host(source)
                _fetch(host, source, check)
                _put(target, host, check)
    except (RaycollectError, MemoryError):
        raise
    except Exception as exc:
        raise KernelError(detail=f"a copy from {_place(source)} to {_place(target)} failed: {exc}") from exc


def _move(target: DeviceArray, source: DeviceArray, check: Check) -> None:
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


def _fetch(target: Array, source: DeviceArray, check: Check) -> None:
    cupy = _cupy_for(source)
    if cupy is None:
        np.copyto(target, arrays.copy_to_host(source).reshape(target.shape))
        return
    is_direct = target.flags.c_contiguous and target.dtype == source.dtype
    host = target if is_direct else np.empty(source.shape, source.dtype)
    with _lent(cupy, source.device) as stream:
        with stream.entered():
            row = cupy.ascontiguousarray(bits_view(source))
        wait(stream.has_ended, check)
        _copy(stream, row, host, check, is_fetch=True)
    if host is not target:
        np.copyto(target, host.reshape(target.shape))


def _put(target: DeviceArray, host: Array, check: Check) -> None:
    on_host = np.ascontiguousarray(host, native(host.dtype)).reshape(target.shape)  # a scalar becomes an array first
    cupy = _cupy_for(target)
    if cupy is None:
        target.tensor.copy_(arrays.restore(on_host if on_host.flags.writeable else on_host.copy(), "torch"))
        if target.device.startswith(CUDA):
            import_module("torch").cuda.current_stream(target.device).synchronize()
        return
    view, is_dense = bits_view(target), target.shadow.flags.c_contiguous
    with _lent(cupy, target.device) as stream:
        with stream.entered():
            on_gpu = view if is_dense else cupy.empty(view.shape, view.dtype)
        wait(stream.has_ended, check)  # after an abort, no copy is left that would write the target later
        _copy(stream, on_gpu, on_host, check, is_fetch=False)
        if not is_dense:
            with stream.entered():
                view[...] = on_gpu
            wait(stream.has_ended, check)


def _copy(stream: GroupStream, row: Any, host: Array, check: Check, *, is_fetch: bool) -> None:
    """Copies between a row of a GPU and one of the host, both without gaps, by chunks: each ends before the next."""
    flat, cupy = host.reshape(-1).view(np.uint8), import_module("cupy")
    if flat.size != row.nbytes:
        raise ValueError(f"{flat.size} bytes can't be copied to or from {row.nbytes}")
    with on_device(row.device.id):
        is_locked = cupy.cuda.runtime.pointerGetAttributes(flat.ctypes.data).type == _HOST
        bounce = None if is_locked else _page_locked(cupy, BOUNCE_NBYTES)
        for lo, hi in chunks(flat.size, CHUNK_NBYTES if bounce is None else BOUNCE_NBYTES):
            part = flat[lo:hi]
            memory = part if bounce is None else bounce[: hi - lo]
            if bounce is not None and not is_fetch:
                memory[...] = part
            on_gpu, on_host = row.data.ptr + lo, memory.ctypes.data
            to, source = (on_host, on_gpu) if is_fetch else (on_gpu, on_host)
            stream.copy(to, source, hi - lo)
            try:
                wait(stream.has_ended, check)
            except BaseException:
                _drain(stream, (memory, row))
                raise
            if bounce is not None and is_fetch:
                part[...] = memory


def _drain(stream: GroupStream, memory: tuple[Array, Any]) -> None:
    # Keeps the memory of both sides until no copy uses it: their pools may reuse it at once.
    with suppress(Exception):  # a failed device does not copy
        if not has_drained(stream.has_ended, _DRAIN_S):
            _in_use.append(memory)


_in_use: list[tuple[Array, Any]] = []  # Memory of copies that have not ended, which is never freed
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
