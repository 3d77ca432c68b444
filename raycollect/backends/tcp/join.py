"""How the members of a `tcp` group connect: one socket per pair, authenticated from both ends.

Each rank listens on its node's address and publishes it; the higher rank of a pair connects to the lower. Ranks of one
node connect by Unix sockets where they can, which move data with half the work. Rank 0 publishes a random key on the
rendezvous, which is authenticated, so holders of the key are members::

    connector -> listener   MAGIC:4 | own rank:4 | other's rank:4 | nonce:32
    listener -> connector   nonce:32 | HMAC:32
    connector -> listener   HMAC:32
    listener -> connector   1

Each HMAC-SHA256 is keyed with the group's key and covers its sender's role, the group's id, both ranks and both nonces,
so that no message can be replayed on another connection. All handshakes run concurrently and each has a time limit, so
that a silent stranger delays nobody; more than `MAX_STRANGERS` at once delay a join by that limit. The log has a line
on the first stranger and one on all others. Later frames are not authenticated.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, cast

from msgspec import Meta

from raycollect.backends.joining import gathered, not_joined
from raycollect.core import sockets
from raycollect.core.codec import Codec
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Rendezvous
from raycollect.errors import BackendUnavailableError

_log = logging.getLogger("raycollect")
# How long the listening end waits for one handshake. The connecting end has until the join ends: the listener may have
# finished, and not listen any more.
HELLO_TIMEOUT_S = 5.0
# How long a rank may leave data unread: it may be busy for longer than plans usually wait. The control connections
# notice a dead host much earlier.
USER_TIMEOUT_S = 120.0
# How many handshakes beside the members' may be open, with a descriptor each; more wait in the kernel's backlog
MAX_STRANGERS = 64
_RETRY_S = 0.05
_MAGIC = b"rcT3"
_HELLO = struct.Struct("<4sII32s")
_NONCE_NBYTES = _TAG_NBYTES = 32
_DONE = b"\x01"
# One end of a handshake: yields what to send and how many bytes it then needs; returns the peer's rank
Shake = Generator[tuple[bytes, int], bytes, int]


class _Address(NamedTuple):
    """Where a rank listens."""

    host: str
    port: Annotated[int, Meta(ge=1, lt=1 << 16)]
    name: str  # of the Unix socket; "": there is none


_ADDRESSES = Codec[_Address](_Address, "address of a rank")


def join(spec: GroupSpec, rank: int, rendezvous: Rendezvous, host: str, timeout_s: float) -> dict[int, socket.socket]:
    """Connects this rank with all others: rank -> a non-blocking, tuned socket; see `communicator.create`."""
    until_s = time.monotonic() + timeout_s
    try:
        listener = sockets.listen(host)
    except (OSError, ValueError) as exc:
        detail = f"backend 'tcp': rank {rank} can't listen on {host!r}: {exc}"
        raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
    local, name = sockets.listen_locally() or (None, "")
    listeners = [listener] if local is None else [listener, local]
    try:
        rendezvous.put(f"tcp.at.{rank}", _ADDRESSES.encode(_Address(host, listener.getsockname()[1], name)))
        if rank == 0:
            rendezvous.put("tcp.key", secrets.token_bytes(_TAG_NBYTES))
        where = gathered(_ADDRESSES, rendezvous, spec, "tcp.at", range(rank), timeout_s)
        key = rendezvous.get("tcp.key", max(until_s - time.monotonic(), 0.0))
        joining = _Joining(spec, rank, key, listeners, where, host)
        try:
            joining.run(until_s)
            missing = joining.missing()
            if missing:
                raise not_joined(spec, missing, timeout_s, joining.trouble)
            return joining.taken()
        finally:
            joining.close()
    finally:
        sockets.close(listeners)


@dataclass(slots=True, eq=False)
class _Handshake:
    """A connection during its handshake."""

    sock: socket.socket
    steps: Shake
    until_s: float  # the deadline
    wanted: int = -1  # the rank that this end connects to; -1 on the listening end
    need: int = 0  # the bytes that the handshake waits for; 0 while connecting
    got: bytearray = field(default_factory=bytearray)  # those that have come


class _Joining:
    """All connections of one rank while it joins."""

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        key: bytes,
        listeners: Sequence[socket.socket],
        where: dict[int, _Address],
        host: str,
    ) -> None:
        self._label = f"group {spec.name!r}, rank {rank}"
        self._addresses = where
        self._listeners = listeners
        self._local = {other for other, one in where.items() if one.host == host and one.name}
        self._protocol = _Protocol(key, spec, rank)
        self._higher = frozenset(range(rank + 1, spec.world_size))
        self._done: dict[int, socket.socket] = {}
        self._handshakes: dict[socket.socket, _Handshake] = {}
        self._to_connect = dict.fromkeys(where, 0.0)  # rank -> the earliest time to connect
        self._most = MAX_STRANGERS + spec.world_size
        self._refused = 0
        self._paused_until_s = 0.0  # until when nothing is accepted, for lack of descriptors
        self.trouble: str = ""  # the last local failure, for the message about missing ranks
        self._selector = selectors.DefaultSelector()

    def missing(self) -> list[int]:
        return [rank for rank in (*self._addresses, *sorted(self._higher)) if rank not in self._done]

    def taken(self) -> dict[int, socket.socket]:
        done, self._done = self._done, {}
        return done

    def run(self, until_s: float) -> None:
        while self.missing() and (now_s := time.monotonic()) < until_s:
            for rank, at_s in list(self._to_connect.items()):
                if at_s <= now_s:
                    self._connect(rank, now_s, until_s)
            for handshake in [one for one in self._handshakes.values() if one.until_s <= now_s]:
                self._drop(handshake, "it did not finish its handshake in time")
            paused = now_s < self._paused_until_s
            is_full = len(self._handshakes) >= self._most
            self._watch_listeners(not paused and not is_full and bool(self._higher - self._done.keys()))
            wakes = (
                self._paused_until_s if paused else until_s,
                until_s,
                *self._to_connect.values(),
                *(one.until_s for one in self._handshakes.values()),
            )
            for key, _ in self._selector.select(max(min(wakes) - now_s, 0.0)):
                if key.data is None:
                    self._accept(cast("socket.socket", key.fileobj))
                elif key.data.sock in self._handshakes:  # else dropped by what came before in this round
                    self._receive(key.data)

    def close(self) -> None:
        if self._refused > 1:
            _log.warning("%s: refused %d more connections while it formed", self._label, self._refused - 1)
        sockets.close((*self._handshakes, *self._done.values()))
        self._selector.close()

    def _watch_listeners(self, wanted: bool) -> None:
        for listener in self._listeners:
            watched = listener in self._selector.get_map()
            if wanted and not watched:
                self._selector.register(listener, selectors.EVENT_READ, None)
            elif watched and not wanted:
                self._selector.unregister(listener)

    def _connect(self, rank: int, now_s: float, until_s: float) -> None:
        del self._to_connect[rank]
        sock = None
        try:
            sock, address = self._socket_to(rank)
            sock.setblocking(False)
            error = sock.connect_ex(address)
            if error not in (0, errno.EINPROGRESS):
                self._local.discard(rank)  # not of this network namespace, or all at once: by the network, then
                raise OSError(error, "can't connect")
        except OSError as exc:
            self.trouble = f"no connection to rank {rank}: {exc}"
            sockets.close(() if sock is None else (sock,))
            self._to_connect[rank] = now_s + _RETRY_S
            return
        handshake = _Handshake(sock, self._protocol.connector(rank), until_s, wanted=rank)
        self._handshakes[sock] = handshake
        self._selector.register(sock, selectors.EVENT_WRITE, handshake)

    def _socket_to(self, rank: int) -> tuple[socket.socket, Any]:
        host, port, name = self._addresses[rank]
        if rank in self._local:
            return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), sockets.local_address(name)
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.socket(family, kind, number), address

    def _accept(self, listener: socket.socket) -> None:
        if len(self._handshakes) >= self._most:  # the other listener had the last place
            return
        try:
            sock, _ = listener.accept()
        except OSError as exc:  # it has gone again; or there is no room for it, and it stays in the backlog
            if exc.errno in sockets.FULL:
                self.trouble = f"no connection can be accepted: {exc}"
                self._paused_until_s = time.monotonic() + _RETRY_S
            return
        sock.setblocking(False)
        handshake = _Handshake(sock, self._protocol.listener(self._higher), time.monotonic() + HELLO_TIMEOUT_S)
        self._handshakes[sock] = handshake
        self._selector.register(sock, selectors.EVENT_READ, handshake)
        self._step(handshake, None)

    def _receive(self, handshake: _Handshake) -> None:
        if handshake.need == 0:  # an error of connecting is seen by the first send
            self._selector.modify(handshake.sock, selectors.EVENT_READ, handshake)
            self._step(handshake, None)
            return
        try:
            data = handshake.sock.recv(handshake.need - len(handshake.got))  # never a byte of what comes after
        except BlockingIOError:
            return
        except OSError:
            data = b""
        handshake.got += data
        if not data:
            self._drop(handshake, "it hung up")
        elif len(handshake.got) == handshake.need:
            got, handshake.got = bytes(handshake.got), bytearray()
            self._step(handshake, got)

    def _step(self, handshake: _Handshake, got: bytes | None) -> None:
        try:
            send, handshake.need = next(handshake.steps) if got is None else handshake.steps.send(got)
            if handshake.sock.send(send) != len(send):
                raise ConnectionError("a fresh connection takes no handshake")
            if handshake.need == 0:
                next(handshake.steps)
        except StopIteration as ended:
            self._finish(handshake, ended.value)
        except (OSError, ValueError) as exc:
            self._drop(handshake, str(exc))

    def _finish(self, handshake: _Handshake, rank: int) -> None:
        self._forget(handshake)
        try:
            sockets.tune(handshake.sock, USER_TIMEOUT_S)
        except OSError as exc:
            self._drop(handshake, str(exc))
            return
        if rank in self._done:  # it connected again: it knows the newer connection
            sockets.close((self._done[rank],))
        self._done[rank] = handshake.sock

    def _drop(self, handshake: _Handshake, why: str) -> None:
        if handshake.wanted < 0:
            if not self._refused:
                _log.warning("%s: refused a connection from %s: %s", self._label, sockets.peer_of(handshake.sock), why)
            self._refused += 1
        self._forget(handshake)
        sockets.close((handshake.sock,))
        if handshake.wanted >= 0:
            self.trouble = f"no connection to rank {handshake.wanted}: {why}"
            self._to_connect[handshake.wanted] = time.monotonic() + _RETRY_S

    def _forget(self, handshake: _Handshake) -> None:
        if self._handshakes.pop(handshake.sock, None) is not None:
            self._selector.unregister(handshake.sock)


class _Protocol:
    """A rank's side of the handshake protocol; no I/O."""

    def __init__(self, key: bytes, spec: GroupSpec, rank: int) -> None:
        self._key = key
        self._group = spec.group_id.encode()
        self._rank = rank

    def connector(self, peer: int) -> Shake:
        # The connecting end. Raises ValueError if the other does not have the key.
        mine = secrets.token_bytes(_NONCE_NBYTES)
        answer = yield _HELLO.pack(_MAGIC, self._rank, peer, mine), _NONCE_NBYTES + _TAG_NBYTES
        said = (self._rank, peer, mine + answer[:_NONCE_NBYTES])
        self._check("listener", said, answer[_NONCE_NBYTES:])
        done = yield self._tag("connector", said), len(_DONE)
        if done != _DONE:
            raise ValueError("the handshake did not end as it has to")
        return peer

    def listener(self, expected: frozenset[int]) -> Shake:
        # The listening end. Raises ValueError if the other is not an expected rank.
        magic, peer, called, theirs = _HELLO.unpack((yield b"", _HELLO.size))
        if magic != _MAGIC or called != self._rank or peer not in expected:
            raise ValueError("a stranger")
        mine = secrets.token_bytes(_NONCE_NBYTES)
        said = (peer, called, theirs + mine)
        self._check("connector", said, (yield mine + self._tag("listener", said), _TAG_NBYTES))
        yield _DONE, 0
        return int(peer)

    def _check(self, role: str, said: tuple[int, int, bytes], tag: bytes) -> None:
        if not hmac.compare_digest(self._tag(role, said), tag):
            raise ValueError(f"the {role} does not have the group's key")

    def _tag(self, role: str, said: tuple[int, int, bytes]) -> bytes:
        # Label and numbers have a fixed form and the nonces a fixed size, so that no two inputs read the same.
        connector, listener, nonces = said
        label = f"raycollect tcp {role} {connector}>{listener}\0".encode()
        return hmac.digest(self._key, label + nonces + self._group, "sha256")
