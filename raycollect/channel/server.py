"""The listening end: every participant has one, on its own thread, to answer while methods run."""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from raycollect.channel.endpoint import ControlLink, LinkHandler
from raycollect.channel.loop import Loop
from raycollect.channel.messages import Message
from raycollect.channel.protocol import NONCE_NBYTES, Connection, Event, Opened, Reply
from raycollect.channel.refusals import Refusals
from raycollect.channel.stream import SocketStream
from raycollect.core import sockets, threads
from raycollect.core.model import Address
from raycollect.errors import ChannelError, ConnectionLostError

_log = logging.getLogger("raycollect")

HANDSHAKE_TIMEOUT_S = 5.0
# The most clients in a handshake; more wait in the kernel's backlog.
#
# Each takes a descriptor and less than 16 KiB, so that clients without the key never take more than 64 and 1 MiB.
MAX_HALF_OPEN = 64

_GRACE_S = 0.25
_READ = selectors.EVENT_READ
_DATA_JOIN_S = 2.0


class DataLink:
    """A data connection seen from its server; used by its own thread."""

    def __init__(self, stream: SocketStream) -> None:
        """Serves a connection whose handshake is done; `sent` counts answers."""
        self.peer: str = stream.peer
        self.sent: int = 0
        self._stream = stream

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Waits for the next request; None if the client or the server has ended the connection.

        The connection ends after `timeout_s`.

        Raises:
            ProtocolError: The client broke a rule.
            AuthenticationError: The request was forged.
        """
        try:
            return self._stream.receive(timeout_s)
        except ConnectionLostError:
            return None

    def send(self, message: Message, blobs: Sequence[memoryview] = ()) -> None:
        """Answers, with `blobs` one after the other as the blob; they are not copied, so they must not change.

        Raises:
            ConnectionLostError: The client ended the connection.
            ProtocolError: The message can't be sent; the connection goes on.
        """
        self._stream.send(message, blobs)
        self.sent += 1

    def has_ended(self) -> bool:
        """Whether the client has ended the connection; never waits."""
        return self._stream.has_ended()


class ServerHandler(LinkHandler, Protocol):
    """Handles a participant's connections. All methods except `serve_data` run on the server's thread: be quick."""

    def opened(self, link: ControlLink) -> None:
        """Handles a new control connection. The first call for a link; `closed` is the last."""
        ...

    def serve_data(self, link: DataLink) -> None:
        """Serves one data connection on its own thread: receives and answers until `receive` returns None."""
        ...


@runtime_checkable
class MeshHandler(Protocol):
    """Takes the connections of a mesh."""

    def connected(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Takes a non-blocking socket whose handshake is done; runs on the server's thread: be quick."""
        ...


class Server:
    """Listens on one address for clients that hold the secret."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        handler: ServerHandler | MeshHandler,
        *,
        local: socket.socket | None = None,
        expected: int = 0,
    ) -> None:
        """Binds a free port of the Ray node's address, and starts the thread.

        Args:
            host: The address.
            secret: The key that clients must hold.
            handler: Handles their connections.
            local: A listening Unix socket, which the server closes.
            expected: The number of legitimate clients that may connect at once.

        Raises:
            ValueError: The host means all interfaces, or the secret is too short.
            OSError: The host is not an address of this machine.
            ResourceLimitError: No thread can be started.
        """
        Connection("server", secret, nonce=bytes(NONCE_NBYTES))  # checks the secret now, not at the first client
        self._secret = secret
        self._handler: ServerHandler | MeshHandler | None = handler  # None after its end
        self._listeners = [] if local is None else [local]
        self._most = MAX_HALF_OPEN + expected
        self._paused = self._sweeping = False
        self.trouble: str = ""  # the last reason why no client could be accepted
        self._half_open: dict[_HalfOpen, None] = {}  # an ordered set
        self._data: dict[SocketStream, threading.Thread] = {}
        self._data_lock = threading.Lock()
        try:
            self._listeners.insert(0, sockets.listen(host))
            self.address: Address = Address(host=host, port=self._listeners[0].getsockname()[1], secret=secret)
            self._loop = Loop("raycollect-server")
        except BaseException:
            sockets.close(self._listeners)
            raise
        self._refusals = Refusals(self._loop.call_later)
        self._loop.call_soon(self._begin)

    def close(self) -> None:
        """Ends the listener, all connections and their threads. May be called twice."""
        self._loop.close()
        with self._data_lock:
            serving = dict(self._data)
        for stream in serving:
            stream.shutdown()
        for thread in serving.values():
            if thread is not threading.current_thread():
                thread.join(_DATA_JOIN_S)

    def end(self, reason: ChannelError) -> None:
        """Stops listening: called by the loop when it stops."""
        for listener in self._listeners:
            self._loop.unwatch(listener)
        sockets.close(self._listeners)
        self._refusals.tell()
        self._handler = None  # the handler may hold this server

    def _begin(self) -> None:
        self._loop.owned.add(self)
        self._listen()

    def _listen(self) -> None:
        for listener in self._listeners:
            self._loop.watch(listener, _READ, partial(self._accept, listener))

    def _accept(self, listener: socket.socket, ready: int) -> None:
        if len(self._half_open) >= self._most:
            self._pause()
            return
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as exc:
            self.trouble = f"no connection can be accepted for now: {exc}"
            self._refusals.add("an unknown peer", self.trouble)
            self._pause()  # most likely out of descriptors: retrying at once would spin
            return
        connection = Connection("server", self._secret, nonce=secrets.token_bytes(NONCE_NBYTES))
        client = _HalfOpen(self._loop, sock, connection, self._refusals, self._promote, self._leave)
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._sweep)
        self._half_open[client] = None
        client.begin()

    def _leave(self, client: _HalfOpen) -> None:
        self._half_open.pop(client, None)

    def _sweep(self) -> None:
        # One timer for all: a timer per client would outlive the client.
        now_s = time.monotonic()
        for client in list(self._half_open):
            if client.until_s > now_s:
                self._loop.call_later(client.until_s - now_s, self._sweep)
                return
            client.refuse(f"it did not finish its handshake in {HANDSHAKE_TIMEOUT_S:g} s")
        self._sweeping = False

    def _pause(self) -> None:
        # New clients stay in the backlog for a moment; then the oldest unfinished handshakes are refused.
        if not self._paused:
            self._paused = True
            for listener in self._listeners:
                self._loop.unwatch(listener)
            self._loop.call_later(_GRACE_S, self._resume)

    def _resume(self) -> None:
        if len(self._half_open) >= self._most:
            for client in list(self._half_open)[: self._most // 2]:
                client.refuse("it made no progress while others waited")
        self._paused = False
        self._listen()

    def _promote(self, client: _HalfOpen, opened: Opened, rest: list[Event]) -> None:
        handler = self._handler
        if handler is None:  # impossible: this is the loop's thread, which has then ended
            return
        if isinstance(handler, MeshHandler):
            if opened.purpose == "mesh" and not rest:
                handler.connected(client.sock, opened.hello)
            else:
                client.refuse("it does not belong to the mesh")
            return
        if opened.purpose == "mesh":
            client.refuse("there is no mesh here")
            return
        if opened.purpose == "data":
            self._serve(SocketStream(client.sock, client.connection, rest), handler)
            return
        link = ControlLink(self._loop, client.sock, client.connection, handler, hello=opened.hello)
        link.attach(())
        try:
            handler.opened(link)
        except Exception as exc:  # noqa: BLE001 - the handler is foreign code
            link.fail(threads.failed("taking in a connection", exc))
        link.deliver(rest)

    def _serve(self, stream: SocketStream, handler: ServerHandler) -> None:
        stream.sock.setblocking(True)
        try:
            with self._data_lock:  # the thread takes it, too, at its end
                serving = threads.start(f"raycollect-data-{stream.peer}", self._serve_data, stream, handler)
                self._data[stream] = serving
        except RuntimeError as exc:  # no thread can be started
            self._refusals.add(stream.peer, f"no thread can be started for it: {exc}")
            self._forget(stream)

    def _serve_data(self, stream: SocketStream, handler: ServerHandler) -> None:
        try:
            handler.serve_data(DataLink(stream))
        except ConnectionLostError as exc:
            _log.debug("data connection: %s", exc)
        except ChannelError as exc:
            _log.warning("data connection: %s", exc)
        except Exception as exc:  # noqa: BLE001 - the handler is foreign code
            threads.failed("serving a data connection", exc)
        finally:
            self._forget(stream)

    def _forget(self, stream: SocketStream) -> None:
        stream.close()
        with self._data_lock:
            self._data.pop(stream, None)


@dataclass(slots=True, eq=False)
class _HalfOpen:
    """A client that has not authenticated yet. Used on the server's thread only."""

    _loop: Loop
    sock: socket.socket
    connection: Connection
    _refusals: Refusals
    _on_open: Callable[[_HalfOpen, Opened, list[Event]], None]
    _on_leave: Callable[[_HalfOpen], None]
    peer: str = field(init=False)
    until_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.peer = sockets.peer_of(self.sock)
        self.until_s = time.monotonic() + HANDSHAKE_TIMEOUT_S

    def begin(self) -> None:
        """Sends the challenge and waits for the proof."""
        self._loop.owned.add(self)
        try:
            self.sock.setblocking(False)
            sockets.tune(self.sock)
            self._send(self.connection.start())
        except OSError as exc:
            self.refuse(f"it ended at once: {exc}")
            return
        self._loop.watch(self.sock, _READ, self._on_ready)

    def refuse(self, why: str) -> None:
        """Closes, and logs the reason."""
        self._refusals.add(self.peer, why)
        self.end(ConnectionLostError(detail=why, peer=self.peer))

    def end(self, reason: ChannelError) -> None:
        """Closes the socket."""
        self._leave()
        sockets.close((self.sock,))

    def _on_ready(self, ready: int) -> None:
        try:
            nbytes = self.sock.recv_into(self._loop.buffer)
            if not nbytes:
                raise self.connection.receive_eof()
            events = self.connection.receive(self._loop.buffer[:nbytes])
            self._take(events)
        except (BlockingIOError, InterruptedError):
            pass
        except ChannelError as exc:
            with contextlib.suppress(OSError):  # so that an honest client can report "wrong key" instead of "lost"
                self.sock.send(self.connection.farewell)
            self.refuse(exc.detail)
        except OSError as exc:
            self.refuse(f"the connection broke: {exc}")

    def _take(self, events: list[Event]) -> None:
        for place, event in enumerate(events):
            if isinstance(event, Reply):
                self._send(event.data)
            elif isinstance(event, Opened):
                self._leave()
                self._on_open(self, event, events[place + 1 :])
                return

    def _send(self, data: bytes) -> None:
        # A fresh socket's buffer is empty: if a few bytes don't fit, the peer misbehaves.
        if self.sock.send(data) != len(data):
            raise ConnectionLostError(detail="it does not read", peer=self.peer)

    def _leave(self) -> None:
        self._on_leave(self)
        self._loop.owned.discard(self)
        self._loop.unwatch(self.sock)
