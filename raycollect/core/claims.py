"""Keys that one thread at a time works on. It holds no lock, so other keys are free."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from math import inf
from time import monotonic

from raycollect.core.signals import Deferred, waiting


class ClaimedError(Exception):
    """The key is claimed.

    Attributes:
        is_own: Whether the calling thread has claimed it: the call is made in a signal handler or a finalizer.
    """

    def __init__(self, key: Hashable, *, is_own: bool) -> None:
        super().__init__(key)
        self.is_own: bool = is_own


class Claims:
    """The claimed keys, for any thread, also in signal handlers and finalizers; the main thread in `Deferred`."""

    def __init__(self) -> None:
        self._claims: dict[Hashable, Claim] = {}

    def claim(self, key: Hashable, deadline_s: float) -> Claim:
        """A context in which the calling thread alone works on a key; waits for another thread's claim to end.

        Args:
            key: The key.
            deadline_s: When to give up, by `time.monotonic`.

        Raises:
            ClaimedError: On entry: another thread's claim has not ended in time, or the calling thread claims the key.
        """
        return Claim(self._claims, key, deadline_s)

    def wait(self, key: Hashable, deadline_s: float) -> bool:
        """Waits until no other thread claims a key; False at the deadline."""
        with Deferred():
            other = self._claims.get(key)
            while other is not None and other.owner != threading.get_ident():
                if not other.wait(deadline_s):
                    return False
                other = self._claims.get(key)
        return True


class Claim:
    """The context that `Claims.claim` returns."""

    __slots__ = ("_claims", "_deadline_s", "_ended", "_key", "owner")

    def __init__(self, claims: dict[Hashable, Claim], key: Hashable, deadline_s: float) -> None:
        self.owner: int = threading.get_ident()
        self._ended = threading.Event()
        self._claims = claims
        self._key = key
        self._deadline_s = deadline_s

    def __enter__(self) -> None:
        while (other := self._claims.setdefault(self._key, self)) is not self:
            is_own = other.owner == self.owner
            if is_own or not other.wait(self._deadline_s):
                raise ClaimedError(self._key, is_own=is_own)

    def __exit__(self, *exc: object) -> None:
        del self._claims[self._key]
        self._ended.set()

    def wait(self, deadline_s: float) -> bool:
        """Waits for the end of the claim; False at the deadline."""
        return waiting(self._ended.wait, None if deadline_s == inf else deadline_s - monotonic())
