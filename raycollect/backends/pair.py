"""Two ranks over one TCP connection: what sends and receives that members call themselves run on, in groups of `gloo`.

gloo's libraries hold the GIL while they wait for the other rank. Where every rank sends to the next and receives from
the one before at once, each would wait in its send for a receive that could not begin. Here the GIL is free, and an
abort ends a wait at once. Rank 0 listens; whoever connects must know a random token. What follows is not authenticated,
like gloo's own connections. Extra memory: `CHUNK_NBYTES` where an array is not contiguous (P8).
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time

from raycollect.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    InternalError,
    KernelError,
)
from raycollect.model import Communicator, Completion, Exchange, GroupSpec, Kernel, Launch, OpKind, Rendezvous

from ._exchanged import Exchanged
from .arrays import Flat
from .completion import DONE, chunks, translated

__all__ = ["CHUNK_NBYTES", "PairCommunicator", "create"]

CHUNK_NBYTES = 1 << 20
JOIN_TIMEOUT_S = 60.0
HELLO_TIMEOUT_S = 2.0

_NAME = "pair"
_TOKEN_NBYTES = 32


def create(
    spec: GroupSpec, rank: int, rendezvous: Rendezvous, exchange: Exchange, *, host: str = "127.0.0.1"
) -> Communicator:
    """Connects two ranks.

    Args:
        spec: The pair.
        rank: This process's rank, 0 or 1.
        rendezvous: How the other learns where rank 0 listens.
        exchange: Carries arrivals.
        host: The address to listen on.

    Raises:
        BackendUnavailableError: They can't connect.
        CollectiveTimeoutError: The other did not come.
    """
    try:
        link = _listen(rendezvous, host) if rank == 0 else _connect(rendezvous)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as exc:
        detail = f"rank {rank} can't connect to the other from {host or 'this host'}: {exc}"
        raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
    return PairCommunicator(spec, rank, link, exchange)


def _listen(rendezvous: Rendezvous, host: str) -> socket.socket:
    token = secrets.token_bytes(_TOKEN_NBYTES)
    until_s = time.monotonic() + JOIN_TIMEOUT_S
    with socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0]) as listener:
        where = {"host": host, "port": listener.getsockname()[1], "token": token.hex()}
        rendezvous.put(_NAME, json.dumps(where).encode())
        while True:
            listener.settimeout(max(until_s - time.monotonic(), 0.001))
            link, _ = listener.accept()
            try:
                link.settimeout(HELLO_TIMEOUT_S)
                if hmac.compare_digest(_receive(link, _TOKEN_NBYTES), token):
                    link.sendall(b"y")
                    return link
            except OSError:
                pass  # a stranger, or one who went away
            link.close()


def _connect(rendezvous: Rendezvous) -> socket.socket:
    where = json.loads(rendezvous.get(_NAME, JOIN_TIMEOUT_S))
    link = socket.create_connection((where["host"], where["port"]), JOIN_TIMEOUT_S)
    try:
        link.sendall(bytes.fromhex(where["token"]))
        _receive(link, 1)
    except OSError:
        link.close()
        raise
    return link


def _receive(link: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = link.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return data


class PairCommunicator(Exchanged):
    """One rank's membership. An abort wakes it in mid-kernel as well; the connection ends with that."""

    def __init__(self, spec: GroupSpec, rank: int, link: socket.socket, exchange: Exchange) -> None:
        super().__init__(spec, rank, exchange)
        self._link = link
        self._moving = 0  # the launch whose kernel runs
        self._lock = threading.Lock()
        self._kernels = {OpKind.SEND: self._send, OpKind.RECV: self._recv}

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread."""
        if kernel.kind not in self._kernels:
            raise InternalError(detail=f"a {kernel.kind.value} between two ranks of a group")
        with self._lock:
            self._check_aborted(launch)
            self._moving = launch.seq
        until_s = time.monotonic() + launch.timeout_s
        try:
            with translated(kernel.kind, self._group_name, self.rank):
                self._move(kernel, launch, until_s)
        finally:
            with self._lock:
                self._moving = 0
        return DONE

    def abort(self, seq: int) -> None:
        """Wakes this rank in that launch, at the door or in mid-kernel."""
        super().abort(seq)
        with self._lock:  # a kernel that begins now sees the abort; one that has begun is at work
            if self._moving == seq:
                self._shut()

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._broken = self._broken or "the communicator was closed"
            if self._moving:
                self._shut()
        self._link.close()

    def _shut(self) -> None:
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def _move(self, kernel: Kernel, launch: Launch, until_s: float) -> None:
        try:
            self._kernels[kernel.kind](kernel, until_s)
        except TimeoutError as exc:
            detail = f"launch {launch.seq} did not end within {launch.timeout_s:g} s"
            raise CollectiveTimeoutError(
                group_name=self._group_name, timeout_s=launch.timeout_s, detail=detail
            ) from exc
        except OSError as exc:
            self._check_aborted(launch)
            raise KernelError(
                group_name=self._group_name, rank=self.rank, detail=f"the connection broke: {exc}"
            ) from exc

    def _send(self, kernel: Kernel, until_s: float) -> None:
        """Sends all bytes of an array."""
        src = Flat(kernel.src)
        for lo, hi in chunks(src.size, CHUNK_NBYTES // src.dtype.itemsize):
            self._link.settimeout(max(until_s - time.monotonic(), 0.001))
            self._link.sendall(src.read(lo, hi).view("u1").data)

    def _recv(self, kernel: Kernel, until_s: float) -> None:
        """Fills an array."""
        dst = Flat(kernel.dst)
        for lo, hi in chunks(dst.size, CHUNK_NBYTES // dst.dtype.itemsize):
            out = dst.target(lo, hi)
            view = out.view("u1").data
            while view.nbytes:
                self._link.settimeout(max(until_s - time.monotonic(), 0.001))
                nbytes = self._link.recv_into(view)
                if not nbytes:
                    raise ConnectionResetError("the other rank closed the connection")
                view = view[nbytes:]
            dst.commit(lo, hi, out)
