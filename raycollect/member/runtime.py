"""The runtime of a process: its groups, its tensors and its timelines.

Functions that Ray or a user calls get it from `this_runtime` once; from there on the `Runtime` is passed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from raycollect.engine.instruments import Instruments
from raycollect.group.process_groups import ProcessGroups
from raycollect.observe import Recorder, Tracer, metrics
from raycollect.observe.timeline_session import Timelines
from raycollect.pos import Store, tensors

_Part = TypeVar("_Part")


class Runtime:
    """The state of a process. Any thread may use it; it needs no Ray.

    Two runtimes in one process are like two processes that share memory: each has its own groups, tensors and
    timelines, and ranks of both may be in one group.

    Args:
        instruments: The environment of programs: the tensors, the clock, the injected faults.

    Attributes:
        tracer: Whether the process records a timeline.
        timelines: The timelines of the process, and of groups that it drives.
        process_groups: The groups of which the process is a member.
    """

    def __init__(self, instruments: Instruments | None = None) -> None:
        self.instruments: Instruments = instruments or Instruments(
            store=Store(), recorder=Recorder(time.monotonic), clock=time.monotonic, allocate=tensors.allocate
        )
        self.tracer: Tracer = self.instruments.tracer
        self.process_groups: ProcessGroups = ProcessGroups(self.instruments.cache, self.tracer)
        metrics.publish(self.instruments.counters, self.process_groups.name_of)
        self.timelines: Timelines = Timelines(self.tracer, self.process_groups.places)
        self._parts: dict[type, Any] = {}
        self._making = threading.RLock()  # a part may need another one

    def part(self, kind: type[_Part], make: Callable[[Runtime], _Part]) -> _Part:
        """A singleton of the process, by its type; `make` makes it on first use."""
        part: _Part | None = self._parts.get(kind)
        if part is None:
            with self._making:
                part = self._parts.get(kind)
                if part is None:
                    part = self._parts[kind] = make(self)
        return part

    def forget(self, kind: type[Any]) -> None:
        """Lets the next `part` make a new one."""
        with self._making:
            self._parts.pop(kind, None)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which calls of this thread use this runtime instead of the process's runtime.

        Other threads don't, also if they work for such a call: torch's backward passes, and torch's asynchronous calls.
        """
        token = _entered.set(self)
        try:
            yield
        finally:
            _entered.reset(token)


_entered: ContextVar[Runtime | None] = ContextVar("raycollect_runtime", default=None)


class _Process:
    """Holds the runtime of this process. A forked child starts without one, and never touches its parent's runtime."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self._inherited: list[Runtime | None] = []
        self._making = threading.Lock()
        os.register_at_fork(after_in_child=self._begin_in_child)

    def make(self) -> Runtime:
        with self._making:
            self.runtime = self.runtime or Runtime()
            return self.runtime

    def _begin_in_child(self) -> None:
        self._inherited.append(self.runtime)
        self.runtime = None
        self._making = threading.Lock()  # a thread of the parent may hold the old lock
        _entered.set(None)


_process = _Process()


def this_runtime() -> Runtime:
    """The runtime of `Runtime.entered`, or that of this process, made on first use. Any thread may call it."""
    return _entered.get() or _process.runtime or _process.make()
