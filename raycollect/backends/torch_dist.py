"""Backend `torch:<name>`: any backend of `torch.distributed`, by its name there.

Theory, for w ranks and n bytes. Each operation is the library's own, on chunks of `CHUNK_NBYTES` of bytes: every
library moves those, whatever the dtype. What a library for CPU memory does not reduce as numpy does (`is_native`: other
dtypes, floats of 16 bits, MIN and MAX of floats with their NaN, bitwise ops) is moved and folded in rank order. That
takes an allgather, (w - 1) x n out of each rank, or from `SLICED_FROM` on an all-to-all of slices and their allgather,
2 (w - 1) / w x n; a gather for REDUCE; and always an all-to-all for REDUCESCATTER, which is the least there is. In a
device's memory the library reduces, whatever it is.

Pieces of several sizes: ALLTOALL moves exactly them; ALLGATHER does up to the smallest, and the rest of each by a
broadcast; GATHER, SCATTER and a device's REDUCESCATTER pad each chunk to that of the largest piece.

What comes from others is received in memory of our own, and copied out when it is whole: a kernel that was given up may
still be under way in a thread of the library, and must not write to a tensor that is the user's again. Waiting gives
the GIL back and sees an abort; the group is broken then. Extra memory: at most 4 x `CHUNK_NBYTES` per rank (P8), and a
copy of a device's tensor that has gaps.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from raycollect.contracts import Completion, Exchange, Rendezvous, SegmentSource
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    KernelError,
    Violation,
    refusal,
)
from raycollect.model import GroupSpec, Kernel, Launch, OpKind

from ._exchanged import Exchanged
from ._torch_group import make
from ._torch_rows import is_native
from ._torch_run import CHUNK_NBYTES, Library, Run
from .completion import DONE, translated

__all__ = ["CHUNK_NBYTES", "TorchCommunicator", "create", "is_native"]

JOIN_TIMEOUT_S = 60.0

PATIENT = frozenset({"torch:gloo", "torch:mpi", "torch:ucc"})
"""Where a wait that is too short leaves a collective as it is; elsewhere it may end the whole group."""

CLOSE_TIMEOUT_S = 1.0
"""How long `close` waits for a kernel that does not see it: one in a call of the library that blocks."""

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_LACKING = re.compile(r"(not|n't) (yet )?(support|implement)(ed)?", re.IGNORECASE)


def create(
    spec: GroupSpec,
    rank: int,
    rendezvous: Rendezvous,
    exchange: Exchange,
    *,
    host: str = "127.0.0.1",
    segments: SegmentSource | None = None,
) -> TorchCommunicator:
    """Joins the group; returns when this rank has met all others.

    Args:
        spec: The group; its backend is ``"torch:<name>"``.
        rank: This process's rank.
        rendezvous: How the members find each other.
        exchange: Carries arrivals.
        host: The address of this node to listen on, and on which the others reach it.
        segments: Not used.

    Raises:
        BackendNotInstalledError: torch has no such backend here.
        InvalidGroupError: The options don't fit.
        BackendUnavailableError: The members can't connect.
        CollectiveTimeoutError: A member did not come.
    """
    library = Library(
        backend=make(spec, rank, rendezvous, host=host, timeout_s=JOIN_TIMEOUT_S),
        rank=rank,
        world_size=spec.world_size,
        group_name=spec.name,
        is_patient=spec.backend in PATIENT,
    )
    communicator = TorchCommunicator(library, spec, exchange)
    # Some connect at their first operation; after the join there may be no rendezvous any more.
    first = Launch(seq=0, ranks=tuple(range(spec.world_size)), timeout_s=JOIN_TIMEOUT_S)
    if OpKind.BARRIER.value in spec.ops:
        communicator.launch(first, Kernel(kind=OpKind.BARRIER))
    return communicator


class TorchCommunicator(Exchanged):
    """One rank's membership. An abort wakes a rank in mid-kernel as well; the group is broken then."""

    def __init__(self, library: Library, spec: GroupSpec, exchange: Exchange) -> None:
        super().__init__(spec, library.rank, exchange)
        self._backend = spec.backend
        self._library: Library | None = library
        self._lock = threading.Lock()

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread."""
        with self._lock:  # `close` lets go of the library only when nobody is in a kernel
            self._check_whole()
            if self._library is None:
                raise GroupBrokenError(group_name=self._group_name, detail="the communicator was closed")
            run = Run(self._library, launch, self._check_going)
            with self._failing(kernel, run, launch), translated(kernel.kind, self._group_name, self.rank):
                run.run(kernel)
        return DONE

    def close(self) -> None:
        """Lets go of the library, once a kernel under way has seen it."""
        self._broken = self._broken or "the communicator was closed"
        if self._lock.acquire(timeout=CLOSE_TIMEOUT_S):
            try:
                library, self._library = self._library, None
                if library is not None:
                    with suppress(AttributeError, RuntimeError):  # some only end with the last reference
                        library.backend.shutdown()
            finally:
                self._lock.release()

    @contextmanager
    def _failing(self, kernel: Kernel, run: Run, launch: Launch) -> Iterator[None]:
        """Notes that a kernel which failed has left the library unusable, unless it refused to begin."""
        kind = kernel.kind.value
        try:
            yield
        except BaseException as exc:
            said = str(exc.__cause__) if isinstance(exc, KernelError) else ""
            if not run.has_begun and _LACKING.search(said):
                found = f"{kind}, of which torch says: {said}"
                expected = f"an operation that backend {self._backend!r} has for such tensors"
                violation = Violation(kind="unsupported", rank=self.rank, field="op", found=found, expected=expected)
                raise refusal(kind, self._group_name, (violation,)) from exc
            self._broken = self._broken or f"{kind} of launch {launch.seq} failed in mid-kernel: {exc}"
            if not _TIMED_OUT.search(said):
                raise
            timeout_s = launch.timeout_s
            error = CollectiveTimeoutError(op=kind, group_name=self._group_name, timeout_s=timeout_s, detail=said)
            raise error from exc
