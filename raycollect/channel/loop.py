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
_REST_S = 0.25  # how long a socket rests after its callback failed, in seconds


class Owned(Protocol):
    """Anything that a loop ends when it stops."""

    def end(self, reason: ChannelError) -> None:
        """Closes what it holds; may be called twice."""
        ...


class Loop:
    """A thread that calls back when sockets are ready.

    `call_soon` and `close` may be called by any thread, everything else by the loop's own thread only. `call_soon`
    takes no lock: the garbage collector may call it, in any thread at any place.
    """

    def __init__(self, name: str) -> None:
        self.owned: set[Owned] = set()  # its thread's own; ended when it stops
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = sockets.wake_pair()
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._on_wake)
        self._calls: deque[Callable[[], None]] = deque()
        self._timers = TimerQueue()
        self._stopping = False
        self.buffer: memoryview = memoryview(bytearray(256 * 1024))  # what all sockets of this thread are read into
        self._thread = threads.start(name, self._run)

    def call_soon(self, call: Callable[[], None]) -> bool:
        """Makes a call on the loop's thread; False when it has stopped and never will."""
        self._calls.append(call)
        if self._stopping:  # then the thread may have looked for the last time
            with contextlib.suppress(ValueError):  # it has made the call, or makes it now
                self._calls.remove(call)
                return False
        if threading.current_thread() is not self._thread:
            self._wake()
        return True

    def close(self) -> None:
        """Ends all that the loop owns, and the thread; waits for it, unless called by it. May be called twice."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                _log.warning("%s does not end: one of its callbacks blocks", self._thread.name)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread will wake anyway; closed: the thread has ended
            self._wake_out.send(b"\0")

    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Calls `callback(ready)` whenever one of the `events` of `selectors` is there."""
        known = sock in self._selector.get_map()
        (self._selector.modify if known else self._selector.register)(sock, events, callback)

    def unwatch(self, sock: socket.socket) -> None:
        """Forgets a socket; one that is not watched is no error."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Makes a call after a while."""
        return self._timers.add(delay_s, call)

    def _run(self) -> None:
        try:
            threads.repeat(self._turn)
        finally:
            self._stopping = True
            self._make_calls()  # what was asked for before the end: links to take over, and so to close
            reason = ConnectionLostError(detail="this end was closed")
            for owned in list(self.owned):
                threads.survives(owned.end, reason)
            self.owned.clear()
            self._timers.all.clear()
            self._selector.close()
            sockets.close((self._wake_in, self._wake_out))

    def _turn(self) -> bool:
        """Does what is due, and waits where nothing is; False: the loop has to stop."""
        if not self._stopping:
            self._select()
        self._make_calls()
        while self._timers.all and (call := self._timers.pop()) is not None:
            threads.survives(call)
        return not self._stopping

    def _make_calls(self) -> None:
        with contextlib.suppress(IndexError):  # there are no more
            while True:
                threads.survives(self._calls.popleft())

    def _select(self) -> None:
        # The thread holds nothing of what was ready while it waits for more.
        left_s = self._timers.left_s() if self._timers.all else None
        for key, ready in self._selector.select(0.0 if self._calls else left_s):
            if not threads.survives(key.data, ready):
                self._rest(key)

    def _rest(self, key: selectors.SelectorKey) -> None:
        # What failed on a socket may fail again at once: it is left alone for a moment.
        sock = key.fileobj
        if not isinstance(sock, socket.socket):
            return

        def again() -> None:
            if sock.fileno() >= 0:  # it was not closed meanwhile
                self.watch(sock, key.events, key.data)

        self.unwatch(sock)
        self.call_later(_REST_S, again)

    def _on_wake(self, ready: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
