"""GPU memory shared between processes: a rank's exports, and its imports from others.

An IPC handle names a whole allocation, and pools divide theirs. So an array is described as the handle of its
allocation, and an offset. Memory without a handle (CUDA's own pools, virtual mappings, managed memory) and arrays with
gaps are copied to a room: memory that is allocated for export, and reused by later kernels.

A rank opens the memory that others list, and closes it when its own work there has ended, before the owners use it
again: freeing memory that another process has open is undefined in CUDA, and no library reports when its pool frees an
allocation. The address of a freed allocation may be reused with other memory, so handles are queried each time, too.

A process can't open its own handles, and need not: ranks in one process exchange plain addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from raycollect.backends import cuda_driver
from raycollect.backends.streams import on_device
from raycollect.core.codec import Codec, Wire
from raycollect.errors import InternalError

# Rooms are multiples of this: smaller allocations share a device page, and so a handle
ROOM_NBYTES = 2 << 20
_ALIGNMENT = 512

Span = tuple[int, int]  # An address in this process, and a number of bytes


class ExportedSpans(NamedTuple):
    """The memory that a rank exports for one kernel."""

    gives: tuple[Span, ...]  # where others may read
    takes: tuple[Span, ...]  # where others may write


class IpcListing(Wire, frozen=True, kw_only=True):
    """A rank's exports for the kernels that run next, as others receive them."""

    process: bytes  # the rank's process
    allocations: tuple[tuple[int, bytes], ...]  # (start in its process, handle)
    # sources and targets of each kernel, as (allocation, offset, length)
    kernels: tuple[tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]], ...]


LISTINGS = Codec[IpcListing](IpcListing, "listing of GPU memory")


class Exports:
    """The exported memory of one rank; used with its device current."""

    def __init__(self, device: int) -> None:
        self._cuda = import_module("cupy").cuda
        self._device = device
        self._rooms: list[Any] = []
        self._used: list[int] = []
        self._now: dict[int, bytes] = {}  # the handles of allocations, for the current kernels

    def restart(self) -> None:
        """Begins new kernels: no rank uses the rooms any more, and handles are queried again."""
        self._used = [0] * len(self._rooms)
        self._now = {}

    def abandon_rooms(self) -> Sequence[Any]:
        """Returns the rooms and forgets them; the caller holds them as long as others may use them."""
        rooms, self._rooms, self._used = self._rooms, [], []
        return rooms

    def can_show(self, address: int, nbytes: int) -> bool:
        """Tells whether other processes can open that memory."""
        return not nbytes or self._place(address, nbytes) is not None

    def room(self, nbytes: int) -> int:
        """Returns the address of memory for export, valid until `restart`; raises cupy's error without free memory."""
        for at, room in enumerate(self._rooms):
            start = -(-self._used[at] // _ALIGNMENT) * _ALIGNMENT
            if start + nbytes <= room.size:
                self._used[at] = start + nbytes
                return int(room.ptr) + start
        least = max(nbytes, sum(room.size for room in self._rooms))  # grows geometrically, so that rooms stay few
        with on_device(self._device):
            self._rooms.append(self._cuda.Memory(-(-max(least, 1) // ROOM_NBYTES) * ROOM_NBYTES))
        self._used.append(nbytes)
        return int(self._rooms[-1].ptr)

    def listing(self, kernels: Sequence[ExportedSpans]) -> IpcListing:
        """Describes spans that can all be exported."""
        index: dict[int, int] = {}

        def encode_span(span: Span) -> tuple[int, int, int]:
            address, nbytes = span
            if not nbytes:
                return 0, 0, 0
            base = self._place(address, nbytes)
            if base is None:
                raise InternalError(detail=f"{nbytes} bytes of a GPU's memory that can't be shown")
            return index.setdefault(base, len(index)), address - base, nbytes

        places = tuple(
            (tuple(map(encode_span, exported.gives)), tuple(map(encode_span, exported.takes))) for exported in kernels
        )
        allocations = tuple((base, self._now[base]) for base in index)
        return IpcListing(process=cuda_driver.process(), allocations=allocations, kernels=places)

    def _place(self, address: int, nbytes: int) -> int | None:
        # The start of the allocation; None if it has no handle.
        room = next(
            (candidate for candidate in self._rooms if candidate.ptr <= address < candidate.ptr + candidate.size), None
        )
        allocation = cuda_driver.allocation(address) if room is None else (int(room.ptr), int(room.size))
        if allocation is None or address + nbytes > sum(allocation):
            return None
        base = allocation[0]
        if base not in self._now:
            runtime = self._cuda.runtime
            try:
                self._now[base] = bytes(runtime.ipcGetMemHandle(base))
            except runtime.CUDARuntimeError:
                self._now[base] = b""
        return base if self._now[base] else None


class Imports:
    """The memory of other ranks that one rank has open; used with its device current."""

    def __init__(self) -> None:
        self._runtime = import_module("cupy").cuda.runtime
        self._opened: list[int] = []

    def shown(self, listings: Sequence[IpcListing]) -> list[tuple[ExportedSpans, ...]]:
        """Opens the listed memory, until `close`. Raises cupy's errors.

        Returns:
            For each listing and each kernel: its exports, with addresses of this process.
        """
        return [tuple(self._kernels(listing)) for listing in listings]

    def _kernels(self, listing: IpcListing) -> Iterator[ExportedSpans]:
        is_here = listing.process == cuda_driver.process()
        starts = [base if is_here else self._open(handle) for base, handle in listing.allocations]
        for sides in listing.kernels:
            gives, takes = (
                tuple((starts[which] + at, nbytes) if nbytes else (0, 0) for which, at, nbytes in side)
                for side in sides
            )
            yield ExportedSpans(gives, takes)

    def _open(self, handle: bytes) -> int:
        # CUDA counts how often a process opens an allocation, such as for two ranks or two groups.
        start = int(self._runtime.ipcOpenMemHandle(handle))
        self._opened.append(start)
        return start

    def close(self) -> None:
        """Closes all open memory, which must be unused. Raises cupy's errors."""
        while self._opened:
            self._runtime.ipcCloseMemHandle(self._opened.pop())
