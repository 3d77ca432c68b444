"""A control connection on a `Loop`, used by the server and the controller's hub."""

from __future__ import annotations

import enum
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

from raycollect.channel.loop import Loop
from raycollect.channel.messages import Broken, Message
from raycollect.channel.protocol import Connection, Event
from raycollect.core import sockets, threads
from raycollect.core.signals import Deferred
from raycollect.core.timers import Timer
from raycollect.errors import ChannelError, ConnectionLostError, ProtocolError, copy_error

_log = logging.getLogger("raycollect")

MAX_QUEUED_NBYTES = 64 << 20  # may be queued for a peer that doesn't read; beyond it, the link ends
_LINGER_S = 1.0
_AGAIN_S = 0.001
_LAST_READS = 64
_PAUSE_S = 5.0  # After such a pause the peer's host may be unreachable
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class LinkHandler(Protocol):
    """Receives a link's messages. Called on the loop's thread: be quick, never block."""

    def received(self, link: ControlLink, message: Message) -> None:
        """Handles a message; those of one link in the order in which they were sent."""
        ...

    def closed(self, link: ControlLink, reason: ChannelError) -> None:
        """Handles the end of the link, by either end; called exactly once, and last."""
        ...


class _Phase(enum.Enum):
    OPEN = enum.auto()
    CLOSING = enum.auto()  # this end closed: queued messages are sent, received ones dropped
    CLOSED = enum.auto()


class ControlLink:
    """An open control connection. `send` and `close` may be called by any thread, also by finalizers.

    The peer accepts frames in sequence only. So messages are queued, and one thread at a time numbers and writes them
    all: other threads don't wait for it, no signal handler runs in between, and a finalizer's message is sent next.
    """

    def __init__(
        self, loop: Loop, sock: socket.socket, connection: Connection, handler: LinkHandler, *, hello: dict[str, Any]
    ) -> None:
        """Takes over a non-blocking socket whose handshake is done; `attach` comes next, on the loop's thread."""
        self.hello = hello
        self.peer: str = sockets.peer_of(sock)
        self._loop = loop
        self._sock = sock
        self._connection = connection
        self._handler: LinkHandler | None = handler  # None after its `closed`
        self._line: deque[bytes] = deque()  # the payloads of messages that have no number yet
        self._lock = threading.Lock()  # held by the thread that numbers and writes
        self._phase = _Phase.OPEN
        self._queue: deque[memoryview] = deque()
        self._queued_nbytes = 0
        self._linger: Timer | None = None
        self._sent_s = time.monotonic()
        self._is_wary = False  # whether the silence before the last message counted

    def __repr__(self) -> str:
        return f"Link({self.peer}, {self._phase.name.lower()})"

    @property
    def queued_nbytes(self) -> int:
        """The bytes that wait for the socket; 0 once the link has ended."""
        return 0 if self._has_ended else self._queued_nbytes

    @property
    def _has_ended(self) -> bool:
        return self._phase is _Phase.CLOSED

    def send(self, message: Message) -> None:
        """Sends a message, or queues the part that the socket doesn't take; never blocks.

        Raises:
            ConnectionLostError: The link has ended, or its peer doesn't read.
            ProtocolError: The message can't be sent (too big, not plain values); the link stays open.
        """
        if self._phase is not _Phase.OPEN:
            raise ConnectionLostError(detail="the link is closed", peer=self.peer)
        self._line.append(self._connection.payload(message))
        lost = self._write_line()
        if lost is not None:
            raise copy_error(lost)

    def close(self) -> None:
        """Ends the link, after the queued messages were sent, or a second. May be called twice."""
        with Deferred():
            if self._phase is _Phase.OPEN:
                self._phase = _Phase.CLOSING
                self._loop.call_soon(self._drain)

    def _write_line(self) -> ConnectionLostError | None:
        """Writes all queued messages, unless another thread does so, which checks again afterwards."""
        lost = None
        with Deferred():
            while self._line and not self._has_ended and self._lock.acquire(blocking=False):
                try:
                    while self._line and lost is None and not self._has_ended:
                        lost = self._write(self._connection.seal(self._line.popleft()))
                    if lost is not None:
                        self._phase = _Phase.CLOSING
                        self._line.clear()
                finally:
                    self._lock.release()
            if lost is not None:
                self._loop.call_soon(partial(self._give_up, lost))
        return lost

    def _write(self, frame: bytes) -> ConnectionLostError | None:
        rest, now_s = memoryview(frame), time.monotonic()
        if self._is_wary or now_s - self._sent_s >= _PAUSE_S:
            self._is_wary = sockets.count_silence(self._sock)
        self._sent_s = now_s
        if not self._queue:
            try:
                sent = self._sock.send(frame)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as exc:
                return ConnectionLostError(detail=f"can't send: {exc}", peer=self.peer)
            if sent == len(frame):
                return None
            rest = rest[sent:]
            self._loop.call_soon(self._watch_writes)
        self._queue.append(rest)
        self._queued_nbytes += len(rest)
        if self._queued_nbytes > MAX_QUEUED_NBYTES:
            return ConnectionLostError(
                detail=f"the peer does not read: {self._queued_nbytes} bytes wait", peer=self.peer
            )
        return None

    def attach(self, events: Iterable[Event]) -> None:
        """Starts reading, after `events` that were received with the handshake's last bytes."""
        self._loop.owned.add(self)
        self._loop.watch(self._sock, _READ, self._on_ready)
        self.deliver(events)

    def end(self, reason: ChannelError) -> None:
        """Closes the socket at once, and notifies the handler unless it was notified."""
        is_mine = self._lock.acquire(timeout=_LINGER_S)  # no thread writes to a closed and reused descriptor
        self._phase = _Phase.CLOSED
        self._queue.clear()
        if is_mine:
            self._lock.release()
        if self._linger is not None:
            self._linger.cancel()
        self._loop.owned.discard(self)
        self._loop.unwatch(self._sock)
        sockets.close((self._sock,))
        self._announce(reason)

    def _announce(self, reason: ChannelError) -> None:
        handler, self._handler = self._handler, None  # the handler may hold this link
        if handler is not None:
            threads.survives(handler.closed, self, reason)

    def _on_ready(self, ready: int) -> None:
        try:
            if ready & _WRITE:
                self._flush()
            if ready & _READ:
                self._read()
        except Exception as exc:  # noqa: BLE001 - the state is unknown after any exception
            self.fail(threads.failed("reading a connection", exc))

    def fail(self, error: threads.Failure) -> None:
        """Ends the link after a failure of this end, which leaves its state unknown; sends the peer the reason."""
        reason = ConnectionLostError(detail=f"this end failed: {error.detail}", peer=self.peer)
        try:
            self.send(Broken(detail=error.detail))
        except ChannelError:
            self.end(reason)
        else:
            self._phase = _Phase.CLOSING
            self._drain(reason)

    def _read(self) -> bool:
        """Reads once; False without data."""
        if self._phase is _Phase.CLOSED:
            return False
        try:
            nbytes = self._sock.recv_into(self._loop.buffer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self.end(ConnectionLostError(detail=f"the connection broke: {exc}", peer=self.peer))
            return False
        if nbytes and self._handler is None:
            return True
        try:
            if not nbytes:
                raise self._connection.receive_eof()
            events = self._connection.receive(self._loop.buffer[:nbytes])
        except ChannelError as exc:
            exc.peer = self.peer
            self.end(exc)
            return False
        self.deliver(events)
        return True

    def deliver(self, events: Iterable[Event]) -> None:
        """Hands messages to the handler, in order."""
        for event in events:
            handler = self._handler
            if handler is None or self._phase is _Phase.CLOSED:
                return
            if isinstance(event, Broken):
                self.end(ConnectionLostError(detail=f"the other end failed: {event.detail}", peer=self.peer))
            elif isinstance(event, Message):
                try:
                    handler.received(self, event)
                except ProtocolError as exc:
                    _log.warning("%r is ended: %s", self, exc.detail)
                    exc.peer = self.peer
                    self.end(exc)
                except Exception as exc:  # noqa: BLE001 - handlers catch the exceptions that they can recover from
                    self.fail(threads.failed(f"taking in {type(event).__name__}", exc))

    def _watch_writes(self) -> None:
        if self._phase is not _Phase.CLOSED:
            self._loop.watch(self._sock, _READ | _WRITE, self._on_ready)

    def _flush(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # the socket stays ready
        try:
            is_done = self._flush_queue()
        finally:
            self._lock.release()
        self._write_line()
        if not is_done or self._queue:
            return
        if self._phase is not _Phase.CLOSED:
            self._loop.watch(self._sock, _READ, self._on_ready)
        if self._linger is not None:
            self._shut()

    def _flush_queue(self) -> bool:
        try:
            while self._queue:
                sent = self._sock.send(self._queue[0])
                self._queued_nbytes -= sent
                if sent < len(self._queue[0]):
                    self._queue[0] = self._queue[0][sent:]
                    return False
                self._queue.popleft()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self._queue.clear()  # reading reports the cause, after the peer's last messages
        return True

    def _give_up(self, reason: ConnectionLostError) -> None:
        # Reads the peer's last messages first, which may have the cause.
        for _ in range(_LAST_READS):
            if not self._read():
                break
        self.end(reason)

    def _drain(self, reason: ConnectionLostError | None = None) -> None:
        # Closing a socket with unread input resets the connection, and the peer would lose the last messages.
        if self._phase is _Phase.CLOSED:
            return
        reason = reason or ConnectionLostError(detail="closed by this end", peer=self.peer)
        self._announce(reason)
        if self._linger is None:
            self._linger = self._loop.call_later(_LINGER_S, partial(self.end, reason))
        self._write_line()
        if self._line or self._lock.locked():  # another thread writes
            self._loop.call_later(_AGAIN_S, partial(self._drain, reason))
        elif not self._queue:
            self._shut()

    def _shut(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as exc:
            self.end(ConnectionLostError(detail=f"the connection broke: {exc}", peer=self.peer))
