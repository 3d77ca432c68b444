"""Releases a communicator's library object once no thread uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from raycollect.errors import GroupBrokenError

_Held = TypeVar("_Held")
_Result = TypeVar("_Result")


class InUse(Generic[_Held]):
    """Lends a communicator's library object to one thread at a time, and releases it once.

    Args:
        held: Such as a library's connections; the last reference is dropped with the release. None: nothing.
        release: Releases it.
        group_name: The group, for errors.
    """

    def __init__(self, held: _Held | None, release: Callable[[_Held], object], group_name: str) -> None:
        self._held: list[_Held] = [] if held is None else [held]  # popped by the thread that releases it
        self._release = release
        self._group_name = group_name
        self._is_closed = False
        self._lock = threading.Lock()  # held by the thread inside

    def call(self, use: Callable[..., _Result], *args: Any) -> _Result:
        """Calls `use` with the object and `args`; raises GroupBrokenError after `close`."""
        try:
            # No signal handler runs between a lock's `__enter__`, which is C code, and its block: KeyboardInterrupt
            # can't leave the lock taken.
            with self._lock:
                if self._is_closed or not self._held:
                    raise GroupBrokenError(group_name=self._group_name, detail="the communicator was closed")
                return use(self._held[0], *args)
        finally:
            if self._is_closed:
                self._leave()

    def close(self) -> None:
        """Releases it at once or, if a thread uses it, has that thread release it as it leaves.

        Any thread may call it, more than once.
        """
        self._is_closed = True  # first: a thread that takes the lock later sees it closed
        self._leave()

    def _leave(self) -> None:
        if not self._lock.locked():
            try:
                held = self._held.pop()
            except IndexError:  # another thread has it
                return
            self._release(held)
