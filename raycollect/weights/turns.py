"""One operation at a time on a publication or a subscription, from any threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raycollect.core.claims import ClaimedError, Claims
from raycollect.core.signals import Allowed, Deferred
from raycollect.errors import VersionError, VersionTimeoutError
from raycollect.weights.exclusion import blocking_in_loop, running_loop


class Turns:
    """Lets operations on one object run one at a time; any thread may call it.

    Args:
        name: The name of the publication, for messages.
        is_own: Whether the operations are calls for tensors of this process. An event loop does not wait for them, as
            they may need it to release a lock.
    """

    def __init__(self, name: str, *, is_own: bool = False) -> None:
        self._name = name
        self._is_own = is_own
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
            UnsupportedError: The caller is in an event loop, which does not wait.
        """
        never_waits = self._is_own and running_loop() is not None
        with Deferred():
            try:
                with self._claims.claim(self._name, 0.0 if never_waits else until_s), Allowed():
                    yield
            except ClaimedError as exc:
                if never_waits and not exc.is_own:
                    raise blocking_in_loop(op) from None
                raise self._refused(op, timeout_s, is_own=exc.is_own) from None

    def _refused(self, op: str, timeout_s: float, *, is_own: bool) -> VersionError:
        if is_own:
            detail = (
                f"{op} was called inside another operation on it in this thread, as by a signal handler: call it after"
            )
            return VersionError(name=self._name, detail=detail)
        detail = f"{op} waited {timeout_s:g} s for an operation on it that another thread has under way"
        return VersionTimeoutError(name=self._name, timeout_s=timeout_s, detail=detail)
