"""The devices' side: queues of work, what waits for what, and in which order they run.

Work is run by whoever waits for a device or asks how far it is, and by one thread in the background for what nobody
waits for. Among the queues that could go on, the one of the highest priority does, and priorities are drawn anew at
random: what nothing orders comes in another order with each seed.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from ._errors import CUDARuntimeError, Status
from ._memory import Heap, Span
from ._queues import Item, Mark, Queue, Work, merge

TICK_S = 0.001
"""How long nothing has to happen until the background thread runs what nobody waits for."""

_REDRAWN = 0.2
"""How often priorities are drawn anew."""

_RELAXED = 2
"""The mode of captures in which a thread may do anything."""

_handles = itertools.count(0x5000_0000, 0x40)
"""Of streams and events: never those of an earlier fake."""


class Thread(threading.local):
    """What each host thread has chosen: its device, its mode of captures, and on each device a stream."""

    def __init__(self) -> None:
        self.device = 0
        self.capture_mode = 0
        self.streams: dict[int, Any] = {}
        self.stack: list[tuple[int, Any]] = []


class Machine:
    """The devices of one fake.

    Attributes:
        lock: Guards all state of devices; nothing else is taken under it.
        counts: What was called how often, by the runtime's names.
        violations: What no program may do, and this one did.
        thread: What the calling thread has chosen.
        buses: By device, its PCI bus id, where it is not the usual one.
        uuids: By device, its UUID, or that of the part of one that MIG makes; else the driver does not tell.
    """

    def __init__(self, devices: int, seed: int) -> None:
        self.devices = devices
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._idle = threading.Condition(self.lock)
        self.counts: Counter[str] = Counter()
        self.contexts: set[int] = set()
        self.buses: dict[int, str] = {}
        self.uuids: dict[int, bytes] = {}
        self.violations: list[str] = []
        self.thread = Thread()
        self.handles: dict[int, Any] = {}
        self.null = [Queue(device, 0, blocking=True) for device in range(devices)]
        self.queues: set[Queue] = set(self.null)
        self.heap = Heap(self)
        self._random = random.Random(seed)
        for queue in self.null:
            queue.priority = self._random.random()
        self._graveyard: deque[Callable[[], None]] = deque()
        self._steps = 0
        self._running = 0  # how many items threads are in
        self.alone: int | None = None  # the one thread that may run work
        self.capturing: int | None = None  # the thread that captures a graph
        self._open = True
        self._background = threading.Thread(target=self._run_in_background, name="fake-cupy", daemon=True)
        self._background.start()

    def close(self) -> None:
        """Runs what can be run, and ends; who still waits is refused."""
        for queue in self.queues:
            queue.held = False
        self.drain()
        with self.lock:
            self._open = False
            self.wake()
        self._background.join()

    def violate(self, line: str) -> None:
        self.violations.append(line)

    def check_open(self) -> None:
        if not self._open:
            raise CUDARuntimeError(Status.UNLOADING)

    def exchange_capture_mode(self, mode: int) -> int:
        """As the driver's function: 0 is "global", 2 "relaxed"."""
        before, self.thread.capture_mode = self.thread.capture_mode, mode
        return before

    def check_safe(self) -> None:
        """Refuses what is unsafe while another thread captures."""
        if self.capturing not in (None, threading.get_ident()) and self.thread.capture_mode != _RELAXED:
            raise CUDARuntimeError(Status.CAPTURE_UNSUPPORTED)

    # ------------------------------------------------------------------------------------------- handles

    def add(self, made: Any) -> int:
        """Gives a stream or an event its handle."""
        with self.lock:
            self.contexts.add(self.thread.device)
            handle = next(_handles)
            self.handles[handle] = made
            return handle

    def new_queue(self, *, blocking: bool) -> int:
        queue = Queue(self.current_device(), 0, blocking=blocking)
        queue.handle = self.add(queue)
        with self.lock:
            queue.priority = self._random.random()
            self.queues.add(queue)
        return queue.handle

    def current_device(self) -> int:
        if not self.devices:
            raise CUDARuntimeError(Status.NO_DEVICE)
        return self.thread.device

    def queue(self, handle: int, device: int | None = None) -> Queue:
        """Finds a stream; 0 and 1 are the default stream of the given or current device.

        Raises:
            CUDARuntimeError: There is none.
        """
        if handle in (0, 1):
            return self.null[self.current_device() if device is None else device]
        found = self.handles.get(handle)
        if not isinstance(found, Queue):
            raise CUDARuntimeError(Status.INVALID_HANDLE)
        return found

    def current_queue(self) -> Queue:
        """The calling thread's stream on its device.

        Raises:
            CUDARuntimeError: It is a stream of another device.
        """
        device = self.current_device()
        stream = self.thread.streams.get(device)
        queue = self.queue(stream.ptr if stream is not None else 0)
        if queue.device != device:
            raise CUDARuntimeError(Status.INVALID_HANDLE)
        return queue

    def last_rites(self, act: Callable[[], None]) -> None:
        """Does what follows from the end of an object: now, or soon if the end came under the lock."""
        self._graveyard.append(act)
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            with self.lock:
                self.bury()

    def bury(self) -> None:
        while self._graveyard:
            self._graveyard.popleft()()

    # ------------------------------------------------------------------------------------------ enqueuing

    def work(self, name: str, run: Callable[[], None] | None, spans: Iterable[Span] = (), keep: Any = None) -> Work:
        """Describes work on memory."""
        return Work(name, run, self.heap.blocks(name, spans), keep)

    def enqueue(self, queue: Queue, work: Work, after: Iterable[Mark] = ()) -> None:
        """Puts work at a stream's end."""
        with self.lock:
            self.check_open()
            self.bury()
            self.contexts.add(queue.device)
            fences = [other.mark() for other in self.queues if other.items and queue.fences(other)]
            item = Item(queue, work, queue.issued + 1, [*after, *fences])
            work.issue(item)
            queue.issued = item.number
            for mark in item.after:
                merge(queue.clock, mark.clock)
            for block in work.blocks:
                block.uses[queue] = item.number
            queue.items.append(item)
            self.changed.notify()
            self._idle.notify()

    # -------------------------------------------------------------------------------------------- running

    def wait(self, done: Callable[[], bool]) -> None:
        """Runs work until something is so.

        Raises:
            CUDARuntimeError: The fake has ended.
        """
        while True:
            with self.changed:
                item = None
                while not done() and (item := self._claim()) is None:
                    self.check_open()
                    self.changed.wait()
            if item is None:
                return
            self._execute(item)

    def poll(self, done: Callable[[], bool]) -> bool:
        """Tells whether something is so; if not, the devices go on by a step."""
        with self.lock:
            self.check_open()
            if done():
                return True
            item = self._claim()
        if item is not None:
            self._execute(item)
        return False

    def drain(self) -> None:
        """Runs all that can be run now, and waits for what other threads are running."""
        while True:
            with self.changed:
                while (item := self._claim()) is None and self._running:
                    self.changed.wait()
            if item is None:
                return
            self._execute(item)

    def _claim(self) -> Item | None:
        self.bury()
        if self.alone not in (None, threading.get_ident()):
            return None
        ready = sorted((queue for queue in self.queues if queue.ready), key=lambda queue: (queue.device, queue.handle))
        if not ready:
            return None
        if self._random.random() < _REDRAWN:
            for queue in ready:
                queue.priority = self._random.random()
        chosen = max(ready, key=lambda queue: queue.priority)
        chosen.busy = True
        self._steps += 1
        self._running += 1
        return chosen.items[0]

    def _execute(self, item: Item) -> None:
        has_ended = item.work.start(self, item)
        with self.lock:
            self._running -= 1
            if has_ended:
                self.finish(item)
            else:
                self.wake()

    def finish(self, item: Item) -> None:
        """Ends the item at the head of its queue."""
        with self.lock:
            queue = item.queue
            assert queue.items.popleft() is item
            queue.busy = False
            queue.finished = item.number
            if queue.dying:
                dying, queue.dying = queue.dying, []
                for number, others, block in dying:
                    self.heap.bury(block, [Mark(queue, number, {}), *others])
            if queue.destroyed and not queue.items:
                self.queues.discard(queue)
            self.wake()

    def wake(self) -> None:
        """Lets all who wait look again; is called under the lock."""
        self.changed.notify_all()
        self._idle.notify()

    def _run_in_background(self) -> None:
        while True:
            with self._idle:
                while self._open and not any(queue.ready for queue in self.queues):
                    self._idle.wait()
                if not self._open:
                    return
                before = self._steps
            threading.Event().wait(TICK_S)
            if self._steps == before:
                self.drain()
