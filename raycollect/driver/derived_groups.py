"""The derived groups of a controller, and which of them have to go. Pure."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

from raycollect.planner import Membership


class DerivedGroups:
    """Derived groups by their actors, in order. Any thread may call it.

    Each group costs its actors memory and descriptors, so the number of groups per actor is bounded.

    Args:
        most: The allowed number of groups per actor; beyond it, the idle groups that were not used for the longest time
            are removed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: OrderedDict[tuple[str, ...], Membership] = OrderedDict()  # the least recently used first
        self._lock = threading.RLock()  # a finalizer may look a group up

    def all(self) -> tuple[Membership, ...]:
        """All groups."""
        return tuple(self._groups.values())

    def __contains__(self, membership: Membership) -> bool:
        return self._groups.get(membership.participants) is membership

    def find(self, actor_ids: tuple[str, ...]) -> Membership | None:
        """The group of these actors in this order, or None. Marks the group as used."""
        with self._lock:
            membership = self._groups.get(actor_ids)
            if membership is not None:
                self._groups.move_to_end(actor_ids)
            return membership

    def add(self, membership: Membership) -> None:
        """Adds the group of its actors in their order."""
        with self._lock:
            self._groups[membership.participants] = membership

    def full(self, actor_ids: tuple[str, ...]) -> set[str]:
        """The actors among these that have more than the allowed number of groups."""
        counts = Counter(actor_id for actors in tuple(self._groups) for actor_id in actors)
        return {actor_id for actor_id in actor_ids if counts[actor_id] > self._most}

    def take_surplus(self, newest: Membership, is_idle: Callable[[Membership], bool]) -> list[Membership]:
        """Removes idle groups until no actor of the newest group has more than the allowed number."""
        removed = []
        with self._lock:
            full = self.full(newest.participants)
            for group in self.all():
                if full and group is not newest and not full.isdisjoint(group.participants) and is_idle(group):
                    removed.append(self._groups.pop(group.participants))
                    full = self.full(newest.participants)
        return removed

    def take(self, is_due: Callable[[Membership], bool]) -> list[Membership]:
        """Removes all groups that are due."""
        with self._lock:
            removed = list(filter(is_due, self.all()))
            for group in removed:
                del self._groups[group.participants]
        return removed
