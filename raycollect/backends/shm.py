"""Backend `shm`: the members are processes of one machine; they work on staging slots in shared memory.

Theory. Each rank has two slots of `CHUNK_NBYTES`. An allreduce of n bytes over w ranks runs in chunks. Each rank copies
its chunk to its slot; a barrier; then either every rank folds all w slots straight into its own array ("redundant":
one barrier, w reads and w - 1 writes per byte and rank), or each rank folds its w-th of the chunk in place and, after
a second barrier, copies the whole result out ("sliced": two barriers, 2 reads and 1 + 1/w writes). The slots alternate,
so that the copy of the next chunk overlaps the folds of slower ranks. Either way each element is the left fold in
rank order, so the bits do not depend on chunks, algorithm or rank (P7). Extra memory: 2 x `CHUNK_NBYTES` per rank (P8).
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from raycollect.errors import GroupBrokenError, InternalError
from raycollect.model import Communicator, Completion, Exchange, GroupSpec, Kernel, Launch, OpKind, Rendezvous

from ._meeting import Meeting, control_nbytes, prepare
from ._segment import client_segment, server_segment
from .arrays import Array, Flat, fold
from .completion import DONE, chunks, movement, reduce_op, reduction, translated

__all__ = ["CHUNK_NBYTES", "ShmCommunicator", "create"]

CHUNK_NBYTES = 1 << 20
"""The bytes of one staging slot; a multiple of every item size."""

SLICED_FROM_NBYTES: tuple[tuple[int, int], ...] = ((3, 512 << 10),)
"""(world size, chunk bytes) from which on slices beat the redundant fold, as measured; smaller groups never slice."""

_SLOTS = 2


def create(spec: GroupSpec, rank: int, rendezvous: Rendezvous, exchange: Exchange, *, host: str = "") -> Communicator:
    """Joins the group; returns when this rank has the shared memory (rank 0: when all ranks have it).

    Args:
        spec: The group; all its members are processes of one machine and user.
        rank: This process's rank.
        rendezvous: How the members find each other.
        exchange: Not used: arrivals travel in shared memory.
        host: Not used: nothing listens.

    Raises:
        BackendUnavailableError: There is no shared memory to be had.
        CollectiveTimeoutError: Rank 0 did not come.
    """
    nbytes = control_nbytes(spec.world_size) + spec.world_size * _SLOTS * CHUNK_NBYTES
    if rank == 0:
        segment = server_segment(spec, rendezvous, nbytes, lambda fresh: prepare(fresh, spec.world_size))
    else:
        segment = client_segment(spec, rank, rendezvous, nbytes)
    return ShmCommunicator(spec, rank, segment)


class ShmCommunicator:
    """One rank's membership; see `raycollect.model.Communicator`."""

    def __init__(self, spec: GroupSpec, rank: int, segment: mmap.mmap) -> None:
        self.rank = rank
        self.world_size = spec.world_size
        self._group_name = spec.name
        self._turn = 0
        self._staged: Kernel | None = None
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        slots = np.frombuffer(segment, np.uint8)[control_nbytes(spec.world_size) :]
        # Whoever is inside holds these two; the memory is unmapped when the last reference goes.
        self._slots: Array | None = slots.reshape(spec.world_size, _SLOTS, CHUNK_NBYTES)
        self._meeting: Meeting | None = Meeting(segment, rank, spec.world_size, spec.name)
        self._kernels: dict[OpKind, Callable[[Meeting, Launch, Kernel, float], None]] = {
            OpKind.ALLREDUCE: self._allreduce,
            OpKind.BROADCAST: self._copy,
            OpKind.SEND: self._copy,
            OpKind.RECV: self._copy,
            OpKind.BARRIER: self._barrier,
        }

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """Copies the first chunk to this rank's slot, so that the door is the kernel's first barrier too."""
        with _Inside(self) as meeting, translated(kernel.kind, self._group_name, self.rank):
            meeting.enter(launch, time.monotonic() + launch.timeout_s)
            given = self._given(kernel)
            if given is not None and given.size:
                self._turn = 0
                hi = min(given.size, CHUNK_NBYTES // given.dtype.itemsize)
                self._staging(given.dtype, hi)[self.rank][...] = given.read(0, hi)
            self._staged = kernel

    def agree(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Brings `launch.ranks` together; arrivals travel in shared memory."""
        with _Inside(self) as meeting:
            self._turn = 0
            return meeting.agree(launch, arrival)

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread, for at most `launch.timeout_s`."""
        with _Inside(self) as meeting, translated(kernel.kind, self._group_name, self.rank):
            self._kernels[kernel.kind](meeting, launch, kernel, time.monotonic() + launch.timeout_s)
        return DONE

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        """Leaves the launch; a closed communicator has left them all."""
        try:
            with _Inside(self) as meeting:
                return meeting.end(launch, ok)
        except GroupBrokenError:
            return ()

    def abort(self, seq: int) -> None:
        """Wakes this rank if it waits in that launch, now or later."""
        try:
            with _Inside(self) as meeting:
                meeting.abort(seq)
        except GroupBrokenError:
            return

    def close(self) -> None:
        """Wakes whoever is inside, and lets go of the memory when they have left."""
        with self._lock:
            self._closed = True
            meeting = self._meeting
        if meeting is not None:
            meeting.close()
        self._release()

    def _come_in(self) -> Meeting:
        """Keeps the memory mapped while a thread works on it, until `_go_out`."""
        with self._lock:
            meeting = self._meeting
            if self._closed or meeting is None:
                raise GroupBrokenError(group_name=self._group_name, detail="the communicator was closed")
            self._users += 1
        return meeting

    def _go_out(self) -> None:
        with self._lock:
            self._users -= 1
        self._release()

    def _release(self) -> None:
        with self._lock:
            if self._closed and self._users == 0:
                self._meeting = self._slots = None

    def _staging(self, dtype: np.dtype[np.generic], width: int) -> Array:
        """Gives the slots of the next chunk, [world_size, width]."""
        if self._slots is None:
            raise InternalError(detail="a kernel runs in a closed communicator")
        self._turn += 1
        staging: Array = self._slots[:, self._turn % _SLOTS, : width * dtype.itemsize].view(dtype)
        return staging

    def _given(self, kernel: Kernel) -> Flat | None:
        """What this rank gives to others in a kernel; None where it only takes."""
        if kernel.kind is OpKind.ALLREDUCE:
            return Flat(kernel.src)
        if kernel.kind is OpKind.BARRIER:
            return None
        return movement(kernel, is_root=self.rank == self._root(kernel))[0]

    def _root(self, kernel: Kernel) -> int:
        return self.rank if kernel.kind is OpKind.SEND else kernel.peer

    def _was_staged(self, kernel: Kernel) -> bool:
        """True for the kernel whose first chunk all ranks brought before the door."""
        staged, self._staged = self._staged is kernel, None
        return staged

    def _barrier(self, meeting: Meeting, launch: Launch, kernel: Kernel, until_s: float) -> None:
        """Waits for all; the door was the barrier where it was staged."""
        if not self._was_staged(kernel):
            meeting.barrier(launch, until_s)

    def _allreduce(self, meeting: Meeting, launch: Launch, kernel: Kernel, until_s: float) -> None:
        """Folds everybody's `src` into everybody's `dst`, which may be `src` itself."""
        (src, dst), op, ranks = reduction(kernel), reduce_op(kernel), launch.ranks
        me, step = ranks.index(self.rank), CHUNK_NBYTES // src.dtype.itemsize
        staged = self._was_staged(kernel)
        for lo, hi in chunks(src.size, step):
            width = hi - lo
            staging = self._staging(src.dtype, width)
            parts = [staging[rank] for rank in ranks]
            if lo or not staged:
                parts[me][...] = src.read(lo, hi)
                meeting.barrier(launch, until_s)
            # One's own part is read from the slot too: `out` may be its storage, and ranks below it come first.
            out = dst.target(lo, hi)
            if _is_sliced(len(ranks), width * src.dtype.itemsize):
                mine = slice(me * width // len(ranks), (me + 1) * width // len(ranks))
                fold(op, [part[mine] for part in parts], parts[0][mine])
                meeting.barrier(launch, until_s)
                out[...] = parts[0]
            else:
                fold(op, parts, out)
            dst.commit(lo, hi, out)

    def _copy(self, meeting: Meeting, launch: Launch, kernel: Kernel, until_s: float) -> None:
        """Moves the root's `src` to everybody's `dst`: a broadcast, or the two ends of a send."""
        root, staged = self._root(kernel), self._was_staged(kernel)
        src, dst, whole = movement(kernel, is_root=self.rank == root)
        for lo, hi in chunks(whole.size, CHUNK_NBYTES // whole.dtype.itemsize):
            slot = self._staging(whole.dtype, hi - lo)[root]
            if lo or not staged:
                if src is not None:
                    slot[...] = src.read(lo, hi)
                meeting.barrier(launch, until_s)
            if dst is not None:
                dst.write(lo, hi, slot)


class _Inside:
    """A thread at work in a communicator."""

    __slots__ = ("_communicator",)

    def __init__(self, communicator: ShmCommunicator) -> None:
        self._communicator = communicator

    def __enter__(self) -> Meeting:
        return self._communicator._come_in()

    def __exit__(self, *exc: object) -> None:
        self._communicator._go_out()


def _is_sliced(world_size: int, nbytes: int) -> bool:
    return any(world_size >= least and nbytes >= from_nbytes for least, from_nbytes in SLICED_FROM_NBYTES)
