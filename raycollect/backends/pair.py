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
from collections.abc import Sequence

from raycollect.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    GroupBrokenError,
    InternalError,
    KernelError,
    PlanAbortedError,
)
from raycollect.model import Communicator, Completion, Exchange, GroupSpec, Kernel, Launch, OpKind, Rendezvous

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


class PairCommunicator:
    """One rank's membership; see `raycollect.model.Communicator`."""

    def __init__(self, spec: GroupSpec, rank: int, link: socket.socket, exchange: Exchange) -> None:
        self.rank = rank
        self.world_size = 2
        self._group_name = spec.name
        self._link = link
        self._exchange = exchange
        self._moving = 0  # the launch whose kernel runs
        self._aborted: set[int] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._kernels = {OpKind.SEND: self._send, OpKind.RECV: self._recv}

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """Does nothing: bytes go from the array itself."""

    def agree(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Brings both together, over the exchange."""
        if self._closed:
            raise GroupBrokenError(group_name=self._group_name, detail="the communicator was closed")
        self._check_going(launch.seq)
        return self._exchange(launch, arrival)

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread."""
        if kernel.kind not in self._kernels:
            raise InternalError(detail=f"a {kernel.kind.value} between two ranks of a group")
        with self._lock:
            self._check_going(launch.seq)
            self._moving = launch.seq
        until_s = time.monotonic() + launch.timeout_s
        try:
            with translated(kernel.kind, self._group_name, self.rank):
                self._move(kernel, launch, until_s)
        finally:
            with self._lock:
                self._moving = 0
        return DONE

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        """Leaves the launch."""
        with self._lock:
            self._aborted = {seq for seq in self._aborted if seq > launch.seq}
        return ()

    def abort(self, seq: int) -> None:
        """Wakes this rank in that launch; in mid-kernel the connection ends with it."""
        with self._lock:
            self._aborted.add(seq)
            if self._moving == seq:
                self._shut()
        self._exchange.abort(seq)

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._closed = True
            if self._moving:
                self._shut()
        self._link.close()

    def _shut(self) -> None:
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def _check_going(self, seq: int) -> None:
        if seq in self._aborted:
            raise PlanAbortedError(group_name=self._group_name, rank=self.rank, detail=f"launch {seq} was aborted")

    def _move(self, kernel: Kernel, launch: Launch, until_s: float) -> None:
        try:
            self._kernels[kernel.kind](kernel, until_s)
        except TimeoutError as exc:
            detail = f"launch {launch.seq} did not end within {launch.timeout_s:g} s"
            raise CollectiveTimeoutError(
                group_name=self._group_name, timeout_s=launch.timeout_s, detail=detail
            ) from exc
        except OSError as exc:
            self._check_going(launch.seq)
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
