"""Backend `tcp`: members on any machines, over plain sockets; one for each pair of ranks.

Theory, for w ranks and arrays of n bytes. A small array is sent whole to each rank that needs it, in one round. A large
one is cut into a slice for each rank: every rank sends slice j to rank j, which folds the slices in rank order and
sends the result to all. That is a reduce-scatter and an allgather by direct exchange (Thakur, Rabenseifner, Gropp:
"Optimization of Collective Communication Operations in MPICH", 2005): as many bytes as a ring, in two rounds instead of
2 (w - 1), and each element is the left fold in rank order, for any size, chunks and algorithm (P7).

==============  =======================  ============================================================================
kernel          small: sent              large: sent, per rank
==============  =======================  ============================================================================
ALLREDUCE       (w - 1) n per rank       2 (w - 1) / w x n
REDUCE          n per rank, to the root  (w - 1) / w x n for the slices, 1 / w x n to the root
BROADCAST       (w - 1) n by the root    n by the root, a slice to each other rank; these forward theirs, w - 2 times
REDUCESCATTER   (w - 1) / w x n: each piece directly to its rank, which folds
ALLGATHER,      exactly the bytes of the pieces, directly from sender to receiver
GATHER,
SCATTER,
ALLTOALL
SEND            n
==============  =======================  ============================================================================

Data is sent in pipelined chunks: while this rank reduces, the sockets carry the next chunk. All ranks process chunks
and steps in one order, so that the frames of a pair need no tags.

`run` has the kernels, `by_host` those between hosts with several ranks (`GroupSpec.hosts`), `join` makes and
authenticates the connections, `link` and `peer` move frames and carry the agreement. A wait ends at the launch's
deadline and on an abort, also inside a kernel, and the group stays usable after either. Only the end of a connection
breaks the group. Extra memory: at most 6 x `CHUNK_NBYTES` per rank (P8), 17 x in `by_host`, a third of which is kept
across kernels; and 4 KiB for each connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from raycollect.backends.in_use import InUse
from raycollect.backends.kernels import recognized, translated
from raycollect.backends.tcp import by_host
from raycollect.backends.tcp.by_host import HostRun, Hosts
from raycollect.backends.tcp.join import join
from raycollect.backends.tcp.link import TcpMesh
from raycollect.backends.tcp.run import KernelRun, Staging
from raycollect.core import sockets
from raycollect.core.model import RANK_ORDER, GroupSpec, Kernel, Launch
from raycollect.core.protocols import Joining
from raycollect.errors import BackendUnavailableError, GroupBrokenError, InvalidGroupError
from raycollect.errors.text import listed, shown

_BESIDE = 5  # The descriptors of a joining rank besides one per rank: two listeners, a poller and its wake-up pair
JOIN_TIMEOUT_S = 45.0  # Less than the minute of a declaration, which can then report the missing ranks


def create(joining: Joining) -> TcpCommunicator:
    """Joins the group; returns when this rank is connected to all others.

    Listens on `Joining.host` only. The only option is ``deterministic``, which is "rank_order".

    Raises:
        InvalidGroupError: The options are unknown, or have wrong values.
        BackendUnavailableError: This rank can't listen there.
        CollectiveTimeoutError: Names the members that did not join in time.
    """
    _check_options(joining.spec)
    return connect(joining, in_rank_order=joining.spec.in_rank_order)


def connect(joining: Joining, *, in_rank_order: bool = True) -> TcpCommunicator:
    """Joins a group, also for backends that have their own options; see `create`.

    `in_rank_order`: whether reductions are left folds in rank order, also between hosts with several ranks.
    """
    spec, rank = joining.spec, joining.rank
    check_descriptors(spec, rank, spec.world_size + _BESIDE)
    alone = spec.world_size == 1
    socks = {} if alone else join(spec, rank, joining.rendezvous, joining.host, JOIN_TIMEOUT_S)
    return TcpCommunicator(spec, rank, TcpMesh(rank, spec.name, socks), in_rank_order=in_rank_order)


def check_descriptors(spec: GroupSpec, rank: int, needed: int) -> None:
    """Raises BackendUnavailableError if this process can't open `needed` more descriptors."""
    short = sockets.shortage(needed) if spec.world_size > 1 else ""
    if short:
        detail = f"backend {spec.backend!r}: rank {rank} can't join a group of {spec.world_size}: {short}"
        raise BackendUnavailableError(group_name=spec.name, detail=detail)


def _check_options(spec: GroupSpec) -> None:
    given = dict(spec.options)
    order, detail = given.pop(RANK_ORDER[0], RANK_ORDER[1]), ""
    if given:
        detail = f"there is no option {listed(map(shown, given))}; there is {RANK_ORDER[0]!r}"
    elif order != RANK_ORDER[1]:
        detail = f"option 'deterministic' is {shown(order)}, not {RANK_ORDER[1]!r}"
    if detail:
        raise InvalidGroupError(group_name=spec.name, detail=f"backend 'tcp': {detail}")


class TcpCommunicator:
    """One rank's membership, a `Communicator`."""

    sees_departures: bool = True

    def __init__(self, spec: GroupSpec, rank: int, mesh: TcpMesh, *, in_rank_order: bool) -> None:
        self.rank = rank
        self.world_size: int = spec.world_size
        self._group_name = spec.name
        self._tcp_mesh = mesh
        self._hosts, self._in_rank_order = spec.hosts, in_rank_order
        self._staging, self._between = Staging(), Staging(by_host.SLOTS)
        self._begun: KernelRun | None = None  # the next kernel, if it has begun with the agreement
        self._use = InUse(mesh, partial(_release, self._staging, self._between), spec.name)

    def agree(
        self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Exchanges arrivals among `launch.ranks`; the kernel's data may travel with them (`KernelRun.go_ahead`)."""
        return recognized(self._use.call(self._agree, launch, arrival, kernel), expected)

    __call__ = agree  # for communicators that use this one as their `Exchange`

    def _agree(self, mesh: TcpMesh, launch: Launch, arrival: bytes, kernel: Kernel | None) -> Sequence[bytes]:
        self._begun = None
        if kernel is None:
            return mesh.agree(launch, arrival)
        run = self._run(mesh, launch)
        brought = mesh.agree(launch, arrival, partial(run.go_ahead, kernel))
        self._begun = run
        return brought

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels in the caller's thread, each for at most `launch.timeout_s`."""
        for kernel in kernels:
            self._use.call(self._launch, launch, kernel)

    def _launch(self, mesh: TcpMesh, launch: Launch, kernel: Kernel) -> None:
        with translated(kernel.kind, self._group_name, self.rank):
            mesh.begin(launch)
            begun, self._begun = self._begun, None
            (begun or self._run(mesh, launch)).run(launch, kernel)

    def _run(self, mesh: TcpMesh, launch: Launch) -> KernelRun:
        hosts = Hosts.of(self._hosts, launch.ranks) if self._hosts else None
        if hosts is None:
            return KernelRun(mesh, launch, self._staging)
        order, between = self._in_rank_order, self._between
        return HostRun(mesh, launch, self._staging, between=between, hosts=hosts, in_rank_order=order)

    def silent(self, launch: Launch, timeout_s: float) -> tuple[int, ...]:
        """Finds ranks of a launch that do not respond; see `TcpMesh.silent`. Never raises."""
        with suppress(GroupBrokenError):
            return self._use.call(TcpMesh.silent, launch, timeout_s)
        return ()

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Leaves the launch; tells the others if this rank has not run all of it."""
        self._begun = None
        with suppress(GroupBrokenError):  # a closed communicator has left all launches
            self._use.call(TcpMesh.end, launch, ok)
        return ()

    def abort(self, seq: int) -> None:
        """Wakes this rank if it waits in that launch, now or later."""
        self._tcp_mesh.abort(seq)

    def lost(self, rank: int) -> bool:
        """Ends waits for a rank whose process has ended."""
        self._tcp_mesh.lose(rank)
        return True

    def close(self) -> None:
        """Wakes the thread inside; the connections are closed when it has left."""
        self._tcp_mesh.stop()
        self._use.close()


def _release(staging: Staging, between: Staging, mesh: TcpMesh) -> None:
    mesh.close()
    staging.close()
    between.close()
