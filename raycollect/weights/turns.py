"""One operation at a time on a publication or a subscription, whichever threads call them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from raycollect.errors import VersionError, VersionTimeoutError

_LOOK_S = 0.5
"""How long an operation waits before it looks again: a signal may have kept the one before from waking it."""


class Turns:
    """Lets operations on one object run one at a time; any thread may call it.

    Args:
        name: That of the publication, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()  # whose lock a signal handler may take again
        self._owner: tuple[int, object] | None = None  # the thread of the operation under way, and its mark

    @contextmanager
    def taken(self, op: str, timeout_s: float, until_s: float) -> Iterator[None]:
        """Waits for the operation that another thread has under way, and keeps others off for a block.

        Args:
            op: What waits.
            timeout_s: How long it may take, for messages.
            until_s: Until when it waits, by `time.monotonic`.

        Raises:
            VersionTimeoutError: The other one has not ended in time.
            VersionError: This very thread has one under way: a signal handler or a finalizer interrupted it.
        """
        mark = threading.get_ident(), object()
        try:
            self._wait(op, mark, until_s, timeout_s)
            yield
        finally:
            if self._owner is mark:
                self._owner = None
                with self._changed:
                    self._changed.notify()

    def _wait(self, op: str, mark: tuple[int, object], until_s: float, timeout_s: float) -> None:
        owner = self._owner
        if owner is not None and owner[0] == mark[0]:
            detail = (
                f"{op} was called inside another operation on it in this thread, as by a signal handler: call it after"
            )
            raise VersionError(name=self._name, detail=detail)
        with self._changed:
            while self._owner is not None:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    detail = f"{op} waited {timeout_s:g} s for an operation on it that another thread has under way"
                    raise VersionTimeoutError(name=self._name, timeout_s=timeout_s, detail=detail)
                self._changed.wait(min(left_s, _LOOK_S))
            self._owner = mark
