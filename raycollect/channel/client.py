"""The client ends: the controller's hub of control connections, and the client of a data connection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from raycollect.channel.endpoint import ControlLink, LinkHandler
from raycollect.channel.loop import Loop
from raycollect.channel.messages import Message
from raycollect.channel.stream import SocketStream, open_stream
from raycollect.core.model import Address
from raycollect.errors import ConnectionLostError


class Hub:
    """One thread that reads all control connections of a controller. Any thread may call it."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._loop = Loop("raycollect-hub")

    def connect(self, address: Address, hello: dict[str, Any], handler: LinkHandler, timeout_s: float) -> ControlLink:
        """Connects to a participant; returns when both ends have authenticated each other.

        The hub's thread may call `handler` before this returns.

        Raises:
            ConnectionLostError: The address does not answer in time, or the hub is closed.
            AuthenticationError: One end doesn't hold the key.
            ProtocolError: The peer is not a raycollect endpoint of this version; or `hello` is too big.
        """
        return self.adopt(open_stream(address, "control", hello, timeout_s), hello, handler)

    def adopt(self, stream: SocketStream, hello: dict[str, Any], handler: LinkHandler) -> ControlLink:
        """Takes over a control connection that this end has opened, with its pending events.

        Raises:
            ConnectionLostError: The hub is closed.
        """
        stream.sock.setblocking(False)
        link = ControlLink(self._loop, stream.sock, stream.connection, handler, hello=hello)
        if not self._loop.call_soon(partial(link.attach, stream.take_events())):
            stream.close()
            raise ConnectionLostError(detail="the hub is closed", peer=stream.peer)
        return link

    def later(self, delay_s: float, call: Callable[[], None]) -> bool:
        """Makes a call on the hub's thread after a delay; False if the hub is closed."""

        def begin() -> None:
            self._loop.call_later(delay_s, call)

        return self._loop.call_soon(begin)

    def close(self) -> None:
        """Ends all links, and the thread. May be called twice."""
        self._loop.close()


class DataClient:
    """Fetches from one participant, blocking; for one thread at a time (the caller locks)."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        """Connects; `timeout_s` is also the limit until a request has another. Raises the errors of `open_stream`."""
        self._timeout_s = timeout_s
        self._stream = open_stream(address, "data", {}, timeout_s)

    @property
    def blob_left(self) -> int:
        """The unread bytes of the last answer's blob."""
        return self._stream.blob_left

    def request(self, message: Message, timeout_s: float | None = None) -> Message:
        """Sends a request and waits for its answer; an answer's blob must be read before the next request.

        `timeout_s` is also the limit of what follows, until the next request.

        Raises:
            ConnectionLostError: The connection ended, or timed out; the client is closed.
            ProtocolError: The request can't be sent or the answer breaks a rule.
            AuthenticationError: The answer was forged.
        """
        if timeout_s is not None:
            self._timeout_s = timeout_s
        self._stream.send(message, timeout_s=self._timeout_s)
        return self._stream.receive(self._timeout_s)

    def tell(self, message: Message) -> None:
        """Sends a message without an answer; raises ConnectionLostError."""
        self._stream.send(message, timeout_s=self._timeout_s)

    def receive_blob(self, *into: memoryview) -> None:
        """Fills `into`, in order, with the next bytes of the last answer's blob: all at once, or piece by piece.

        Raises:
            ConnectionLostError: The connection ended, or paused for longer than the client's limit.
            ProtocolError: `into` is longer than the rest of the blob.
        """
        self._stream.receive_blob(into, self._timeout_s)

    def close(self) -> None:
        """Closes the connection. May be called twice."""
        self._stream.close()
