"""Memory of a GPU between processes: what a rank shows of its own, and what it has opened of others'.

A handle names a whole allocation, and pools cut theirs up. So an array is told as the handle of its allocation, and
its place in there. What has no handle (memory of CUDA's own pools, of virtual mappings, managed memory) and what has
gaps is copied to a room: memory that is allocated for being shown, and used again by each kernel.

Opening a handle costs far more than a small kernel, so what was opened stays open: for each rank the allocations that
it has shown last. An allocation that was freed may come again at the same address with other memory. CUDA then gives
another handle, so a handle is asked for in each kernel, and another one under the same address replaces the old. A rank
that shows a new allocation looks which of those that it had shown are gone, and tells: the others close them, as memory
is given back to the device only when nobody has it open any more.

A process can't open its own handles, and need not: where ranks are in one process, addresses are told as they are.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from raycollect.errors import InternalError

from . import _ipc_driver

__all__ = ["Exports", "Imports", "Listing", "Shown", "Span"]

ROOM_NBYTES = 2 << 20
"""Rooms are multiples of this: what is smaller shares a page of the device, and so a handle, with others."""

MOST_OPENED = 256
"""How many allocations of others a communicator keeps open at most."""

_ALIGNMENT = 512
_NOWHERE = 0xFFFF

_HEAD = struct.Struct(f"<{_ipc_driver.PROCESS_NBYTES}sHHH")
_ALLOCATION = struct.Struct("<Q64s")
_GONE = struct.Struct("<Q")
_COUNTS = struct.Struct("<HH")
_PLACE = struct.Struct("<HQQ")

Span = tuple[int, int]
"""An address in this process, and a number of bytes."""


class Shown(NamedTuple):
    """What a rank shows for one kernel.

    Attributes:
        gives: Where others may read.
        takes: Where others may write.
    """

    gives: tuple[Span, ...]
    takes: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a rank tells the others of the kernels that run next.

    Attributes:
        process: Its process.
        allocations: Where each begins in its process, and its handle.
        gone: Where allocations began that it had shown, and that are no more.
        kernels: For each kernel what it gives and takes; instead of addresses: allocation, and place in there.
    """

    process: bytes
    allocations: tuple[tuple[int, bytes], ...]
    gone: tuple[int, ...]
    kernels: tuple[tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]], ...]

    def pack(self) -> bytes:
        """Puts it into bytes."""
        parts = [_HEAD.pack(self.process, len(self.allocations), len(self.gone), len(self.kernels))]
        parts += [_ALLOCATION.pack(*one) for one in self.allocations]
        parts += [_GONE.pack(base) for base in self.gone]
        for gives, takes in self.kernels:
            parts.append(_COUNTS.pack(len(gives), len(takes)))
            parts += [_PLACE.pack(*one) for one in (*gives, *takes)]
        return b"".join(parts)

    @classmethod
    def unpack(cls, packed: bytes) -> Listing:
        """Reads what `pack` has made."""
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
    """What one rank shows of its memory; used with its device current.

    Args:
        device: The number of its device in this process.
    """

    def __init__(self, device: int) -> None:
        self._cuda = import_module("cupy").cuda
        self._device = device
        self._rooms: list[Any] = []  # they stay: others have them open
        self._used: list[int] = []
        self._now: dict[int, bytes] = {}  # the handles of allocations, in the kernels that are being listed
        self._shown: dict[int, bytes] = {}

    def restart(self) -> None:
        """Begins with other kernels: nobody uses the rooms any more, and handles are asked for anew."""
        self._used = [0] * len(self._rooms)
        self._now = {}

    def forsake_rooms(self) -> Sequence[Any]:
        """Gives up the rooms, which somebody may still use; whoever gets them keeps them until then."""
        rooms, self._rooms, self._used = self._rooms, [], []
        return rooms

    def can_show(self, address: int, nbytes: int) -> bool:
        """Whether other processes can open the memory there."""
        return not nbytes or self._place(address, nbytes) is not None

    def room(self, nbytes: int) -> int:
        """Gives memory for being shown, until `restart`; where it lies.

        Raises:
            Exception: There is no more; cupy's own.
        """
        for at, room in enumerate(self._rooms):
            start = -(-self._used[at] // _ALIGNMENT) * _ALIGNMENT
            if start + nbytes <= room.size:
                self._used[at] = start + nbytes
                return int(room.ptr) + start
        least = max(nbytes, sum(room.size for room in self._rooms))  # few of them, however much they grow
        with self._cuda.Device(self._device):
            self._rooms.append(self._cuda.Memory(-(-max(least, 1) // ROOM_NBYTES) * ROOM_NBYTES))
        self._used.append(nbytes)
        return int(self._rooms[-1].ptr)

    def listing(self, kernels: Sequence[Shown]) -> Listing:
        """Tells where in their allocations those spans lie, all of which can be shown."""
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
            process=_ipc_driver.process(), allocations=allocations, gone=self._gone(allocations), kernels=places
        )

    def _gone(self, allocations: Sequence[tuple[int, bytes]]) -> tuple[int, ...]:
        """Which allocations that were shown are no more; looked at where a new one is shown."""
        if all(self._shown.get(base) == handle for base, handle in allocations):
            return ()
        self._shown.update(allocations)
        gone = tuple(base for base, handle in self._shown.items() if self._handle(base) != handle)
        for base in gone:
            del self._shown[base]
        return gone

    def _place(self, address: int, nbytes: int) -> int | None:
        """Where the allocation of some memory begins; None: it has no handle."""
        room = next((one for one in self._rooms if one.ptr <= address < one.ptr + one.size), None)
        found = _ipc_driver.allocation(address) if room is None else (int(room.ptr), int(room.size))
        if found is None or address + nbytes > sum(found):
            return None
        base = found[0]
        if base not in self._now:
            self._now[base] = self._handle(base)
        return base if self._now[base] else None

    def _handle(self, base: int) -> bytes:
        """The handle of an allocation; empty: it has none."""
        runtime = self._cuda.runtime
        try:
            return bytes(runtime.ipcGetMemHandle(base))
        except runtime.CUDARuntimeError:
            return b""


class Imports:
    """What one rank has opened of others' memory; used with its device current."""

    def __init__(self) -> None:
        self._runtime = import_module("cupy").cuda.runtime
        self._opened: OrderedDict[tuple[int, int], tuple[bytes, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._opened)

    def shown(self, listings: dict[int, Listing]) -> list[tuple[Shown, ...]]:
        """Opens what ranks list; nothing of an earlier call is in use any more.

        Args:
            listings: Rank -> what it lists.

        Returns:
            For each rank, in that order, and each kernel: what it shows, with addresses of this process.

        Raises:
            Exception: A handle can't be opened; cupy's own.
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
        is_here = listing.process == _ipc_driver.process()
        starts = [base if is_here else self._open(rank, base, handle) for base, handle in listing.allocations]
        for sides in listing.kernels:
            gives, takes = (
                tuple((starts[which] + at, nbytes) if nbytes else (0, 0) for which, at, nbytes in side)
                for side in sides
            )
            yield Shown(gives, takes)

    def _open(self, rank: int, base: int, handle: bytes) -> int:
        """Opens an allocation, or finds it opened; another one that was there before is closed."""
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
        """Closes all of it; nothing uses it any more."""
        for which in tuple(self._opened):
            self._close(which)
