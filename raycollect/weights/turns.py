"""One operation at a time on a publication or a subscription, from any threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raycollect.core.claims import ClaimedError, Claims
from raycollect.core.signals import Allowed, Deferred
from raycollect.errors import VersionError, VersionTimeoutError


class Turns:
    """Lets operations on one object run one at a time; any thread may call it.

    Args:
        name: The name of the publication, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._claims = Claims()

    @contextmanager
    def taken(self, op: str, timeout_s: float, until_s: float) -> Iterator[None]:
        """Waits for the operation of another thread, and excludes others during a block.

        Args:
            op: The operation that waits.
            timeout_s: The time limit, for messages.
            until_s: The deadline, by `time.monotonic`.

        Raises:
            VersionTimeoutError: The other operation has not ended in time.
            VersionError: This thread runs an operation: a signal handler or a finalizer has interrupted it.
        """
        with Deferred():
            try:
                with self._claims.claim(self._name, until_s), Allowed():
                    yield
            except ClaimedError as exc:
                raise self._refused(op, timeout_s, is_own=exc.is_own) from None

    def _refused(self, op: str, timeout_s: float, *, is_own: bool) -> VersionError:
        if is_own:
            detail = (
                f"{op} was called inside another operation on it in this thread, as by a signal handler: call it after"
            )
            return VersionError(name=self._name, detail=detail)
        detail = f"{op} waited {timeout_s:g} s for an operation on it that another thread has under way"
        return VersionTimeoutError(name=self._name, timeout_s=timeout_s, detail=detail)
