"""Backend `nccl` without NCCL: all ranks share one GPU, and NCCL is older than 2.30, which takes them there.

The ranks are processes of one machine that work in each other's memory of the GPU, by CUDA IPC (`_ipc_memory`), with
what `_ipc_run` makes of a kernel. They meet in the host's memory, as those of `shm` do, whose communicator this one has
inside: for the door, and twice in each launch of kernels.

====  ===============================================================  ==========================================
step  what a rank does                                                 and then
====  ===============================================================  ==========================================
1     copies what can't be shown, behind all that the caller has       waits until its stream has done that, and
      enqueued                                                         meets the others, with a listing
2     opens what others list, folds and copies in each other's arrays  waits for its stream, and meets the others
3     copies back what others have written elsewhere                   waits for its stream
====  ===============================================================  ==========================================

No stream ever waits for another process, only hosts do: a rank that does not come, or dies, stops nobody's GPU. The
first meeting says that what is listed has been written; the second one that nobody reads or writes it any more, so that
it is its rank's own again. Bits are those of `shm`: the fold in rank order (P7).

Failure. A wait ends with its deadline, an abort, or the leaving of another rank, and the launch with a typed error. The
rank's own kernels have ended then, as they wait for nobody. Those of others may not have: what was shown is kept until
these have left the launch, too. A rank whose GPU stands still in mid-kernel leaves it when the group ends, and is
waited for until then. Else the group is as good as before, unless the device has failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

from raycollect.contracts import Completion, Exchange, Rendezvous
from raycollect.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    GroupBrokenError,
    KernelError,
    RaycollectError,
)
from raycollect.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp

from . import shm
from ._ipc_fold import Folder
from ._ipc_memory import Exports, Imports, Listing, Shown
from ._ipc_run import Part
from ._meeting import Meeting
from ._on_gpu import OnGpu
from .completion import DONE
from .device_arrays import DeviceArray
from .folds import refusal_reason
from .shm import ShmCommunicator
from .streams import GroupStream

__all__ = ["IpcCommunicator", "share"]

TOGETHER = 64
"""How many kernels at most share their meetings."""

TRIAL_TIMEOUT_S = 45.0
"""How long the first collective of a group may take: each process starts its part of the GPU, and compiles."""

_TRIAL_SIZE = 1 << 10

_PATIENCE, _PAUSE_S = 50, 0.0005
"""Between two looks a wait sleeps for this part of the time that it has lasted, but no longer than that."""

_DRAIN_S = 5.0
"""How long this rank's own kernels may take to end once something has failed."""

_Loan = tuple[Any, dict[int, int], Meeting]
"""What was shown in a launch that failed, the words of those who may still use it, and where they say so."""

_forsaken: list[_Loan] = []
"""What communicators that are closed had shown to ranks that have not left the launch."""


def _recall() -> None:
    """Lets go of what nobody uses any more."""
    _forsaken[:] = [loan for loan in _forsaken if loan[2].owing(loan[1])]


def share(
    spec: GroupSpec, rank: int, rendezvous: Rendezvous, exchange: Exchange, *, device: int, why: str = ""
) -> IpcCommunicator:
    """Joins a group whose ranks share one GPU; returns when a first sum has come out right.

    Args:
        spec: The group.
        rank: This process's rank.
        rendezvous: How the members find each other.
        exchange: Not used: arrivals travel in shared memory.
        device: The number of the GPU in this process.
        why: Why the group does not use NCCL.

    Raises:
        BackendUnavailableError: The processes can't share memory, of the host or of the GPU.
        CollectiveTimeoutError: A member did not come.
    """
    host = cast("ShmCommunicator", shm.create(spec, rank, rendezvous, exchange))
    made: IpcCommunicator | ShmCommunicator = host
    try:
        made = IpcCommunicator(spec, rank, host, device=device, why=why)
        _try(made)
    except BaseException as exc:
        made.close()
        if isinstance(exc, CollectiveTimeoutError) or not isinstance(exc, Exception):
            raise
        detail = f"backend 'nccl': rank {rank} can't work with the others in the memory of their GPU: {exc}"
        cure = "Processes in different containers need one IPC namespace; or use 'shm', through the memory of the host"
        raise BackendUnavailableError(group_name=spec.name, detail=f"{detail}. {cure}") from exc
    return made


def _try(made: IpcCommunicator) -> None:
    """Adds up a known array on all ranks, which starts and compiles what each needs."""
    cupy, world = import_module("cupy"), made.world_size
    first = Launch(seq=0, ranks=tuple(range(world)), timeout_s=TRIAL_TIMEOUT_S)
    ok = False
    try:
        with cupy.cuda.Device(made.number):
            given = cupy.full(_TRIAL_SIZE * world, made.rank + 1, "int32")
            seen = DeviceArray(given)
            made.launch(first, Kernel(kind=OpKind.ALLREDUCE, src=seen, dst=seen, op=ReduceOp.SUM))
            found = set(given.get().tolist())
        expected = world * (world + 1) // 2
        if found != {expected}:
            detail = f"a sum of 1 to {world} gave {sorted(found)[:3]}, not {expected}"
            raise KernelError(op="allreduce", group_name=made.group_name, rank=made.rank, detail=detail)
        ok = True
    finally:
        made.end(first, ok)


class _Door:
    """The door of another communicator as an exchange."""

    def __init__(self, host: ShmCommunicator) -> None:
        self._host = host

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        return self._host.agree(launch, arrival)

    def abort(self, seq: int) -> None:
        self._host.abort(seq)


class IpcCommunicator(OnGpu):
    """One rank's membership.

    Attributes:
        number: That of its GPU.
        why: Why the group does not use NCCL, in words.
        group_name: The group.
    """

    def __init__(self, spec: GroupSpec, rank: int, host: ShmCommunicator, *, device: int, why: str) -> None:
        super().__init__(spec, rank, _Door(host), device)
        self.number: int = device
        self.why: str = why
        self.group_name: str = spec.name
        self._host = host
        self._stream = GroupStream(device)
        self._folder = Folder(device)
        self._exports = Exports(device)
        self._imports = Imports()
        self._lent: list[_Loan] = []
        self._lock = threading.Lock()
        self._is_inside = self._is_closed = self._is_released = False
        self._is_stuck = self._is_at_others = False

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel behind what the caller has enqueued; it has ended when this returns."""
        self._run(launch, (kernel,))
        return DONE

    def launch_together(self, launch: Launch, kernels: Sequence[Kernel]) -> int:
        """Runs kernels whose ranks meet for all of them at once; see `contracts.Together`."""
        some = kernels[:TOGETHER]
        self._run(launch, some)
        return len(some)

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        """Leaves the launch; gives the ranks that are known to have run all of it."""
        super().end(launch, ok)
        if self._is_stuck and self._is_at_others:
            return ()  # the others keep what this rank's kernels may use yet
        return self._host.end(launch, ok)

    def close(self) -> None:
        """Wakes whoever is inside, and closes the memory of others when nobody is."""
        self._broken = self._broken or "the communicator was closed"
        with self._lock:
            self._is_closed = True
        self._host.close()
        self._release()

    # ------------------------------------------------------------------------------------------ one launch

    def _run(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        self._check_going(launch)
        for kernel in kernels:
            self.stage(launch, kernel)
        until_s, self._is_at_others = time.monotonic() + launch.timeout_s, False
        with self._inside() as meeting, self._failing(meeting, launch, kernels):
            self._recalled(meeting)
            self._exports.restart()
            parts = [Part(one, self.rank, launch.ranks, self._exports, self._folder) for one in kernels]
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
            self._is_at_others = False
            meeting.barrier(launch, until_s)
            if any(part.is_unsettled for part in parts):
                with self._stream.entered():
                    for part in parts:
                        part.settle()
                self._wait(launch, until_s)

    def _listed(self, launch: Launch, listing: Listing, until_s: float) -> list[tuple[Shown, ...]]:
        """Meets the others; gives what each shows, by its place in the launch and by kernel."""
        left_s = max(until_s - time.monotonic(), 0.0)
        told = self._host.agree(replace(launch, timeout_s=left_s), listing.pack())
        self._check_going(launch)
        with import_module("cupy").cuda.Device(self.number):
            return self._imports.shown(
                {
                    rank: listing if rank == self.rank else Listing.unpack(one)
                    for rank, one in zip(launch.ranks, told, strict=True)
                }
            )

    def _wait(self, launch: Launch, until_s: float) -> None:
        """Waits until what was enqueued last has ended on the GPU.

        Raises:
            CollectiveTimeoutError: It had not in time.
            PlanAbortedError: It was aborted.
            GroupBrokenError: The communicator was closed.
        """
        began_s = time.monotonic()
        while not self._stream.has_ended():
            self._check_going(launch)
            now_s = time.monotonic()
            if now_s > until_s:
                detail = f"launch {launch.seq} did not end on the GPU of rank {self.rank} within {launch.timeout_s:g} s"
                raise CollectiveTimeoutError(group_name=self.group_name, timeout_s=launch.timeout_s, detail=detail)
            time.sleep(min((now_s - began_s) / _PATIENCE, _PAUSE_S))

    # ------------------------------------------------------------------------------------------ failures

    @contextmanager
    def _inside(self) -> Iterator[Meeting]:
        """Keeps what is opened open while a thread works with it."""
        with self._lock:
            if self._is_closed:
                raise GroupBrokenError(group_name=self.group_name, detail=self._broken)
            self._is_inside = True
        try:
            parts = self._host._come_in()
            try:
                yield parts.meeting
            finally:
                self._host._go_out()
        finally:
            with self._lock:
                self._is_inside = False
            self._release()

    @contextmanager
    def _failing(self, meeting: Meeting, launch: Launch, kernels: Sequence[Kernel]) -> Iterator[None]:
        """Says what went wrong; keeps what was shown as long as others may use it."""
        kind = kernels[0].kind.value
        try:
            yield
        except BaseException as exc:
            has_failed = isinstance(exc, Exception) and not isinstance(exc, RaycollectError)
            told = f"{type(exc).__name__}: {exc}"
            if not self._drain() or (has_failed and not isinstance(exc, MemoryError)):
                self._broken = self._broken or f"{kind} of launch {launch.seq} failed in mid-kernel: {told}"
            self._lent.append(((*kernels, *self._exports.forsake_rooms()), meeting.closing(launch), meeting))
            self._check_aborted(launch)  # the cause, where the failure is its echo
            if self._is_closed:
                raise GroupBrokenError(group_name=self.group_name, detail=self._broken) from exc
            if has_failed:
                raise KernelError(op=kind, group_name=self.group_name, rank=self.rank, detail=told) from exc
            raise

    def _drain(self) -> bool:
        """Waits until the GPU has let go of the arrays, but not for ever; tells whether it has."""
        until_s = time.monotonic() + _DRAIN_S
        try:
            while not self._stream.has_ended():
                if time.monotonic() > until_s:
                    self._is_stuck = True  # it keeps its memory, and what it has opened
                    return False
                time.sleep(_PAUSE_S)
        except Exception:  # noqa: BLE001 - a device that has failed does nothing more, and says so each time
            return False
        return True

    def _recalled(self, meeting: Meeting) -> None:
        """Lets go of what was shown in launches that failed, and that nobody uses any more."""
        if self._lent:
            self._lent = [loan for loan in self._lent if meeting.owing(loan[1])]
        if _forsaken:
            _recall()

    def _release(self) -> None:
        """Gives back what a closed communicator holds, once nobody is inside."""
        with self._lock:
            if not self._is_closed or self._is_inside or self._is_released:
                return
            self._is_released = True
        _forsaken.extend(self._lent)
        self._lent = []
        if not self._is_stuck:
            self._quietly(self._imports.close)
            self._exports.forsake_rooms()
        _recall()

    def _quietly(self, act: Callable[[], None]) -> None:
        try:
            with import_module("cupy").cuda.Device(self.number):
                act()
        except Exception:  # noqa: BLE001 - the device has failed, or the process ends
            return

    def _other_than(self, op: ReduceOp, dtype: str) -> str:
        why = refusal_reason(op, dtype)
        return f"another one: {why}" if why else ""
