"""Backend `gloo`: members on any machines, over TCP, by pygloo or xoscar's fork of it.

Theory, for w ranks and arrays of n bytes. The library reduces and broadcasts large arrays: ALLREDUCE, by a ring that
sends 2 (w - 1) / w x n, and REDUCE, where gloo reduces as numpy does (`is_native`), and BROADCAST. The bits are equal
on all ranks, but the fold is not in rank order. Everything else, and small arrays, travel on the mesh (`meshed`), by
the kernels of backend `tcp`.

The library holds the GIL while it blocks and can't be interrupted. So this adapter connects only when all members are
ready, enters a kernel only after the ranks have agreed, and releases the GIL between chunks, where it also notices an
abort. Within a chunk each wait for another rank is limited to the rest of the kernel's time; pygloo 0.2.1 has no
working timeout, so gloo's own 30 s apply. A failure leaves the library's context unusable, and the group broken. Extra
memory: at most 3 x `CHUNK_NBYTES` per rank (P8).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from operator import methodcaller
from typing import Any

import numpy as np

from raycollect.backends.arrays import Array, Flat
from raycollect.backends.capabilities import RINGS_OF_GLOO
from raycollect.backends.folds import finish
from raycollect.backends.in_use import InUse
from raycollect.backends.joining import gathered
from raycollect.backends.kernels import chunks, late, movement, reduce_op, reduction, translated
from raycollect.backends.meshed import Meshed, descriptors, is_as_numpy
from raycollect.backends.tcp.communicator import TcpCommunicator, check_descriptors, connect
from raycollect.core.codec import Codec
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Joining, Rendezvous
from raycollect.errors import BackendUnavailableError, InvalidGroupError, RaycollectError
from raycollect.errors.text import listed

CHUNK_NBYTES = 4 << 20  # The bytes that one call of the library moves while it holds the GIL
JOIN_TIMEOUT_S = 45.0  # Less than the minute of a declaration, which can then report the missing ranks
LIBRARY = "raycollect.backends.gloo.library"
_NAME = Codec[str](str, "name of a library")
# The dtypes that gloo reduces as numpy does. float16 is left out: gloo rounds at each step of the ring (seen at 8
# ranks: up to 2.4 units in the last place, 0.5 by a fold in float32) and is slower.
_DTYPES = frozenset({"int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64"})


def is_native(op: ReduceOp, dtype: str) -> bool:
    """Tells whether gloo itself reduces elements of that dtype, with numpy's semantics."""
    return dtype in _DTYPES and is_as_numpy(op, dtype)


def create(joining: Joining) -> GlooCommunicator:
    """Joins the group; returns when this rank is connected to all others.

    Raises:
        InvalidGroupError: Options were given; it takes none.
        BackendUnavailableError: The members have different libraries, or can't connect.
        CollectiveTimeoutError: A member did not join in time.
    """
    spec = joining.spec
    if spec.options:
        detail = f"backend 'gloo': it takes no options, and got {listed(dict(spec.options))}"
        raise InvalidGroupError(group_name=spec.name, detail=detail)
    check_descriptors(spec, joining.rank, descriptors(spec.world_size))
    gloo = import_module(LIBRARY).gloo
    if spec.world_size > 1:
        _check_libraries(joining, gloo.__name__)
    mesh = connect(joining)
    try:
        # Connecting holds the GIL until all ranks connect, so it starts after the mesh has connected them.
        return GlooCommunicator(GlooLink(gloo, joining) if spec.world_size > 1 else None, joining, mesh)
    except BaseException:
        mesh.close()
        raise


def _check_libraries(joining: Joining, mine: str) -> None:
    # pygloo and its fork encode addresses differently, and crash or hang together.
    spec, rendezvous = joining.spec, joining.rendezvous
    rendezvous.put(f"gloo.library.{joining.rank}", _NAME.encode(mine))
    libraries = gathered(_NAME, rendezvous, spec, "gloo.library", range(spec.world_size), JOIN_TIMEOUT_S)
    if len(set(libraries.values())) > 1:
        said = listed((f"rank {rank} has {name}" for rank, name in libraries.items()), "; ")
        detail = f"backend 'gloo': all members need the same library, but {said}. Install the same one for all of them"
        raise BackendUnavailableError(group_name=spec.name, detail=f"{detail}; or use backend='auto', which needs none")


class GlooCommunicator(Meshed):
    """One rank's membership. A library kernel notices an abort between two chunks; the group is broken then.

    Without a `link`, all kernels run on the mesh.
    """

    def __init__(self, link: GlooLink | None, joining: Joining, mesh: TcpCommunicator) -> None:
        super().__init__(joining, mesh, RINGS_OF_GLOO if link else frozenset(), is_native)
        self._use = InUse(link, methodcaller("close"), self._group_name)

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Leaves the launch. Closes the library's connections if others may be inside it, which wakes them."""
        if any(self._is_for_library(launch, kernel) for kernel in owed):
            self._break(f"rank {self.rank} left launch {launch.seq} before it had run its kernels")
        return super().end(launch, ok, owed)

    def close(self) -> None:
        """Closes the connections, at the end of the running library kernel: it can't be interrupted."""
        super().close()
        self._use.close()

    def _run(self, launch: Launch, kernel: Kernel) -> None:
        run = self._broadcast if kernel.kind is OpKind.BROADCAST else self._reduce
        try:
            with translated(kernel.kind, self._group_name, self.rank):
                self._use.call(run, launch, kernel)
        except BaseException as exc:  # noqa: BLE001 - raised again, or translated
            # A failed kernel leaves the library's context unusable.
            self._break(f"{kernel.kind.value} of launch {launch.seq} failed in mid-kernel: {exc}")
            raise self._failed(exc, launch, kernel) from exc.__cause__

    def _reduce(self, link: GlooLink, launch: Launch, kernel: Kernel) -> None:
        # ALLREDUCE, or REDUCE to `kernel.peer`; on other ranks the library writes to its own memory
        op, root = reduce_op(kernel), kernel.peer if kernel.kind is OpKind.REDUCE else None
        src, dst = reduction(kernel) if root in (None, self.rank) else (Flat(kernel.src), None)
        for lo, hi in self._chunks(link, launch, src):
            own = np.ascontiguousarray(src.read(lo, hi))
            out = dst.target(lo, hi) if dst else np.empty_like(own)
            link.reduce(op, own, out, root)
            if dst:
                finish(op, out, self.world_size)
                dst.commit(lo, hi, out)

    def _broadcast(self, link: GlooLink, launch: Launch, kernel: Kernel) -> None:
        src, dst, whole = movement(kernel, is_root=self.rank == kernel.peer)
        for lo, hi in self._chunks(link, launch, whole):
            buffer = dst.target(lo, hi) if src is None and dst is not None else whole.read(lo, hi)
            link.broadcast(buffer, kernel.peer)
            if dst is not None:
                dst.commit(lo, hi, buffer) if src is None else dst.write(lo, hi, buffer)

    def _chunks(self, link: GlooLink, launch: Launch, row: Flat) -> Iterator[tuple[int, int]]:
        # Before each chunk: raises if the launch was aborted or is late; limits the library to the remaining time.
        until_s = time.monotonic() + launch.timeout_s
        for lo, hi in chunks(row.size, CHUNK_NBYTES // row.dtype.itemsize):
            self._check_aborted(launch)
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise late(self._group_name, launch)
            link.limit(left_s)
            yield lo, hi

    def _break(self, reason: str) -> None:
        # Wakes ranks that wait for this one inside the library.
        self._broken = self._broken or reason
        self._use.close()


class GlooLink:
    """One rank's connections; all arrays are contiguous, and each call blocks until this rank's part is done.

    Creating it blocks until all ranks connect, and raises BackendUnavailableError if they can't.
    """

    def __init__(self, gloo: Any, joining: Joining) -> None:
        spec, rank, host = joining.spec, joining.rank, joining.host
        self._gloo = gloo
        try:
            self._context = gloo.rendezvous.Context(rank, spec.world_size)
            self.limit(JOIN_TIMEOUT_S)
            store = _GlooStore(joining.rendezvous)
            theirs = gloo.rendezvous.CustomStore(store)
            device = gloo.transport.tcp.CreateDevice(gloo.transport.tcp.attr(host))
            self._context.connectFullMesh(theirs, device)
        except RaycollectError:
            raise
        except Exception as exc:  # the library is not ours
            detail = f"backend 'gloo': rank {rank} can't connect to the others from {host}: {exc}"
            raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
        self._held = store, theirs, device  # the context needs these objects, but does not hold them

    def limit(self, timeout_s: float) -> None:
        """Limits later waits for other ranks, if the library can."""
        with suppress(TypeError):  # pygloo 0.2.1 has the method, but not the conversion of its argument
            self._context.setTimeout(timedelta(seconds=timeout_s))

    def reduce(self, op: ReduceOp, own: Array, out: Array, root: int | None) -> None:
        """Reduces [n] elements of a native dtype to the root, or to all by a ring; AVG gives the sum.

        The library may write `out` on all ranks.
        """
        gloo = self._gloo
        run, how = (gloo.allreduce, gloo.RING) if root is None else (gloo.reduce, root)
        dtype = getattr(gloo, f"gloo{own.dtype.name.capitalize()}")
        theirs = getattr(gloo.ReduceOp, "SUM" if op is ReduceOp.AVG else op.name)
        run(self._context, own.ctypes.data, out.ctypes.data, own.size, dtype, theirs, how)

    def broadcast(self, array: Array, root: int) -> None:
        """Copies the root's bytes to all."""
        pointer = array.ctypes.data
        self._gloo.broadcast(self._context, pointer, pointer, array.nbytes, self._gloo.glooUint8, root)

    def close(self) -> None:
        """Closes the connections."""
        self._context.closeConnections()


class _GlooStore:
    """The rendezvous as gloo's store. Each key is set by one rank and read by the others.

    pygloo calls `set` and `get`, xoscar `set_tcp` and `get_tcp`; both call `wait` with a list of keys before `get`.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def set(self, key: str, data: bytes) -> bool:
        self._rendezvous.put(f"gloo.key.{key}", bytes(data))
        return True

    def get(self, key: str) -> bytes:
        return self._rendezvous.get(f"gloo.key.{key}", JOIN_TIMEOUT_S)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> bool:
        for key in keys:
            self.get(key)
        return True

    set_tcp = set  # noqa: A003
    get_tcp = get
