"""How the members of a `tcp` group connect: one socket for each pair, proven from both ends.

Each rank listens on its node's address and publishes where; the higher rank of a pair connects to the lower. Rank 0
publishes a random key, so that whoever has it came by the rendezvous, which is authenticated::

    connector -> listener   MAGIC:4 | own rank:4 | other's rank:4 | nonce:32
    listener -> connector   nonce:32 | HMAC:32
    connector -> listener   HMAC:32
    listener -> connector   1

Each HMAC-SHA256 is keyed with the group's key and covers its sender's role, the group's id, both ranks and both nonces,
so that nothing said on one connection opens another. All handshakes go on at once and each has a limit, so that a
stranger who is silent holds up nobody; where there are many, those who came first and are not done make room, and
members among them call again. The log has a line on the first stranger and one on all others. What follows on the
connections is not authenticated frame by frame.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from raycollect import sockets
from raycollect.contracts import Rendezvous
from raycollect.errors import BackendUnavailableError, CollectiveTimeoutError
from raycollect.model import GroupSpec

__all__ = ["HELLO_TIMEOUT_S", "join"]

_log = logging.getLogger("raycollect")

HELLO_TIMEOUT_S = 5.0
"""How long a rank that was called waits for one handshake.

Who calls has time until the join ends: the other may count it as there already, and listen no more.
"""

USER_TIMEOUT_S = 120.0
"""How long a rank may leave unread what was sent: it may be at work elsewhere, for longer than plans usually wait.

That a host has died the control connections tell much earlier.
"""

MAX_STRANGERS = 64
"""How many may be shaking hands beside the members, with a descriptor each; more wait in the kernel's backlog."""

_RETRY_S = 0.05
_GRACE_S = 0.25
_MAGIC = b"rcT1"
_HELLO = struct.Struct("<4sII32s")
_NONCE_NBYTES = _TAG_NBYTES = 32
_DONE = b"\x01"

Shake = Generator[tuple[bytes, int], bytes, int]
"""One end of a handshake: yields what to send and how many bytes it then needs; returns the other's rank."""


def join(spec: GroupSpec, rank: int, rendezvous: Rendezvous, host: str, timeout_s: float) -> dict[int, socket.socket]:
    """Connects this rank with all others.

    Args:
        spec: The group.
        rank: This process's rank.
        rendezvous: Where ranks publish how they are reached, and rank 0 the key.
        host: The one address to listen on.
        timeout_s: How long to wait for all of them.

    Returns:
        Rank -> a non-blocking, tuned socket.

    Raises:
        BackendUnavailableError: This rank can't listen there.
        CollectiveTimeoutError: Naming the ranks that did not come.
    """
    until_s = time.monotonic() + timeout_s
    try:
        listener = sockets.listen(host)
    except (OSError, ValueError) as exc:
        detail = f"backend 'tcp': rank {rank} can't listen on {host!r}: {exc}"
        raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
    with listener:
        rendezvous.put(f"tcp.at.{rank}", json.dumps([host, listener.getsockname()[1]]).encode())
        if rank == 0:
            rendezvous.put("tcp.key", secrets.token_bytes(_TAG_NBYTES))
        where = _addresses(spec, rank, rendezvous, timeout_s, until_s)
        key = rendezvous.get("tcp.key", max(until_s - time.monotonic(), 0.0))
        joining = _Joining(spec, rank, key, listener, where)
        try:
            joining.run(until_s)
            missing = joining.missing()
            if missing:
                raise _absent(spec, missing, timeout_s)
            return joining.taken()
        finally:
            joining.close()


def _addresses(
    spec: GroupSpec, rank: int, rendezvous: Rendezvous, timeout_s: float, until_s: float
) -> dict[int, tuple[str, int]]:
    """Waits to hear where the lower ranks listen."""
    found, missing = {}, []
    for other in range(rank):
        try:
            host, port = json.loads(rendezvous.get(f"tcp.at.{other}", max(until_s - time.monotonic(), 0.001)))
            found[other] = (str(host), int(port))
        except CollectiveTimeoutError:
            missing.append(other)
    if missing:
        raise _absent(spec, missing, timeout_s)
    return found


def _absent(spec: GroupSpec, missing: list[int], timeout_s: float) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(
        op="join",
        group_name=spec.name,
        missing=tuple(missing),
        timeout_s=timeout_s,
        detail=f"backend 'tcp': ranks {missing} did not come, or could not be reached, within {timeout_s:g} s",
    )


@dataclass(slots=True, eq=False)
class _Meeting:
    """A connection on which hands are being shaken.

    Attributes:
        sock: It.
        shake: This end of the handshake.
        until_s: When it is given up.
        wanted: Whom this rank called; -1 where it was called.
        need: How many bytes the handshake waits for; 0 while it connects.
        got: Those that have come.
    """

    sock: socket.socket
    shake: Shake
    until_s: float
    wanted: int = -1
    need: int = 0
    got: bytearray = field(default_factory=bytearray)


class _Joining:
    """All connections of one rank while it joins."""

    def __init__(
        self, spec: GroupSpec, rank: int, key: bytes, listener: socket.socket, where: dict[int, tuple[str, int]]
    ) -> None:
        self._who = f"group {spec.name!r}, rank {rank}"
        self._where = where
        self._listener = listener
        self._hands = _Hands(key, spec, rank)
        self._higher = frozenset(range(rank + 1, spec.world_size))
        self._done: dict[int, socket.socket] = {}
        self._meetings: dict[socket.socket, _Meeting] = {}
        self._calls = dict.fromkeys(where, 0.0)  # whom to call, and not before when
        self._most = MAX_STRANGERS + spec.world_size
        self._full_until_s = 0.0  # how long nobody has to make room yet; 0: there is room
        self._refused = 0
        self._selector = selectors.DefaultSelector()

    def missing(self) -> list[int]:
        """The ranks that are not connected yet."""
        return [rank for rank in (*self._where, *sorted(self._higher)) if rank not in self._done]

    def taken(self) -> dict[int, socket.socket]:
        """Gives the connections away."""
        done, self._done = self._done, {}
        return done

    def run(self, until_s: float) -> None:
        """Shakes hands until all are connected, or the time is over."""
        while self.missing() and (now_s := time.monotonic()) < until_s:
            for rank, at_s in list(self._calls.items()):
                if at_s <= now_s:
                    self._call(rank, now_s, until_s)
            for meeting in [one for one in self._meetings.values() if one.until_s <= now_s]:
                self._drop(meeting, "it did not finish its handshake in time")
            self._make_room(now_s)
            self._listen(not self._full_until_s and bool(self._higher - self._done.keys()))
            wakes = (
                self._full_until_s or until_s,
                until_s,
                *self._calls.values(),
                *(one.until_s for one in self._meetings.values()),
            )
            for key, _ in self._selector.select(max(min(wakes) - now_s, 0.0)):
                if key.data is None:
                    self._answer()
                elif key.data.sock in self._meetings:  # else dropped by what came before in this round
                    self._go_on(key.data)

    def close(self) -> None:
        """Closes all that was not given away, and tells the log how many were refused."""
        if self._refused > 1:
            _log.warning("%s: refused %d more connections while it formed", self._who, self._refused - 1)
        sockets.close((*self._meetings, *self._done.values()))
        self._selector.close()

    def _make_room(self, now_s: float) -> None:
        """Drops half of those who call, the oldest, where there have been too many for a moment."""
        if len(self._meetings) < self._most:
            self._full_until_s = 0.0
        elif not self._full_until_s:
            self._full_until_s = now_s + _GRACE_S
        elif self._full_until_s <= now_s:
            callers = [one for one in self._meetings.values() if one.wanted < 0]
            for meeting in callers[: -(-len(callers) // 2)]:
                self._drop(meeting, "it was not done while others waited")
            self._full_until_s = 0.0

    def _listen(self, wanted: bool) -> None:
        watched = self._listener in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif watched and not wanted:
            self._selector.unregister(self._listener)

    def _call(self, rank: int, now_s: float, until_s: float) -> None:
        """Begins to connect to a lower rank."""
        del self._calls[rank]
        sock = None
        try:
            family, kind, number, _, address = socket.getaddrinfo(*self._where[rank], type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, number)
            sock.setblocking(False)
            error = sock.connect_ex(address)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, "can't connect")
        except OSError:
            sockets.close(() if sock is None else (sock,))
            self._calls[rank] = now_s + _RETRY_S
            return
        meeting = _Meeting(sock, self._hands.connector(rank), until_s, wanted=rank)
        self._meetings[sock] = meeting
        self._selector.register(sock, selectors.EVENT_WRITE, meeting)

    def _answer(self) -> None:
        """Takes a call."""
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it has gone again
        sock.setblocking(False)
        meeting = _Meeting(sock, self._hands.listener(self._higher), time.monotonic() + HELLO_TIMEOUT_S)
        self._meetings[sock] = meeting
        self._selector.register(sock, selectors.EVENT_READ, meeting)
        self._step(meeting, None)

    def _go_on(self, meeting: _Meeting) -> None:
        """Something has come, or a call was answered."""
        if meeting.need == 0:  # an error of connecting is seen by the first send
            self._selector.modify(meeting.sock, selectors.EVENT_READ, meeting)
            self._step(meeting, None)
            return
        try:
            data = meeting.sock.recv(meeting.need - len(meeting.got))  # never a byte of what comes after
        except BlockingIOError:
            return
        except OSError:
            data = b""
        meeting.got += data
        if not data:
            self._drop(meeting, "it hung up")
        elif len(meeting.got) == meeting.need:
            got, meeting.got = bytes(meeting.got), bytearray()
            self._step(meeting, got)

    def _step(self, meeting: _Meeting, got: bytes | None) -> None:
        """Gives the handshake what it waits for, and sends what it answers."""
        try:
            send, meeting.need = next(meeting.shake) if got is None else meeting.shake.send(got)
            if meeting.sock.send(send) != len(send):
                raise ConnectionError("a fresh connection takes no handshake")
            if meeting.need == 0:
                next(meeting.shake)
        except StopIteration as ended:
            self._shaken(meeting, ended.value)
        except (OSError, ValueError) as exc:
            self._drop(meeting, str(exc))

    def _shaken(self, meeting: _Meeting, rank: int) -> None:
        self._forget(meeting)
        try:
            sockets.tune(meeting.sock, USER_TIMEOUT_S)
        except OSError as exc:
            self._drop(meeting, str(exc))
            return
        if rank in self._done:  # it called again: what it knows of is the newer one
            sockets.close((self._done[rank],))
        self._done[rank] = meeting.sock

    def _drop(self, meeting: _Meeting, why: str) -> None:
        """Hangs up; whom this rank has called, it calls again."""
        if meeting.wanted < 0:
            if not self._refused:
                _log.warning("%s: refused a connection from %s: %s", self._who, sockets.peer_of(meeting.sock), why)
            self._refused += 1
        self._forget(meeting)
        sockets.close((meeting.sock,))
        if meeting.wanted >= 0:
            self._calls[meeting.wanted] = time.monotonic() + _RETRY_S

    def _forget(self, meeting: _Meeting) -> None:
        if self._meetings.pop(meeting.sock, None) is not None:
            self._selector.unregister(meeting.sock)


class _Hands:
    """What a rank says and hears in a handshake; no I/O."""

    def __init__(self, key: bytes, spec: GroupSpec, rank: int) -> None:
        self._key = key
        self._group = spec.group_id.encode()
        self._rank = rank

    def connector(self, peer: int) -> Shake:
        """The end that connects. Raises ValueError where the other does not have the key."""
        mine = secrets.token_bytes(_NONCE_NBYTES)
        answer = yield _HELLO.pack(_MAGIC, self._rank, peer, mine), _NONCE_NBYTES + _TAG_NBYTES
        said = (self._rank, peer, mine + answer[:_NONCE_NBYTES])
        self._check("listener", said, answer[_NONCE_NBYTES:])
        done = yield self._tag("connector", said), len(_DONE)
        if done != _DONE:
            raise ValueError("the handshake did not end as it has to")
        return peer

    def listener(self, expected: frozenset[int]) -> Shake:
        """The end that was called. Raises ValueError where the other is none of the ranks that are expected."""
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
