"""`cupy.cuda.runtime`: the functions of the CUDA runtime that are called by pointers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ._errors import CUDARuntimeError, Status
from ._machine import Machine
from ._memory import HOST as _HOST
from ._queues import Mark, Queue
from ._state import counted, current

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)
streamDefault, streamNonBlocking = 0, 1
streamLegacy = 1
eventDisableTiming = 2

_ATTRIBUTES = {75: 9, 76: 0}
"""Those that the fake knows: the compute capability, major and minor."""


@dataclass(slots=True, eq=False)
class EventState:
    """An event: where it was last recorded, if it was."""

    device: int
    mark: Mark | None = None


def _event(machine: Machine, ptr: int) -> EventState:
    found = machine.handles.get(ptr)
    if not isinstance(found, EventState):
        raise CUDARuntimeError(Status.INVALID_HANDLE)
    return found


# ------------------------------------------------------------------------------------------------- devices


@counted
def getDeviceCount() -> int:
    """Raises where there is none, as the real one does."""
    if not current().devices:
        raise CUDARuntimeError(Status.NO_DEVICE)
    return current().devices


def getDevice() -> int:
    return current().current_device()


@counted
def setDevice(device: int) -> None:
    if not 0 <= device < current().devices:
        raise CUDARuntimeError(Status.INVALID_DEVICE)
    current().thread.device = device
    current().contexts.add(device)  # since CUDA 12


@counted
def deviceSynchronize() -> None:
    machine = current()
    device = machine.current_device()
    with machine.lock:
        queues = [queue for queue in machine.queues if queue.device == device]
        marks = [queue.mark() for queue in queues]
    machine.wait(lambda: all(mark.passed for mark in marks))


@counted
def deviceGetPCIBusId(device: int) -> str:
    if not 0 <= device < current().devices:
        raise CUDARuntimeError(Status.INVALID_DEVICE)
    return current().buses.get(device, f"0000:{0x10 + device:02X}:00.0")


def deviceGetAttribute(attrib: int, device: int) -> int:
    if attrib not in _ATTRIBUTES:
        raise CUDARuntimeError(Status.INVALID_VALUE)
    return _ATTRIBUTES[attrib]


# ------------------------------------------------------------------------------------------------- streams


@counted
def streamCreateWithFlags(flags: int) -> int:
    current().check_safe()
    return current().new_queue(blocking=not flags & streamNonBlocking)


def _destroy_stream(machine: Machine, ptr: int) -> None:
    """Work that is in the stream goes on."""
    with machine.lock:
        queue = machine.queue(ptr)
        del machine.handles[ptr]
        queue.destroyed = True
        if not queue.items:
            machine.queues.discard(queue)


@counted
def streamSynchronize(stream: int) -> None:
    machine = current()
    queue = machine.queue(stream)
    machine.wait(_all_of(machine, queue))


@counted
def streamQuery(stream: int) -> int:
    machine = current()
    machine.check_safe()
    queue = machine.queue(stream)
    return 0 if machine.poll(_all_of(machine, queue)) else int(Status.NOT_READY)


def _all_of(machine: Machine, queue: Queue) -> Any:
    """What tells whether all that the stream has now, and what the default stream waits for, is done."""
    with machine.lock:
        others = [other for other in machine.queues if queue.handle == 0 and queue.fences(other)]
        marks = [one.mark() for one in (queue, *others)]
    return lambda: all(mark.passed for mark in marks)


@counted
def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    machine = current()
    with machine.lock:
        queue, mark = machine.queue(stream), _event(machine, event).mark
        if mark is not None:
            machine.enqueue(queue, machine.work("a wait", None), [mark])


# -------------------------------------------------------------------------------------------------- events


@counted
def eventCreateWithFlags(flags: int) -> int:
    machine = current()
    machine.check_safe()
    return machine.add(EventState(machine.current_device()))


def _destroy_event(machine: Machine, ptr: int) -> None:
    _event(machine, ptr)
    del machine.handles[ptr]


@counted
def eventRecord(event: int, stream: int) -> None:
    """Who waits for what was recorded before goes on doing so."""
    machine = current()
    with machine.lock:
        state, queue = _event(machine, event), machine.queue(stream)
        if state.device != queue.device:
            raise CUDARuntimeError(Status.INVALID_HANDLE)
        machine.enqueue(queue, machine.work("a record", None))
        state.mark = queue.mark()


@counted
def eventQuery(event: int) -> int:
    current().check_safe()
    mark = _event(current(), event).mark
    return 0 if mark is None or current().poll(lambda: mark.passed) else int(Status.NOT_READY)


@counted
def eventSynchronize(event: int) -> None:
    mark = _event(current(), event).mark
    if mark is not None:
        current().wait(lambda: mark.passed)


# -------------------------------------------------------------------------------------------------- memory


@counted
def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    machine = current()
    if not 0 <= kind <= memcpyDefault:
        raise CUDARuntimeError(Status.INVALID_VALUE)
    if not size:
        return
    if not dst or not src:
        raise CUDARuntimeError(Status.INVALID_VALUE)
    to, given = machine.heap.view(dst, size), machine.heap.view(src, size)
    if machine.heap.find(src) is None:
        given = given.copy()  # pageable memory: the driver has taken it when the call returns
    is_pageable = machine.heap.find(dst) is None
    if is_pageable:
        machine.counts["pageable"] += 1

    def copy() -> None:
        to[:] = given

    work = machine.work("memcpyAsync", copy, [(dst, size), (src, size)])
    queue = machine.queue(stream)
    machine.enqueue(queue, work)
    if is_pageable:  # the call returns when all has arrived, and can't be interrupted
        machine.wait(_all_of(machine, queue))


@counted
def pointerGetAttributes(ptr: int) -> SimpleNamespace:
    machine = current()
    machine.contexts.add(machine.current_device())
    block = machine.heap.find(ptr)
    kind = 0 if block is None else 1 if block.device == _HOST else 2
    return SimpleNamespace(type=kind, device=-2 if block is None else max(0, block.device))
