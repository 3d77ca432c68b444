"""The kernels of backend `tcp`: their sends and receives, by chunks; `communicator` has the theory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat

import numpy as np

from raycollect.backends.arrays import Array, Flat
from raycollect.backends.folds import fold, fold_with
from raycollect.backends.kernels import (
    clipped,
    keep_own,
    metered,
    movement,
    reduce_op,
    reduction,
    scattered_reduction,
    source,
    transfers,
)
from raycollect.backends.tcp.link import TcpMesh
from raycollect.backends.tcp.peer import FRAME_NBYTES, FrameBatch
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.operations import OPERATIONS

CHUNK_NBYTES = 2 << 20  # The bytes that a rank sends or stages at a time
# (world size, bytes): the size up to which groups of at most that world size send arrays whole, as measured. Two ranks
# send equally many bytes either way, and wait half as often.
WHOLE_UP_TO_NBYTES: tuple[tuple[int, int], ...] = ((2, 1 << 62), (4, 128 << 10), (1 << 30, 32 << 10))
AHEAD_NBYTES = 32 << 10  # Up to this size arrays of a reduction travel with the arrivals, if they fit into a chunk
_SLOTS = 2

Steps = Iterator[FrameBatch]  # A chunk in progress: yields the batches that it waits for
_Fold = Callable[[Array, list[Array], Array], None]  # (own array, arrays of the others, target)


def chunk_size(dtype: np.dtype[np.generic], share: int = 1) -> int:
    """The number of elements of a chunk, if a rank sends or stages `share` of them at a time."""
    return max(1, min(CHUNK_NBYTES // max(1, share), FRAME_NBYTES) // dtype.itemsize)


class Staging:
    """Memory in which chunks wait to be folded; reused by later kernels, because its first touch is slow."""

    def __init__(self, count: int = _SLOTS) -> None:
        self._count = count  # of chunks that may wait at once
        self._slots: Array = np.empty((0, 0), np.uint8)

    def slot(self, turn: int, nbytes: int) -> Array:
        """Returns memory for one chunk, valid until as many chunks as there are slots have begun."""
        if nbytes > CHUNK_NBYTES:  # more ranks than a chunk has room for
            return np.empty(nbytes, np.uint8)
        if not self._slots.size:
            self._slots = np.empty((self._count, CHUNK_NBYTES), np.uint8)
        slot: Array = self._slots[turn % self._count, :nbytes]
        return slot

    def close(self) -> None:
        """Releases the memory."""
        self._slots = np.empty((0, 0), np.uint8)


class KernelRun:
    """One kernel in progress on one rank."""

    def __init__(self, mesh: TcpMesh, launch: Launch, staging: Staging) -> None:
        self._mesh = mesh
        self._launch = launch
        self._staging = staging
        self._until_s = 0.0  # set by `run`
        self._me = mesh.rank
        self._ranks = launch.ranks
        others = list(launch.ranks)
        others.remove(mesh.rank)
        self._others = tuple(others)
        self._ahead: tuple[Array, list[Array], FrameBatch] | None = None  # this rank's array, and those of the others

    def go_ahead(self, kernel: Kernel) -> bool:
        """Sends the array of a small reduction together with the arrival, which saves a round; False for other kernels.

        The other ranks stage it, and drop it if they refuse the launch.
        """
        if kernel.kind not in (OpKind.ALLREDUCE, OpKind.REDUCE) or not self._others:
            return False
        src = source(kernel)
        most = min(AHEAD_NBYTES // src.dtype.itemsize, chunk_size(src.dtype, len(self._others)))
        if not 0 < src.size <= most or not self._is_small(src):
            return False
        own, batch, takers = src.read(0, src.size), FrameBatch(), _takers(kernel, self._ranks)
        self._send_to(takers, own, batch, ahead=True)
        parts = self._receive(0, own, batch, ahead=True) if self._me in takers else []
        self._ahead = own, parts, batch
        return True

    def run(self, launch: Launch, kernel: Kernel) -> None:
        """Runs the kernel to its end, within the time of its launch."""
        self._launch, self._until_s = launch, time.monotonic() + launch.timeout_s
        if self._ahead is None:
            self._kernel(kernel)
            return
        own, parts, batch = self._ahead
        # Data sent ahead does not prove that its sender has passed the agreement.
        self._mesh.wait(batch, self._launch, self._until_s, self._others)
        if parts:
            dst = reduction(kernel)[1]
            out = dst.target(0, own.size)
            self._fold(reduce_op(kernel), own, parts, out)
            dst.commit(0, own.size, out)

    def _kernel(self, kernel: Kernel) -> None:
        _KERNELS[kernel.kind](self, kernel)

    def _go(self, row: Iterable[Steps]) -> None:
        # Runs chunks as a pipeline. In round t chunk t takes its first step, then the older ones, oldest first, wait
        # and take their next. All ranks do so, and so agree on the order of all frames of a pair.
        older: list[tuple[Steps, FrameBatch]] = []
        for begun in chain(row, repeat(None)):
            newest = _next(begun) if begun is not None else []
            going = []
            for steps, batch in older:
                self._mesh.wait(batch, self._launch, self._until_s)
                going += _next(steps)
            older = going + newest
            if begun is None and not older:
                return

    def _is_small(self, flat: Flat) -> bool:
        world_size, nbytes = len(self._ranks), flat.size * flat.dtype.itemsize
        for most, up_to_nbytes in WHOLE_UP_TO_NBYTES:
            if world_size <= most:
                return nbytes <= up_to_nbytes
        return False

    def _barrier(self, kernel: Kernel) -> None:
        batch = FrameBatch()
        self._mesh.greet(self._others, batch)
        self._mesh.wait(batch, self._launch, self._until_s)

    def _reduction(self, kernel: Kernel) -> tuple[ReduceOp, Sequence[int], Flat, Flat | None]:
        takers = _takers(kernel, self._ranks)
        src, dst = reduction(kernel) if self._me in takers else (source(kernel), None)
        return reduce_op(kernel), takers, src, dst

    def _allreduce(self, kernel: Kernel) -> None:
        op, takers, src, dst = self._reduction(kernel)
        if self._is_small(src):
            self._fold_whole(partial(self._fold, op), src, dst, self._ranks, takers)
            return
        spans = enumerate(metered(src.size, CHUNK_NBYTES // src.dtype.itemsize))
        self._go(self._sliced(op, src, dst, takers, turn, lo, hi) for turn, (lo, hi) in spans)

    def _fold_whole(
        self, fold_all: _Fold, src: Flat, dst: Flat | None, givers: Sequence[int], takers: Collection[int]
    ) -> None:
        spans = enumerate(metered(src.size, chunk_size(src.dtype, len(self._others))))
        self._go(self._whole(fold_all, src, dst, givers, takers, turn, lo, hi) for turn, (lo, hi) in spans)

    def _whole(
        self,
        fold_all: _Fold,
        src: Flat,
        dst: Flat | None,
        givers: Sequence[int],
        takers: Collection[int],
        turn: int,
        lo: int,
        hi: int,
    ) -> Steps:
        # A chunk that a rank sends to the takers, and folds with the arrays of the givers.
        own, batch = src.read(lo, hi), FrameBatch()
        self._send_to(takers, own, batch)
        if dst is None:
            yield batch
            return
        others = [rank for rank in givers if rank != self._me]
        parts = self._receive(turn, own, batch, others)
        yield batch
        out = dst.target(lo, hi)
        fold_all(own, parts, out)
        dst.commit(lo, hi, out)

    def _sliced(
        self, op: ReduceOp, src: Flat, dst: Flat | None, takers: Collection[int], turn: int, lo: int, hi: int
    ) -> Steps:
        # A chunk of which each rank folds a slice, and sends the result to the takers.
        slices, batch = _slices(self._ranks, hi - lo), FrameBatch()
        own, mine = src.read(lo, hi), slices[self._me]
        for rank in self._others:
            self._mesh.send(rank, own[slices[rank]], batch)
        parts = self._receive(turn, own[mine], batch)
        yield batch
        out = dst.target(lo, hi) if dst is not None else None
        folded = out[mine] if out is not None else np.empty_like(own[mine])
        self._fold(op, own[mine], parts, folded)
        del own, parts
        batch = FrameBatch()
        for rank in self._others:
            if rank in takers:
                self._mesh.send(rank, folded, batch)
            if out is not None:
                self._mesh.receive(rank, out[slices[rank]], batch)
        yield batch
        if dst is not None and out is not None:
            dst.commit(lo, hi, out)

    def _scan(self, kernel: Kernel) -> None:
        src, dst = reduction(kernel)
        ranks, sources = self._ranks, OPERATIONS[kernel.kind].sources
        givers_of = {rank: [ranks[giver] for giver in sources(at, len(ranks))] for at, rank in enumerate(ranks)}
        givers, takers = givers_of[self._me], [rank for rank in ranks if self._me in givers_of[rank]]
        op = reduce_op(kernel)

        def partial_fold(own: Array, parts: list[Array], out: Array) -> None:  # in their order, also between hosts
            if self._me in givers:
                fold_with(op, parts, givers.index(self._me), own, out)
            else:
                fold(op, parts, out)

        self._fold_whole(partial_fold, src, dst, givers, takers)

    def _reducescatter(self, kernel: Kernel) -> None:
        src, dst = scattered_reduction(kernel, self._ranks, self._me)
        op, give, step = reduce_op(kernel), dict(zip(self._ranks, src, strict=True)), chunk_size(dst.dtype, len(src))
        most = max(piece.size for piece in src)
        self._go(self._scattered(op, give, dst, turn, lo, hi) for turn, (lo, hi) in enumerate(metered(most, step)))

    def _scattered(self, op: ReduceOp, give: dict[int, Flat], dst: Flat, turn: int, lo: int, hi: int) -> Steps:
        batch = FrameBatch()
        for rank in self._others:
            self._mesh.send(rank, give[rank].read(*clipped(give[rank], lo, hi)), batch)
        span = clipped(dst, lo, hi)
        own = give[self._me].read(*span)
        parts = self._receive(turn, own, batch)
        yield batch
        out = dst.target(*span)
        self._fold(op, own, parts, out)
        dst.commit(*span, out)

    def _send_to(self, takers: Collection[int], own: Array, batch: FrameBatch, *, ahead: bool = False) -> None:
        for taker in takers:
            if taker != self._me:
                self._mesh.send(taker, own, batch, ahead=ahead)

    def _receive(
        self, turn: int, like: Array, batch: FrameBatch, givers: Sequence[int] | None = None, *, ahead: bool = False
    ) -> list[Array]:
        # Stages one array from each other rank, or from some, in rank order.
        givers = self._others if givers is None else givers
        slot = self._staging.slot(turn, len(givers) * like.nbytes).view(like.dtype)
        parts = list(slot.reshape(len(givers), like.size))
        for rank, part in zip(givers, parts, strict=True):
            self._mesh.receive(rank, part, batch, ahead=ahead)
        return parts

    def _fold(self, op: ReduceOp, own: Array, parts: list[Array], out: Array) -> None:
        fold_with(op, parts, self._ranks.index(self._me), own, out)

    def _broadcast(self, kernel: Kernel) -> None:
        root = kernel.peer
        src, dst, whole = movement(kernel, is_root=self._me == root)
        if src is not None and dst is not None:
            keep_own({root: src}, {root: dst}, root, chunk_size(src.dtype))
        if self._is_small(whole):
            give, take = ({}, {root: whole}) if src is None else (dict.fromkeys(self._others, whole), {})
            self._move(give, take, whole, len(self._others))
            return
        rest = tuple(rank for rank in self._ranks if rank != root)
        self._go(
            self._spread(root, rest, whole, lo, hi)
            for lo, hi in metered(whole.size, CHUNK_NBYTES // whole.dtype.itemsize)
        )

    def _spread(self, root: int, rest: Sequence[int], whole: Flat, lo: int, hi: int) -> Steps:
        # A chunk of which each rank but the root gets a slice, and forwards it to the others.
        slices, batch = _slices(rest, hi - lo), FrameBatch()
        if self._me == root:
            own = whole.read(lo, hi)
            for rank in rest:
                self._mesh.send(rank, own[slices[rank]], batch)
            yield batch
            return
        out = whole.target(lo, hi)
        self._mesh.receive(root, out[slices[self._me]], batch)
        yield batch
        batch = FrameBatch()
        for rank in rest:
            if rank != self._me:
                self._mesh.send(rank, out[slices[self._me]], batch)
                self._mesh.receive(rank, out[slices[rank]], batch)
        yield batch
        whole.commit(lo, hi, out)

    def _transfer(self, kernel: Kernel) -> None:
        give, take = transfers(kernel, self._ranks, self._me)
        any_ = next(iter((give or take).values()))
        keep_own(give, take, self._me, chunk_size(any_.dtype))
        self._move(give, take, any_, len(self._others))

    def _send(self, kernel: Kernel) -> None:
        src = Flat(kernel.src)
        self._move({kernel.peer: src}, {}, src)

    def _recv(self, kernel: Kernel) -> None:
        dst = Flat(kernel.dst)
        self._move({}, {kernel.peer: dst}, dst)

    def _move(self, give: dict[int, Flat], take: dict[int, Flat], like: Flat, share: int = 1) -> None:
        give, take = ({rank: flat for rank, flat in side.items() if rank != self._me} for side in (give, take))
        most = max((flat.size for flat in (*give.values(), *take.values())), default=0)
        self._go(self._moved(give, take, lo, hi) for lo, hi in metered(most, chunk_size(like.dtype, share)))

    def _moved(self, give: dict[int, Flat], take: dict[int, Flat], lo: int, hi: int) -> Steps:
        batch, taken = FrameBatch(), []
        for rank, src in give.items():
            out, here = src.read(*clipped(src, lo, hi)), take.get(rank)
            if here is not None and here.address == src.address:  # in place: received data would overwrite data to send
                out = out.copy()
            self._mesh.send(rank, out, batch)
        for rank, dst in take.items():
            span = clipped(dst, lo, hi)
            into = dst.target(*span)
            taken.append((dst, span, into))
            self._mesh.receive(rank, into, batch)
        yield batch
        for dst, span, into in taken:
            dst.commit(*span, into)


def _takers(kernel: Kernel, ranks: Sequence[int]) -> Sequence[int]:
    return ranks if kernel.kind is OpKind.ALLREDUCE else (kernel.peer,)


def _next(steps: Steps) -> list[tuple[Steps, FrameBatch]]:
    batch = next(steps, None)
    return [] if batch is None else [(steps, batch)]


def _slices(ranks: Sequence[int], size: int) -> dict[int, slice]:
    count = len(ranks)
    return {rank: slice(at * size // count, (at + 1) * size // count) for at, rank in enumerate(ranks)}


_KERNELS: dict[OpKind, Callable[[KernelRun, Kernel], None]] = {
    OpKind.ALLREDUCE: KernelRun._allreduce,
    OpKind.REDUCE: KernelRun._allreduce,
    OpKind.BROADCAST: KernelRun._broadcast,
    OpKind.ALLGATHER: KernelRun._transfer,
    OpKind.REDUCESCATTER: KernelRun._reducescatter,
    OpKind.GATHER: KernelRun._transfer,
    OpKind.SCATTER: KernelRun._transfer,
    OpKind.ALLTOALL: KernelRun._transfer,
    OpKind.SCAN: KernelRun._scan,
    OpKind.EXSCAN: KernelRun._scan,
    OpKind.SEND: KernelRun._send,
    OpKind.RECV: KernelRun._recv,
    OpKind.BARRIER: KernelRun._barrier,
}
