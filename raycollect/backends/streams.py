"""Streams: what a kernel on a GPU comes after, and how this process learns that it has ended.

Work on a GPU runs in the order of its stream, and streams know nothing of each other. A communicator has a stream of
its own. Before each kernel it is made to wait for what the caller has enqueued: on cupy's and torch's current streams
of the caller's thread, and on the default stream, where all threads meet. A kernel has ended when the event behind it
has, which is asked of from the host; so whatever the caller enqueues next, on any stream, comes after it.

A call that another thread makes for its caller follows the caller's mark instead (`mark`, `after`). What a method
leaves on a stream of its own is joined to the default stream when its tensors are kept (`settle`). What goes from one
device to another follows the caller's streams on both (`follow`).

What is to run again and again as one piece is recorded on a stream of its own (`captured`), so that one that fails
leaves the communicator's as it was.

Events are used again: no call makes one. Where cupy was not imported there are no streams to follow.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from raycollect.model import TensorInfo

from .device_arrays import device_id

__all__ = ["GroupStream", "Mark", "after", "captured", "follow", "has_run", "mark", "settle", "wait"]

_LOOK_S = 0.0002
"""How long a wait for a device sleeps between two looks."""

DEFAULT = 0
"""The pointer of the default stream, which waits for all others that do not say that they are independent of it."""

_NOT_READY = 600
"""cudaErrorNotReady."""


class Mark:
    """How far the streams of a thread had come, on each device; its events are used again when it is let go of.

    Attributes:
        events: Device -> the events to follow.
    """

    __slots__ = ("__weakref__", "events")

    def __init__(self, events: dict[int, list[Any]]) -> None:
        self.events: dict[int, list[Any]] = events
        # No `__del__`: where a mark is in a cycle, those of its events would be called with it, and end them.
        weakref.finalize(self, _give_back, _free, events).atexit = False


class _Thread(threading.local):
    """What a thread's kernels follow, if that is not what it has enqueued itself."""

    mark: Mark | None = None


_thread = _Thread()
_free: dict[int, list[Any]] = defaultdict(list)
"""Device -> events that nobody uses. Appending and popping are atomic."""


class GroupStream:
    """The stream of one communicator, used by one thread at a time.

    Args:
        device: The number of its device in this process.
    """

    def __init__(self, device: int) -> None:
        self._cuda = import_module("cupy").cuda
        self._device = device
        with self._cuda.Device(device):
            self.stream: Any = self._cuda.Stream(non_blocking=True)
            self._before = self._cuda.Event(disable_timing=True)
            self._after = self._cuda.Event(disable_timing=True)

    @property
    def pointer(self) -> int:
        """The stream as NCCL takes it."""
        return int(self.stream.ptr)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Lets what cupy does inside run on this stream, behind all that the caller has enqueued; notes the end."""
        with self._cuda.Device(self._device):
            self._follow()
            with self.stream:
                try:
                    yield
                finally:  # what was enqueued before a failure runs all the same
                    self._after.record(self.stream)

    def has_ended(self) -> bool:
        """Whether all that was done when it was last `entered` has been done.

        Raises:
            Exception: The device has failed; cupy's own.
        """
        return _is_done(self._cuda.runtime.eventQuery(self._after.ptr))  # to `Event.done`, what failed is under way

    def _follow(self) -> None:
        runtime, told = self._cuda.runtime, _thread.mark
        if told is not None:
            for event in told.events.get(self._device, ()):
                runtime.streamWaitEvent(self.stream.ptr, event.ptr)
            return
        for pointer in _current(self._device):
            runtime.eventRecord(self._before.ptr, pointer)  # a wait stays as it was when the event is recorded again
            runtime.streamWaitEvent(self.stream.ptr, self._before.ptr)


def has_run(stream: int) -> bool:
    """Whether a stream of the current device, by its pointer, has done all that it was given.

    Raises:
        Exception: The device has failed; cupy's own.
    """
    return _is_done(import_module("cupy").cuda.runtime.streamQuery(stream))


def wait(has_ended: Callable[[], bool], check: Callable[[], None]) -> None:
    """Waits for a device, and asks besides whether to go on: `check` may raise."""
    while not has_ended():
        check()
        time.sleep(_LOOK_S)


def _is_done(status: Any) -> bool:
    if int(status) not in (0, _NOT_READY):
        raise import_module("cupy").cuda.runtime.CUDARuntimeError(int(status))
    return int(status) == 0


def captured(device: int, enqueue: Callable[[int], object]) -> Any:
    """Records work as a CUDA graph, and runs none of it.

    Args:
        device: The number of the device.
        enqueue: Puts the work on a stream, which is current and whose pointer it is given. It must neither wait for
            anything nor allocate memory.

    Returns:
        cupy's graph.

    Raises:
        Exception: The driver did not take it; cupy's own.
    """
    cuda = import_module("cupy").cuda
    with cuda.Device(device):
        stream = cuda.Stream(non_blocking=True)
        with stream:
            # Relaxed: what other threads do meanwhile, such as asking events or allocating, neither fails by it nor
            # spoils it.
            stream.begin_capture(cuda.runtime.streamCaptureModeRelaxed)
            try:
                enqueue(int(stream.ptr))
            except BaseException:
                with suppress(Exception):  # it was spoilt
                    stream.end_capture()
                raise
            return stream.end_capture()


def mark(tensors: Iterable[TensorInfo]) -> Mark | None:
    """Notes how far the calling thread's streams have come on the devices of tensors; None where there are none."""
    events: dict[int, list[Any]] = {}
    for device in _devices(tensors):
        cuda = import_module("cupy").cuda
        with cuda.Device(device):
            for pointer in _current(device):
                event = _event(cuda, device)
                cuda.runtime.eventRecord(event.ptr, pointer)
                events.setdefault(device, []).append(event)
    return Mark(events) if events else None


@contextmanager
def after(told: Mark | None) -> Iterator[None]:
    """Lets kernels that the calling thread launches inside follow a mark; None: what the thread itself has enqueued."""
    before, _thread.mark = _thread.mark, told
    try:
        yield
    finally:
        _thread.mark = before


def settle(tensors: Iterable[TensorInfo]) -> None:
    """Lets the default stream of the devices of tensors follow the calling thread's, for whoever uses them next."""
    for device in _devices(tensors):
        cuda = import_module("cupy").cuda
        with cuda.Device(device):
            event = _event(cuda, device)
            for pointer in _current(device):
                if pointer != DEFAULT:
                    cuda.runtime.eventRecord(event.ptr, pointer)
                    cuda.runtime.streamWaitEvent(DEFAULT, event.ptr)
            _free[device].append(event)


def follow(device: int, others: Iterable[int] = ()) -> int:
    """Lets cupy's current stream of a device follow what the calling thread has enqueued there and on other devices.

    Returns:
        The pointer of that stream.
    """
    cuda = import_module("cupy").cuda
    stream = int(cuda.get_current_stream(device).ptr)
    for other in {device, *others}:
        with cuda.Device(other):
            event = _event(cuda, other)
            for pointer in _current(other):
                if (other, pointer) == (device, stream):
                    continue
                cuda.runtime.eventRecord(event.ptr, pointer)
                with cuda.Device(device):  # the default stream is that of the current device
                    cuda.runtime.streamWaitEvent(stream, event.ptr)
            _free[other].append(event)
    return stream


def _devices(tensors: Iterable[TensorInfo]) -> set[int]:
    """The GPUs on which tensors lie; none where cupy was not imported."""
    if "cupy" not in sys.modules:
        return set()
    return {device_id(one.device) for one in tensors if one.device.startswith("cuda")}


def _give_back(to: dict[int, list[Any]], events: dict[int, list[Any]]) -> None:
    for device, given in events.items():
        to[device].extend(given)


def _event(cuda: Any, device: int) -> Any:
    """An event of the current device, perhaps used before."""
    try:
        return _free[device].pop()
    except IndexError:
        return cuda.Event(disable_timing=True)


def _current(device: int) -> Sequence[int]:
    """The streams on which the calling thread's work may be: the default one, cupy's and torch's current ones."""
    found = {DEFAULT: None, int(import_module("cupy").cuda.get_current_stream(device).ptr): None}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found[int(torch.cuda.current_stream(device).cuda_stream)] = None
    return tuple(found)
