"""A connection in blocking mode, used by one thread at a time: data connections, and the client's handshake."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from raycollect.channel.messages import Message
from raycollect.channel.protocol import NONCE_NBYTES, Connection, Event, Opened, Reply
from raycollect.core import sockets
from raycollect.core.model import Address
from raycollect.core.signals import Allowed, Deferred
from raycollect.errors import ChannelError, ConnectionLostError, ProtocolError

_READ_NBYTES = 64 * 1024


class SocketStream:
    """Messages and blobs over one socket, blocking; every failure closes it."""

    def __init__(self, sock: socket.socket, connection: Connection, events: Iterable[Event] = ()) -> None:
        """Takes over a socket in blocking mode, with `events` that were already received."""
        self.sock = sock
        self.connection = connection
        self.peer: str = sockets.peer_of(sock)
        self.blob_left: int = 0
        self._events = deque(events)

    def send(self, message: Message, blobs: Sequence[memoryview] = (), timeout_s: float | None = None) -> None:
        """Sends a message, and `blobs` one after the other as its blob, without copying them.

        Raises:
            ConnectionLostError: The connection ended.
            ProtocolError: The message can't be sent; the connection goes on.
        """
        frame = self.connection.send(message, sum(blob.nbytes for blob in blobs))
        try:
            self.sock.settimeout(timeout_s)
            self.sock.sendall(frame)
            sockets.pass_on(map(sockets.flat, blobs), self.sock.sendmsg)
        except OSError as exc:
            raise self._lost(f"can't send {type(message).__name__}: {exc}") from exc
        except BaseException:
            self.close()  # after half a frame, later frames would be invalid
            raise

    def receive(self, timeout_s: float | None = None) -> Message:
        """Waits for the next message; its blob, if it has one, must be read next.

        Raises:
            ConnectionLostError: The connection ended, or timed out.
            ProtocolError: The peer broke a rule, or the blob of the last message was not read.
        """
        if self.blob_left:
            raise ProtocolError(detail=f"{self.blob_left} bytes of a blob were not read", peer=self.peer)
        event = self.next_event(None if timeout_s is None else time.monotonic() + timeout_s)
        if not isinstance(event, Message):
            raise ProtocolError(detail=f"{type(event).__name__} after the handshake", peer=self.peer)
        self.blob_left = getattr(event, "blob_nbytes", 0)
        return event

    def receive_blob(self, into: Sequence[memoryview], timeout_s: float | None = None) -> None:
        """Fills `into`, one after the other, with the next bytes of the blob; call it until `blob_left` is 0.

        Args:
            into: Writable contiguous memory, at most `blob_left` bytes.
            timeout_s: The longest pause of the peer, not the limit of the whole.

        Raises:
            ConnectionLostError: The connection ended, or the peer paused.
            ProtocolError: The blob is shorter than `into`.
        """
        wanted = sum(view.nbytes for view in into)
        if wanted > self.blob_left:
            raise ProtocolError(detail=f"{wanted} bytes wanted, the blob has {self.blob_left}", peer=self.peer)
        if not wanted:
            return
        buffered = memoryview(self.connection.take_buffered(wanted))

        def fill(views: list[memoryview]) -> int:
            nonlocal buffered
            nbytes = min(len(buffered), len(views[0]))
            if nbytes:
                views[0][:nbytes], buffered = buffered[:nbytes], buffered[nbytes:]
            else:
                nbytes = self.sock.recvmsg_into(views)[0]
            if not nbytes:
                raise ConnectionResetError("the peer closed the connection")
            self.blob_left -= nbytes
            return nbytes

        try:
            self.sock.settimeout(timeout_s)
            sockets.pass_on(map(sockets.flat, into), fill)
        except OSError as exc:
            raise self._lost(f"{self.blob_left} bytes of a blob did not come: {exc}") from exc
        if not self.blob_left:
            self.connection.blob_received()
            self._events.extend(self._checked(b""))

    def next_event(self, deadline_s: float | None) -> Event:
        """Waits for the next event, until `deadline_s` of the monotonic clock; answers handshakes.

        Raises:
            ConnectionLostError: The connection ended, or timed out.
            ProtocolError: The peer broke a rule.
            AuthenticationError: The peer doesn't hold the key.
        """
        while True:
            while self._events:
                event = self._events.popleft()
                if not isinstance(event, Reply):
                    return event
                self._sendall(event.data, deadline_s)
            self._events.extend(self._checked(self._recv(deadline_s)))

    def take_events(self) -> list[Event]:
        """Returns pending events, for the object that takes over the socket."""
        events = list(self._events)
        self._events.clear()
        return events

    def has_ended(self) -> bool:
        """Whether the peer has ended the connection, and all earlier data was received; never waits."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def shutdown(self) -> None:
        """Ends the connection from another thread: threads that are blocked in it raise ConnectionLostError."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket. May be called twice."""
        self.blob_left = 0
        self.connection.close()
        sockets.close((self.sock,))

    def _sendall(self, data: bytes, deadline_s: float | None) -> None:
        try:
            self.sock.settimeout(_left(deadline_s))
            self.sock.sendall(data)
        except OSError as exc:
            raise self._lost(f"can't send: {exc}") from exc

    def _recv(self, deadline_s: float | None) -> bytes:
        try:
            self.sock.settimeout(_left(deadline_s))
            data = self.sock.recv(self.connection.handshake_left or _READ_NBYTES)
        except OSError as exc:
            raise self._lost(f"nothing came: {exc}") from exc
        if not data:
            reason = self.connection.receive_eof()
            raise self._lost(reason.detail)
        return data

    def _checked(self, data: bytes) -> list[Event]:
        try:
            return self.connection.receive(data)
        except ChannelError as exc:
            exc.peer = self.peer
            self.close()
            raise

    def _lost(self, detail: str) -> ConnectionLostError:
        self.close()
        return ConnectionLostError(detail=detail, peer=self.peer)


def _left(deadline_s: float | None) -> float | None:
    # A small positive time after the deadline, as 0 would mean non-blocking.
    return None if deadline_s is None else max(1e-3, deadline_s - time.monotonic())


def open_stream(address: Address, purpose: str, hello: dict[str, Any], timeout_s: float) -> SocketStream:
    """Connects and shakes hands, blocking.

    Raises:
        ConnectionLostError: The address does not answer in time.
        AuthenticationError: One end doesn't hold the key.
        ProtocolError: The peer is not a raycollect endpoint of this version.
    """
    deadline_s = time.monotonic() + timeout_s
    nonce = secrets.token_bytes(NONCE_NBYTES)
    connection = Connection("client", address.secret, nonce=nonce, purpose=purpose, hello=hello)
    connection.start()
    with Deferred():  # a signal leaves no connection open
        stream = SocketStream(sockets.connect(address.host, address.port, timeout_s), connection)
        try:
            with Allowed():
                event = stream.next_event(deadline_s)
            if not isinstance(event, Opened):
                raise ProtocolError(detail=f"{type(event).__name__} before the handshake ended", peer=stream.peer)
        except BaseException:
            stream.close()
            raise
    return stream
