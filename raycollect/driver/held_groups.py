"""Which groups are held, as a call of them was recorded and is not sent yet, and what has become of them since."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from raycollect.planner import Membership


class HeldGroups:
    """The groups of one controller that are held. Any thread may call it.

    Args:
        changed: Waits until a group whose members another thread changes has its successor.
    """

    def __init__(self, changed: Callable[[Membership], object]) -> None:
        self._counts: Counter[str] = Counter()  # group id -> how many calls need it
        self._unheld: deque[Membership] = deque()  # what is to be released
        # The id of a group that was formed again -> the group of now; actor id -> who took its place
        self._successors: dict[str, tuple[Membership, Mapping[str, str]]] = {}
        self._changed = changed
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

    def release(self, membership: Membership) -> None:
        """Ends a `hold`."""
        self.release_later([membership])
        with self._lock:
            self._settle()

    def release_later(self, memberships: Iterable[Membership]) -> None:
        """Releases groups when somebody looks next; does not wait."""
        self._unheld.extend(memberships)

    def successor(self, membership: Membership) -> tuple[Membership, Mapping[str, str]] | None:
        """What a group that is held has become: it now, and by actor id who took whose place; None: it is the same."""
        self._changed(membership)
        with self._lock:
            return self._successors.get(membership.spec.group_id)

    def succeed(self, old: Membership, now: Membership, heirs: Mapping[str, str]) -> None:
        """A group was formed again; `heirs` are by actor id those who took a place of another one."""
        with self._lock:
            self._settle()
            for group_id, (found, known) in list(self._successors.items()):
                if found is old:
                    known = {one: heirs.get(heir, heir) for one, heir in known.items()}
                    self._successors[group_id] = now, {**heirs, **known}
            if self._counts[old.spec.group_id]:
                self._successors[old.spec.group_id] = now, heirs

    def forget(self, membership: Membership) -> None:
        """A group was destroyed: it succeeds no other any more."""
        with self._lock:
            self._settle()
            self._successors = {one: found for one, found in self._successors.items() if found[0] is not membership}

    def _settle(self) -> None:
        while self._unheld:
            group_id = self._unheld.popleft().spec.group_id
            self._counts[group_id] -= 1
            if self._counts[group_id] <= 0:
                del self._counts[group_id]
                self._successors.pop(group_id, None)
