"""One kernel on a `torch.distributed` backend: which of its operations, on which chunks, and how to wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from raycollect.errors import CollectiveTimeoutError, InternalError
from raycollect.model import Kernel, Launch, OpKind, ReduceOp

from ._torch_group import c10d
from ._torch_rows import Row, row
from .arrays import DeviceArray
from .completion import chunks, reduce_op

__all__ = ["CHUNK_NBYTES", "Library", "Run"]

CHUNK_NBYTES = 8 << 20
"""How much one call of the library moves."""

SLICED_FROM = (4, 1 << 20)
"""(world size, bytes) from which on slices beat the allgather in a fold, as measured on one machine."""

LOOK_S = 0.05
"""How often a wait looks whether it was aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A `torch.distributed` backend that a rank has joined.

    Attributes:
        backend: The backend, an object of torch.
        rank: This process's rank.
        world_size: The number of ranks.
        group_name: For errors.
        is_patient: Whether a collective goes on when a wait for it was too short.
    """

    backend: Any
    rank: int
    world_size: int
    group_name: str
    is_patient: bool


class Run:
    """One kernel under way, on one rank. Collectives run over all ranks of the group.

    Args:
        library: What runs it.
        launch: The launch.
        look: Raises if the launch was aborted, or the communicator closed.

    Attributes:
        has_begun: Whether the library has taken on anything.
    """

    def __init__(self, library: Library, launch: Launch, look: Callable[[Launch], None]) -> None:
        self.has_begun = False
        self._torch = library.backend
        self._library = library
        self._launch = launch
        self._look_outside = look
        self._until_s = time.monotonic() + launch.timeout_s
        self._me = library.rank
        self._ranks = range(library.world_size)
        self._device: Any = None  # where the tensors are, if that is not CPU memory

    def run(self, kernel: Kernel) -> None:
        """Runs it to its end."""
        self._look()
        given = kernel.dst if kernel.src is None else kernel.src
        first = given[0] if isinstance(given, tuple) else given
        self._device = first.tensor.device if isinstance(first, DeviceArray) else None
        _KERNELS[kernel.kind](self, kernel)

    def _barrier(self, kernel: Kernel) -> None:
        """Waits for all; `agree` has done so already where only some take part."""
        if len(self._launch.ranks) == len(self._ranks):
            self._do(self._torch.barrier, self._options(c10d.BarrierOptions))

    # ------------------------------------------------------------------------------------------ reductions

    def _allreduce(self, kernel: Kernel) -> None:
        """Reduces by the library where that is as good, else by a fold."""
        src, dst, op = row(kernel.src), row(kernel.dst), reduce_op(kernel)
        _check_same(kernel, src, dst)
        world_size, least = SLICED_FROM
        step, share = self._gathered, len(self._ranks)
        if src.is_native(op):
            step, share = self._reduced, 1
        elif len(self._ranks) >= world_size and src.size * src.itemsize >= least:
            step, share = self._sliced, 1
        for lo, hi in self._chunks(src.size, src, share):
            dst.write(lo, hi, step(op, src, src.read(lo, hi)))

    def _reduced(self, op: ReduceOp, src: Row, own: Any) -> Any:
        out = own.clone()
        self._do(self._torch.allreduce, [src.typed(out)], self._options(c10d.AllreduceOptions, op=op))
        src.finish(op, out, len(self._ranks))
        return out

    def _gathered(self, op: ReduceOp, src: Row, own: Any) -> Any:
        out = torch.empty_like(own)
        src.fold(op, self._everyone(own), out)
        return out

    def _sliced(self, op: ReduceOp, src: Row, own: Any) -> Any:
        """Each rank folds the slices that all bring it, and gives the result to all."""
        nbytes = -(-own.numel() // (len(self._ranks) * src.itemsize)) * src.itemsize
        mine = torch.zeros(nbytes, dtype=torch.uint8)  # the last slices are shorter, and padded
        give = own.split(nbytes)
        give += (own[:0],) * (len(self._ranks) - len(give))
        own_nbytes = give[self._me].numel()
        src.fold(op, self._exchange(give, [own_nbytes] * len(give)), mine[:own_nbytes])
        return torch.cat(self._everyone(mine))[: own.numel()]

    def _reduce(self, kernel: Kernel) -> None:
        """Reduces to the root by the library where that is as good, else by a fold there."""
        src, op, root = row(kernel.src), reduce_op(kernel), kernel.peer
        dst = row(kernel.dst) if self._me == root else None
        _check_same(kernel, src, dst or src)
        step, share = (self._reduced_to, 1) if src.is_native(op) else (self._folded_by, len(self._ranks))
        for lo, hi in self._chunks(src.size, src, share):
            out = step(op, src, src.read(lo, hi), root)
            if dst is not None:
                dst.write(lo, hi, out)

    def _reduced_to(self, op: ReduceOp, src: Row, own: Any, root: int) -> Any:
        out = own.clone()  # the library may write it on all ranks
        self._do(self._torch.reduce, [src.typed(out)], self._options(c10d.ReduceOptions, op=op, root=root))
        src.finish(op, out, len(self._ranks))
        return out

    def _folded_by(self, op: ReduceOp, src: Row, own: Any, root: int) -> Any:
        out = torch.empty_like(own)
        parts = self._collected(own, root)
        if parts:
            src.fold(op, parts, out)
        return out

    def _reducescatter(self, kernel: Kernel) -> None:
        """Reduces what all bring this rank: by a fold, or by the library of the device."""
        op, src, dst = reduce_op(kernel), self._pieces(kernel, kernel.src), row(kernel.dst)
        _check_same(kernel, src[self._me], dst)
        for lo, hi in self._chunks(max(piece.size for piece in src), dst, len(src)):
            span = _clipped(dst, lo, hi)
            nbytes = (span[1] - span[0]) * dst.itemsize
            if self._device is None:
                out, give = dst.room(span[1] - span[0]), [piece.read(*_clipped(piece, lo, hi)) for piece in src]
                dst.fold(op, self._exchange(give, [nbytes] * len(src)), out)
            else:
                out, give = dst.room(hi - lo), [dst.typed(_padded(piece, lo, hi)) for piece in src]
                options = self._options(c10d.ReduceScatterOptions, op=op)
                self._do(self._torch.reduce_scatter, [dst.typed(out)], [give], options)
                dst.finish(op, out, len(src))
            dst.write(*span, out[:nbytes])

    # ------------------------------------------------------------------------------------------ movements

    def _broadcast(self, kernel: Kernel) -> None:
        """Moves the root's bytes to all."""
        src, dst = kernel.src, kernel.dst
        if self._me == kernel.peer:
            src, dst = (dst, None) if src is None else (src, None if dst is src else dst)
        else:
            src, dst = None, src if dst is None else dst
        self._spread(None if src is None else row(src), None if dst is None else row(dst), kernel.peer)

    def _spread(self, src: Row | None, dst: Row | None, root: int, at: int = 0) -> None:
        """Moves what the root has in `src` to all `dst`, from element `at` on."""
        whole = src or dst
        if whole is None:
            raise InternalError(detail="a broadcast without an array")
        for lo, hi in self._chunks(whole.size - at, whole):
            lo, hi = lo + at, hi + at
            buffer = src.read(lo, hi) if src else whole.room(hi - lo)
            self._do(self._torch.broadcast, [buffer], self._options(c10d.BroadcastOptions, root=root))
            if dst:
                dst.write(lo, hi, buffer)

    def _allgather(self, kernel: Kernel) -> None:
        """Moves up to the size of the smallest piece by an allgather, and the rest by broadcasts."""
        src, dst = row(kernel.src), self._pieces(kernel, kernel.dst)
        _check_same(kernel, src, dst[self._me])
        least = min(piece.size for piece in dst)
        for lo, hi in self._chunks(least, src, len(dst)):
            for piece, values in zip(dst, self._everyone(src.read(lo, hi)), strict=True):
                piece.write(lo, hi, values)
        for rank, piece in enumerate(dst):
            self._spread(src if rank == self._me else None, piece, rank, least)

    def _gather(self, kernel: Kernel) -> None:
        """Moves chunks that are padded to the largest piece's: only the root knows the sizes of all."""
        src = row(kernel.src)
        dst = self._pieces(kernel, kernel.dst) if self._me == kernel.peer else []
        for lo, hi in self._rounds(kernel, src, (src, *dst)):
            parts = self._collected(_padded(src, lo, hi), kernel.peer)
            for piece, values in zip(dst, parts, strict=True):
                _write(piece, lo, hi, values)

    def _scatter(self, kernel: Kernel) -> None:
        """Moves chunks that are padded to the largest piece's: only the root knows the sizes of all."""
        dst = row(kernel.dst)
        src = self._pieces(kernel, kernel.src) if self._me == kernel.peer else []
        for lo, hi in self._rounds(kernel, dst, (dst, *src)):
            give = [[_padded(piece, lo, hi) for piece in src]] if src else []
            out = dst.room(hi - lo)
            self._do(self._torch.scatter, [out], give, self._options(c10d.ScatterOptions, root=kernel.peer))
            _write(dst, lo, hi, out)

    def _alltoall(self, kernel: Kernel) -> None:
        """Moves exactly the pieces."""
        src, dst = self._pieces(kernel, kernel.src), self._pieces(kernel, kernel.dst)
        _check_same(kernel, src[self._me], dst[self._me])
        for lo, hi in self._rounds(kernel, dst[0], (*src, *dst), len(dst)):
            spans = [_clipped(piece, lo, hi) for piece in dst]
            give = [piece.read(*_clipped(piece, lo, hi)) for piece in src]
            came = self._exchange(give, [(stop - start) * dst[0].itemsize for start, stop in spans])
            for piece, span, values in zip(dst, spans, came, strict=True):
                piece.write(*span, values)

    def _send(self, kernel: Kernel) -> None:
        """Sends bytes to one rank."""
        src = row(kernel.src)
        for lo, hi in self._chunks(src.size, src):
            self._do(self._torch.send, [src.read(lo, hi)], kernel.peer, 0, is_pair=True)

    def _recv(self, kernel: Kernel) -> None:
        """Receives bytes from one rank."""
        dst = row(kernel.dst)
        for lo, hi in self._chunks(dst.size, dst):
            buffer = dst.room(hi - lo)
            self._do(self._torch.recv, [buffer], kernel.peer, 0, is_pair=True)
            dst.write(lo, hi, buffer)

    def _everyone(self, own: Any) -> list[Any]:
        """Gives all ranks' bytes, of which there are as many on each."""
        everyone = [torch.empty_like(own) for _ in self._ranks]
        self._do(self._torch.allgather, [everyone], [own], self._options(c10d.AllgatherOptions))
        return everyone

    def _collected(self, own: Any, root: int) -> list[Any]:
        """Gives the root all ranks' bytes, of which there are as many on each; nothing elsewhere."""
        parts = [torch.empty_like(own) for _ in self._ranks] if self._me == root else []
        options = self._options(c10d.GatherOptions, root=root)
        self._do(self._torch.gather, [parts] if parts else [], [own], options)
        return parts

    def _exchange(self, give: Sequence[Any], take: Sequence[int]) -> Sequence[Any]:
        """Gives each rank its bytes, and takes that many from each."""
        packed = torch.cat(list(give))
        out = packed.new_empty(sum(take))
        sizes = [part.numel() for part in give]
        self._do(self._torch.alltoall_base, out, packed, list(take), sizes, self._options(c10d.AllToAllOptions))
        came: Any = out
        return tuple(came.split(list(take)))

    # ------------------------------------------------------------------------------------------ around the library

    def _pieces(self, kernel: Kernel, side: Any) -> list[Row]:
        if type(side) is not tuple or len(side) != len(self._ranks):
            raise InternalError(detail=f"{kernel.kind.value} among {len(self._ranks)} ranks without a piece for each")
        return [row(piece) for piece in side]

    def _chunks(self, size: int, one: Row, share: int = 1) -> Iterator[tuple[int, int]]:
        """Cuts elements into ranges of which `share` fit into a chunk."""
        for lo, hi in chunks(size, CHUNK_NBYTES // share // one.itemsize):
            self._look()
            yield lo, hi

    def _rounds(self, kernel: Kernel, one: Row, rows: Sequence[Row], share: int = 0) -> Iterator[tuple[int, int]]:
        """Cuts the largest piece of all ranks, so that all of them call the library as often."""
        if any(each.size > kernel.most for each in rows):
            raise InternalError(
                detail=f"{kernel.kind.value} of more than the {kernel.most} elements that were agreed on"
            )
        return self._chunks(kernel.most, one, share or len(self._ranks))

    def _options(self, cls: Any, *, op: ReduceOp | None = None, root: int | None = None) -> Any:
        """Makes the library's options; its own threads give up when we do."""
        options = cls()
        options.timeout = self._left()
        if op is not None:
            options.reduceOp = _reduce_by(op)
        if root is not None:
            options.rootRank = root
        return options

    def _do(self, function: Callable[..., Any], *args: Any, is_pair: bool = False) -> None:
        """Calls the library and waits until this rank's part is done."""
        work = function(*args)
        self.has_begun = True
        if is_pair or not self._library.is_patient or self._device is not None:
            self._wait_beside(work)
        else:
            self._wait(work)

    def _wait(self, work: Any) -> None:
        """Waits in slices; a work survives a wait that was too short."""
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what it has, or it ended just now
                    return
                self._look()
            else:
                return

    def _wait_beside(self, work: Any) -> None:
        """Waits in a thread: gloo gives a send or receive up with a wait that is too short, others the whole group."""
        done, failed, device = threading.Event(), [], self._device

        def wait() -> None:
            try:
                work.wait(self._left())
                if device is not None:  # the wait may have been one of its queue only
                    getattr(torch, device.type).synchronize(device)
            except Exception as exc:  # noqa: BLE001 - raised below
                failed.append(exc)
            finally:
                done.set()

        threading.Thread(target=wait, name="raycollect-torch", daemon=True).start()
        while not done.wait(LOOK_S):
            self._look()
        if failed:
            raise failed[0]

    def _left(self) -> timedelta:
        return timedelta(seconds=max(self._until_s - time.monotonic(), 0.001))

    def _look(self) -> None:
        """Raises if the launch was aborted or takes too long, or the communicator was closed."""
        self._look_outside(self._launch)
        if time.monotonic() > self._until_s:
            detail = f"launch {self._launch.seq} did not end within {self._launch.timeout_s:g} s"
            timeout_s, group_name = self._launch.timeout_s, self._library.group_name
            raise CollectiveTimeoutError(group_name=group_name, timeout_s=timeout_s, detail=detail)


_KERNELS: dict[OpKind, Callable[[Run, Kernel], None]] = {
    OpKind.ALLREDUCE: Run._allreduce,
    OpKind.REDUCE: Run._reduce,
    OpKind.BROADCAST: Run._broadcast,
    OpKind.ALLGATHER: Run._allgather,
    OpKind.REDUCESCATTER: Run._reducescatter,
    OpKind.GATHER: Run._gather,
    OpKind.SCATTER: Run._scatter,
    OpKind.ALLTOALL: Run._alltoall,
    OpKind.SEND: Run._send,
    OpKind.RECV: Run._recv,
    OpKind.BARRIER: Run._barrier,
}


def _reduce_by(op: ReduceOp) -> Any:
    return getattr(c10d.ReduceOp, "SUM" if op is ReduceOp.AVG else op.name)


def _clipped(one: Row, lo: int, hi: int) -> tuple[int, int]:
    """Cuts a range of the largest piece down to what this one has of it; perhaps nothing."""
    hi = min(hi, one.size)
    return min(lo, hi), hi


def _padded(one: Row, lo: int, hi: int) -> Any:
    """Gives elements [lo, hi) as bytes, with zeros for those that are not there."""
    own = one.read(*_clipped(one, lo, hi))
    if own.numel() == (hi - lo) * one.itemsize:
        return own
    padded = one.room(hi - lo).zero_()
    padded[: own.numel()] = own
    return padded


def _write(one: Row, lo: int, hi: int, values: Any) -> None:
    """Writes those of the elements [lo, hi) that are there."""
    start, stop = _clipped(one, lo, hi)
    one.write(start, stop, values[: (stop - start) * one.itemsize])


def _check_same(kernel: Kernel, src: Row, dst: Row) -> None:
    if (src.size, src.itemsize) != (dst.size, dst.itemsize):
        raise InternalError(detail=f"{kernel.kind.value} of {src.size} elements into {dst.size}")
