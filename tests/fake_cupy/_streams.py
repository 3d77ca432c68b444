"""`cupy.cuda`: devices, streams and events, as cupy's classes over the runtime."""

from __future__ import annotations

from typing import Any, ClassVar

from . import _runtime
from ._errors import CUDARuntimeError
from ._machine import Machine
from ._state import current


class Device:
    """A device; as a context manager, and by `use`, the calling thread's."""

    def __init__(self, device: Any = None) -> None:
        self.id = _runtime.getDevice() if device is None else int(device)
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __enter__(self) -> Device:  # noqa: PYI034 - 3.10 has no Self
        self._before.append(_runtime.getDevice())
        if self._before[-1] != self.id:
            self.use()
        return self

    def __exit__(self, *_: object) -> None:
        _runtime.setDevice(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def use(self) -> Device:
        _runtime.setDevice(self.id)
        return self

    def synchronize(self) -> None:
        with self:
            _runtime.deviceSynchronize()


class Event:
    """An event, on the device that was current when it was made."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = 0
        self._machine = current()
        self.ptr = _runtime.eventCreateWithFlags(_runtime.eventDisableTiming if disable_timing else 0)

    def __del__(self) -> None:
        if self.ptr:
            self._machine.last_rites(_ender(self._machine, "eventDestroy", self.ptr))

    @property
    def done(self) -> bool:
        return _runtime.eventQuery(self.ptr) == 0

    def record(self, stream: Any = None) -> None:
        _runtime.eventRecord(self.ptr, (get_current_stream() if stream is None else stream).ptr)

    def synchronize(self) -> None:
        _runtime.eventSynchronize(self.ptr)


class _BaseStream:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def _own_device(self) -> int:
        now = _runtime.getDevice()
        if self.device_id not in (-1, now):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device"
                f" ({now})"
            )
        return now

    def __enter__(self) -> _BaseStream:  # noqa: PYI034 - 3.10 has no Self
        thread, device = current().thread, self._own_device()
        thread.stack.append((device, self))
        thread.streams[device] = self
        return self

    def __exit__(self, *_: object) -> None:
        """Goes back to the stream of the block around it, whatever `use` has chosen meanwhile or before."""
        thread = current().thread
        device, _left = thread.stack.pop()
        around = [stream for at, stream in thread.stack if at == device]
        thread.streams[device] = around[-1] if around else Stream.null

    def use(self) -> _BaseStream:
        """As a future cupy will, it refuses this inside of a block."""
        if current().thread.stack:
            raise RuntimeError("Stream.use() inside of a stream's block")
        current().thread.streams[self._own_device()] = self
        return self

    @property
    def done(self) -> bool:
        return _runtime.streamQuery(self.ptr) == 0

    def synchronize(self) -> None:
        _runtime.streamSynchronize(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        _runtime.eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        _runtime.streamWaitEvent(self.ptr, event.ptr)


class Stream(_BaseStream):
    """A stream of the device that was current when it was made."""

    null: ClassVar[Stream]

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self.ptr = 0
        if ptds:
            raise NotImplementedError("the fake has no per-thread default stream")
        if null:
            super().__init__(0, -1)
            return
        self._machine: Machine = current()
        flags = _runtime.streamNonBlocking if non_blocking else _runtime.streamDefault
        super().__init__(_runtime.streamCreateWithFlags(flags), _runtime.getDevice())

    def __del__(self) -> None:
        if self.ptr and "_machine" in self.__dict__:
            self._machine.last_rites(_ender(self._machine, "streamDestroy", self.ptr))


Stream.null = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Any:
    """Gives the calling thread's stream of a device."""
    return current().thread.streams.get(_runtime.getDevice() if device_id == -1 else device_id, Stream.null)


def _ender(machine: Machine, name: str, ptr: int) -> Any:
    """What destroys the handle of an object that is gone; it must not refer to the object."""
    end = _runtime._destroy_event if name == "eventDestroy" else _runtime._destroy_stream

    def act() -> None:
        try:
            end(machine, ptr)
            machine.counts[name] += 1
        except CUDARuntimeError:
            pass  # somebody has destroyed it by its pointer

    return act
