"""The connections of a `tcp` group: one socket per pair, authenticated by both ends.

Each rank listens on its node's address, and publishes it with a random key on the authenticated rendezvous: holders of
the key are members. The higher rank of a pair connects to the lower one, on one node by a Unix socket if possible,
which moves data with half the work. Handshake, limits and log are those of every port (`channel.protocol`,
`channel.server`): unauthenticated clients can delay a join, but can't enter the group. Later frames are not
authenticated.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from raycollect.backends.joining import gathered, not_joined
from raycollect.channel.server import Server
from raycollect.channel.stream import open_stream
from raycollect.core import sockets
from raycollect.core.codec import Codec
from raycollect.core.model import Address, GroupSpec
from raycollect.core.protocols import Rendezvous
from raycollect.errors import BackendUnavailableError, ChannelError, ConnectionLostError

# How long a rank may leave data unread: it may be busy for longer than plans usually wait. Control connections detect a
# dead host much earlier.
USER_TIMEOUT_S = 120.0
ANSWER_S = 5.0  # How long a rank may take for a handshake while other ranks are not connected yet
_RETRY_S = 0.05
_SECRET_NBYTES = 32


class _ListenAddress(NamedTuple):
    """The address on which a rank listens."""

    host: str
    port: Annotated[int, Meta(ge=1, lt=1 << 16)]
    name: str  # of the Unix socket, or ""
    secret: Annotated[bytes, Meta(min_length=_SECRET_NBYTES)]


_ADDRESSES = Codec[_ListenAddress](_ListenAddress, "address of a rank")


def join(spec: GroupSpec, rank: int, rendezvous: Rendezvous, host: str, timeout_s: float) -> dict[int, socket.socket]:
    """Connects this rank with all others: rank -> a non-blocking, tuned socket; see `communicator.create`."""
    until_s = time.monotonic() + timeout_s
    arrivals = _Arrivals(rank, spec.world_size)
    server = _listen(spec, rank, rendezvous, host, arrivals) if arrivals.expected else None
    done: dict[int, socket.socket] = {}
    is_joined = False
    try:
        where = gathered(_ADDRESSES, rendezvous, spec, "tcp.at", range(rank), timeout_s)
        missing, trouble = _connect_all(rank, host, where, arrivals, done, until_s)
        if missing:
            raise not_joined(spec, missing, timeout_s, trouble or (server.trouble if server else ""))
        is_joined = True
    finally:
        if server is not None:
            server.close()
        arrivals.take(done)  # closes older connections of ranks that reconnected
        if not is_joined:
            sockets.close(done.values())
    return done


def _listen(spec: GroupSpec, rank: int, rendezvous: Rendezvous, host: str, arrivals: _Arrivals) -> Server:
    """Listens for the higher ranks, and publishes the address; raises BackendUnavailableError if it can't."""
    local, name = sockets.listen_locally() or (None, "")
    secret = secrets.token_bytes(_SECRET_NBYTES)
    try:
        server = Server(host, secret, arrivals, local=local, expected=spec.world_size)
    except (OSError, ValueError) as exc:
        detail = f"backend 'tcp': rank {rank} can't listen on {host!r}: {exc}"
        raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
    try:
        own = _ListenAddress(host, server.address.port, name, secret)
        rendezvous.put(f"tcp.at.{rank}", _ADDRESSES.encode(own))
    except BaseException:
        server.close()
        raise
    return server


class _Arrivals:
    """The connections of higher ranks, accepted by the server's thread."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.expected = range(rank + 1, world_size)
        self._arrived: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()

    def connected(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Takes the connection of a member."""
        rank: Any = hello.get("rank")
        if rank not in self.expected:
            sockets.close((sock,))
            return
        with suppress(OSError):  # the connection has already ended
            self._arrived.put((rank, _tuned(sock)))

    def take(self, done: dict[int, socket.socket], wait_s: float = 0.0) -> None:
        """Moves new connections to `done`, and waits for the first; a rank's newest connection replaces older ones."""
        try:
            rank, sock = self._arrived.get(timeout=wait_s) if wait_s > 0 else self._arrived.get_nowait()
            while True:
                if rank in done:
                    sockets.close((done[rank],))
                done[rank] = sock
                rank, sock = self._arrived.get_nowait()
        except Empty:
            return


def _connect_all(
    rank: int,
    host: str,
    where: Mapping[int, _ListenAddress],
    arrivals: _Arrivals,
    done: dict[int, socket.socket],
    until_s: float,
) -> tuple[list[int], str]:
    """Connects to the lower ranks and awaits the higher ones; returns the ranks that failed, and the last reason."""
    missing = {*where, *arrivals.expected}
    failed: set[int] = set()
    trouble = ""
    while missing and (left_s := until_s - time.monotonic()) > 0:
        to_call = sorted(missing.intersection(where))
        for at, other in enumerate(to_call):
            left_s = max(until_s - time.monotonic(), 0.0)
            try:
                # Each rank gets a share of the time, so that one that does not answer delays no other; it is retried
                # later.
                limit_s = left_s if len(to_call) == 1 else min(left_s / (len(to_call) - at + 1), ANSWER_S)
                done[other] = _connected(where[other], rank, host, limit_s)
            except (ChannelError, OSError) as exc:
                failed.add(other)
                trouble = f"no connection to rank {other}: {exc}"
        if missing - done.keys():
            left_s = max(until_s - time.monotonic(), 0.0)
            arrivals.take(done, min(_RETRY_S, left_s) if failed - done.keys() else left_s)
        missing -= done.keys()
    return sorted(missing), trouble


def _connected(target: _ListenAddress, rank: int, host: str, timeout_s: float) -> socket.socket:
    until_s = time.monotonic() + timeout_s
    if target.name and target.host == host:
        with suppress(ConnectionLostError):  # not a name of this network namespace, or a full backlog
            return _opened(target.name, target, rank, timeout_s)
    return _opened(target.host, target, rank, until_s - time.monotonic())


def _opened(host: str, target: _ListenAddress, rank: int, timeout_s: float) -> socket.socket:
    address = Address(host=host, port=target.port, secret=target.secret)
    sock = open_stream(address, "mesh", {"rank": rank}, timeout_s).sock
    return _tuned(sock)


def _tuned(sock: socket.socket) -> socket.socket:
    try:
        sock.setblocking(False)
        sockets.tune(sock, USER_TIMEOUT_S)
    except OSError:
        sockets.close((sock,))
        raise
    return sock
