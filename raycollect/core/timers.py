"""Calls at a later time, all in one thread of the process; they must not block.

The thread starts with the first call, and ends after some time without calls. A forked child begins without calls.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import time
from collections.abc import Callable

from raycollect.core import threads

AGAIN_S = 1.0
"""The delay of a `Watcher`'s next look after a failure, in seconds."""

_IDLE_S = 2.0  # how long the thread waits for more calls, in seconds


class Timer:
    """A call at a later time, which can be cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Makes the timer do nothing."""
        self.call = None


class TimerQueue:
    """Timers in the order of their times: `all` is a heap. For one thread at a time."""

    def __init__(self) -> None:
        self.all: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def add(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Adds a call."""
        timer = Timer(call)
        heapq.heappush(self.all, (time.monotonic() + delay_s, next(self._order), timer))
        return timer

    def left_s(self) -> float | None:
        """The seconds until the next call; None without calls."""
        while self.all and self.all[0][2].call is None:
            heapq.heappop(self.all)
        return max(0.0, self.all[0][0] - time.monotonic()) if self.all else None

    def pop(self) -> Callable[[], object] | None:
        """Removes a due call; None if no call is due."""
        return heapq.heappop(self.all)[2].call if self.left_s() == 0 else None


class _TimerThread:
    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins without calls, also in a forked child: the parent makes its calls, its thread may hold the lock."""
        self._changed = threading.Condition()
        self._queue = TimerQueue()
        self._thread: threading.Thread | None = None

    def later(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Makes a call after a delay; any thread. Raises RuntimeError if no thread can be started."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threads.start("raycollect-timer", threads.repeat, self._turn)
            timer = self._queue.add(delay_s, call)
            self._changed.notify()
        return timer

    def _turn(self) -> bool:
        with self._changed:
            call = self._queue.pop()
            if call is None:
                left_s = self._queue.left_s()
                was_notified = self._changed.wait(_IDLE_S if left_s is None else min(left_s, threading.TIMEOUT_MAX))
                if not was_notified and self._queue.left_s() is None:
                    self._thread = None
                    return False
        if call is not None:
            threads.survives(call)
        return True


_timers = _TimerThread()
os.register_at_fork(after_in_child=_timers.begin)

later: Callable[[float, Callable[[], object]], Timer] = _timers.later
"""Makes a call after a delay; any thread may call it. Raises RuntimeError if no thread can be started."""


def soon_or_now(delay_s: float, call: Callable[[], object]) -> None:
    """Makes a call after a delay; at once if no thread can be started."""
    try:
        later(delay_s, call)
    except RuntimeError:
        threads.survives(call)


class Watcher:
    """Base of classes that periodically check long-running operations, in the timer's thread.

    Any thread calls the other methods. `timer` is that of the next look; None: none is scheduled, or a look is running.
    """

    def __init__(self) -> None:
        self.timer: Timer | None = None
        self._next_s = 0.0
        self._is_over = False
        self._setting = threading.Lock()

    def look(self) -> float:
        """Looks, and returns the seconds until the next look; infinity: none until `look_after` is called."""
        raise NotImplementedError

    def look_after(self, delay_s: float) -> None:
        """Looks after `delay_s` seconds, or sooner. Raises RuntimeError if no thread can be started."""
        if delay_s == math.inf:
            return
        next_s = time.monotonic() + delay_s
        with self._setting:
            if self._is_over or (self.timer is not None and self._next_s <= next_s):
                return
            if self.timer is not None:
                self.timer.cancel()
            self._next_s, self.timer = next_s, later(max(delay_s, 0.0), self._due)

    def stop(self) -> None:
        """Ends the looks."""
        with self._setting:
            self._is_over = True
            if self.timer is not None:
                self.timer.cancel()

    def _due(self) -> None:
        with self._setting:  # `look_after` may not have set it yet
            self.timer = None  # first, so that operations that begin now are seen, or schedule a look
        if self._is_over:
            return
        try:
            left_s = self.look()
        except Exception as exc:  # noqa: BLE001 - looks continue after any failure
            threads.failed(f"{type(self).__name__}.look", exc)
            left_s = AGAIN_S
        threads.survives(self.look_after, left_s)
