"""Backend `nccl` without NCCL: all ranks share one GPU, and NCCL is older than 2.30, which supports that.

The ranks are processes of one machine that access each other's GPU memory by CUDA IPC (`ipc_memory`); `ipc_run` maps
kernels to folds and copies. They synchronize in host memory through an `shm` communicator: in the agreement, and twice
in each launch of kernels.

====  ===============================================================  ==========================================
step  a rank                                                           and then
====  ===============================================================  ==========================================
1     copies arrays that can't be exported, after the caller's work    waits for its stream, and exchanges a
                                                                       listing with the others
2     opens the listed memory, folds and copies in others' arrays      waits for its stream, closes the opened
                                                                       memory, and waits at a barrier
3     copies the results in temporary memory to its arrays             waits for its stream
====  ===============================================================  ==========================================

Only hosts wait for other processes, never streams: a rank that is absent or dies blocks no GPU. After the exchange, all
listed data has been written; after the barrier, no process has another's memory open, so that it may be freed. Bits are
those of `shm`: the fold in rank order (P7).

Failure. A wait ends at its deadline, on an abort, or when another rank leaves, and the launch raises a typed error. By
then the rank's own kernels have ended, as they wait for no other rank, and the memory that it had opened is closed.
Kernels of other ranks may still run: exported memory is held until these have left the launch, too. A rank whose GPU
hangs inside a kernel keeps the memory open. It leaves the launch when the group is closed after that kernel has ended,
or when its process ends, and the others wait for it until then. Otherwise the group stays usable. A rank whose device
has failed leaves the launch, and its opened memory is released with its process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from typing import cast

from raycollect.backends.device_arrays import DeviceArray
from raycollect.backends.folds import refusal_reason
from raycollect.backends.kernels import late
from raycollect.backends.nccl.ipc_fold import Folder
from raycollect.backends.nccl.ipc_memory import LISTINGS, ExportedSpans, Exports, Imports, IpcListing
from raycollect.backends.nccl.ipc_run import IpcKernel
from raycollect.backends.nccl.on_gpu import OnGpu
from raycollect.backends.shm.communicator import ShmCommunicator
from raycollect.backends.shm.communicator import create as create_shm
from raycollect.backends.shm.loans import Loans
from raycollect.backends.shm.meeting import Meeting
from raycollect.backends.streams import GroupStream, has_drained, on_device, wait
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Joining, NoSegments
from raycollect.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    GroupBrokenError,
    KernelError,
    RaycollectError,
)

TOGETHER = 64  # The most kernels that run with common barriers
TRIAL_TIMEOUT_S = 45.0  # The limit of the first collective of a group: each process initializes the GPU, and compiles
_TRIAL_SIZE = 1 << 10
_DRAIN_S = 5.0  # How long this rank's own kernels may take to end after a failure


def share(joining: Joining, *, device: int) -> IpcCommunicator:
    """Joins a group whose ranks share one GPU; returns when a first sum was correct."""
    spec, rank = joining.spec, joining.rank
    host = cast("ShmCommunicator", create_shm(replace(joining, segments=NoSegments())))
    communicator: IpcCommunicator | ShmCommunicator = host
    try:
        communicator = IpcCommunicator(joining, host, device=device)
        _try(communicator)
    except BaseException as exc:
        communicator.close()
        if isinstance(exc, CollectiveTimeoutError) or not isinstance(exc, Exception):
            raise
        detail = f"backend 'nccl': rank {rank} can't work with the others in the memory of their GPU: {exc}"
        cure = "Processes in different containers need one IPC namespace; or use 'shm', through the memory of the host"
        raise BackendUnavailableError(group_name=spec.name, detail=f"{detail}. {cure}") from exc
    return communicator


def _try(communicator: IpcCommunicator) -> None:
    # Sums a known array over all ranks, which also initializes and compiles.
    cupy, world = import_module("cupy"), communicator.world_size
    first = Launch(seq=0, ranks=tuple(range(world)), timeout_s=TRIAL_TIMEOUT_S)
    ok = False
    try:
        with on_device(communicator.number):
            given = cupy.full(_TRIAL_SIZE * world, communicator.rank + 1, "int32")
            seen = DeviceArray(given)
            communicator.launch(first, (Kernel(kind=OpKind.ALLREDUCE, src=seen, dst=seen, op=ReduceOp.SUM),))
            totals = set(given.get().tolist())
        expected = world * (world + 1) // 2
        if totals != {expected}:
            detail = f"a sum of 1 to {world} gave {sorted(totals)[:3]}, not {expected}"
            raise KernelError(op="allreduce", group_name=communicator.group_name, rank=communicator.rank, detail=detail)
        ok = True
    finally:
        communicator.end(first, ok)


class IpcCommunicator(OnGpu):
    """One rank's membership."""

    def __init__(self, joining: Joining, host: ShmCommunicator, *, device: int) -> None:
        super().__init__(replace(joining, exchange=host), device)
        self.number: int = device  # the GPU's number in this process
        self.group_name: str = joining.spec.name
        self._host = host
        self._stream = GroupStream(device)
        self._folder = Folder(device)
        self._exports = Exports(device)
        self._imports = Imports()
        self._loans = Loans()
        self._lock = threading.Lock()
        self._is_inside = self._is_closed = self._is_releasing = self._is_released = False
        self._is_at_others = self._is_stuck = False  # whether its kernels use others' memory; whether they hang
        self._stuck_in: Launch | None = None  # the launch that a stuck rank has not left

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels after the caller's work, with common barriers."""
        for start in range(0, len(kernels), TOGETHER):
            self._run_together(launch, kernels[start : start + TOGETHER])

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Leaves the launch; returns the ranks known to have run all of it."""
        super().end(launch, ok, owed)
        with self._lock:  # either this sees the release, or `_release` sees the launch
            if self._is_stuck and not self._is_released:
                self._stuck_in = launch
                return ()  # the others hold the memory that this rank's kernels may use
        return self._host.end(launch, ok)

    def close(self) -> None:
        """Wakes the thread inside, and releases all memory when it has left; may be called again."""
        self._broken = self._broken or "the communicator was closed"
        with self._lock:
            self._is_closed = True
        self._host.close()
        self._release()

    def _run_together(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        self._check_going(launch)
        for kernel in kernels:
            self._check_kernel(launch, kernel)
        until_s, self._is_at_others = time.monotonic() + launch.timeout_s, False
        with self._inside() as meeting, self._failing(meeting, launch, kernels):
            self._loans.release_unused()
            self._exports.restart()
            parts = [IpcKernel(kernel, self.rank, launch.ranks, self._exports, self._folder) for kernel in kernels]
            with self._stream.entered():
                shown = [part.show() for part in parts]
                listing = self._exports.listing(shown)
            self._wait(launch, until_s)
            all_shown = self._listed(launch, listing, until_s)
            self._is_at_others = True
            with self._stream.entered():
                for part, *mine in zip(parts, *all_shown, strict=True):
                    part.work(mine)
            self._wait(launch, until_s)
            with on_device(self.number):
                self._imports.close()
            self._is_at_others = False
            meeting.barrier(launch, until_s)
            if any(part.is_unsettled for part in parts):
                with self._stream.entered():
                    for part in parts:
                        part.settle()
                self._wait(launch, until_s)

    def _listed(self, launch: Launch, listing: IpcListing, until_s: float) -> list[tuple[ExportedSpans, ...]]:
        left_s = max(until_s - time.monotonic(), 0.0)
        replies = zip(
            launch.ranks,
            self._host.agree(Launch(seq=launch.seq, ranks=launch.ranks, timeout_s=left_s), LISTINGS.encode(listing)),
            strict=True,
        )
        self._check_going(launch)
        listings = [listing if rank == self.rank else LISTINGS.decode(blob) for rank, blob in replies]
        with on_device(self.number):
            return self._imports.shown(listings)

    def _wait(self, launch: Launch, until_s: float) -> None:
        def check() -> None:
            self._check_going(launch)
            if time.monotonic() > until_s:
                raise late(self.group_name, launch, f"end on the GPU of rank {self.rank}")

        wait(self._stream.has_ended, check)

    @contextmanager
    def _inside(self) -> Iterator[Meeting]:
        # Keeps this rank from leaving while a thread, or its GPU, works with others' memory.
        with self._lock:
            if self._is_closed:
                raise GroupBrokenError(group_name=self.group_name, detail=self._broken)
            self._is_inside = True
        try:
            with self._host as parts:
                yield parts.meeting
        finally:
            with self._lock:
                self._is_inside = False
            self._release()

    @contextmanager
    def _failing(self, meeting: Meeting, launch: Launch, kernels: Sequence[Kernel]) -> Iterator[None]:
        # Keeps exported memory as long as others may use it.
        kind = kernels[0].kind.value
        try:
            yield
        except BaseException as exc:
            has_failed = isinstance(exc, Exception) and not isinstance(exc, RaycollectError)
            cause = f"{type(exc).__name__}: {exc}"
            if not self._drain() or (has_failed and not isinstance(exc, MemoryError)):
                self._broken = self._broken or f"{kind} of launch {launch.seq} failed in mid-kernel: {cause}"
            self._loans.add((*kernels, *self._exports.abandon_rooms()), meeting, launch)
            self._check_aborted(launch)  # the cause, if the failure is its consequence
            if self._is_closed:
                raise GroupBrokenError(group_name=self.group_name, detail=self._broken) from exc
            if has_failed:
                raise KernelError(op=kind, group_name=self.group_name, rank=self.rank, detail=cause) from exc
            raise

    def _drain(self) -> bool:
        # Waits, with a limit, until the GPU uses no arrays, and closes those of others; False if the GPU still runs.
        try:
            if not has_drained(self._stream.has_ended, _DRAIN_S):
                self._is_stuck = self._is_at_others
                return False
            with on_device(self.number):
                self._imports.close()
        except Exception:  # noqa: BLE001 - a failed device runs nothing, and every call to it raises
            return False
        return True

    def _release(self) -> None:
        with self._lock:
            if not self._is_closed or self._is_inside or self._is_releasing or self._is_released:
                return
            self._is_releasing = True
        self._loans.abandon()
        has_ended, is_closed = True, False
        with suppress(Exception), on_device(self.number):  # fails if the device has failed, or the process ends
            has_ended = self._stream.has_ended()  # else its GPU may still use the memory
            if has_ended:
                self._imports.close()
                self._exports.abandon_rooms()
                is_closed = True
        with self._lock:
            self._is_releasing, self._is_released = False, has_ended
            stuck_in = self._stuck_in if is_closed else None
        if stuck_in is not None:
            self._host.end(stuck_in, False)

    def _other_than(self, op: ReduceOp, dtype: str) -> str:
        why = refusal_reason(op, dtype)
        return f"another one: {why}" if why else ""
