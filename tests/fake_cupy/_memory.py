"""Memory of devices: numpy buffers whose addresses are the pointers, and who may touch them until when.

As in cupy's pool, freed memory is for whoever comes next on the stream that it was allocated on. Work on another
stream must have come before that: else it is a violation, at once and in each order of things. The bytes are poisoned
when the streams have come there.

Threads may stand for processes. Memory of another process is reached where its handle was opened, at another address
than its own, and nowhere else; a process can't open its own handles. Memory that is freed while another process has it
open is a violation, as CUDA does not define what follows.
"""

from __future__ import annotations

import bisect
import ctypes
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ._errors import CUDARuntimeError, Status
from ._queues import Mark, Queue

if TYPE_CHECKING:
    from ._machine import Machine

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Span = tuple[int, int]
"""A pointer, and a number of bytes."""

UNWRITTEN = 0xCD
POISON = 0xCB

_ALIGNMENT = 512
_QUARANTINE_NBYTES = 64 << 20
"""How much freed memory is kept, so that its addresses are known for what they are."""

_MOST_CLOSED = 1024
"""For how many closed openings the same holds."""


class OutOfMemoryError(MemoryError):
    """A device has no more memory, or is not allowed more."""

    def __init__(self, size: int, total: int, limit: int) -> None:
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes, limit: {limit:,} bytes)"
        )


class Block:
    """One allocation.

    Attributes:
        home: The stream that it was allocated on.
        uses: By stream, the number of the last item there that touches it.
        freed: Its last owner is gone.
        dead: It is poisoned.
        process: Whose it is.
        has_handle: Whether it can be shown to other processes.
        open_in: Where other processes have it open.
    """

    def __init__(self, nbytes: int, device: int, home: Queue, process: int, *, has_handle: bool) -> None:
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
        skipped = -raw.ctypes.data % _ALIGNMENT
        self.bytes: Bytes = raw[skipped : skipped + nbytes]
        self.bytes.fill(UNWRITTEN)
        self.start = raw.ctypes.data + skipped
        self.nbytes = nbytes
        self.device = device
        self.home = home
        self.uses: dict[Queue, int] = {}
        self.freed = False
        self.dead = False
        self.process = process
        self.has_handle = has_handle
        self.open_in: dict[int, Opened] = {}

    def __repr__(self) -> str:
        return f"{self.nbytes} bytes at {self.start:#x} of device {self.device}"


class Opened:
    """An allocation of another process, where this one has it.

    Attributes:
        block: What it is.
        process: Who has opened it.
        start: Where; nothing else is ever there.
        count: How often it was opened, and not closed.
    """

    def __init__(self, block: Block, process: int) -> None:
        self.block = block
        self.process = process
        self._reserved = np.empty(block.nbytes + _ALIGNMENT, np.uint8)
        self.start = -(-self._reserved.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self.count = 0


class Heap:
    """The allocations of all devices.

    Attributes:
        limits: By device, how many bytes there are.
        allocated: By device, how many bytes are in use.
        opened: Where processes have opened allocations of others, the last closed ones too, by their addresses.
        unshown: Whether what is allocated from now on has no handle, as memory of CUDA's own pools.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._quarantine: deque[Block] = deque()
        self._quarantined = 0
        self.limits: dict[int, int] = {}
        self.allocated: dict[int, int] = dict.fromkeys(range(machine.devices), 0)
        self.opened: dict[int, Opened] = {}
        self._opened_starts: list[int] = []
        self._closed: deque[Opened] = deque()
        self.unshown = False

    def allocate(self, nbytes: int) -> Block:
        """Allocates on the calling thread's device and stream.

        Raises:
            OutOfMemoryError: More than the limit.
        """
        home = self._machine.current_queue()
        with self._machine.lock:
            self._machine.bury()
            device, limit = home.device, self.limits.get(home.device)
            if limit is not None and self.allocated[device] + nbytes > limit:
                raise OutOfMemoryError(nbytes, self.allocated[device], limit)
            self._machine.contexts.add(device)
            block = Block(nbytes, device, home, self._machine.thread.process, has_handle=not self.unshown)
            self.allocated[device] += nbytes
            self._blocks[block.start] = block
            bisect.insort(self._starts, block.start)
            return block

    def free(self, block: Block) -> None:
        """Ends an allocation; is called under the lock."""
        home, last = block.home, [block.home.mark()]
        for queue, number in block.uses.items():
            if queue.finished >= number or queue is home:
                continue
            if home.clock.get(queue, 0) < number and not home.fences(queue):
                self._machine.violate(f"{block} was freed while work on {queue} refers to it")
            last.append(Mark(queue, number, {}))
        for process in block.open_in:
            self._machine.violate(f"{block} was freed while process {process} has it open")
        block.freed = True
        self.allocated[block.device] -= block.nbytes
        self.bury(block, [mark for mark in last if mark.queue is home or home.fences(mark.queue)])

    def bury(self, block: Block, after: list[Mark]) -> None:
        """Poisons a block once streams have come to where they must; is called under the lock."""
        left = [mark for mark in after if not mark.passed]
        if left:
            left[0].queue.dying.append((left[0].number, left[1:], block))
            return
        block.dead = True
        block.bytes.fill(POISON)
        self._quarantine.append(block)
        self._quarantined += block.nbytes
        while self._quarantined > _QUARANTINE_NBYTES:
            gone = self._quarantine.popleft()
            self._quarantined -= gone.nbytes
            del self._blocks[gone.start]
            del self._starts[bisect.bisect_left(self._starts, gone.start)]

    def find(self, ptr: int) -> Block | None:
        """Finds the allocation that an address is in; None: it is not the fake's."""
        opened = self.find_opened(ptr)
        if opened is not None:
            return opened.block
        with self._machine.lock:
            at = bisect.bisect_right(self._starts, ptr) - 1
            block = self._blocks[self._starts[at]] if at >= 0 else None
        return block if block is not None and ptr < block.start + max(1, block.nbytes) else None

    def find_opened(self, ptr: int) -> Opened | None:
        """Finds what was opened at an address."""
        with self._machine.lock:
            at = bisect.bisect_right(self._opened_starts, ptr) - 1
            found = self.opened[self._opened_starts[at]] if at >= 0 else None
        return found if found is not None and ptr < found.start + max(1, found.block.nbytes) else None

    def blocks(self, what: str, spans: Iterable[Span]) -> list[Block]:
        """Finds the allocations that work touches; notes what it must not."""
        found = []
        for ptr, nbytes in spans:
            block = self.find(ptr) if nbytes else None
            if block is None:
                continue
            opened = self.find_opened(ptr)
            start, process = (block.start, block.process) if opened is None else (opened.start, opened.process)
            if ptr + nbytes > start + block.nbytes:
                self._machine.violate(f"{what} goes {ptr + nbytes - start - block.nbytes} bytes beyond {block}")
            elif process != self._machine.thread.process:
                self._machine.violate(f"{what} is given {block}, at an address of process {process}")
            elif opened is not None and not opened.count:
                self._machine.violate(f"{what} is given {block}, which was closed")
            elif block.freed:
                self._machine.violate(f"{what} is given {block}, which was freed")
            found.append(block)
        return found

    def view(self, ptr: int, nbytes: int) -> Bytes:
        """Gives the bytes at an address; those of others have to be there as long as they are looked at."""
        if not nbytes:
            return np.empty(0, np.uint8)
        block, opened = self.find(ptr), self.find_opened(ptr)
        if block is not None:
            at = ptr - (block.start if opened is None else opened.start)
            if at + nbytes <= block.nbytes:
                return block.bytes[at : at + nbytes]
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))

    def rest(self, ptr: int) -> Bytes:
        """Gives the bytes from an address to the end of its allocation; all of it may be read by a kernel."""
        block, opened = self.find(ptr), self.find_opened(ptr)
        if block is None:
            raise CUDARuntimeError(Status.INVALID_VALUE)
        return block.bytes[ptr - (block.start if opened is None else opened.start) :]

    # ---------------------------------------------------------------------------------- between processes

    def allocation(self, ptr: int) -> tuple[int, int] | None:
        """Tells where the allocation that a pointer is in begins, and its length, as the driver does."""
        block, opened = self.find(ptr), self.find_opened(ptr)
        if block is None or block.freed:
            return None
        return (block.start if opened is None else opened.start), block.nbytes

    def handle(self, ptr: int) -> bytes:
        """Makes a handle of the allocation that a pointer is in: of all of it, as the runtime does."""
        block = self.find(ptr)
        if block is None or block.freed or not block.has_handle or block.process != self._machine.thread.process:
            raise CUDARuntimeError(Status.INVALID_VALUE)
        return b"fake-ipc" + block.start.to_bytes(8, "little") + id(block).to_bytes(8, "little") + bytes(40)

    def open(self, handle: bytes) -> int:
        """Gives where this process has the allocation that a handle was made of; the same for each time."""
        start = int.from_bytes(handle[8:16], "little")
        block = self._blocks.get(start)
        known = len(handle) == 64 and handle[:8] == b"fake-ipc" and block is not None
        if not known or block is None or block.freed or id(block) != int.from_bytes(handle[16:24], "little"):
            raise CUDARuntimeError(Status.INVALID_VALUE)
        process = self._machine.thread.process
        if block.process == process:
            raise CUDARuntimeError(Status.INVALID_CONTEXT)
        with self._machine.lock:
            found = block.open_in.get(process)
            if found is None:
                found = block.open_in[process] = Opened(block, process)
                self.opened[found.start] = found
                bisect.insort(self._opened_starts, found.start)
            found.count += 1
        return found.start

    def close(self, ptr: int) -> None:
        """Closes what was opened there."""
        with self._machine.lock:
            found = self.opened.get(ptr)
            if found is None or not found.count or found.process != self._machine.thread.process:
                raise CUDARuntimeError(Status.INVALID_VALUE)
            found.count -= 1
            if found.count:
                return
            del found.block.open_in[found.process]
            self._closed.append(found)
            if len(self._closed) > _MOST_CLOSED:
                gone = self._closed.popleft()
                del self.opened[gone.start]
                del self._opened_starts[bisect.bisect_left(self._opened_starts, gone.start)]
