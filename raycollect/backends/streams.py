"""CUDA streams: the work that a kernel follows, and how this process learns that the kernel has ended.

GPU work runs in the order of its stream, and streams are independent of each other. A communicator has its own stream.
Before each kernel this stream waits for the caller's work on cupy's and torch's current streams of the calling thread,
and on the default stream. A kernel has ended when the event after it is done, which the host queries; so the caller's
later work, on any stream, follows the kernel.

A call that another thread makes for its caller follows the caller's mark instead (`mark`, `after`). Work that a method
leaves on its own stream is joined to the default stream when its tensors are kept (`settle`). Copies between devices
follow the caller's streams on both (`follow`).

Events are reused: no call creates one. Without cupy, torch settles its own streams.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from raycollect.backends.cuda_driver import RelaxedCapture
from raycollect.backends.device_arrays import device_id
from raycollect.core import threads
from raycollect.core.model import TensorInfo

# A wait for a device first polls without sleeping: the shortest sleep of the host lasts longer than a small kernel.
# Then it sleeps for a fraction of its duration between two queries, at most `_PAUSE_S`
_SPIN_S, _PATIENCE, _PAUSE_S = 0.0002, 50, 0.0005
DEFAULT = 0  # The pointer of the default stream, which waits for all streams that are not non-blocking
_NOT_READY = 600  # cudaErrorNotReady


class Mark:
    """The progress of a thread's streams on each device; its events are reused when it is released."""

    __slots__ = ("__weakref__", "events")

    def __init__(self, events: dict[int, list[Any]]) -> None:
        self.events: dict[int, list[Any]] = events  # device -> the events to follow
        # No `__del__`: the garbage collector would finalize a mark in a cycle together with its events.
        weakref.finalize(self, _give_back, _free, events).atexit = False


class _Thread(threading.local):
    """The mark that a thread's kernels follow instead of its own streams."""

    mark: Mark | None = None


_thread = _Thread()
_free: dict[int, list[Any]] = defaultdict(list)  # Device -> unused events. Appending and popping are atomic.


class GroupStream:
    """The stream of one communicator on a device, used by one thread at a time."""

    def __init__(self, device: int) -> None:
        self._cuda = import_module("cupy").cuda
        self._device = device
        with RelaxedCapture(), on_device(device):
            self.stream: Any = self._cuda.Stream(non_blocking=True)
            self._before = self._cuda.Event(disable_timing=True)
            self._after = self._cuda.Event(disable_timing=True)

    @property
    def pointer(self) -> int:
        """The stream as NCCL takes it."""
        return int(self.stream.ptr)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Runs cupy's work inside on this stream, after the caller's work; records the end."""
        with RelaxedCapture(), on_device(self._device):
            self._follow()
            with on_stream(self.stream, self._device):
                try:
                    yield
                finally:  # work enqueued before a failure runs all the same
                    self._after.record(self.stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueues a copy between addresses of this device and of page-locked memory, after this stream's work."""
        runtime = self._cuda.runtime
        with RelaxedCapture(), on_device(self._device):
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, self.stream.ptr)
            self._after.record(self.stream)

    def has_ended(self) -> bool:
        """Tells whether the last `entered` or `copy` is done; raises cupy's error if the device has failed."""
        return _is_done(self._cuda.runtime.eventQuery(self._after.ptr))  # `Event.done` is False after a failure

    def _follow(self) -> None:
        runtime, progress = self._cuda.runtime, _thread.mark
        if progress is not None:
            for event in progress.events.get(self._device, ()):
                runtime.streamWaitEvent(self.stream.ptr, event.ptr)
            return
        for pointer in _current(self._device):
            runtime.eventRecord(self._before.ptr, pointer)  # recording the event again does not change earlier waits
            runtime.streamWaitEvent(self.stream.ptr, self._before.ptr)


def current_device() -> int | None:
    """Returns the calling thread's current device; None if there is none, or cupy was not imported."""
    try:
        return int(sys.modules["cupy"].cuda.runtime.getDevice())
    except Exception:  # noqa: BLE001 - not imported, or no driver: cupy raises many kinds
        return None


@contextmanager
def on_device(device: int | None) -> Iterator[None]:
    """Makes a device the calling thread's current one inside; None: does nothing.

    Setting a device makes a context on it, which takes about 0.5 GB there, and cupy's `Device` also restores the
    previous one. So nothing is set if the device is already current, and nothing is restored in threads that run no
    user code.
    """
    if device is None or device == current_device():
        yield
        return
    cuda = import_module("cupy").cuda
    if threads.is_own():
        cuda.Device(device).use()
        yield
    else:
        with cuda.Device(device):
            yield


@contextmanager
def on_stream(stream: Any, device: int) -> Iterator[None]:
    """Makes a stream cupy's current one of a device, which must be the current device.

    At the end of a stream's block, cupy forgets the stream that `use` had chosen before it (cupy#8377).
    """
    cuda = import_module("cupy").cuda
    before = cuda.get_current_stream(device)
    try:
        with stream:
            yield
    finally:
        if cuda.get_current_stream(device).ptr != before.ptr:
            before.use()


def wait(has_ended: Callable[[], bool], check: Callable[[], None]) -> None:
    """Polls a device until it is done; `check` runs in between and may raise."""
    began_s = time.monotonic()
    with RelaxedCapture():
        while not has_ended():
            check()
            pause(time.monotonic() - began_s)


def has_drained(has_ended: Callable[[], bool], limit_s: float) -> bool:
    """Waits until a device is done, after a failure; False if it is not in time. Raises the errors of `has_ended`."""
    until_s = time.monotonic() + limit_s
    with RelaxedCapture():
        wait(lambda: has_ended() or time.monotonic() > until_s, lambda: None)
        return has_ended()


def pause(waited_s: float) -> None:
    """Sleeps between two queries of a device, depending on the time waited so far; not at first."""
    if waited_s > _SPIN_S:
        time.sleep(min(waited_s / _PATIENCE, _PAUSE_S))


def _is_done(status: Any) -> bool:
    if int(status) not in (0, _NOT_READY):
        raise import_module("cupy").cuda.runtime.CUDARuntimeError(int(status))
    return int(status) == 0


def mark(tensors: Sequence[TensorInfo]) -> Mark | None:
    """Records the progress of the calling thread's streams on the devices of tensors; None if there are none.

    Inside `after` it is the mark that the thread's kernels follow.
    """
    if not tensors or _thread.mark is not None:
        return _thread.mark
    events: dict[int, list[Any]] = {}
    for device in _devices(tensors):
        try:
            cuda = import_module("cupy").cuda
        except ImportError:  # then torch copies, on the default stream of another thread that makes the call
            _settle_torch(device)
            continue
        with on_device(device):
            for pointer in _current(device):
                event = _event(cuda, device)
                cuda.runtime.eventRecord(event.ptr, pointer)
                events.setdefault(device, []).append(event)
    return Mark(events) if events else None


@contextmanager
def after(progress: Mark | None) -> Iterator[None]:
    """Makes kernels that the calling thread launches inside follow a mark; None: its own streams."""
    before, _thread.mark = _thread.mark, progress
    try:
        yield
    finally:
        _thread.mark = before


def settle(tensors: Iterable[TensorInfo]) -> None:
    """Makes the default stream of the tensors' devices follow the calling thread's streams, for later users."""
    for device in _devices(tensors):
        if "cupy" not in sys.modules:
            _settle_torch(device)
            continue
        cuda = import_module("cupy").cuda
        with on_device(device):
            event = _event(cuda, device)
            for pointer in _current(device):
                if pointer != DEFAULT:
                    cuda.runtime.eventRecord(event.ptr, pointer)
                    cuda.runtime.streamWaitEvent(DEFAULT, event.ptr)
            _free[device].append(event)


def _settle_torch(device: int) -> None:
    # Without cupy, only torch has streams; importing cupy takes seconds, and it may be missing.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        default, current = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
        if current != default:
            default.wait_stream(current)


def follow(device: int, others: Iterable[int] = ()) -> int:
    """Makes cupy's current stream of a device follow the calling thread's work there and on others; returns it."""
    cuda = import_module("cupy").cuda
    stream = int(cuda.get_current_stream(device).ptr)
    for other in {device, *others}:
        with on_device(other):
            event = _event(cuda, other)
            for pointer in _current(other):
                if (other, pointer) == (device, stream):
                    continue
                cuda.runtime.eventRecord(event.ptr, pointer)
                with on_device(device):  # the default stream is that of the current device
                    cuda.runtime.streamWaitEvent(stream, event.ptr)
            _free[other].append(event)
    return stream


def _devices(tensors: Iterable[TensorInfo]) -> set[int]:
    return {device_id(tensor.device) for tensor in tensors if tensor.device.startswith("cuda")}


def _give_back(to: dict[int, list[Any]], events: dict[int, list[Any]]) -> None:
    for device, given in events.items():
        to[device].extend(given)


def _event(cuda: Any, device: int) -> Any:
    try:
        return _free[device].pop()
    except IndexError:
        with RelaxedCapture():
            return cuda.Event(disable_timing=True)


def _current(device: int) -> Sequence[int]:
    # The default stream, cupy's and torch's current ones.
    pointers = {DEFAULT: None, int(import_module("cupy").cuda.get_current_stream(device).ptr): None}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        pointers[int(torch.cuda.current_stream(device).cuda_stream)] = None
    return tuple(pointers)
