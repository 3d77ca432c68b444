"""Releases what a communicator holds once no thread uses it any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from raycollect.errors import GroupBrokenError

_Held = TypeVar("_Held")


class InUse(Generic[_Held]):
    """Gives what a communicator holds to one thread at a time, by `with`, and releases it once.

    `close` releases it at once or, if a thread uses it, has that thread release it when it leaves.

    Args:
        held: A library's connections or the like; the last reference to it goes with its release.
        release: Releases it.
        group_name: The group, for errors.
    """

    def __init__(self, held: _Held | None, release: Callable[[_Held], object], group_name: str) -> None:
        self._held: _Held | None = held
        self._release = release
        self._group_name = group_name
        self._is_closed = False
        self._lock = threading.Lock()  # held by the thread inside

    def __enter__(self) -> _Held:
        self._lock.acquire()
        held = self._held
        if self._is_closed or held is None:
            self.__exit__()
            raise GroupBrokenError(group_name=self._group_name, detail="the communicator was closed")
        return held

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        if self._is_closed:
            self._leave()

    def close(self) -> None:
        """Admits no thread any more; any thread may call it, more than once."""
        self._is_closed = True
        self._leave()

    def _leave(self) -> None:
        if self._lock.acquire(blocking=False):  # else whoever has it comes here as it leaves
            held, self._held = self._held, None
            self._lock.release()
            if held is not None:
                self._release(held)
