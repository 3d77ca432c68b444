"""Backend `nccl`: members on NVIDIA GPUs, by `cupy.cuda.nccl`; torch is not needed.

Theory. Each operation is NCCL's own where it exists: ALLREDUCE, REDUCE, BROADCAST, and ALLGATHER and REDUCESCATTER of
pieces of one size. With several sizes these are a broadcast from, or a reduction to, each rank; GATHER, SCATTER and
ALLTOALL are a send and a receive between each two ranks that exchange data, all in one NCCL group. What NCCL can't
reduce (whole numbers of 16 bits, bitwise ops, products of complex numbers) moves as bytes and is folded in rank order
by cupy, `FOLD_NBYTES` of all ranks together at a time (P8). NCCL's own reductions use rings and trees: the bits are the
same on all ranks, but not those of the left fold (P7). Arrays with gaps are copied.

Order. The ranks agree over the exchange before each launch, so that no kernel waits on a GPU for an absent rank. The
kernels run on a stream of the group (`streams`), after the caller's enqueued work. `launch` returns when they have
ended, so the caller's later work follows them. It queries the event after them, not the device: other streams continue,
and a call with `async_op` overlaps with the caller's own kernels.

Failure. Waiting notices the launch's deadline, an abort, and asynchronous errors of NCCL. Any of these aborts NCCL's
communicator (`ncclCommAbort`), whose kernels then end on the GPU; the group is broken. An NCCL call that blocks while
it enqueues (NCCL connects to ranks on first use) is ended from another thread in the same way: by the thread that
aborts, or by the guard, if the call exceeds its launch's limit. NCCL frees the communicator under that call, and cupy
has no call that only interrupts it; so an abort first waits `ENTER_S`, in which most calls return. An unbroken group is
destroyed (`ncclCommDestroy`) on close, not aborted: NCCL may still be sending data of its kernels.

Repetition. A kernel keeps its script, so that a captured step or a repeated call only enqueues it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

from raycollect.backends.cuda_driver import RelaxedCapture
from raycollect.backends.device_arrays import DeviceArray
from raycollect.backends.exchanged import Exchanged
from raycollect.backends.kernels import late
from raycollect.backends.nccl.group import HINT, NcclEndpoint, free, join, said
from raycollect.backends.nccl.ops import folds, reduction_of
from raycollect.backends.nccl.run import write
from raycollect.backends.nccl.scripts import Script, enqueue
from raycollect.backends.streams import GroupStream, has_drained, pause
from raycollect.core import threads, timers
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Joining
from raycollect.errors import CollectiveTimeoutError, GroupBrokenError, KernelError, RaycollectError

JOIN_TIMEOUT_S = 45.0  # Less than the minute of a declaration, which can then report the missing ranks
LOOK_S = 0.01  # How often a wait asks NCCL for errors
FLOAT8_FROM = 90  # The first compute capability on which NCCL reduces 8-bit floats
_ABORT_S = 1.0  # How long to wait until NCCL has ended a communicator; a helper thread continues
_DRAIN_S = 5.0  # How long kernels may take to end on the GPU after their communicator was aborted
ENTER_S = 0.1  # How long a rank may keep enqueueing after an abort before its communicator is aborted under it
GUARD_S = 0.25  # How often the guard checks for ranks that block while they enqueue

_log = logging.getLogger("raycollect")


def create(joining: Joining) -> NcclCommunicator:
    """Joins the group; returns when this rank has met all others.

    The option ``device`` is the number of the GPU in each member's process, by default the calling thread's current one
    (0 if none was chosen).

    Raises:
        InvalidGroupError: The options don't fit.
        BackendUnavailableError: There is no GPU, or NCCL can't connect these members.
        CollectiveTimeoutError: A member did not join in time.
        KernelError: NCCL can't connect to a member.
    """
    spec = joining.spec
    joined = join(spec, joining.rank, joining.rendezvous, host=joining.host, timeout_s=JOIN_TIMEOUT_S)
    communicator = NcclCommunicator(joined, joining)
    first = Launch(seq=0, ranks=tuple(range(spec.world_size)), timeout_s=JOIN_TIMEOUT_S)
    communicator.launch(first, (Kernel(kind=OpKind.BARRIER),))  # NCCL connects at its first operation
    return communicator


class NcclCommunicator(Exchanged):
    """One rank's membership. An abort also wakes a rank inside a kernel, and breaks the group."""

    def __init__(self, joined: NcclEndpoint, joining: Joining) -> None:
        super().__init__(joining)
        self.device: str = f"cuda:{joined.device}"  # ``"cuda:0"``
        self._nccl = joined.communicator
        self._version = joined.version
        self._capability = joined.capability
        self._stream = GroupStream(joined.device)
        self._key = object()  # marks the scripts that kernels keep for this communicator, without holding it
        self._workspace: Any = None  # memory that running kernels use
        self._entering = 0  # the launch whose kernels are being enqueued, which may block
        self._until_s = math.inf  # the time limit of that
        self._lock = threading.Lock()
        self._is_over = self._is_late = False
        self._is_in_step = True  # whether the last launch succeeded
        self._is_bereft = False  # whether the process of a rank has ended
        _guard.add(self)

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels after the caller's work: one, or several as one NCCL group."""
        self.enqueue(launch, kernels)
        self.finish(launch, kernels[0])

    def enqueue(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Enqueues kernels; `finish` waits for them."""
        self._check_going(launch)
        for kernel in kernels:
            self._check_kernel(launch, kernel)
        with self._failing(kernels[0], launch), self._watched(launch), self._stream.entered():
            scripts_by_kernel = [self._written(kernel) for kernel in kernels]
            self._workspace = scripts_by_kernel
            if all(len(scripts) == 1 for scripts in scripts_by_kernel):
                self._enqueue([script for (script,) in scripts_by_kernel])
            else:
                for script in (script for scripts in scripts_by_kernel for script in scripts):
                    self._enqueue((script,))

    def finish(self, launch: Launch, kernel: Kernel) -> None:
        """Waits until the last enqueued work has ended on the GPU.

        Raises:
            CollectiveTimeoutError: It exceeded the launch's limit.
            PlanAbortedError: It was aborted.
            KernelError: NCCL or the device failed.
        """
        began_s = asked_s = time.monotonic()
        with self._failing(kernel, launch), RelaxedCapture():
            while not self._stream.has_ended():
                self._check_going(launch)
                now_s = time.monotonic()
                if now_s - asked_s > LOOK_S:
                    self._ask()
                    asked_s = now_s
                if now_s - began_s > launch.timeout_s:
                    raise self._late(launch, "end on the GPU")
                pause(now_s - began_s)
            self._check_going(launch)  # the kernels of an aborted communicator end, too
            self._ask()
        self._workspace = None

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Leaves the launch."""
        self._is_in_step = ok
        return super().end(launch, ok, owed)

    def abort(self, seq: int) -> None:
        """Wakes this rank, wherever it waits."""
        self._is_bereft = self._is_bereft or not seq
        super().abort(seq)
        if self._entering == seq:  # the call can't check for aborts; most return at once, and need the communicator
            timers.soon_or_now(ENTER_S, partial(self._wake, seq))

    def close(self) -> None:
        """Ends NCCL's communicator; running kernels are aborted."""
        is_whole, self._broken = not self._broken, self._broken or "the communicator was closed"
        # In this order: a launch either sees `_broken`, or is seen here, first as entering and then by its workspace
        is_idle = not self._entering and self._workspace is None
        self._end(is_quiet=is_whole and is_idle and self._is_in_step and not self._is_bereft)

    def _enqueue(self, scripts: Sequence[Script]) -> None:
        enqueue(scripts, self._nccl, self._stream.pointer)

    def _written(self, kernel: Kernel) -> list[Script]:
        key, scripts = kernel.memo.get("nccl", (None, None))
        if key is self._key:
            return cast("list[Script]", scripts)
        written = write(kernel, self.rank, self.world_size, self._version)
        if len(written) == 1 and written[0].is_bare:
            kernel.memo["nccl"] = self._key, written
        return written

    @contextmanager
    def _watched(self, launch: Launch) -> Iterator[None]:
        # Lets other threads abort NCCL's communicator while this one is in a call that may block.
        self._until_s = time.monotonic() + launch.timeout_s
        self._entering = launch.seq
        try:
            self._check_going(launch)  # an abort either sees `_entering`, or is seen here
            yield
        finally:
            self._entering, self._until_s = 0, math.inf

    def _look(self) -> bool:
        # Aborts NCCL's communicator if a call blocks for too long; False if the communicator has ended.
        if time.monotonic() > self._until_s and not self._is_late:
            self._is_late = True
            self._end_aside()
        return not self._is_over

    def _ask(self) -> None:
        with self._lock:  # ending the communicator frees it
            if not self._is_over:
                self._nccl.check_async_error()

    def _wake(self, seq: int) -> None:
        if self._entering == seq:
            self._end_aside()

    def _end_aside(self) -> None:
        threads.call_in_helper(threads.survives, self._end)

    def _end(self, *, is_quiet: bool = False) -> None:
        # If `is_quiet`, NCCL may still be sending data of this rank, which an abort would drop.
        with self._lock:
            is_over, self._is_over = self._is_over, True
        if is_over:
            return
        # In a helper thread, and not under the lock: NCCL waits for the work before its kernels on their stream; a
        # destroyed communicator also waits for the other ranks of the host
        threads.bounded(partial(free, self._nccl, is_quiet=is_quiet), _ABORT_S)

    def _late(self, launch: Launch, what: str) -> CollectiveTimeoutError:
        return late(self._group_name, launch, f"{what} of rank {self.rank}", f"; {HINT}")

    @contextmanager
    def _failing(self, kernel: Kernel, launch: Launch) -> Iterator[None]:
        # Aborts NCCL's communicator after a failure, so that no kernel is left on the GPU.
        kind = kernel.kind.value
        try:
            yield
        except BaseException as exc:
            why = str(exc) if isinstance(exc, RaycollectError) else said(exc)
            closed = self._broken
            self._broken = closed or f"{kind} of launch {launch.seq} failed in mid-kernel: {why}"
            self._end()
            self._drain()
            self._check_aborted(launch)  # the cause, if the failure is its consequence
            if isinstance(exc, RaycollectError) or not isinstance(exc, Exception):
                raise
            if closed:
                raise GroupBrokenError(group_name=self._group_name, detail=closed) from exc
            if self._is_late:
                raise self._late(launch, "get to the GPU") from exc
            raise KernelError(op=kind, group_name=self._group_name, rank=self.rank, detail=why) from exc

    def _drain(self) -> None:
        # Waits, with a limit, until the GPU no longer uses the arrays.
        with suppress(Exception):  # a failed device no longer writes
            if not has_drained(self._stream.has_ended, _DRAIN_S):
                return  # and hold the memory
        self._workspace = None

    def _check_kernel(self, launch: Launch, kernel: Kernel) -> None:
        # Raises UnsupportedError for arrays that are not on this rank's GPU, or can't be reduced.
        if kernel.memo.get("nccl.checked") == self.device:
            return
        if stray := _stray_device(kernel, self.device):
            expected = f"{self.device}, the device of this rank of the group; shm and tcp take others"
            raise self._refused(kernel, "device", stray, expected)
        if kernel.op is not None and kernel.sample is not None:
            dtype = kernel.sample.dtype.name
            if not self._can_reduce(kernel.op, dtype):
                expected = f"one that NCCL {self._version} on sm_{self._capability}, or cupy, has for that type"
                raise self._refused(kernel, "reduce op", f"{kernel.op.name} of {dtype}", expected)
        kernel.memo["nccl.checked"] = self.device  # not this object: the memo would keep it alive

    def _can_reduce(self, op: ReduceOp, dtype: str) -> bool:
        if dtype.startswith("float8") and self._capability < FLOAT8_FROM:
            return False
        return reduction_of(op, dtype, self._version) is not None or folds(op, dtype)


def _stray_device(kernel: Kernel, device: str) -> str:
    # The device of the first array on another device: ``"cpu"``, ``"cuda:1"``; empty if all are on `device`.
    for side in (kernel.src, kernel.dst):
        for array in side if type(side) is tuple else (() if side is None else (side,)):
            actual = array.device if isinstance(array, DeviceArray) else "cpu"
            if actual != device:
                return actual
    return ""


class _Guard(timers.Watcher):
    """Watches ranks that may block in an NCCL call, as long as communicators exist."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._there: weakref.WeakSet[NcclCommunicator] = weakref.WeakSet()

    def add(self, communicator: NcclCommunicator) -> None:
        with self._lock:
            self._there.add(communicator)
        self.look_after(0.0)

    def look(self) -> float:
        with self._lock:
            for communicator in list(self._there):
                threads.survives(self._look_at, communicator)
            return GUARD_S if self._there else math.inf

    def _look_at(self, communicator: NcclCommunicator) -> None:
        if not communicator._look():
            self._there.discard(communicator)


_guard = _Guard()
