"""GPU memory shared between processes: what a rank exports, and what it has imported from others.

An IPC handle names a whole allocation, and pools divide theirs. So an array is described as the handle of its
allocation, and an offset. Memory without a handle (CUDA's own pools, virtual mappings, managed memory) and arrays with
gaps are copied to a room: memory that is allocated for export, and reused by each kernel.

Opening a handle costs far more than a small kernel, so imports stay open: for each rank the allocations that it has
exported last. The address of a freed allocation may be reused with other memory. CUDA then returns another handle, so
handles are queried in each kernel, and a new one at the same address replaces the old. A rank that exports a new
allocation checks which earlier ones are gone, and tells the others, which close them: memory returns to the device only
when nobody has it open any more.

A process can't open its own handles, and need not: ranks in one process exchange plain addresses.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from raycollect.backends.nccl import ipc_driver
from raycollect.backends.streams import on_device
from raycollect.errors import InternalError

# Rooms are multiples of this: smaller allocations share a page of the device, and so a handle, with others
ROOM_NBYTES = 2 << 20
MOST_OPENED = 256  # The most allocations of others that a communicator keeps open
_ALIGNMENT = 512
_NOWHERE = 0xFFFF
_HEAD = struct.Struct(f"<{ipc_driver.PROCESS_NBYTES}sHHH")
_ALLOCATION = struct.Struct("<Q64s")
_GONE = struct.Struct("<Q")
_COUNTS = struct.Struct("<HH")
_PLACE = struct.Struct("<HQQ")

Span = tuple[int, int]  # An address in this process, and a number of bytes


class Shown(NamedTuple):
    """What a rank exports for one kernel."""

    gives: tuple[Span, ...]  # where others may read
    takes: tuple[Span, ...]  # where others may write


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a rank tells the others about the kernels that run next."""

    process: bytes  # its process
    allocations: tuple[tuple[int, bytes], ...]  # (start in its process, handle)
    gone: tuple[int, ...]  # the starts of exported allocations that were freed
    # sources and targets of each kernel, as (allocation, offset, length)
    kernels: tuple[tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]], ...]

    def pack(self) -> bytes:
        """Encodes it."""
        parts = [_HEAD.pack(self.process, len(self.allocations), len(self.gone), len(self.kernels))]
        parts += [_ALLOCATION.pack(*one) for one in self.allocations]
        parts += [_GONE.pack(base) for base in self.gone]
        for gives, takes in self.kernels:
            parts.append(_COUNTS.pack(len(gives), len(takes)))
            parts += [_PLACE.pack(*one) for one in (*gives, *takes)]
        return b"".join(parts)

    @classmethod
    def unpack(cls, packed: bytes) -> Listing:
        """Decodes what `pack` has made."""
        at = 0

        def read(form: struct.Struct) -> tuple[Any, ...]:
            nonlocal at
            at += form.size
            return form.unpack_from(packed, at - form.size)

        process, allocations, gone, kernels = read(_HEAD)
        found = cls(
            process=process,
            allocations=tuple((base, handle) for base, handle in (read(_ALLOCATION) for _ in range(allocations))),
            gone=tuple(read(_GONE)[0] for _ in range(gone)),
            kernels=tuple(_sides(read) for _ in range(kernels)),
        )
        if at != len(packed):
            raise InternalError(detail=f"a listing of {len(packed)} bytes, of which {at} were read")
        return found


def _sides(read: Any) -> Any:
    gives, takes = read(_COUNTS)
    return tuple(read(_PLACE) for _ in range(gives)), tuple(read(_PLACE) for _ in range(takes))


class Exports:
    """What one rank exports of its memory; used with its device current."""

    def __init__(self, device: int) -> None:
        self._cuda = import_module("cupy").cuda
        self._device = device
        self._rooms: list[Any] = []  # they stay: others have them open
        self._used: list[int] = []
        self._now: dict[int, bytes] = {}  # the handles of allocations, in the kernels that are being listed
        self._shown: dict[int, bytes] = {}

    def restart(self) -> None:
        """Begins new kernels: nobody uses the rooms any more, and handles are queried again."""
        self._used = [0] * len(self._rooms)
        self._now = {}

    def forsake_rooms(self) -> Sequence[Any]:
        """Gives up the rooms, which others may still use; the caller keeps them alive until then."""
        rooms, self._rooms, self._used = self._rooms, [], []
        return rooms

    def can_show(self, address: int, nbytes: int) -> bool:
        """Tells whether other processes can open that memory."""
        return not nbytes or self._place(address, nbytes) is not None

    def room(self, nbytes: int) -> int:
        """Returns the address of memory for export, valid until `restart`; raises cupy's error if there is no more."""
        for at, room in enumerate(self._rooms):
            start = -(-self._used[at] // _ALIGNMENT) * _ALIGNMENT
            if start + nbytes <= room.size:
                self._used[at] = start + nbytes
                return int(room.ptr) + start
        least = max(nbytes, sum(room.size for room in self._rooms))  # few of them, however much they grow
        with on_device(self._device):
            self._rooms.append(self._cuda.Memory(-(-max(least, 1) // ROOM_NBYTES) * ROOM_NBYTES))
        self._used.append(nbytes)
        return int(self._rooms[-1].ptr)

    def listing(self, kernels: Sequence[Shown]) -> Listing:
        """Describes spans that can all be exported."""
        index: dict[int, int] = {}

        def told(span: Span) -> tuple[int, int, int]:
            address, nbytes = span
            if not nbytes:
                return _NOWHERE, 0, 0
            base = self._place(address, nbytes)
            if base is None:
                raise InternalError(detail=f"{nbytes} bytes of a GPU's memory that can't be shown")
            return index.setdefault(base, len(index)), address - base, nbytes

        places = tuple((tuple(map(told, one.gives)), tuple(map(told, one.takes))) for one in kernels)
        allocations = tuple((base, self._now[base]) for base in index)
        return Listing(
            process=ipc_driver.process(), allocations=allocations, gone=self._gone(allocations), kernels=places
        )

    def _gone(self, allocations: Sequence[tuple[int, bytes]]) -> tuple[int, ...]:
        # Checked only when a new allocation is exported.
        if all(self._shown.get(base) == handle for base, handle in allocations):
            return ()
        self._shown.update(allocations)
        gone = tuple(base for base, handle in self._shown.items() if self._handle(base) != handle)
        for base in gone:
            del self._shown[base]
        return gone

    def _place(self, address: int, nbytes: int) -> int | None:
        # The start of the allocation; None if it has no handle.
        room = next((one for one in self._rooms if one.ptr <= address < one.ptr + one.size), None)
        found = ipc_driver.allocation(address) if room is None else (int(room.ptr), int(room.size))
        if found is None or address + nbytes > sum(found):
            return None
        base = found[0]
        if base not in self._now:
            self._now[base] = self._handle(base)
        return base if self._now[base] else None

    def _handle(self, base: int) -> bytes:
        runtime = self._cuda.runtime
        try:
            return bytes(runtime.ipcGetMemHandle(base))
        except runtime.CUDARuntimeError:
            return b""


class Imports:
    """What one rank has imported of others' memory; used with its device current."""

    def __init__(self) -> None:
        self._runtime = import_module("cupy").cuda.runtime
        self._opened: OrderedDict[tuple[int, int], tuple[bytes, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._opened)

    def shown(self, listings: dict[int, Listing]) -> list[tuple[Shown, ...]]:
        """Opens what ranks list; imports of earlier calls are not in use any more. Raises cupy's errors.

        Returns:
            For each rank, in the order of `listings`, and each kernel: its exports, with addresses of this process.
        """
        used = {(rank, base) for rank, listing in listings.items() for base, _ in listing.allocations}
        for rank, listing in listings.items():
            for base in listing.gone:
                if (rank, base) not in used:
                    self._close((rank, base))
        while len(self._opened) > MOST_OPENED and (oldest := next(iter(self._opened))) not in used:
            self._close(oldest)
        return [tuple(self._kernels(rank, listing)) for rank, listing in listings.items()]

    def _kernels(self, rank: int, listing: Listing) -> Iterator[Shown]:
        is_here = listing.process == ipc_driver.process()
        starts = [base if is_here else self._open(rank, base, handle) for base, handle in listing.allocations]
        for sides in listing.kernels:
            gives, takes = (
                tuple((starts[which] + at, nbytes) if nbytes else (0, 0) for which, at, nbytes in side)
                for side in sides
            )
            yield Shown(gives, takes)

    def _open(self, rank: int, base: int, handle: bytes) -> int:
        # An older import at the same address is closed.
        known = self._opened.get((rank, base))
        if known is not None and known[0] == handle:
            self._opened.move_to_end((rank, base))
            return known[1]
        self._close((rank, base))
        start = int(self._runtime.ipcOpenMemHandle(handle))
        self._opened[rank, base] = handle, start
        return start

    def _close(self, which: tuple[int, int]) -> None:
        known = self._opened.pop(which, None)
        if known is not None:
            self._runtime.ipcCloseMemHandle(known[1])

    def close(self) -> None:
        """Closes all imports; nothing uses them any more."""
        for which in tuple(self._opened):
            self._close(which)
