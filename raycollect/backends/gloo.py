"""Backend `gloo`: members on any machines, over TCP, by `pygloo` or by xoscar's fork of it.

Theory. An allreduce in a dtype that gloo knows is its ring: 2 (w - 1) / w x n bytes out of each rank, in chunks of
`CHUNK_NBYTES`; the bits are equal on all ranks, but the fold does not go in rank order. Other dtypes move as bytes
(allgather of a chunk, (w - 1) x n bytes out of each rank) and are folded in rank order by numpy.

Both libraries hold the GIL while they block and can't be interrupted. So this adapter connects only when all members
have said that they are ready, enters a kernel only after the ranks have agreed (over the injected exchange), and gives
the GIL back between chunks, where it also sees an abort. A failure leaves the library's context dead, and the group
with it. pygloo 0.2.1 can't be told a timeout (its binding lacks the conversion): there it is gloo's own 30 s.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import numpy as np

from raycollect.errors import (
    BackendNotInstalledError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    GroupBrokenError,
    PlanAbortedError,
    RaycollectError,
)
from raycollect.model import Completion, Exchange, GroupSpec, Kernel, Launch, OpKind, ReduceOp, Rendezvous

from .arrays import Array, Flat, finish, fold
from .completion import DONE, chunks, movement, reduce_op, reduction, translated

__all__ = ["CHUNK_NBYTES", "GlooCommunicator", "GlooLibrary", "create"]

CHUNK_NBYTES = 4 << 20
"""How much one call of the library moves: the GIL is held that long."""

JOIN_TIMEOUT_S = 60.0
KERNEL_TIMEOUT_S = 60.0
"""The library's own limit for one chunk, where it can be set: a peer died without closing its connection."""

NATIVE_DTYPES = {
    "int8": "glooInt8",
    "uint8": "glooUint8",
    "int32": "glooInt32",
    "uint32": "glooUint32",
    "int64": "glooInt64",
    "uint64": "glooUint64",
    "float16": "glooFloat16",
    "float32": "glooFloat32",
    "float64": "glooFloat64",
}
"""numpy's dtype -> gloo's; both libraries reduce each of them by each of `NATIVE_OPS`."""

NATIVE_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PRODUCT",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.AVG: "SUM",
}

LIBRARIES = ("pygloo", "xoscar.collective.xoscar_pygloo")
"""Modules to look for, in this order."""

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


class GlooLibrary:
    """The names that differ between the two libraries.

    Attributes:
        name: The module's name.
        module: The module.
        dtypes: Its enum of element types.
        ring: Its ring algorithm.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.module = module
        self.dtypes = getattr(module, "glooDataType_t", None) or module.GlooDataType_t
        self.ring = (getattr(module, "allreduceAlgorithm", None) or module.AllreduceAlgorithm).RING

    @classmethod
    def load(cls, group_name: str) -> GlooLibrary:
        """Imports whichever library there is.

        Raises:
            BackendNotInstalledError: There is none; what each import said is in the text.
        """
        said = []
        for name in LIBRARIES:
            try:
                return cls(name, import_module(name))
            except ImportError as exc:
                said.append(f"{name}: {exc}")
        raise BackendNotInstalledError(group_name=group_name, detail="backend 'gloo': " + "; ".join(said))


class _Store:
    """Our rendezvous as gloo's store. Each key is set by one rank and read by the others.

    pygloo calls `set` and `get`, xoscar `set_tcp` and `get_tcp`; both call `wait` with a list of keys before `get`.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def set(self, key: str, data: bytes) -> bool:
        """Publishes a key."""
        self._rendezvous.put(f"gloo.key.{key}", bytes(data))
        return True

    def get(self, key: str) -> bytes:
        """Waits for a key."""
        return self._rendezvous.get(f"gloo.key.{key}", JOIN_TIMEOUT_S)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> bool:
        """Waits for keys."""
        for key in keys:
            self.get(key)
        return True

    set_tcp = set  # noqa: A003
    get_tcp = get


def create(
    spec: GroupSpec, rank: int, rendezvous: Rendezvous, exchange: Exchange, *, host: str = "127.0.0.1"
) -> GlooCommunicator:
    """Joins the group; returns when this rank is connected to all others.

    Args:
        spec: The group.
        rank: This process's rank.
        rendezvous: How the members find each other.
        exchange: Carries arrivals.
        host: The address of this node to listen on, and on which the others reach it.

    Raises:
        BackendNotInstalledError: No library is there.
        BackendUnavailableError: The members can't connect.
        CollectiveTimeoutError: A member did not come.
    """
    library = GlooLibrary.load(spec.name)
    context = None
    if spec.world_size > 1:
        # Connecting holds the GIL until all are there, so it starts when all are.
        rendezvous.put(f"gloo.ready.{rank}", library.name.encode())
        others = {rendezvous.get(f"gloo.ready.{peer}", JOIN_TIMEOUT_S).decode() for peer in range(spec.world_size)}
        if len(others) > 1:
            detail = f"backend 'gloo': the members have different libraries: {', '.join(sorted(others))}"
            raise BackendUnavailableError(group_name=spec.name, detail=detail)
        context = _connect(library, spec, rank, rendezvous, host)
    return GlooCommunicator(library, context, spec, rank, exchange)


def _connect(library: GlooLibrary, spec: GroupSpec, rank: int, rendezvous: Rendezvous, host: str) -> tuple[Any, ...]:
    """Connects to all; returns the context, and all that it needs and does not hold itself."""
    gloo = library.module
    try:
        context = gloo.rendezvous.Context(rank, spec.world_size)
        try:
            context.setTimeout(timedelta(seconds=KERNEL_TIMEOUT_S))
        except TypeError:  # pygloo 0.2.1 has the method, but not the conversion of its argument
            pass
        ours = _Store(rendezvous)
        store = gloo.rendezvous.CustomStore(ours)
        device = gloo.transport.tcp.CreateDevice(gloo.transport.tcp.attr(host))
        context.connectFullMesh(store, device)
    except RaycollectError:
        raise
    except Exception as exc:
        detail = f"backend 'gloo': rank {rank} can't connect to the others from {host}: {exc}"
        raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
    return context, device, store, ours


class GlooCommunicator:
    """One rank's membership; see `raycollect.model.Communicator`."""

    def __init__(
        self, library: GlooLibrary, connection: tuple[Any, ...] | None, spec: GroupSpec, rank: int, exchange: Exchange
    ) -> None:
        self.rank = rank
        self.world_size = spec.world_size
        self._group_name = spec.name
        self._gloo = library.module
        self._library = library
        self._connection = connection
        self._exchange = exchange
        self._aborted: set[int] = set()
        self._broken = ""
        self._lock = threading.Lock()
        self._kernels: dict[OpKind, Callable[[Any, _Limit, Launch, Kernel], None]] = {
            OpKind.ALLREDUCE: self._allreduce,
            OpKind.BROADCAST: self._broadcast,
            OpKind.SEND: self._send,
            OpKind.RECV: self._recv,
            OpKind.BARRIER: self._barrier,
        }

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """Does nothing: the library sends from the arrays themselves."""

    def agree(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Brings `launch.ranks` together over the exchange, so that the library never waits for anyone."""
        self._check_whole()
        self._check_going(launch)
        return self._exchange(launch, arrival)

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread."""
        with self._lock:  # `close` lets go of the context only when nobody is in a kernel
            self._check_whole()
            with self._failing(kernel, launch), translated(kernel.kind, self._group_name, self.rank):
                context = self._connection[0] if self._connection else None
                self._kernels[kernel.kind](context, _Limit(self, launch), launch, kernel)
        return DONE

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        """Leaves the launch."""
        for seq in tuple(self._aborted):
            if seq <= launch.seq:
                self._aborted.discard(seq)
        return ()

    def abort(self, seq: int) -> None:
        """Wakes this rank at the door; a kernel stops between two chunks, and the group is broken then."""
        self._aborted.add(seq)
        self._exchange.abort(seq)

    def close(self) -> None:
        """Closes the connections, unless a kernel is under way: the library can't be interrupted."""
        self._broken = self._broken or "the communicator was closed"
        if self._lock.acquire(blocking=False):
            try:
                connection, self._connection = self._connection, None
                if connection is not None:
                    connection[0].closeConnections()
            finally:
                self._lock.release()

    def check_going(self, launch: Launch, until_s: float) -> None:
        """Between two chunks: raises if the launch was aborted or takes too long."""
        self._check_going(launch)
        if time.monotonic() > until_s:
            detail = f"launch {launch.seq} did not end within {launch.timeout_s:g} s"
            raise CollectiveTimeoutError(group_name=self._group_name, timeout_s=launch.timeout_s, detail=detail)

    def _check_going(self, launch: Launch) -> None:
        if launch.seq in self._aborted:
            detail = f"launch {launch.seq} was aborted"
            raise PlanAbortedError(group_name=self._group_name, rank=self.rank, detail=detail)

    def _check_whole(self) -> None:
        if self._broken:
            raise GroupBrokenError(group_name=self._group_name, detail=self._broken)

    @contextmanager
    def _failing(self, kernel: Kernel, launch: Launch) -> Iterator[None]:
        """Notes that a kernel which failed has left the library's context unusable."""
        try:
            yield
        except BaseException as exc:
            self._broken = f"{kernel.kind.value} of launch {launch.seq} failed in mid-kernel: {exc}"
            if not isinstance(exc, RaycollectError) or not _TIMED_OUT.search(str(exc.__cause__)):
                raise
            raise CollectiveTimeoutError(
                op=kernel.kind.value, group_name=self._group_name, timeout_s=launch.timeout_s, detail=str(exc.__cause__)
            ) from exc

    def _barrier(self, context: Any, limit: _Limit, launch: Launch, kernel: Kernel) -> None:
        """Waits for all; `agree` has done so already where only some take part."""
        limit.check()
        if context is not None and len(launch.ranks) == self.world_size:
            self._gloo.barrier(context)

    def _allreduce(self, context: Any, limit: _Limit, launch: Launch, kernel: Kernel) -> None:
        """Reduces by the library where it knows the dtype, else by numpy."""
        (src, dst), op = reduction(kernel), reduce_op(kernel)
        native = context is not None and src.dtype.name in NATIVE_DTYPES
        step, share = (self._ring, 1) if native else (self._gathered, self.world_size)
        for lo, hi in chunks(src.size, CHUNK_NBYTES // share // src.dtype.itemsize):
            limit.check()
            out = dst.target(lo, hi)
            step(context, op, np.ascontiguousarray(src.read(lo, hi)), out)
            dst.commit(lo, hi, out)

    def _ring(self, context: Any, op: ReduceOp, own: Array, out: Array) -> None:
        dtype = getattr(self._library.dtypes, NATIVE_DTYPES[own.dtype.name])
        reduce_by = getattr(self._gloo.ReduceOp, NATIVE_OPS[op])
        self._gloo.allreduce(context, _pointer(own), _pointer(out), own.size, dtype, reduce_by, self._library.ring)
        finish(op, out, self.world_size)

    def _gathered(self, context: Any, op: ReduceOp, own: Array, out: Array) -> None:
        if context is None:
            fold(op, [own], out)
            return
        everyone = np.empty((self.world_size, own.size), own.dtype)
        self._gloo.allgather(context, _pointer(own), _pointer(everyone), own.nbytes, self._library.dtypes.glooUint8)
        fold(op, list(everyone), out)

    def _broadcast(self, context: Any, limit: _Limit, launch: Launch, kernel: Kernel) -> None:
        """Moves the root's bytes to all."""
        src, dst, whole = movement(kernel, is_root=self.rank == kernel.peer)
        uint8 = self._library.dtypes.glooUint8
        for lo, hi in _byte_chunks(whole):
            limit.check()
            buffer = dst.target(lo, hi) if src is None and dst is not None else whole.read(lo, hi)
            if context is not None:
                pointer = _pointer(buffer)
                self._gloo.broadcast(context, pointer, pointer, buffer.nbytes, uint8, kernel.peer)
            if dst is not None:
                dst.commit(lo, hi, buffer) if src is None else dst.write(lo, hi, buffer)

    def _send(self, context: Any, limit: _Limit, launch: Launch, kernel: Kernel) -> None:
        """Sends bytes to one rank."""
        _, _, src = movement(kernel, is_root=True)
        for lo, hi in _byte_chunks(src):
            limit.check()
            own = src.read(lo, hi)
            self._gloo.send(context, _pointer(own), own.nbytes, self._library.dtypes.glooUint8, kernel.peer)

    def _recv(self, context: Any, limit: _Limit, launch: Launch, kernel: Kernel) -> None:
        """Receives bytes from one rank."""
        _, _, dst = movement(kernel, is_root=False)
        for lo, hi in _byte_chunks(dst):
            limit.check()
            out = dst.target(lo, hi)
            self._gloo.recv(context, _pointer(out), out.nbytes, self._library.dtypes.glooUint8, kernel.peer)
            dst.commit(lo, hi, out)


class _Limit:
    """When a kernel must stop: asked between two chunks."""

    def __init__(self, communicator: GlooCommunicator, launch: Launch) -> None:
        self._communicator = communicator
        self._launch = launch
        self._until_s = time.monotonic() + launch.timeout_s

    def check(self) -> None:
        """Raises if the launch was aborted or takes too long."""
        self._communicator.check_going(self._launch, self._until_s)


def _byte_chunks(flat: Flat) -> Iterator[tuple[int, int]]:
    return chunks(flat.size, CHUNK_NBYTES // flat.dtype.itemsize)


def _pointer(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
