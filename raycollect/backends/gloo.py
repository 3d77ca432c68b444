"""Backend `gloo`: members on any machines, over TCP, by `pygloo` or by xoscar's fork of it.

Theory, for w ranks and arrays of n bytes (what each rank sends, unless said otherwise):

==============  ====================================================================================================
ALLREDUCE       where gloo reduces as numpy does (`is_native`): its ring, 2 (w - 1) / w x n; the bits are equal on all
                ranks, but the fold does not go in rank order. Else, folded in rank order: an allgather of bytes,
                (w - 1) x n, or from `SLICED_FROM` on slices as in REDUCESCATTER and their allgather, 2 (w - 1) / w x n
REDUCE          gloo's, or all bytes to the root, which folds them
REDUCESCATTER   each slice goes straight to its rank, which folds in rank order: (w - 1) / w x n, the least there is
ALLGATHER       gloo's ring up to the size of the smallest piece, a broadcast of what is left of each larger one
GATHER,         a chunk from each giver to each taker in turn: exactly the bytes of the pieces
SCATTER,
ALLTOALL
==============  ====================================================================================================

A gloo send waits for its receive, whatever the size, so that the order matters. Pairs meet in rounds: in round k, rank
i meets rank k - i (mod w), and the lower one sends first. Both of a pair know whether they have nothing to say, and all
ranks go through chunks and rounds in one order, so that of the pairs that have yet to meet the first one can go.

Both libraries hold the GIL while they block and can't be interrupted. So this adapter connects only when all members
have said that they are ready, enters a kernel only after the ranks have agreed (over the injected exchange), and gives
the GIL back between chunks, where it also sees an abort. A failure leaves the library's context dead, and the group
with it. Extra memory: at most 3 x `CHUNK_NBYTES` per rank (P8).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from raycollect.contracts import Completion, Exchange, Rendezvous, SegmentSource
from raycollect.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    InvalidGroupError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
)
from raycollect.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp

from ._exchanged import Exchanged
from ._gloo_link import GlooLibrary, GlooLink, is_native
from .arrays import Array, Flat
from .completion import (
    DONE,
    chunks,
    clipped,
    keep_own,
    movement,
    reduce_op,
    reduction,
    scattered_reduction,
    transfers,
    translated,
)
from .folds import finish, fold

__all__ = ["CHUNK_NBYTES", "GlooCommunicator", "create", "is_native"]

CHUNK_NBYTES = 4 << 20
"""How much one call of the library moves: the GIL is held that long."""

JOIN_TIMEOUT_S = 45.0
"""How long to wait for a member; less than the minute of a declaration, which then hears who was waited for."""

SLICED_FROM = (4, 1 << 20)
"""(world size, bytes) from which on slices beat the allgather in a fold, as measured on one machine."""

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_PEER_GONE = re.compile(r"closed by peer|reset by peer|broken pipe|read error|write error", re.IGNORECASE)
"""What the library says where another rank's end of a connection is gone: who it is, and why, others tell."""


def create(
    spec: GroupSpec,
    rank: int,
    rendezvous: Rendezvous,
    exchange: Exchange,
    *,
    host: str = "127.0.0.1",
    segments: SegmentSource | None = None,
) -> GlooCommunicator:
    """Joins the group; returns when this rank is connected to all others.

    Args:
        spec: The group.
        rank: This process's rank.
        rendezvous: How the members find each other.
        exchange: Carries arrivals.
        host: The address of this node to listen on, and on which the others reach it.
        segments: Not used.

    Raises:
        InvalidGroupError: It was given options, and takes none.
        BackendNotInstalledError: No library is there.
        BackendUnavailableError: The members can't connect.
        CollectiveTimeoutError: A member did not come.
    """
    if spec.options:
        detail = f"backend 'gloo': it takes no options, and got {', '.join(dict(spec.options))}"
        raise InvalidGroupError(group_name=spec.name, detail=detail)
    library = GlooLibrary.load(spec.name)
    link = None
    if spec.world_size > 1:
        # Connecting holds the GIL until all are there, so it starts when all are.
        rendezvous.put(f"gloo.ready.{rank}", library.name.encode())
        others = {rendezvous.get(f"gloo.ready.{peer}", JOIN_TIMEOUT_S).decode() for peer in range(spec.world_size)}
        if len(others) > 1:
            detail = f"backend 'gloo': the members have different libraries: {', '.join(sorted(others))}"
            raise BackendUnavailableError(group_name=spec.name, detail=detail)
        link = GlooLink(library, spec, rank, rendezvous, host=host, timeout_s=JOIN_TIMEOUT_S)
    return GlooCommunicator(link, spec, rank, exchange)


class GlooCommunicator(Exchanged):
    """One rank's membership. A kernel sees an abort between two chunks; the group is broken then."""

    def __init__(self, link: GlooLink | None, spec: GroupSpec, rank: int, exchange: Exchange) -> None:
        super().__init__(spec, rank, exchange)
        self._link = link
        self._lock = threading.Lock()

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread."""
        with self._lock:  # `close` lets go of the link only when nobody is in a kernel
            self._check_whole()
            with self._failing(kernel, launch), translated(kernel.kind, self._group_name, self.rank):
                _Run(self, self._link, launch).run(kernel)
        return DONE

    def forsake(self, launch: Launch) -> None:
        """Ends the connections: others may be in the library, where nothing else wakes them."""
        with self._lock:
            self._break(f"rank {self.rank} left launch {launch.seq} before its kernels")

    def _break(self, reason: str) -> None:
        """Ends the connections for good, under the lock, so that nobody waits for this rank in the library."""
        self._broken = self._broken or reason
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        """Closes the connections, unless a kernel is under way: the library can't be interrupted."""
        self._broken = self._broken or "the communicator was closed"
        if self._lock.acquire(blocking=False):
            try:
                link, self._link = self._link, None
                if link is not None:
                    link.close()
            finally:
                self._lock.release()

    def check_going(self, launch: Launch, until_s: float) -> None:
        """Between two chunks: raises if the launch was aborted or takes too long."""
        self._check_aborted(launch)
        if time.monotonic() > until_s:
            detail = f"launch {launch.seq} did not end within {launch.timeout_s:g} s"
            raise CollectiveTimeoutError(group_name=self._group_name, timeout_s=launch.timeout_s, detail=detail)

    @contextmanager
    def _failing(self, kernel: Kernel, launch: Launch) -> Iterator[None]:
        """Notes that a kernel which failed has left the library's context unusable."""
        try:
            yield
        except BaseException as exc:
            self._break(f"{kernel.kind.value} of launch {launch.seq} failed in mid-kernel: {exc}")
            said = str(exc.__cause__)
            if isinstance(exc, KernelError) and _PEER_GONE.search(said):
                raise PlanAbortedError(group_name=self._group_name, detail=f"a connection has ended: {said}") from exc
            if not isinstance(exc, RaycollectError) or not _TIMED_OUT.search(said):
                raise
            raise CollectiveTimeoutError(
                op=kernel.kind.value, group_name=self._group_name, timeout_s=launch.timeout_s, detail=str(exc.__cause__)
            ) from exc


class _Run:
    """One kernel under way, on one rank. Collectives run over all ranks of the group."""

    def __init__(self, communicator: GlooCommunicator, link: GlooLink | None, launch: Launch) -> None:
        self._communicator = communicator
        self._link = link  # None: the only rank
        self._launch = launch
        self._until_s = time.monotonic() + launch.timeout_s
        self._me = communicator.rank
        self._ranks = tuple(range(communicator.world_size))

    def run(self, kernel: Kernel) -> None:
        """Runs it to its end."""
        self._check()
        _KERNELS[kernel.kind](self, kernel)

    def _check(self) -> None:
        self._communicator.check_going(self._launch, self._until_s)

    def _chunks(self, size: int, dtype: np.dtype[np.generic], share: int = 1) -> Iterator[tuple[int, int]]:
        """Cuts elements into ranges of which `share` fit into a chunk."""
        for lo, hi in chunks(size, CHUNK_NBYTES // share // dtype.itemsize):
            self._check()
            yield lo, hi

    def _barrier(self, kernel: Kernel) -> None:
        """Waits for all; `agree` has done so already where only some take part."""
        if self._link and len(self._launch.ranks) == len(self._ranks):
            self._link.barrier()

    # ------------------------------------------------------------------------------------------ reductions

    def _allreduce(self, kernel: Kernel) -> None:
        """Reduces by the library where it has numpy's meaning, else by a fold."""
        (src, dst), op = reduction(kernel), reduce_op(kernel)
        world_size, least = SLICED_FROM
        step, share = self._gathered, len(self._ranks)
        if self._link and is_native(op, src.dtype.name):
            step, share = self._ring, 1
        elif len(self._ranks) >= world_size and src.size * src.dtype.itemsize >= least:
            step, share = self._sliced, 1
        for lo, hi in self._chunks(src.size, src.dtype, share):
            out = dst.target(lo, hi)
            step(op, np.ascontiguousarray(src.read(lo, hi)), out)
            dst.commit(lo, hi, out)

    def _ring(self, op: ReduceOp, own: Array, out: Array) -> None:
        if self._link:
            self._link.allreduce(op, own, out)
        finish(op, out, len(self._ranks))

    def _gathered(self, op: ReduceOp, own: Array, out: Array) -> None:
        fold(op, list(self._everyone(own)), out)

    def _sliced(self, op: ReduceOp, own: Array, out: Array) -> None:
        """Each rank folds the slices that all bring it, and gives the result to all."""
        width = -(-own.size // len(self._ranks))
        give = [own[rank * width : (rank + 1) * width] for rank in self._ranks]
        mine = np.zeros(width, own.dtype)  # the last slices are shorter, and padded
        self._fold_mine(op, give, mine[: give[self._me].size])
        out[...] = self._everyone(mine).reshape(-1)[: out.size]

    def _reduce(self, kernel: Kernel) -> None:
        """Reduces by the library where it has numpy's meaning, else by a fold on the root."""
        is_root, op = kernel.peer == self._me, reduce_op(kernel)
        src, dst = reduction(kernel) if is_root else (Flat(kernel.src), None)
        native = self._link and is_native(op, src.dtype.name)
        step, share = (self._tree, 1) if native else (self._collected, len(self._ranks))
        for lo, hi in self._chunks(src.size, src.dtype, share):
            own = np.ascontiguousarray(src.read(lo, hi))
            out = dst.target(lo, hi) if dst else np.empty(0 if not native else own.size, own.dtype)
            step(op, own, out, kernel.peer)
            if dst:
                dst.commit(lo, hi, out)

    def _tree(self, op: ReduceOp, own: Array, out: Array, root: int) -> None:
        if self._link:
            self._link.reduce(op, own, out, root)
        if self._me == root:
            finish(op, out, len(self._ranks))

    def _collected(self, op: ReduceOp, own: Array, out: Array, root: int) -> None:
        if self._me != root:
            self._send_bytes(own, root)
            return
        parts = np.empty((len(self._ranks), own.size), own.dtype)
        parts[root] = own
        for rank in self._ranks:
            if rank != root:
                self._recv_bytes(parts[rank], rank)
        fold(op, list(parts), out)

    def _reducescatter(self, kernel: Kernel) -> None:
        """Folds what all bring this rank."""
        op, (src, dst) = reduce_op(kernel), scattered_reduction(kernel, self._ranks, self._me)
        for lo, hi in self._chunks(max(piece.size for piece in src), dst.dtype, len(src)):
            span = clipped(dst, lo, hi)
            out = dst.target(*span)
            self._fold_mine(op, [piece.read(*clipped(piece, lo, hi)) for piece in src], out)
            dst.commit(*span, out)

    def _fold_mine(self, op: ReduceOp, give: Sequence[Array], out: Array) -> None:
        """Gives each rank its array and folds what all give this one; `out` may be ``give[own rank]``."""
        parts = np.empty((len(self._ranks), out.size), out.dtype)
        parts[self._me] = give[self._me]
        for rank in self._peers():
            self._swap(rank, give[rank], parts[rank])
        fold(op, list(parts), out)

    # ------------------------------------------------------------------------------------------ movements

    def _broadcast(self, kernel: Kernel) -> None:
        """Moves the root's bytes to all."""
        src, dst, whole = movement(kernel, is_root=self._me == kernel.peer)
        self._spread(src, dst, whole, kernel.peer)

    def _spread(self, src: Flat | None, dst: Flat | None, whole: Flat, root: int, at: int = 0) -> None:
        """Moves what the root reads to all, from element `at` on; `src` and `dst` as `movement` gives them."""
        for lo, hi in self._chunks(whole.size - at, whole.dtype):
            span = lo + at, hi + at
            buffer = dst.target(*span) if src is None and dst is not None else whole.read(*span)
            if self._link:
                self._link.broadcast(buffer, root)
            if dst is not None:
                dst.commit(*span, buffer) if src is None else dst.write(*span, buffer)

    def _allgather(self, kernel: Kernel) -> None:
        """Moves up to the size of the smallest piece by the library's allgather, and the rest by broadcasts."""
        give, take = transfers(kernel, self._ranks, self._me)
        src, least = give[self._me], min(piece.size for piece in take.values())
        for lo, hi in self._chunks(least, src.dtype, len(take)):
            everyone = self._everyone(np.ascontiguousarray(src.read(lo, hi)))
            for rank, piece in take.items():
                piece.write(lo, hi, everyone[rank])
        for rank, piece in take.items():
            own = src if rank == self._me else None
            self._spread(own, piece, own or piece, rank, least)

    def _everyone(self, own: Array) -> Array:
        everyone = np.empty((len(self._ranks), own.size), own.dtype)
        if self._link:
            self._link.allgather(own, everyone)
        else:
            everyone[0] = own
        return everyone

    def _transfer(self, kernel: Kernel) -> None:
        """Moves pieces from rank to rank: a chunk to and from each in turn, so that none waits for whole pieces."""
        give, take = transfers(kernel, self._ranks, self._me)
        most = max(flat.size for flat in (*give.values(), *take.values()))
        dtype = next(iter((give or take).values())).dtype
        keep_own(give, take, self._me, CHUNK_NBYTES // dtype.itemsize)
        for lo, hi in self._chunks(most, dtype):
            for rank in self._peers():
                there, here = give.get(rank), take.get(rank)
                out = there.read(*clipped(there, lo, hi)) if there else None
                if here is None:
                    self._swap(rank, out, None)
                    continue
                span = clipped(here, lo, hi)
                into = here.target(*span)
                # In place, the higher rank of a pair would receive over what it has yet to send.
                self._swap(rank, out.copy() if out is not None and self._me > rank else out, into)
                here.commit(*span, into)

    def _peers(self) -> Iterator[int]:
        """The other ranks, in an order in which all ranks can go through their pairs."""
        for turn in self._ranks:
            rank = (turn - self._me) % len(self._ranks)
            if rank != self._me:
                yield rank

    def _swap(self, rank: int, out: Array | None, into: Array | None) -> None:
        """Gives a rank an array and takes one from it; the lower of the two sends first."""
        steps = [(self._send_bytes, out), (self._recv_bytes, into)]
        for step, array in steps if self._me < rank else reversed(steps):
            if array is not None:
                step(array, rank)

    def _send(self, kernel: Kernel) -> None:
        """Sends bytes to one rank."""
        src = Flat(kernel.src)
        for lo, hi in self._chunks(src.size, src.dtype):
            self._send_bytes(src.read(lo, hi), kernel.peer)

    def _recv(self, kernel: Kernel) -> None:
        """Receives bytes from one rank."""
        dst = Flat(kernel.dst)
        for lo, hi in self._chunks(dst.size, dst.dtype):
            out = dst.target(lo, hi)
            self._recv_bytes(out, kernel.peer)
            dst.commit(lo, hi, out)

    def _send_bytes(self, array: Array, rank: int) -> None:
        if self._link and array.size:
            self._link.send(np.ascontiguousarray(array), rank)

    def _recv_bytes(self, array: Array, rank: int) -> None:
        if self._link and array.size:
            self._link.recv(array, rank)


_KERNELS: dict[OpKind, Callable[[_Run, Kernel], None]] = {
    OpKind.ALLREDUCE: _Run._allreduce,
    OpKind.REDUCE: _Run._reduce,
    OpKind.BROADCAST: _Run._broadcast,
    OpKind.ALLGATHER: _Run._allgather,
    OpKind.REDUCESCATTER: _Run._reducescatter,
    OpKind.GATHER: _Run._transfer,
    OpKind.SCATTER: _Run._transfer,
    OpKind.ALLTOALL: _Run._transfer,
    OpKind.SEND: _Run._send,
    OpKind.RECV: _Run._recv,
    OpKind.BARRIER: _Run._barrier,
}
