"""Releases what a communicator holds once no thread uses it any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from raycollect.errors import GroupBrokenError

_Held = TypeVar("_Held")
_Result = TypeVar("_Result")


class InUse(Generic[_Held]):
    """Gives what a communicator holds to one thread at a time, and releases it once.

    Args:
        held: A library's connections or the like; the last reference to it goes with its release. None: nothing.
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
        """Calls `use` with what is held, and with `args`; raises GroupBrokenError where that was closed."""
        try:
            # No signal handler runs between the `__enter__` of a lock, which is C code, and the block behind it: an
            # exception such as that of Ctrl-C can't leave the lock taken.
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
        self._is_closed = True  # first: whoever takes the lock behind this finds it closed
        self._leave()

    def _leave(self) -> None:
        if not self._lock.locked():
            try:
                held = self._held.pop()
            except IndexError:  # another thread has it
                return
            self._release(held)
