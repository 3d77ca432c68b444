"""`cupy.cuda.nccl`: communicators whose calls are checked, enqueued, and matched on the streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from . import _world
from ._clique import RULES, Call, Launch, Seat
from ._errors import CUDARuntimeError, NcclError
from ._machine import Machine
from ._memory import Block
from ._queues import Queue

NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)

available = True

_ID_LENGTH = 128
_FLOAT8_FROM = 22400
_FLOAT8 = (10, 11)
_REDUCTIONS = ("allReduce", "reduce", "reduceScatter")

_CUDA_ERROR, _INVALID_ARGUMENT = 1, 4

_DTYPES: dict[int, tuple[Any, int]] = {
    **{code: (dtype, 0) for code, dtype in enumerate((np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64))},
    **{code: (dtype, 0) for code, dtype in enumerate((np.float16, np.float32, np.float64), 6)},
    9: (ml_dtypes.bfloat16, 21000),
    10: (ml_dtypes.float8_e4m3fn, _FLOAT8_FROM),
    11: (ml_dtypes.float8_e5m2, _FLOAT8_FROM),
}
"""Datatype -> dtype, and the NCCL that has it first."""


def get_version() -> int:
    return _world.world().version


def get_unique_id() -> bytes | tuple[int, ...]:
    """Since cupy 14 these are bytes, before that C's signed chars."""
    world = _world.world()
    unique = world.random.randbytes(_ID_LENGTH)
    world.cliques[unique] = None
    world.machine.counts["nccl.get_unique_id"] += 1
    return unique if world.has_bytes else tuple(one - 256 if one > 127 else one for one in unique)


def _id_of(world: _world.World, given: Any) -> bytes:
    expected = bytes if world.has_bytes else tuple
    if not isinstance(given, expected):
        told = f"expected {expected.__name__}, got {type(given).__name__}"
        raise TypeError(f"Argument 'commId' has incorrect type ({told})")
    if len(given) != _ID_LENGTH:
        raise ValueError(f"commId length {len(given)} != {_ID_LENGTH}.")
    return bytes(one & 0xFF for one in given)


def groupStart() -> None:
    _world.world().group.depth += 1


def groupEnd() -> None:
    """Enqueues the group's calls, one item per stream; if one of them was refused, none of them."""
    world = _world.world()
    group = world.group
    if not group.depth:
        raise NcclError(_world.INVALID_USAGE)
    group.depth -= 1
    if group.depth:
        return
    calls, group.calls = group.calls, []
    error, group.error = group.error, 0
    if error:
        raise NcclError(error)
    _enqueue(world.machine, calls)


def _enqueue(machine: Machine, calls: Sequence[tuple[Queue, Call]]) -> None:
    _check_apart(machine, [call for _, call in calls])
    queues: dict[Queue, list[Call]] = {}
    for queue, call in calls:
        queues.setdefault(queue, []).append(call)
    for queue, together in queues.items():
        try:
            machine.enqueue(queue, Launch(together, calls))
        except CUDARuntimeError as exc:
            raise NcclError(_CUDA_ERROR) from exc


def _check_apart(machine: Machine, calls: Sequence[Call]) -> None:
    """No call of a group writes what another one reads or writes."""
    for call in calls:
        for other in calls:
            touched = [one for one in (other.send, other.recv) if one is not None]
            if call is not other and call.recv is not None and any(_meet(call.recv, one) for one in touched):
                machine.violate(f"NCCL: {call.told} writes what {other.told} of its group touches")
                raise NcclError(_INVALID_ARGUMENT)


def _meet(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return bool(np.may_share_memory(a, b))  # by bounds, which is exact for what is contiguous


class NcclCommunicator:
    """A rank's end of a communicator, on the calling thread's device; blocks until all ranks are there."""

    _seat: Seat | None = None

    def __init__(self, ndev: int, commId: Any, rank: int) -> None:
        world = _world.world()
        unique = _id_of(world, commId)
        assert not world.group.depth, "the fake makes no communicators inside a group"
        world.machine.counts["nccl.communicators"] += 1
        device = world.machine.current_device()
        world.machine.check_safe()
        if not 0 <= rank < ndev:
            raise NcclError(_INVALID_ARGUMENT)
        with world.machine.lock:
            seat = _world.sit(world, unique, Seat(_world.clique_of(world, unique, ndev), rank, device))
        try:
            world.machine.wait(lambda: seat.clique.status is not None)
        except CUDARuntimeError as exc:
            raise NcclError(_world.SYSTEM_ERROR) from exc
        if seat.clique.status:
            raise NcclError(seat.clique.status)
        self._seat = seat

    def __del__(self) -> None:
        seat = self._seat
        if seat is not None and not seat.ended:
            machine = seat.clique.machine
            machine.last_rites(lambda: _world.leave(machine, seat))

    # --------------------------------------------------------------------------------------------- itself

    def _there(self) -> Seat:
        if self._seat is None or self._seat.ended:
            raise NcclError(_INVALID_ARGUMENT)
        return self._seat

    def rank_id(self) -> int:
        return self._there().rank

    def size(self) -> int:
        return self._there().clique.size

    def check_async_error(self) -> None:
        seat = self._there()
        seat.clique.machine.counts["nccl.check_async_error"] += 1
        if seat.error:
            raise NcclError(seat.error)

    def destroy(self) -> None:
        """Ends it once what it has enqueued is done."""
        seat = self._seat
        if seat is not None and not seat.ended:
            seat.clique.machine.counts["nccl.destroy"] += 1
            seat.clique.machine.wait(lambda: not seat.open)
            seat.ended = True

    def abort(self) -> None:
        """Ends it, and what it has enqueued; waits until the streams have come there. The other ranks wait on."""
        seat = self._seat
        if seat is not None and not seat.ended:
            machine = seat.clique.machine
            with machine.lock:
                machine.counts["nccl.abort"] += 1
                seat.ended = True
                seat.clique.withdraw(machine, seat)
            machine.wait(lambda: all(mark.passed for mark in (*seat.before, *seat.last)))

    # ------------------------------------------------------------------------------------------ operations

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        what = ("allReduce", count, datatype, op)
        self._call(what, stream, send=(sendbuf, count), recv=(recvbuf, count), in_place=sendbuf == recvbuf)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        recv = (recvbuf, count) if self._is(root) else None
        what = ("reduce", count, datatype, op, root)
        self._call(what, stream, send=(sendbuf, count), recv=recv, in_place=sendbuf == recvbuf)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        send = (sendbuff, count) if self._is(root) else None
        what = ("broadcast", count, datatype, root)
        self._call(what, stream, send=send, recv=(recvbuff, count), in_place=sendbuff == recvbuff)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        send = (sendbuf, recvcount * self.size())
        in_place = recvbuf == sendbuf + self.rank_id() * recvcount * _itemsize(datatype)
        what = ("reduceScatter", recvcount, datatype, op)
        self._call(what, stream, send=send, recv=(recvbuf, recvcount), in_place=in_place)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        recv = (recvbuf, count * self.size())
        in_place = sendbuf == recvbuf + self.rank_id() * count * _itemsize(datatype)
        self._call(("allGather", count, datatype), stream, send=(sendbuf, count), recv=recv, in_place=in_place)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._is(peer)
        self._call(("send", count, datatype), stream, send=(sendbuf, count), peer=peer)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._is(peer)
        self._call(("recv", count, datatype), stream, recv=(recvbuf, count), peer=peer)

    def _is(self, rank: int) -> bool:
        """Whether it is this rank, which has to be one of the communicator's."""
        seat = self._there()
        if not 0 <= rank < seat.clique.size:
            self._refuse(_INVALID_ARGUMENT)
        return rank == seat.rank

    def _refuse(self, status: int) -> None:
        group = _world.world().group
        if group.depth:
            group.error = group.error or status
        raise NcclError(status)

    def _call(
        self,
        what: tuple[Any, ...],
        stream: int,
        *,
        send: tuple[int, int] | None = None,
        recv: tuple[int, int] | None = None,
        in_place: bool = False,
        peer: int = -1,
    ) -> None:
        """Checks a call, and enqueues it unless a group is open; a buffer is a pointer and a number of elements."""
        world, seat = _world.world(), self._there()
        machine = world.machine
        machine.counts[f"nccl.{what[0]}"] += 1
        if seat.failing is not None and seat.failing[1]:
            status, seat.failing = seat.failing[0], None
            self._refuse(status)
        dtype, since = _DTYPES.get(what[2], (None, 0))
        known = dtype is not None and world.version >= since
        if not known or (what[0] in _REDUCTIONS and what[3] not in RULES):
            self._refuse(_INVALID_ARGUMENT)
        if what[0] in _REDUCTIONS and what[3] == NCCL_AVG and what[2] in _FLOAT8 and seat.clique.size == 1:
            self._refuse(_INVALID_ARGUMENT)
        queue = self._queue(machine, seat, stream)
        given, blocks = self._buffer(machine, what[0], send, np.dtype(dtype))
        taken, more = self._buffer(machine, what[0], recv, np.dtype(dtype))
        if given is not None and taken is not None and _meet(given, taken) and not in_place:
            machine.violate(f"NCCL: {what[0]} of {what[1]} elements reads and writes the same bytes, not in place")
            self._refuse(_INVALID_ARGUMENT)
        call = Call(seat=seat, what=what, peer=peer, send=given, recv=taken, blocks=[*blocks, *more])
        if world.group.depth:
            world.group.calls.append((queue, call))
        else:
            _enqueue(machine, [(queue, call)])

    def _queue(self, machine: Machine, seat: Seat, stream: int) -> Queue:
        try:
            queue = machine.queue(stream, seat.device)
        except CUDARuntimeError:
            self._refuse(_CUDA_ERROR)
        if queue.device != seat.device:
            self._refuse(_CUDA_ERROR)
        return queue

    def _buffer(
        self, machine: Machine, kind: str, given: tuple[int, int] | None, dtype: np.dtype[Any]
    ) -> tuple[Any, Iterable[Block]]:
        if given is None or not given[1]:
            return (None if given is None else np.empty(0, dtype)), ()
        ptr, nbytes = given[0], given[1] * dtype.itemsize
        blocks = machine.heap.blocks(f"nccl.{kind}", [(ptr, nbytes)]) if ptr else []
        if not ptr or any(block.device != self._there().device for block in blocks):
            self._refuse(_INVALID_ARGUMENT)
        return machine.heap.view(ptr, nbytes).view(dtype), blocks


def _itemsize(datatype: int) -> int:
    return np.dtype(_DTYPES[datatype][0]).itemsize if datatype in _DTYPES else 1
