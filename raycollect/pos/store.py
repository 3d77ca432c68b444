"""Key -> tensors, by a table of states. Pure except for one lock: no ray, no array library.

The store also tracks memory ranges, since a ref names storage, not a snapshot (P6): the ranges that a running plan
writes (readers wait for it), and those that a failed plan left half-written (using them raises, P4).
"""

from __future__ import annotations

import enum
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from raycollect.channel.messages import StoreStatistics
from raycollect.core.model import TASK_NBYTES, Key
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError, StoreFullError
from raycollect.pos.container import Container
from raycollect.pos.extents import Extents

Range = tuple[int, int]
"""Addresses in memory: first byte, one past the last."""

_FEW = 64  # the most pairs of ranges that are compared one by one
_LOOK_S = 0.5  # how often a waiting claim checks whether to continue


class State(enum.Enum):
    """The state of a key."""

    ABSENT = "absent"
    """Its method has not ended yet, or never ran."""
    HELD = "held"
    FAILED = "failed"
    """Its method raised."""
    BY_VALUE = "by_value"
    """Its method returned a value that is passed by value."""
    FREED = "freed"
    REPLACED = "replaced"
    """The tensors of its value have changed: only returned by `current`."""


_NEXT: dict[tuple[State, str], State] = {
    **{(state, event): state for state in State for event in ("put", "fail", "pass", "free")},  # but for:
    (State.ABSENT, "put"): State.HELD,
    (State.ABSENT, "fail"): State.FAILED,
    (State.ABSENT, "pass"): State.BY_VALUE,
    (State.ABSENT, "free"): State.FREED,
    (State.HELD, "free"): State.FREED,
    (State.FAILED, "put"): State.HELD,  # a retry that succeeded
    (State.FAILED, "pass"): State.BY_VALUE,
    (State.FAILED, "free"): State.FREED,
    (State.BY_VALUE, "put"): State.HELD,
}
"""The first value of a retried method stays. A freed key stays freed: its last ref was released before its value."""

_EVENTS = {"fail": State.FAILED, "pass": State.BY_VALUE}
"""Event -> the state that its detail describes."""


@dataclass(frozen=True, slots=True)
class Absence:
    """The reason why a key has no tensor; `detail` is the exception, or the type of the value."""

    state: State
    detail: str = ""


class Store:
    """The tensors of one process. Any thread may call it.

    Args:
        limit: The most keys held at a time; None: no limit (they are freed with their last ref).
        memory: The most remembered absences, for error messages.

    Attributes:
        dirty: The half-written ranges, with weak references to the owners of their memory. If it is empty, as in most
            processes, `is_dirty` and `mark_written` return at once.
    """

    def __init__(self, *, limit: int | None = None, memory: int = 4096) -> None:
        self._limit = limit
        self._memory = memory
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._held: dict[Key, Container] = {}
        self._absent: OrderedDict[bytes, Absence] = OrderedDict()  # by key, or by task where all its returns share it
        self._freed = 0
        self._reading: list[Sequence[Range]] = []
        self._writing: list[Sequence[Range]] = []
        self._pending: list[Sequence[Range]] = []  # of plans that wait to write
        self._claims_waiting = 0
        self.dirty: dict[Range, Callable[[], Any]] = {}

    def limit(self, count: int | None) -> None:
        """Changes the most keys held at a time."""
        with self._changed:
            self._limit = count

    def put(self, key: Key, container: Container) -> bool:
        """Stores a value; the first write of a key wins. False if the key was freed before.

        Raises:
            StoreFullError: The limit is reached.
        """
        with self._changed:
            state = _NEXT[self._state(key), "put"]
            if state is State.FREED:
                return False
            if key not in self._held:
                if self._limit is not None and len(self._held) >= self._limit:
                    raise StoreFullError(limit=self._limit)
                self._held[key] = container
                self._absent.pop(key, None)
                self._absent.pop(key[:TASK_NBYTES], None)
            self._changed.notify_all()
            return True

    def fail(self, task: bytes, detail: str) -> None:
        """Records that a task raised: it has no return values."""
        self._note(task, "fail", detail)

    def pass_by(self, name: bytes, detail: str) -> None:
        """Records that a task's return values, or the one with this key, go by value; `detail`: such as ``"int"``."""
        self._note(name, "pass", detail)

    def free(self, keys: Sequence[Key]) -> int:
        """Drops values, and returns how many were held; a running plan keeps the memory of its values alive."""
        with self._changed:
            gone = []  # released outside the lock: finalizers may run any code
            for key in keys:
                if _NEXT[self._state(key), "free"] is State.FREED:
                    self._remember(key, Absence(State.FREED))
                gone.append(self._held.pop(key, None))
            count = sum(container is not None for container in gone)
            self._freed += count
            self._changed.notify_all()
        return count

    def look(self, key: Key) -> Container | Absence:
        """The value of a key, or the reason of its absence. Never waits."""
        with self._lock:
            return self._look(key)

    def current(self, key: Key) -> Container | Absence:
        """As `look`, with the current tensors of a list or dict; see `Container.current`."""
        with self._lock:
            stored = self._look(key)
        if isinstance(stored, Absence) or stored.leaves is None:
            return stored
        now = stored.current()
        if isinstance(now, str):
            return Absence(State.REPLACED, now)
        if now is not stored:
            self.replace(key, now)
        return now

    def wait(self, key: Key, given_up: Callable[[], bool]) -> Container | Absence:
        """Waits until the key's method has ended, or `given_up`, called after every change and `wake`, returns True."""
        with self._changed:
            while True:
                value = self._look(key)
                if isinstance(value, Container) or value.state is not State.ABSENT or given_up():
                    return value
                self._changed.wait()

    def wake(self) -> None:
        """Makes every `wait` call its `given_up` again."""
        with self._changed:
            self._changed.notify_all()

    def statistics(self) -> StoreStatistics:
        """A snapshot."""
        with self._changed:
            return StoreStatistics(held=len(self._held), dirty=len(self._living_dirt()), freed=self._freed)

    def _look(self, key: Key) -> Container | Absence:
        held = self._held.get(key)
        if held is not None:
            return held
        return self._absent.get(key) or self._absent.get(key[:TASK_NBYTES]) or Absence(State.ABSENT)

    def _state(self, key: bytes) -> State:
        if key in self._held:
            return State.HELD
        absence = self._absent.get(key) or self._absent.get(key[:TASK_NBYTES])
        return absence.state if absence else State.ABSENT

    def _note(self, name: bytes, event: str, detail: str) -> None:
        with self._changed:
            state = self._state(name)
            if _NEXT[state, event] is not state or _EVENTS[event] is state:
                self._remember(name, Absence(_NEXT[state, event], detail))
            self._changed.notify_all()

    def _remember(self, name: bytes, absence: Absence) -> None:
        self._absent[name] = absence
        self._absent.move_to_end(name)
        while len(self._absent) > self._memory:
            self._absent.popitem(last=False)

    def replace(self, key: Key, container: Container) -> None:
        """Replaces the value of a held key."""
        with self._changed:
            if key in self._held:
                self._held[key] = container
                self._changed.notify_all()

    def reading(
        self, ranges: Sequence[Range], aborted: Callable[[], str | None] = lambda: None, limit_s: float = math.inf
    ) -> _Claim:
        """A context that blocks plans that write these ranges; entering waits for running and waiting writers.

        It raises PlanAbortedError when `aborted`, called after every change and every 0.5 s, returns a reason, and
        CollectiveTimeoutError after `limit_s`. Pass one of the two: only they end the wait for a writer.
        """
        against = self._writing, self._pending
        return _Claim(self, self._lock, self._reading, against, ranges, None, aborted, limit_s)

    def writing(
        self, ranges: Sequence[Range], aborted: Callable[[], str | None] = lambda: None, limit_s: float = math.inf
    ) -> _Claim:
        """A context that blocks readers of these ranges; entering waits for current readers, which only copy.

        It raises as `reading` does.
        """
        against = self._writing, self._reading
        return _Claim(self, self._lock, self._writing, against, ranges, self._pending, aborted, limit_s)

    def is_read(self, ranges: Iterable[Range]) -> bool:
        """Whether any of these ranges is being read."""
        with self._lock:
            return bool(self._reading) and _any_overlap(tuple(ranges), self._reading)

    def mark_dirty(self, ranges: Sequence[Range], owners: Sequence[Any]) -> None:
        """Marks ranges as half-written, as long as the owners of the memory are alive."""
        with self._changed:
            self.dirty.update(
                {span: weak(owner) for span, owner in zip(ranges, owners, strict=True) if span[0] < span[1]}
            )

    def mark_written(self, ranges: Sequence[Range]) -> None:
        """Marks ranges as written: they, and ranges inside them, are no longer dirty."""
        if not self.dirty:
            return
        with self._changed:
            whole = Extents(*ranges)
            for span in [span for span in self.dirty if not whole.gaps(*span)]:
                del self.dirty[span]

    def is_dirty(self, ranges: Sequence[Range]) -> bool:
        """Whether any of these ranges is half-written."""
        if not self.dirty:
            return False
        with self._changed:
            return _any_overlap(ranges, [self._living_dirt()])

    def _living_dirt(self) -> list[Range]:
        for span in [span for span, owner in self.dirty.items() if owner() is None]:
            del self.dirty[span]  # the memory was freed, and may be reused
        return list(self.dirty)


@dataclass(slots=True, eq=False)
class _Claim:
    """Memory ranges in use, between entering and leaving."""

    _store: Store
    _lock: AbstractContextManager[Any]  # the store's
    _mine: list[Sequence[Range]]
    _against: Sequence[list[Sequence[Range]]]
    _ranges: Sequence[Range]
    _pending: list[Sequence[Range]] | None = None
    _aborted: Callable[[], str | None] = lambda: None
    _limit_s: float = math.inf

    def __enter__(self) -> None:
        with self._lock:
            if any(self._against) and self._has_to_wait():
                self._wait()
            self._mine.append(self._ranges)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            if self._mine[-1] is self._ranges:
                self._mine.pop()
            else:
                _drop(self._mine, self._ranges)
            if self._store._claims_waiting:
                self._store._changed.notify_all()

    def _has_to_wait(self) -> bool:
        return any(others and _any_overlap(self._ranges, others) for others in self._against)

    def _wait(self) -> None:
        """Waits. Later readers wait for this writer, so that a chain of readers can't starve it."""
        store, until_s = self._store, time.monotonic() + self._limit_s
        store._claims_waiting += 1
        if self._pending is not None:
            self._pending.append(self._ranges)
        try:
            while self._has_to_wait():
                reason = self._aborted()
                if reason is not None:
                    raise PlanAbortedError(detail=reason)
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    whom = "a plan that writes" if self._pending is None else "readers of"
                    detail = f"timed out after {self._limit_s:g} s waiting for {whom} this tensor"
                    raise CollectiveTimeoutError(timeout_s=self._limit_s, detail=detail)
                store._changed.wait(min(_LOOK_S, left_s))
        finally:
            store._claims_waiting -= 1
            if self._pending is not None:
                _drop(self._pending, self._ranges)
                store._changed.notify_all()


def _drop(claims: list[Sequence[Range]], ranges: Sequence[Range]) -> None:
    del claims[next(i for i, held in enumerate(claims) if held is ranges)]


def _any_overlap(ranges: Sequence[Range], others: Sequence[Sequence[Range]]) -> bool:
    return any(_overlap(ranges, other) for other in others)


def _overlap(some: Sequence[Range], others: Sequence[Range]) -> bool:
    if len(some) * len(others) <= _FEW:
        return any(max(a[0], b[0]) < min(a[1], b[1]) for b in others for a in some)
    whole = Extents(*others)
    return any(whole.has_some(start, stop) for start, stop in some)


def weak(owner: Any) -> Callable[[], Any]:
    """Returns a weak reference to an object; a strong one if it does not support weak references."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner
