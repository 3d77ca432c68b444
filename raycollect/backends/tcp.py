"""Backend `tcp`: members on any machines, over plain sockets; one for each pair of ranks.

Theory, for w ranks and arrays of n bytes. A small array goes whole to whoever needs it, in one round. A large one is
cut into a slice for each rank: everyone sends slice j to rank j, which folds what it gets in rank order and sends the
result to all. That is a reduce-scatter and an allgather by direct exchange (Thakur, Rabenseifner, Gropp: "Optimization
of Collective Communication Operations in MPICH", 2005): as many bytes as a ring, in two rounds instead of 2 (w - 1),
and each element is the left fold in rank order, whatever the size, the chunks or the way (P7).

==============  =======================  ============================================================================
kernel          small: sent              large: sent, per rank
==============  =======================  ============================================================================
ALLREDUCE       (w - 1) n per rank       2 (w - 1) / w x n
REDUCE          n per rank, to the root  (w - 1) / w x n for the slices, 1 / w x n to the root
BROADCAST       (w - 1) n by the root    n by the root, a slice to each other rank; these send theirs on, w - 2 times
REDUCESCATTER   (w - 1) / w x n: each piece straight to its rank, which folds
ALLGATHER,      exactly the bytes of the pieces, straight from giver to taker
GATHER,
SCATTER,
ALLTOALL
SEND            n
==============  =======================  ============================================================================

All of it goes in chunks, and a chunk is begun before the one before it has ended: while this rank reduces, the sockets
carry what comes next. Ranks go through chunks and steps in one order, so that the frames of a pair need no names.

`_tcp_run` has the kernels. The connections are made and authenticated in `_tcp_join`; `_tcp_link` and `_tcp_peer` move
frames, and carry the door too. A wait ends with the launch's time and with an abort, also in mid-kernel, and the group
works on after either. Only a connection that ends breaks the group. Extra memory: at most 6 x `CHUNK_NBYTES` per rank
(P8), a third of which is kept from kernel to kernel; and 4 KiB for each connection.

The option ``checksum`` (`pg_options={"checksum": True}`) has every frame checked; see `_tcp_summed`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from raycollect.contracts import Completion, Exchange, Rendezvous, SegmentSource
from raycollect.errors import GroupBrokenError, InvalidGroupError
from raycollect.model import GroupSpec, Kernel, Launch

from ._tcp_join import join
from ._tcp_link import Link
from ._tcp_peer import Peer
from ._tcp_run import CHUNK_NBYTES, Run, Staging
from ._tcp_summed import SummedPeer
from .completion import DONE, translated

__all__ = ["CHUNK_NBYTES", "TcpCommunicator", "create"]

JOIN_TIMEOUT_S = 45.0
"""How long to wait for the members; less than the minute of a declaration, which then hears who was waited for."""


def create(
    spec: GroupSpec,
    rank: int,
    rendezvous: Rendezvous,
    exchange: Exchange,
    *,
    host: str = "127.0.0.1",
    segments: SegmentSource | None = None,
) -> TcpCommunicator:
    """Joins the group; returns when this rank is connected to all others.

    Args:
        spec: The group; its options may have ``checksum``, True or False.
        rank: This process's rank.
        rendezvous: How the members find each other.
        exchange: Not used: arrivals travel over the connections.
        host: The address of this node to listen on, and on which the others reach it; nothing else listens.
        segments: Not used.

    Raises:
        InvalidGroupError: The options are others, or have other values.
        BackendUnavailableError: This rank can't listen there.
        CollectiveTimeoutError: Naming the members that did not come.
    """
    peer_of = partial(SummedPeer, spec.name, rank) if _wants_checksums(spec) else Peer
    socks = join(spec, rank, rendezvous, host, JOIN_TIMEOUT_S) if spec.world_size > 1 else {}
    return TcpCommunicator(spec, rank, Link(rank, spec.name, socks, peer_of))


def _wants_checksums(spec: GroupSpec) -> bool:
    given = dict(spec.options)
    wanted = given.pop("checksum", False)
    if given:
        detail = f"backend 'tcp': there is no option {', '.join(map(repr, given))}; there is 'checksum'"
        raise InvalidGroupError(group_name=spec.name, detail=detail)
    if type(wanted) is not bool:
        detail = f"backend 'tcp': option 'checksum' is {wanted!r}, neither True nor False"
        raise InvalidGroupError(group_name=spec.name, detail=detail)
    return wanted


class TcpCommunicator:
    """One rank's membership; see `raycollect.contracts.Communicator`."""

    def __init__(self, spec: GroupSpec, rank: int, link: Link) -> None:
        self.rank = rank
        self.world_size: int = spec.world_size
        self._group_name = spec.name
        self._link = link
        self._staging = Staging()
        self._closed = False
        self._inside = threading.Lock()  # held by whoever uses the connections

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """Does nothing: what is sent is sent from the arrays themselves, after the door."""

    def agree(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Brings `launch.ranks` together; arrivals travel over the connections."""
        with _Inside(self) as link:
            return link.agree(launch, arrival)

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread, for at most `launch.timeout_s`."""
        with _Inside(self) as link, translated(kernel.kind, self._group_name, self.rank):
            link.begin(launch)
            Run(link, launch, self._staging).run(kernel)
        return DONE

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        """Leaves the launch; where this rank has not run all of it, the others are told."""
        try:
            with _Inside(self) as link:
                link.end(launch, ok)
        except GroupBrokenError:
            pass  # a closed communicator has left all launches
        return ()

    def abort(self, seq: int) -> None:
        """Wakes this rank if it waits in that launch, now or later."""
        self._link.abort(seq)

    def close(self) -> None:
        """Wakes whoever is inside; the connections are closed when it has left."""
        self._closed = True
        self._link.stop()
        self._release()

    def _release(self) -> None:
        if self._closed and self._inside.acquire(blocking=False):
            try:
                self._link.close()
                self._staging.close()
            finally:
                self._inside.release()


class _Inside:
    """A thread that uses the connections of a communicator."""

    __slots__ = ("_communicator",)

    def __init__(self, communicator: TcpCommunicator) -> None:
        self._communicator = communicator

    def __enter__(self) -> Link:
        there = self._communicator
        there._inside.acquire()
        if there._closed:
            there._inside.release()
            there._release()
            raise GroupBrokenError(group_name=there._group_name, detail="the communicator was closed")
        return there._link

    def __exit__(self, *exc: object) -> None:
        self._communicator._inside.release()
        self._communicator._release()
