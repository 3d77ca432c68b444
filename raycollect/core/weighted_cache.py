"""A cache bounded by the weight of its results instead of their number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


class WeightedCache(Generic[_K, _T]):
    """A function with a cache of its results; any thread may call it.

    Two dicts replace a list of recent use, so that a hit is one lookup without a lock. Once the results in the first
    dict weigh `most`, it becomes the second one, whose results are dropped unless they were used meanwhile.

    Args:
        function: Makes the result of a key; never None.
        weight: Returns the weight of a key and its result. Of results above `most`, only the last one is cached.
        most: The bound on the weight of each dict.
    """

    def __init__(self, function: Callable[[_K], _T], weight: Callable[[_K, _T], int], most: int) -> None:
        self._function = function
        self._weight = weight
        self._most = most
        self._lock = threading.RLock()  # a finalizer may use it
        self.clear()

    def __call__(self, key: _K) -> _T:
        """Returns the result for a key."""
        result = self._recent.get(key)
        return self._look_up(key) if result is None else result

    def clear(self) -> None:
        """Drops all results."""
        with self._lock:
            self._recent: dict[_K, _T] = {}
            self._earlier: dict[_K, _T] = {}
            self._recent_weight = 0
            self._large: tuple[_K, _T] | None = None

    def _look_up(self, key: _K) -> _T:
        large = self._large
        if large is not None and large[0] == key:
            return large[1]
        result = self._earlier.get(key)
        if result is None:
            result = self._function(key)
        weight = self._weight(key, result)
        if weight > self._most:
            self._large = key, result
            return result
        with self._lock:
            if key in self._recent:  # another thread has made it meanwhile
                return self._recent[key]
            if self._recent_weight + weight > self._most:
                self._earlier, self._recent, self._recent_weight = self._recent, {}, 0
            self._recent[key] = result
            self._recent_weight += weight
        return result
