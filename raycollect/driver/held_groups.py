"""Which groups are held, as a call of them was recorded and is not sent yet."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable

from raycollect.planner import Membership


class HeldGroups:
    """The groups of one controller that are held. Any thread may call it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()  # group id -> how many calls need it
        self._unheld: deque[str] = deque()  # the ids of those that are to be released
        self._lock = threading.RLock()  # a finalizer may release groups

    @property
    def ids(self) -> frozenset[str]:
        """The ids of the groups that are held, and not to be released."""
        with self._lock:
            self._settle()
            return frozenset(self._counts)

    def hold(self, membership: Membership) -> None:
        """Keeps a derived group, however long it is unused."""
        with self._lock:
            self._settle()
            self._counts[membership.spec.group_id] += 1

    def release_later(self, memberships: Iterable[Membership]) -> None:
        """Ends a `hold` of each of these groups when somebody looks next; does not wait."""
        self._unheld.extend([one.spec.group_id for one in memberships])

    def _settle(self) -> None:
        while self._unheld:
            group_id = self._unheld.popleft()
            self._counts[group_id] -= 1
            if self._counts[group_id] <= 0:
                del self._counts[group_id]
