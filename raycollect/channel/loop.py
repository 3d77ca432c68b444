"""A daemon thread that watches sockets, for the server and the controller."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from raycollect.core import sockets, threads
from raycollect.core.timers import Timer, TimerQueue
from raycollect.errors import ChannelError, ConnectionLostError

_log = logging.getLogger("raycollect")

_JOIN_TIMEOUT_S = 5.0
_REST_S = 0.25  # how long a socket is unwatched after its callback failed, in seconds


class Owned(Protocol):
    """An object that a loop ends when it stops."""

    def end(self, reason: ChannelError) -> None:
        """Closes its resources; may be called twice."""
        ...


class Loop:
    """A thread that calls back when sockets are ready.

    `call_soon` and `close` may be called by any thread, all other methods by the loop's own thread only. `call_soon`
    takes no lock: the garbage collector may call it, in any thread at any point.
    """

    def __init__(self, name: str) -> None:
        self.owned: set[Owned] = set()  # used by its thread only; ended when it stops
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = sockets.wake_pair()
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._on_wake)
        self._calls: deque[Callable[[], None]] = deque()
        self._timers = TimerQueue()
        self._stopping = False
        self.buffer: memoryview = memoryview(bytearray(256 * 1024))  # shared by all sockets of this thread
        self._thread = threads.start(name, self._run)

    def call_soon(self, call: Callable[[], None]) -> bool:
        """Makes a call on the loop's thread; False if the loop has stopped."""
        self._calls.append(call)
        if self._stopping:  # the thread may have emptied the queue for the last time
            with contextlib.suppress(ValueError):  # the thread makes the call
                self._calls.remove(call)
                return False
        if threading.current_thread() is not self._thread:
            self._wake()
        return True

    def close(self) -> None:
        """Ends all owned objects, and the thread; waits for it, unless called by it. May be called twice."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                _log.warning("%s does not end: one of its callbacks blocks", self._thread.name)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes anyway; closed: the thread has ended
            self._wake_out.send(b"\0")

    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Calls `callback(ready)` whenever one of the `events` of `selectors` is ready."""
        is_watched = sock in self._selector.get_map()
        (self._selector.modify if is_watched else self._selector.register)(sock, events, callback)

    def unwatch(self, sock: socket.socket) -> None:
        """Stops watching a socket; ignores sockets that are not watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Makes a call after a delay."""
        return self._timers.add(delay_s, call)

    def _run(self) -> None:
        try:
            threads.repeat(self._turn)
        finally:
            self._stopping = True
            self._make_calls()  # earlier calls, such as links to take over, which are then closed
            reason = ConnectionLostError(detail="this end was closed")
            for owned in list(self.owned):
                threads.survives(owned.end, reason)
            self.owned.clear()
            self._timers.all.clear()
            self._selector.close()
            sockets.close((self._wake_in, self._wake_out))

    def _turn(self) -> bool:
        """Makes due calls, or waits; False if the loop has to stop."""
        if not self._stopping:
            self._select()
        self._make_calls()
        while self._timers.all and (call := self._timers.pop()) is not None:
            threads.survives(call)
        return not self._stopping

    def _make_calls(self) -> None:
        with contextlib.suppress(IndexError):  # no more calls
            while True:
                threads.survives(self._calls.popleft())

    def _select(self) -> None:
        # While it waits, the thread holds no reference to the last ready callbacks.
        left_s = self._timers.left_s() if self._timers.all else None
        for key, ready in self._selector.select(0.0 if self._calls else left_s):
            if not threads.survives(key.data, ready):
                self._rest(key)

    def _rest(self, key: selectors.SelectorKey) -> None:
        # A failing callback may fail again at once, so its socket is unwatched for a moment.
        sock = key.fileobj
        if not isinstance(sock, socket.socket):
            return

        def again() -> None:
            if sock.fileno() >= 0:  # not closed meanwhile
                self.watch(sock, key.events, key.data)

        self.unwatch(sock)
        self.call_later(_REST_S, again)

    def _on_wake(self, ready: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
