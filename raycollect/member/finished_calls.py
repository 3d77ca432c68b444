"""The methods of this actor that have ended: what plans wait for that come past the actor's queue (P2)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from raycollect.pos.handle import Handle

KEPT = 4096
"""How many calls are remembered. Who waits for an earlier one has to ask (`Behind`)."""

_INERT = frozenset({type(None), bool, int, float, complex, str, bytes, Handle})
_MOST_ITEMS = 64  # of a list, tuple or dict that is looked into


class FinishedCalls:
    """What is known of the calls, by their tasks. Any thread may call it; methods come one by one."""

    def __init__(self) -> None:
        self._noting = threading.Lock()  # a plan's thread notes what a fence has told, beside that of the methods
        self._ended: dict[bytes, bool] = {}  # whether Ray needs nothing more of it
        self._changed = threading.Condition()
        self._waiting = 0

    def note(self, task: bytes, *, is_over: bool) -> None:
        """A method has ended; `is_over`: Ray does not read a tensor any more to tell its result."""
        ended = self._ended
        with self._noting:
            ended[task] = is_over
            if len(ended) > KEPT:
                del ended[next(iter(ended))]
        if self._waiting:
            self.wake()

    def wake(self) -> None:
        """Whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()

    def is_over(self, task: bytes) -> bool | None:
        """What `note` was told of a call; None: nothing yet."""
        return self._ended.get(task)

    def wait_for(self, is_met: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits until a condition is met, which depends on what is noted here; False: it was not in time."""
        with self._changed:
            self._waiting += 1
            try:
                return self._changed.wait_for(is_met, timeout_s)
            finally:
                self._waiting -= 1


def is_inert(value: Any) -> bool:
    """Whether a value certainly has no part that a plan could write: Ray may still be about to pickle it."""
    kind = type(value)
    if kind in _INERT or isinstance(value, np.generic):
        return True
    if kind in (list, tuple):
        return len(value) <= _MOST_ITEMS and all(map(is_inert, value))
    return kind is dict and len(value) <= _MOST_ITEMS and all(map(is_inert, (*value, *value.values())))
