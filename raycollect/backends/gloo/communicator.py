"""Backend `gloo`: members on any machines, over TCP, by `pygloo`, xoscar's fork of it, or torch's gloo.

Theory, for w ranks and arrays of n bytes. The library reduces and broadcasts large arrays: ALLREDUCE, by a ring that
sends 2 (w - 1) / w x n, and REDUCE, where gloo reduces as numpy does (`is_native`), and BROADCAST. The bits are equal
on all ranks, but the fold is not in rank order. Everything else, and small arrays, travel on the mesh (`meshed`), by
the kernels of backend `tcp`.

pygloo and xoscar hold the GIL while they block and can't be interrupted. So this adapter connects only when all members
are ready, enters a kernel only after the ranks have agreed, and releases the GIL between chunks, where it also notices
an abort. Within a chunk each wait for another rank is limited to the rest of the kernel's time. A failure leaves the
library's context unusable, and the group is broken. Extra memory: at most 8 x `CHUNK_NBYTES` per rank (P8), and only
with torch's gloo.

All ranks use one library: the first, in the order of `LIBRARIES`, that all of them have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from operator import methodcaller

import numpy as np

from raycollect.backends.arrays import Flat
from raycollect.backends.completion import DONE, chunks, late, movement, reduce_op, reduction, translated
from raycollect.backends.folds import finish
from raycollect.backends.gloo.link import TORCH, GlooLibrary, GlooLink, is_native
from raycollect.backends.in_use import InUse
from raycollect.backends.joining import gathered, not_joined
from raycollect.backends.loading import load_library
from raycollect.backends.meshed import Meshed, descriptors
from raycollect.backends.tcp.communicator import TcpCommunicator, check_descriptors, connect
from raycollect.core.codec import Codec
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind
from raycollect.core.protocols import Communicator, Completion, Exchange, Rendezvous, SegmentSource
from raycollect.errors import BackendUnavailableError, GroupBrokenError, InternalError, InvalidGroupError
from raycollect.errors.text import listed

CHUNK_NBYTES = 4 << 20  # How much one call of the library moves: it holds the GIL that long
JOIN_TIMEOUT_S = 45.0  # Less than the minute of a declaration, which can then report who was missing
_NATIVE = frozenset({OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST})  # What the library does
_LIBRARIES = Codec[Sequence[str]](tuple[str, ...], "list of libraries")


def create(
    spec: GroupSpec,
    rank: int,
    rendezvous: Rendezvous,
    exchange: Exchange,
    *,
    host: str = "127.0.0.1",
    segments: SegmentSource | None = None,
) -> Communicator:
    """Joins the group; returns when this rank is connected to all others.

    Raises:
        InvalidGroupError: Options were given; it takes none.
        BackendNotInstalledError: No library is there.
        BackendUnavailableError: The members have no library in common, or can't connect.
        CollectiveTimeoutError: A member did not come.
    """
    if spec.options:
        detail = f"backend 'gloo': it takes no options, and got {listed(dict(spec.options))}"
        raise InvalidGroupError(group_name=spec.name, detail=detail)
    check_descriptors(spec, rank, descriptors(spec.world_size))
    mine = GlooLibrary.found(spec.name)
    name = mine[0]
    if spec.world_size > 1:
        rendezvous.put(f"gloo.has.{rank}", _LIBRARIES.encode(mine))
        name = _common(spec, rendezvous)
    if name == TORCH:
        torch_dist = import_module("raycollect.backends.torch_dist.communicator")  # which imports torch
        made: Communicator = torch_dist.create(
            replace(spec, backend="torch:gloo"), rank, rendezvous, exchange, host=host
        )
        return made
    library = GlooLibrary(load_library(name))
    mesh = connect(spec, rank, rendezvous, host)
    link = None
    try:
        if spec.world_size > 1:
            # Connecting holds the GIL until all are there, so it starts when all are: connected by the mesh.
            link = GlooLink(library, spec, rank, rendezvous, host=host, timeout_s=JOIN_TIMEOUT_S)
    except BaseException:
        mesh.close()
        raise
    return GlooCommunicator(link, spec, mesh)


def _common(spec: GroupSpec, rendezvous: Rendezvous) -> str:
    found, missing = gathered(
        _LIBRARIES, rendezvous, "gloo.has", range(spec.world_size), time.monotonic() + JOIN_TIMEOUT_S
    )
    if missing:
        raise not_joined(spec, missing, JOIN_TIMEOUT_S)
    name: str
    for name in found[0]:
        if all(name in there for there in found.values()):
            return name
    said = listed((f"rank {rank} has {listed(there)}" for rank, there in found.items()), "; ")
    detail = f"backend 'gloo': the members have no library in common: {said}. Install one of them for all of them"
    raise BackendUnavailableError(group_name=spec.name, detail=f"{detail}; or use backend='auto', which needs none")


class GlooCommunicator(Meshed):
    """One rank's membership. A library kernel notices an abort between two chunks; the group is broken then."""

    def __init__(self, link: GlooLink | None, spec: GroupSpec, mesh: TcpCommunicator) -> None:
        super().__init__(spec, mesh, _NATIVE if link else frozenset(), is_native)
        self._use = InUse(link, methodcaller("close"), spec.name) if link else None

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread."""
        self._check_whole()
        if not self._is_for_library(launch, kernel):
            return self._mesh.launch(launch, kernel)
        if self._use is None:
            raise InternalError(detail=f"a {kernel.kind.value} for a library that is not there")
        folding = translated(kernel.kind, self._group_name, self.rank)
        with self._use as link, self._failing(link, kernel, launch), folding:
            _KERNELS[kernel.kind](_Run(self, link, launch), kernel)
        return DONE

    def forsake(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Closes the library's connections if others may be inside it, where nothing else wakes them."""
        if self._use is not None and any(self._is_for_library(launch, kernel) for kernel in kernels):
            with suppress(GroupBrokenError), self._use as link:  # else they are closed
                self._break(link, f"rank {self.rank} left launch {launch.seq} before it had run its kernels")

    def _break(self, link: GlooLink, reason: str) -> None:
        # So that nobody waits for this rank inside the library.
        self._broken = self._broken or reason
        link.close()

    def close(self) -> None:
        """Closes the connections, at the end of the running library kernel: it can't be interrupted."""
        self._broken = self._broken or "the communicator was closed"
        self._mesh.close()
        if self._use is not None:
            self._use.close()

    def check_going(self, launch: Launch, until_s: float) -> float:
        """Between two chunks: raises if the launch was aborted or is late; returns the seconds left."""
        self._check_aborted(launch)
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise late(self._group_name, launch)
        return left_s

    @contextmanager
    def _failing(self, link: GlooLink, kernel: Kernel, launch: Launch) -> Iterator[None]:
        # A failed kernel leaves the library's context unusable.
        try:
            yield
        except BaseException as exc:  # noqa: BLE001 - it is raised, or what it means
            self._break(link, f"{kernel.kind.value} of launch {launch.seq} failed in mid-kernel: {exc}")
            raise self._failed(exc, launch, kernel) from exc.__cause__


class _Run:
    """One library kernel on one rank, over all ranks of the group."""

    def __init__(self, communicator: GlooCommunicator, link: GlooLink, launch: Launch) -> None:
        self._communicator = communicator
        self._link = link
        self._launch = launch
        self._until_s = time.monotonic() + launch.timeout_s
        self._world_size = communicator.world_size
        self._me = communicator.rank

    def _chunks(self, size: int, dtype: np.dtype[np.generic]) -> Iterator[tuple[int, int]]:
        # The library has to finish each chunk in the time that is left.
        for lo, hi in chunks(size, CHUNK_NBYTES // dtype.itemsize):
            self._link.limit(self._communicator.check_going(self._launch, self._until_s))
            yield lo, hi

    def _allreduce(self, kernel: Kernel) -> None:
        (src, dst), op = reduction(kernel), reduce_op(kernel)
        for lo, hi in self._chunks(src.size, src.dtype):
            out = dst.target(lo, hi)
            self._link.allreduce(op, np.ascontiguousarray(src.read(lo, hi)), out)
            finish(op, out, self._world_size)
            dst.commit(lo, hi, out)

    def _reduce(self, kernel: Kernel) -> None:
        is_root, op = kernel.peer == self._me, reduce_op(kernel)
        src, dst = reduction(kernel) if is_root else (Flat(kernel.src), None)
        for lo, hi in self._chunks(src.size, src.dtype):
            own = np.ascontiguousarray(src.read(lo, hi))
            out = dst.target(lo, hi) if dst else np.empty_like(own)
            self._link.reduce(op, own, out, kernel.peer)
            if dst:
                finish(op, out, self._world_size)
                dst.commit(lo, hi, out)

    def _broadcast(self, kernel: Kernel) -> None:
        src, dst, whole = movement(kernel, is_root=self._me == kernel.peer)
        for lo, hi in self._chunks(whole.size, whole.dtype):
            buffer = dst.target(lo, hi) if src is None and dst is not None else whole.read(lo, hi)
            self._link.broadcast(buffer, kernel.peer)
            if dst is not None:
                dst.commit(lo, hi, buffer) if src is None else dst.write(lo, hi, buffer)


# The others run on the mesh
_KERNELS: dict[OpKind, Callable[[_Run, Kernel], None]] = {
    OpKind.ALLREDUCE: _Run._allreduce,
    OpKind.REDUCE: _Run._reduce,
    OpKind.BROADCAST: _Run._broadcast,
}
