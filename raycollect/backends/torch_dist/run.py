"""The kernels of a `torch.distributed` backend: the operations of each, by chunks."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from raycollect.backends.arrays import Array, DeviceArray, Flat
from raycollect.backends.folds import finish
from raycollect.backends.kernels import chunks, clipped, metered, moved, movement, one_each, reduce_op, reduction
from raycollect.backends.meshed import is_as_numpy
from raycollect.backends.torch_dist.calls import Calls
from raycollect.backends.torch_dist.group import c10d
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.errors import InternalError

CHUNK_NBYTES = 8 << 20  # The bytes that one call of the library moves of device tensors, or of copies
LENT_NBYTES = 16 << 20  # The same in the user's arrays; arrays with gaps are copied by as much
# There it reduces parts of at least this size and less than twice that, `AHEAD` at a time: while one of its threads
# reduces, the other moves data. 1.1 to 1.2 times as fast as in one part, on 2 busy cores.
PART_NBYTES = 4 << 20
AHEAD = 4


# The libraries for CPU memory reduce these as numpy does. They round 16-bit floats at each step.
_NATIVE_DTYPES = frozenset({"int8", "uint8", "int32", "int64", "float32", "float64"})


def is_native(op: ReduceOp, dtype: str) -> bool:
    """Tells whether the libraries for CPU memory reduce these as numpy does."""
    return dtype in _NATIVE_DTYPES and is_as_numpy(op, dtype)


def host_tensor(array: Array) -> Any:
    """Wraps a flat, contiguous array as a tensor; the library must not write to one that is read-only."""
    if not array.flags.writeable:  # torch has no read-only tensors, and would warn
        memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        array = np.ndarray(array.shape, array.dtype, memoryview(memory))
    return torch.from_numpy(array)


def run(calls: Calls, launch: Launch, kernel: Kernel) -> None:
    """Runs a kernel to its end; collectives run over all ranks of the group."""
    calls.look()
    first = kernel.sample
    if isinstance(first, DeviceArray):
        calls.device = first.tensor.device
        _ON_DEVICE[kernel.kind](_DeviceRun(calls), kernel)
    elif kernel.kind is not OpKind.BARRIER:
        _ON_HOST[kernel.kind](_HostRun(calls), kernel)
    elif len(launch.ranks) == calls.library.world_size:  # else `agree` has synchronized the participating ranks
        calls.do(calls.library.backend.barrier, calls.options(c10d.BarrierOptions))


class _Run:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._torch = calls.library.backend
        self._me = calls.library.rank
        self._ranks = range(calls.library.world_size)
        # Whether the library works in the user's arrays: only if it can be kept from writing there later.
        self._lends = calls.library.sever is not None


class _HostRun(_Run):
    """A kernel on arrays in CPU memory."""

    def allreduce(self, kernel: Kernel) -> None:
        (src, dst), op = reduction(kernel), reduce_op(kernel)
        if self._lends:
            self._allreduce_within(src, dst, op)
            return
        for lo, hi in self._spans(src):
            out = np.empty(hi - lo, dst.dtype)
            src.fill(out, lo, hi)
            self._calls.do(*self._reducing(out, op))
            finish(op, out, len(self._ranks))
            dst.write(lo, hi, out)

    def _allreduce_within(self, src: Flat, dst: Flat, op: ReduceOp) -> None:
        # In the user's array, or in a copy of an array with gaps, by parts that the library reduces concurrently. The
        # parts are equal on all ranks: they depend on the size only.
        step = -(-dst.size // max(1, dst.size * dst.dtype.itemsize // PART_NBYTES))
        ahead, under_way = chunks(dst.size, step), deque[tuple[Any, Array]]()
        in_place = src.direct and dst.direct and src.address == dst.address
        with self._calls.settled():
            for lo, hi in metered(dst.size, step):
                self._calls.look()
                for start, stop in islice(ahead, AHEAD - len(under_way)):
                    out = dst.target(start, stop)
                    if not in_place:
                        src.fill(out, start, stop)
                    under_way.append((self._calls.begin(*self._reducing(out, op)), out))
                work, out = under_way.popleft()
                self._calls.finish(work)
                finish(op, out, len(self._ranks))
                dst.commit(lo, hi, out)

    def _reducing(self, out: Array, op: ReduceOp) -> tuple[Any, ...]:
        return self._torch.allreduce, [host_tensor(out)], self._calls.options(c10d.AllreduceOptions, op=op)

    def broadcast(self, kernel: Kernel) -> None:
        src, dst, whole = movement(kernel, is_root=self._me == kernel.peer)
        for lo, hi in self._spans(whole):
            if src is not None:
                buffer = src.read(lo, hi) if self._lends else src.read(lo, hi).copy()
            else:
                buffer = self._target(whole, lo, hi)
            options = self._calls.options(c10d.BroadcastOptions, root=kernel.peer)
            self._calls.do(self._torch.broadcast, [host_tensor(buffer.view(np.uint8))], options)
            if src is None:
                self._commit(whole, lo, hi, buffer)
            elif dst is not None:
                dst.write(lo, hi, buffer)

    def _spans(self, flat: Flat) -> Iterator[tuple[int, int]]:
        for lo, hi in metered(flat.size, (LENT_NBYTES if self._lends else CHUNK_NBYTES) // flat.dtype.itemsize):
            self._calls.look()
            yield lo, hi

    def _target(self, dst: Flat, lo: int, hi: int) -> Array:
        return dst.target(lo, hi) if self._lends else np.empty(hi - lo, dst.dtype)

    def _commit(self, dst: Flat, lo: int, hi: int, out: Array) -> None:
        if self._lends:
            dst.commit(lo, hi, out)
        else:
            dst.write(lo, hi, out)


class DeviceRow:
    """A tensor in device memory as a row of elements; a tensor with gaps is copied.

    Chunks are tensors of bytes, which every library moves for any dtype. The device's library reduces.
    """

    def __init__(self, array: DeviceArray) -> None:
        self._tensor = tensor = array.tensor
        self._line = tensor.contiguous().as_strided(
            (tensor.numel(),), (1,)
        )  # a view may keep the stride of one element
        self._is_copy = not tensor.is_contiguous()
        self.size: int = tensor.numel()
        self.itemsize: int = tensor.element_size()

    def read(self, lo: int, hi: int) -> Any:
        """Returns elements [lo, hi) as bytes; this may be a view, which must not be written."""
        return self._line[lo:hi].view(torch.uint8)

    def write(self, lo: int, hi: int, values: Any) -> None:
        """Writes elements [lo, hi) from bytes."""
        self._line[lo:hi] = self.typed(values)
        if self._is_copy and hi == self.size:
            self._tensor.copy_(self._line.view(self._tensor.shape))

    def room(self, count: int) -> Any:
        """Allocates bytes for `count` elements on the same device, contents undefined."""
        return torch.empty(count * self.itemsize, dtype=torch.uint8, device=self._tensor.device)

    def typed(self, values: Any) -> Any:
        """Views bytes as elements, for the library to reduce."""
        return values.view(self._tensor.dtype)

    def finish(self, op: ReduceOp, values: Any, world_size: int) -> None:
        """Turns the library's sum into the average, for AVG only."""
        if op is ReduceOp.AVG:
            self.typed(values).div_(world_size)


class _DeviceRun(_Run):
    """A kernel on tensors in device memory."""

    def allreduce(self, kernel: Kernel) -> None:
        self._reduce(kernel, DeviceRow(kernel.dst), self._torch.allreduce, c10d.AllreduceOptions)

    def reduce(self, kernel: Kernel) -> None:
        dst = DeviceRow(kernel.dst) if self._me == kernel.peer else None
        self._reduce(kernel, dst, self._torch.reduce, c10d.ReduceOptions, root=kernel.peer)

    def _reduce(self, kernel: Kernel, dst: DeviceRow | None, call: Any, options: Any, **root: int) -> None:
        src, op = DeviceRow(kernel.src), reduce_op(kernel)
        _check_same(kernel, src, dst or src)
        for lo, hi in self._chunks(src.size, src):
            out = src.read(lo, hi).clone()  # the library may write it on all ranks
            self._calls.do(call, [src.typed(out)], self._calls.options(options, op=op, **root))
            src.finish(op, out, len(self._ranks))
            if dst is not None:
                dst.write(lo, hi, out)

    def reducescatter(self, kernel: Kernel) -> None:
        op, src, dst = reduce_op(kernel), self._pieces(kernel, kernel.src), DeviceRow(kernel.dst)
        _check_same(kernel, src[self._me], dst)
        for lo, hi in self._chunks(max(piece.size for piece in src), dst, len(src)):
            span = clipped(dst, lo, hi)
            out, give = dst.room(hi - lo), [dst.typed(_padded(piece, lo, hi)) for piece in src]
            options = self._calls.options(c10d.ReduceScatterOptions, op=op)
            self._calls.do(self._torch.reduce_scatter, [dst.typed(out)], [give], options)
            dst.finish(op, out, len(src))
            dst.write(*span, out[: (span[1] - span[0]) * dst.itemsize])

    def broadcast(self, kernel: Kernel) -> None:
        read, written = moved(kernel, is_root=self._me == kernel.peer)
        src, dst = None if read is None else DeviceRow(read), None if written is None else DeviceRow(written)
        whole = src or dst
        assert whole is not None  # `moved` gives one of them
        for lo, hi in self._chunks(whole.size, whole):
            buffer = src.read(lo, hi) if src else whole.room(hi - lo)
            options = self._calls.options(c10d.BroadcastOptions, root=kernel.peer)
            self._calls.do(self._torch.broadcast, [buffer], options)
            if dst:
                dst.write(lo, hi, buffer)

    def allgather(self, kernel: Kernel) -> None:
        # Chunks are padded to the largest piece.
        src, dst = DeviceRow(kernel.src), self._pieces(kernel, kernel.dst)
        _check_same(kernel, src, dst[self._me])
        for lo, hi in self._chunks(max(piece.size for piece in dst), src, len(dst)):
            own = _padded(src, lo, hi)
            everyone = [torch.empty_like(own) for _ in self._ranks]
            self._calls.do(self._torch.allgather, [everyone], [own], self._calls.options(c10d.AllgatherOptions))
            for piece, values in zip(dst, everyone, strict=True):
                _write(piece, lo, hi, values)

    def gather(self, kernel: Kernel) -> None:
        # Chunks are padded to the largest piece: only the root knows the sizes of all.
        src = DeviceRow(kernel.src)
        dst = self._pieces(kernel, kernel.dst) if self._me == kernel.peer else []
        for lo, hi in self._rounds(kernel, src, (src, *dst)):
            parts = self._collected(_padded(src, lo, hi), kernel.peer)
            for piece, values in zip(dst, parts, strict=True):
                _write(piece, lo, hi, values)

    def scatter(self, kernel: Kernel) -> None:
        # As in `_gather`.
        dst = DeviceRow(kernel.dst)
        src = self._pieces(kernel, kernel.src) if self._me == kernel.peer else []
        for lo, hi in self._rounds(kernel, dst, (dst, *src)):
            give = [[_padded(piece, lo, hi) for piece in src]] if src else []
            out = dst.room(hi - lo)
            self._calls.do(self._torch.scatter, [out], give, self._calls.options(c10d.ScatterOptions, root=kernel.peer))
            _write(dst, lo, hi, out)

    def alltoall(self, kernel: Kernel) -> None:
        src, dst = self._pieces(kernel, kernel.src), self._pieces(kernel, kernel.dst)
        _check_same(kernel, src[self._me], dst[self._me])
        for lo, hi in self._rounds(kernel, dst[0], (*src, *dst), len(dst)):
            spans = [clipped(piece, lo, hi) for piece in dst]
            give = [piece.read(*clipped(piece, lo, hi)) for piece in src]
            received = self._exchange(give, [(stop - start) * dst[0].itemsize for start, stop in spans])
            for piece, span, values in zip(dst, spans, received, strict=True):
                piece.write(*span, values)

    def send(self, kernel: Kernel) -> None:
        src = DeviceRow(kernel.src)
        for lo, hi in self._chunks(src.size, src):
            self._calls.do(self._torch.send, [src.read(lo, hi)], kernel.peer, 0, is_pair=True)

    def recv(self, kernel: Kernel) -> None:
        dst = DeviceRow(kernel.dst)
        for lo, hi in self._chunks(dst.size, dst):
            buffer = dst.room(hi - lo)
            self._calls.do(self._torch.recv, [buffer], kernel.peer, 0, is_pair=True)
            dst.write(lo, hi, buffer)

    def _collected(self, own: Any, root: int) -> list[Any]:
        parts = [torch.empty_like(own) for _ in self._ranks] if self._me == root else []
        options = self._calls.options(c10d.GatherOptions, root=root)
        self._calls.do(self._torch.gather, [parts] if parts else [], [own], options)
        return parts

    def _exchange(self, give: Sequence[Any], take: Sequence[int]) -> Sequence[Any]:
        # Sends each rank its bytes, and receives `take` bytes from each.
        packed = torch.cat(list(give))
        out = packed.new_empty(sum(take))
        sizes = [part.numel() for part in give]
        self._calls.do(
            self._torch.alltoall_base, out, packed, list(take), sizes, self._calls.options(c10d.AllToAllOptions)
        )
        received: Any = out
        return tuple(received.split(list(take)))

    def _pieces(self, kernel: Kernel, side: Any) -> list[DeviceRow]:
        return [DeviceRow(piece) for piece in one_each(kernel, side, self._ranks)]

    def _chunks(self, size: int, row: DeviceRow, share: int = 1) -> Iterator[tuple[int, int]]:
        for lo, hi in chunks(size, CHUNK_NBYTES // share // row.itemsize):
            self._calls.look()
            yield lo, hi

    def _rounds(
        self, kernel: Kernel, row: DeviceRow, rows: Sequence[DeviceRow], share: int = 0
    ) -> Iterator[tuple[int, int]]:
        # Cuts the largest piece of all ranks, so that all of them call the library equally often.
        if any(each.size > kernel.most for each in rows):
            raise InternalError(detail=f"{kernel.kind.value} of more than the agreed {kernel.most} elements")
        return self._chunks(kernel.most, row, share or len(self._ranks))


# Other kernels run on the mesh; see `meshed`
_ON_HOST: dict[OpKind, Callable[[_HostRun, Kernel], None]] = {
    OpKind.ALLREDUCE: _HostRun.allreduce,
    OpKind.BROADCAST: _HostRun.broadcast,
}

_ON_DEVICE: dict[OpKind, Callable[[_DeviceRun, Kernel], None]] = {
    OpKind.ALLREDUCE: _DeviceRun.allreduce,
    OpKind.REDUCE: _DeviceRun.reduce,
    OpKind.BROADCAST: _DeviceRun.broadcast,
    OpKind.ALLGATHER: _DeviceRun.allgather,
    OpKind.REDUCESCATTER: _DeviceRun.reducescatter,
    OpKind.GATHER: _DeviceRun.gather,
    OpKind.SCATTER: _DeviceRun.scatter,
    OpKind.ALLTOALL: _DeviceRun.alltoall,
    OpKind.SEND: _DeviceRun.send,
    OpKind.RECV: _DeviceRun.recv,
}


def _padded(row: DeviceRow, lo: int, hi: int) -> Any:
    own = row.read(*clipped(row, lo, hi))
    if own.numel() == (hi - lo) * row.itemsize:
        return own
    padded = row.room(hi - lo).zero_()
    padded[: own.numel()] = own
    return padded


def _write(row: DeviceRow, lo: int, hi: int, values: Any) -> None:
    start, stop = clipped(row, lo, hi)
    row.write(start, stop, values[: (stop - start) * row.itemsize])


def _check_same(kernel: Kernel, src: DeviceRow, dst: DeviceRow) -> None:
    if (src.size, src.itemsize) != (dst.size, dst.itemsize):
        raise InternalError(detail=f"{kernel.kind.value} of {src.size} elements into {dst.size}")
