"""Caches of plans: bounded by their number and their bytes; the plans of a group are dropped when it ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar
from weakref import WeakSet

from raycollect.planner.membership import Membership

_Value = TypeVar("_Value")

_caches: WeakSet[PlanCache[object]] = WeakSet()


def forget(group: Membership) -> None:
    """Drops the plans of a group that has ended from all caches."""
    for cache in list(_caches):
        cache.forget(group)


class PlanCache(Generic[_Value]):
    """Plans by their inputs. Any thread may use it.

    Args:
        most: The most plans in it.
        most_nbytes: The most bytes of these; a single plan may take more.
        nbytes: The size of a plan, roughly.
    """

    def __init__(self, most: int, most_nbytes: int, nbytes: Callable[[_Value], int]) -> None:
        self._most = most
        self._most_nbytes = most_nbytes
        self._measure = nbytes
        # Key -> the time of its last use, the plan, its size, its groups
        self._entries: dict[Hashable, tuple[list[int], _Value, int, Sequence[Membership]]] = {}
        self._nbytes = 0
        self._uses = itertools.count()
        self._lock = threading.RLock()  # a finalizer may plan
        _caches.add(self)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable) -> _Value | None:
        """The plan of a key, which counts as a use; None if unknown."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[0][0] = next(self._uses)
        return entry[1]

    def add(self, key: Hashable, groups: Sequence[Membership], value: _Value) -> None:
        """Adds a plan over these groups; removes the least recently used plans if there are too many."""
        with self._lock:
            self._drop(key)
            self._entries[key] = [next(self._uses)], value, (nbytes := self._measure(value)), groups
            self._nbytes += nbytes
            while len(self._entries) > self._most or (self._nbytes > self._most_nbytes and len(self._entries) > 1):
                entries = list(self._entries.items())  # a finalizer may add or drop others meanwhile
                self._drop(min(entries, key=lambda entry: entry[1][0][0])[0])

    def forget(self, group: Membership) -> None:
        """Drops the plans of a group."""
        with self._lock:
            for key, (*_, groups) in list(self._entries.items()):
                if group in groups:
                    self._drop(key)

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._nbytes -= entry[2]
