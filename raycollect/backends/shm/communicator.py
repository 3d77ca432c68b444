"""Backend `shm`: the members are processes of one machine that share memory.

Kernels on arrays in shared memory (made by `raycollect.empty` and others) work in place (`direct`). Small kernels, and
those on other arrays, are staged by chunks (`staged`); kernels that are launched together are staged as one
(`coalesced`). All ranks choose alike, from the listings written before the barrier (`directory`). Barriers, the
agreement and aborts are in `meeting`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from raycollect.backends.capabilities import refuse_unknown
from raycollect.backends.kernels import translated
from raycollect.backends.shm.boxes import ShmBoxes
from raycollect.backends.shm.coalesced import coalesced
from raycollect.backends.shm.direct import ALIKE, TOGETHER, InPlaceKernels
from raycollect.backends.shm.directory import STAGED, ArrayDirectory, directory_nbytes
from raycollect.backends.shm.meeting import Meeting, control_nbytes, prepare
from raycollect.backends.shm.segment import client_segment, server_segment
from raycollect.backends.shm.staged import StagedKernels, slots_nbytes
from raycollect.core.boxes import BoxExchange
from raycollect.core.kernel_progress import here
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind
from raycollect.core.operations import PARTIAL_FOLDS, PIECEWISE
from raycollect.core.protocols import SMALL_KERNEL_NBYTES, Communicator, Joining, SegmentSource
from raycollect.errors import GroupBrokenError


def create(joining: Joining) -> Communicator:
    """Joins the group; returns when this rank has the shared memory (rank 0: when all ranks have it).

    All members are processes of one machine and user. `Joining.segments` locates tensors for kernels in place.

    Raises:
        BackendUnavailableError: Shared memory is not available.
        CollectiveTimeoutError: Rank 0 did not join in time; on rank 0: another rank did not.
        InvalidGroupError: An option is unknown.
    """
    spec, rank, rendezvous = joining.spec, joining.rank, joining.rendezvous
    refuse_unknown(spec)
    nbytes = sum(part(spec.world_size) for part in (control_nbytes, slots_nbytes, directory_nbytes))
    if rank == 0:
        segment = server_segment(spec, rendezvous, nbytes, lambda fresh: prepare(fresh, spec.world_size))
    else:
        segment = client_segment(spec, rank, rendezvous, nbytes)
    return ShmCommunicator(spec, rank, segment, joining.segments)


class _Parts(NamedTuple):
    """The users of the group's memory, which is unmapped with the last reference to them."""

    meeting: Meeting
    staged: StagedKernels
    direct: InPlaceKernels
    boxes: ShmBoxes


class ShmCommunicator:
    """One rank's membership, a `Communicator`."""

    sees_departures: bool = True

    def __init__(self, spec: GroupSpec, rank: int, segment: memoryview, segments: SegmentSource) -> None:
        self.rank = rank
        self.world_size: int = spec.world_size
        self._group_name = spec.name
        self._begun = 0  # the current launch
        self._staged = 0  # the launch whose first kernel was staged, but has not run
        self._shown = 0  # the launch whose boxes were shown, but have not moved
        self._lock = threading.Lock()
        self._users = 0
        self._entered: _Parts | None = None  # until `end`, by the thread that runs the launch
        self._closed = False
        slots_at = control_nbytes(spec.world_size)
        directory_at = slots_at + slots_nbytes(spec.world_size)
        memory = np.frombuffer(segment, np.uint8)
        directory = ArrayDirectory(memory[directory_at:].data, rank, spec.world_size, segments)
        self._parts: _Parts | None = _Parts(
            Meeting(segment, rank, spec.world_size, spec.name),
            StagedKernels(memory[slots_at:directory_at], rank, spec.world_size),
            InPlaceKernels(directory, rank, segments),
            ShmBoxes(directory, rank, segments),
        )

    def agree(
        self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Exchanges arrivals among `launch.ranks` in shared memory.

        Before that it copies the first chunk of the kernel to this rank's slot, or lists arrays that others can access
        in place.
        """
        until_s = time.monotonic() + launch.timeout_s
        parts = self._entered = self._entered or self._come_in()
        parts.meeting.enter(launch, until_s)
        self._begin(parts, launch)
        if kernel is not None:
            # A repeated kernel is staged as before. Any other kernel is listed: another rank may have shared memory.
            if expected is None or not parts.staged.stage_again(launch, kernel):
                self._stage(parts, launch, kernel)
            self._staged = launch.seq
        else:
            self._staged = 0  # it may be a further agreement: only some ranks staged a kernel before
        parts.staged.turn = 0
        return parts.meeting.agree(launch, arrival, until_s, expected)

    __call__ = agree  # for communicators that use this one as their `Exchange`

    def _stage(self, parts: _Parts, launch: Launch, kernel: Kernel) -> None:
        with translated(kernel.kind, self._group_name, self.rank, folds=False):
            may_be_direct = kernel.kind in PIECEWISE or _is_for_direct(kernel)
            is_direct = may_be_direct and parts.direct.can_give(kernel)
            if not is_direct:
                parts.staged.stage(launch, kernel)
            if may_be_direct:
                parts.direct.show(launch, (kernel,), 0 if is_direct else STAGED)

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels in the caller's thread, each for at most `launch.timeout_s`; in place with common barriers."""
        is_first, self._staged = self._staged == launch.seq, 0
        parts = self._entered = self._entered or self._come_in()
        first = kernels[0]
        if len(kernels) > 1:
            self._launch_together(parts, launch, kernels)
        elif not is_first or not parts.staged.fold_again(launch, first):
            self._launch(parts, launch, first, is_first)

    def _launch(self, parts: _Parts, launch: Launch, kernel: Kernel, is_first: bool) -> None:
        meeting, staged, direct, _ = parts
        until_s = time.monotonic() + launch.timeout_s
        with translated(kernel.kind, self._group_name, self.rank):
            if _is_for_direct(kernel):
                has_run, is_first = direct.run(meeting, launch, (kernel,), listed=is_first, until_s=until_s)
                if has_run:
                    return
            staged.run(meeting, launch, kernel, staged=is_first, until_s=until_s)

    def _launch_together(self, parts: _Parts, launch: Launch, kernels: Sequence[Kernel]) -> None:
        # Each listing has room for `TOGETHER` kernels, which run in place with common barriers, or are staged as one.
        meeting, staged, direct, _ = parts
        kind, most = kernels[0].kind, TOGETHER if kernels[0].kind in ALIKE else 1
        if kind in ALIKE and len(kernels) > TOGETHER and _nbytes(kernels[0]) < SMALL_KERNEL_NBYTES:
            most = len(kernels)  # staged as one: listing them all would take longer
        for start in range(0, len(kernels), most):
            some, until_s = kernels[start : start + most], time.monotonic() + launch.timeout_s
            with translated(kind, self._group_name, self.rank):
                if kind in ALIKE and most <= TOGETHER and InPlaceKernels.is_worth(sum(map(_nbytes, some))):
                    has_run, _ = direct.run(meeting, launch, some, listed=False, until_s=until_s, begun=start)
                    if has_run:
                        continue
                rows = coalesced(some) if len(some) > 1 else some
                for at, kernel in enumerate(rows):
                    each = len(some) / len(rows)
                    here().cover(start + at * each, each)
                    staged.run(meeting, launch, kernel, staged=False, until_s=until_s)

    def show_boxes(self, launch: Launch, boxes: BoxExchange | None) -> None:
        """Lists the positions of this rank's boxes; see `Reaching`."""
        parts = self._entered = self._entered or self._come_in()
        with translated(OpKind.ALLTOALL, self._group_name, self.rank):
            parts.meeting.enter(launch, time.monotonic() + launch.timeout_s)
            self._begin(parts, launch)
            parts.boxes.show(launch, boxes)
            self._shown = launch.seq

    def launch_boxes(self, launch: Launch, boxes: BoxExchange) -> bool:
        """Moves boxes from tensor to tensor, if all ranks can reach each other's memory; see `Reaching`."""
        parts = self._entered = self._entered or self._come_in()
        with translated(OpKind.ALLTOALL, self._group_name, self.rank):
            shown, self._staged, self._shown = self._shown == launch.seq, 0, 0
            return parts.boxes.run(parts.meeting, launch, boxes, time.monotonic() + launch.timeout_s, shown=shown)

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Leaves the launch; a closed communicator has left them all."""
        entered, self._entered = self._entered, None
        try:
            parts = entered or self._come_in()
        except GroupBrokenError:
            return ()
        try:
            return parts.meeting.end(launch, ok)
        finally:
            self._go_out()

    def abort(self, seq: int) -> None:
        """Wakes this rank if it waits in that launch, now or later."""
        with suppress(GroupBrokenError), self as parts:
            parts.meeting.abort(seq)

    def lost(self, rank: int) -> bool:
        """Ends waits for a rank whose process has ended."""
        with suppress(GroupBrokenError), self as parts:
            parts.meeting.lost(rank)
        return True

    def close(self) -> None:
        """Wakes the threads inside, and releases the memory when they have left."""
        with self._lock:
            self._closed = True
            parts = self._parts
        if parts is not None:
            parts.meeting.close()
        self._release()

    def _come_in(self) -> _Parts:
        # Keeps the memory mapped until `_go_out`.
        with self._lock:
            parts = self._parts
            if self._closed or parts is None:
                raise GroupBrokenError(group_name=self._group_name, detail="the communicator was closed")
            self._users += 1
        return parts

    def _go_out(self) -> None:
        with self._lock:
            self._users -= 1
        if self._closed:
            self._release()

    __enter__ = _come_in

    def __exit__(self, *exc: object) -> None:
        self._go_out()

    def _release(self) -> None:
        with self._lock:
            if self._closed and self._users == 0 and self._parts is not None:
                self._parts.meeting.leave()
                self._parts.direct.close()
                self._parts = None

    def _begin(self, parts: _Parts, launch: Launch) -> None:
        if launch.seq != self._begun:
            self._begun = launch.seq
            parts.staged.turn = 0  # its first chunk takes the first slots
            parts.direct.restart()


def _is_for_direct(kernel: Kernel) -> bool:
    # In place, a scan would overwrite data that later ranks have yet to read.
    return kernel.kind not in PARTIAL_FOLDS and InPlaceKernels.is_worth(_nbytes(kernel))


def _nbytes(kernel: Kernel) -> int:
    # A size that all ranks compute alike: that of the array, or of the largest piece.
    sample = kernel.sample
    if sample is None:
        return 0
    return int(kernel.most * sample.dtype.itemsize if kernel.kind in PIECEWISE else sample.nbytes)
