"""What a process holds for its groups and its tensors, and where Ray's and users' calls find it.

Whoever is called by Ray or by a user asks `this_runtime` once; from there on the `Runtime` is passed.
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
    """What a process holds. Any thread may use it; it needs no Ray.

    Two of them in one process are like two processes that share their memory: each has groups, tensors and timelines of
    its own, and a rank of one may be in a group with a rank of the other.

    Args:
        instruments: What programs run with: the tensors, the clock, where faults can be injected.

    Attributes:
        tracer: Whether the process records a timeline.
        timelines: Those that it records of itself and of what it drives.
        process_groups: The groups of which it is a member.
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
        """What else a process has one of, by its type; `make` makes it on first use."""
        found: _Part | None = self._parts.get(kind)
        if found is None:
            with self._making:
                found = self._parts.get(kind)
                if found is None:
                    found = self._parts[kind] = make(self)
        return found

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Calls of this thread inside the block are made with this runtime, and not with that of the process.

        What another thread does for such a call is not: torch's backward passes, and its calls that are waited for
        later.
        """
        token = _entered.set(self)
        try:
            yield
        finally:
            _entered.reset(token)


_entered: ContextVar[Runtime | None] = ContextVar("raycollect_runtime", default=None)


class _Process:
    """Holds the runtime of this process. A forked child begins without one, and lets its parent's be as it is."""

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
        self._making = threading.Lock()  # a thread that no longer exists may hold it
        _entered.set(None)


_process = _Process()


def this_runtime() -> Runtime:
    """The runtime of this process, made on first use; inside `Runtime.entered`, that one. Any thread may call it."""
    return _entered.get() or _process.runtime or _process.make()
