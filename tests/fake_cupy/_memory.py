"""Memory of devices: numpy buffers whose addresses are the pointers, and who may touch them until when.

As in cupy's pool, freed memory is for whoever comes next on the stream that it was allocated on. Work on another
stream must have come before that: else it is a violation, at once and in each order of things. The bytes are poisoned
when the streams have come there.
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

HOST = -1
"""In the place of a device: page-locked memory of the host."""

_ALIGNMENT = 512
_QUARANTINE_NBYTES = 64 << 20
"""How much freed memory is kept, so that its addresses are known for what they are."""


class OutOfMemoryError(MemoryError):
    """A device has no more memory, or is not allowed more."""

    def __init__(self, size: int, total: int, limit: int) -> None:
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes, limit: {limit:,} bytes)"
        )


class Block:
    """One allocation.

    Attributes:
        home: The stream that it was allocated on; None: it is memory of the host.
        uses: By stream, the number of the last item there that touches it.
        freed: Its last owner is gone.
        dead: It is poisoned.
    """

    def __init__(self, nbytes: int, device: int, home: Queue | None) -> None:
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

    def __repr__(self) -> str:
        where = "the host" if self.device == HOST else f"device {self.device}"
        return f"{self.nbytes} bytes at {self.start:#x} of {where}"


class Heap:
    """The allocations of all devices.

    Attributes:
        limits: By device, how many bytes there are.
        allocated: By device, how many bytes are in use.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._quarantine: deque[Block] = deque()
        self._quarantined = 0
        self.limits: dict[int, int] = {}
        self.allocated: dict[int, int] = dict.fromkeys(range(machine.devices), 0)

    def allocate(self, nbytes: int) -> Block:
        """Allocates on the calling thread's device and stream.

        Raises:
            OutOfMemoryError: More than the limit.
        """
        self._machine.check_safe()
        home = self._machine.current_queue()
        with self._machine.lock:
            self._machine.bury()
            device, limit = home.device, self.limits.get(home.device)
            if limit is not None and self.allocated[device] + nbytes > limit:
                raise OutOfMemoryError(nbytes, self.allocated[device], limit)
            self.allocated[device] += nbytes
            return self._add(Block(nbytes, device, home))

    def lock(self, nbytes: int) -> Block:
        """Allocates page-locked memory of the host, which makes a context on the calling thread's device.

        Raises:
            CUDARuntimeError: There is no more.
        """
        self._machine.check_safe()
        with self._machine.lock:
            self._machine.bury()
            if nbytes > self.limits.get(HOST, nbytes):
                raise CUDARuntimeError(Status.OUT_OF_MEMORY)
            return self._add(Block(nbytes, HOST, None))

    def _add(self, block: Block) -> Block:
        self._machine.contexts.add(self._machine.current_device())
        self._blocks[block.start] = block
        bisect.insort(self._starts, block.start)
        return block

    def unlock(self, block: Block) -> None:
        """Gives page-locked memory back to its pool, which waits for no stream; is called under the lock."""
        for queue, number in block.uses.items():
            if queue.finished < number:
                self._machine.violate(f"{block} was given back while work on {queue} refers to it")
        block.freed = True
        self.bury(block, [])

    def free(self, block: Block) -> None:
        """Ends an allocation; is called under the lock."""
        home = block.home
        assert home is not None
        last = [home.mark()]
        for queue, number in block.uses.items():
            if queue.finished >= number or queue is home:
                continue
            if home.clock.get(queue, 0) < number and not home.fences(queue):
                self._machine.violate(f"{block} was freed while work on {queue} refers to it")
            last.append(Mark(queue, number, {}))
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
        with self._machine.lock:
            at = bisect.bisect_right(self._starts, ptr) - 1
            block = self._blocks[self._starts[at]] if at >= 0 else None
        return block if block is not None and ptr < block.start + max(1, block.nbytes) else None

    def blocks(self, what: str, spans: Iterable[Span]) -> list[Block]:
        """Finds the allocations that work touches; notes what it must not."""
        found = []
        for ptr, nbytes in spans:
            block = self.find(ptr) if nbytes else None
            if block is None:
                continue
            beyond = ptr + nbytes - block.start - block.nbytes
            if beyond > 0:
                self._machine.violate(f"{what} goes {beyond} bytes beyond {block}")
            elif block.freed:
                self._machine.violate(f"{what} is given {block}, which was freed")
            found.append(block)
        return found

    def view(self, ptr: int, nbytes: int) -> Bytes:
        """Gives the bytes at an address; those of others have to be there as long as they are looked at."""
        if not nbytes:
            return np.empty(0, np.uint8)
        block = self.find(ptr)
        at = 0 if block is None else ptr - block.start
        if block is not None and at + nbytes <= block.nbytes:
            return block.bytes[at : at + nbytes]
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))
