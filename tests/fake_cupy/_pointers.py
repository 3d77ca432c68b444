"""`cupy.cuda.memory`: who owns memory, and pointers into it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ._memory import Block, Bytes, OutOfMemoryError
from ._state import current
from ._streams import Device

__all__ = ["MemoryPointer", "OutOfMemoryError", "PooledMemory", "UnownedMemory"]


class PooledMemory:
    """Memory of the pool, which its last owner gives back. As cupy's, it takes attributes but no weak references."""

    __slots__ = ("__dict__", "_free", "device_id", "ptr", "size")

    def __init__(self, size: int) -> None:
        self.ptr = 0
        machine = current()
        machine.counts["alloc"] += 1
        self.size = size
        self.device_id = machine.current_device()
        if size:
            block = machine.heap.allocate(size)
            self.ptr = block.start
            self._free = _last_rites(machine, block)

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):  # else there was no room for it, or it was never made
            self._free()

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def _bytes(self) -> Bytes:
        return current().heap.view(self.ptr, self.size)


def _last_rites(machine: Any, block: Block) -> Callable[[], None]:
    return lambda: machine.last_rites(_freer(machine.heap, block))


def _freer(heap: Any, block: Block) -> Callable[[], None]:
    return lambda: heap.free(block)


class UnownedMemory:
    """Somebody else's memory; `owner` is kept alive with it."""

    __slots__ = ("_owner", "device_id", "ptr", "size")

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr = ptr
        self.size = size
        self._owner = owner
        if device_id < 0:
            block = current().heap.find(ptr)
            device_id = current().current_device() if block is None else block.device
        self.device_id = device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def _bytes(self) -> Bytes:
        return current().heap.view(self.ptr, self.size)


class MemoryPointer:
    """A place in a memory."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset

    @property
    def device_id(self) -> int:
        return int(self.mem.device_id)

    @property
    def device(self) -> Device:
        return Device(self.mem.device_id)

    def __int__(self) -> int:
        return int(self.ptr)

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__


def alloc(size: int) -> MemoryPointer:
    """Allocates on the calling thread's device, for its stream there.

    Raises:
        OutOfMemoryError: There is no more.
    """
    return MemoryPointer(PooledMemory(size), 0)


class _PinnedMemoryPointer(ctypes.Array):  # type: ignore[type-arg]
    """Page-locked memory of the pool, which its last user gives back. It has nothing but the buffer protocol."""

    _length_, _type_ = 0, ctypes.c_int8
    __len__ = __iter__ = __getitem__ = __setitem__ = None  # type: ignore[assignment]

    def __del__(self) -> None:
        if hasattr(self, "_unlock"):
            self._unlock()


@lru_cache
def _pointer_to(nbytes: int) -> Any:
    return type("PinnedMemoryPointer", (_PinnedMemoryPointer,), {"_length_": nbytes, "_type_": ctypes.c_int8})


def alloc_pinned_memory(size: int) -> Any:
    """Allocates page-locked memory of the host; the pool rounds its size up to a power of two.

    Raises:
        CUDARuntimeError: There is no more.
    """
    machine = current()
    machine.counts["alloc_pinned_memory"] += 1
    block = machine.heap.lock(1 << max(9, (size - 1).bit_length()))
    made = _pointer_to(block.nbytes).from_buffer(block.bytes)
    made.ptr = block.start
    made._unlock = _last_rites_of_host(machine, block)
    return made


def _last_rites_of_host(machine: Any, block: Block) -> Callable[[], None]:
    return lambda: machine.last_rites(lambda: machine.heap.unlock(block))
