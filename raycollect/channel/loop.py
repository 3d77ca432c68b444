"""One daemon thread that watches sockets: shared by the server's and the controller's end."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from raycollect import sockets
from raycollect.errors import ChannelError, ConnectionLostError

__all__ = ["Loop", "Owned", "Timer"]

_log = logging.getLogger("raycollect")

_JOIN_TIMEOUT_S = 5.0


class Owned(Protocol):
    """What a loop ends when it stops."""

    def end(self, reason: ChannelError) -> None:
        """Closes what it holds; may be called twice."""
        ...


class Timer:
    """A call at a later time; `cancel` it when it is no longer due."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        """Makes a timer; `Loop.call_later` starts it."""
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Makes the timer do nothing."""
        self.call = None


class Loop:
    """A thread that calls back when sockets are ready.

    `call_soon` and `close` may be called by any thread, everything else by the loop's own thread only.
    """

    def __init__(self, name: str) -> None:
        """Starts the thread, under a name."""
        self.owned: set[Owned] = set()  # its thread's own; ended when it stops
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = sockets.wake_pair()
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._on_wake)
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._stopping = False
        self.buffer: memoryview = memoryview(bytearray(256 * 1024))  # what all sockets of this thread are read into
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ any thread

    def call_soon(self, call: Callable[[], None]) -> bool:
        """Lets the loop's thread make a call; False when it has stopped and never will."""
        with self._lock:
            if self._stopping:
                return False
            self._calls.append(call)
        if threading.current_thread() is not self._thread:
            self._wake()
        return True

    def close(self) -> None:
        """Ends all that the loop owns, and the thread; waits for it. May be called twice, and by the thread itself."""
        with self._lock:
            first, self._stopping = not self._stopping, True
        if first:
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                _log.warning("%s does not end: one of its callbacks blocks", self._thread.name)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread will wake anyway; closed: the thread has ended
            self._wake_out.send(b"\0")

    # ------------------------------------------------------------------------------------------ own thread

    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Calls `callback(ready)` whenever one of the `events` of `selectors` is there."""
        self._selector.register(sock, events, callback)

    def rewatch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Changes what is watched for on a socket."""
        self._selector.modify(sock, events, callback)

    def unwatch(self, sock: socket.socket) -> None:
        """Forgets a socket; one that is not watched is no error."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Makes a call after a while."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))
        return timer

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._select()
                while self._calls and not self._stopping:
                    self._guard(self._calls.popleft())
                self._fire()
        finally:
            with self._lock:
                self._stopping = True
            while self._calls:  # what was asked for before the end: links to take over, and so to close
                self._guard(self._calls.popleft())
            reason = ConnectionLostError(detail="this end was closed")
            for owned in list(self.owned):
                self._guard(owned.end, reason)
            self._selector.close()
            sockets.close((self._wake_in, self._wake_out))

    def _select(self) -> None:
        """Calls back for what is ready; nothing of it is held by the thread while it waits for more."""
        for key, ready in self._selector.select(self._idle_s()):
            self._guard(key.data, ready)

    def _guard(self, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception:  # noqa: BLE001 - see below
            # Every owner of a socket handles its own failures; what comes here is our bug, and must not end the thread.
            _log.exception("%s: a callback failed (this is a bug of raycollect)", self._thread.name)

    def _idle_s(self) -> float | None:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if self._calls:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _fire(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            call = heapq.heappop(self._timers)[2].call
            if call is not None:
                self._guard(call)

    def _on_wake(self, ready: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
