"""All groups of which a process is a member."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raycollect.channel import Hub
from raycollect.core.protocols import Communicator
from raycollect.engine.run_cache import RunCache
from raycollect.errors import GroupBrokenError, GroupExistsError
from raycollect.group.coordinator_server import CoordinatorServer
from raycollect.group.process_group import ProcessGroup
from raycollect.observe import TracedGroup, Tracer


class ProcessGroups:
    """The groups of one process. Any thread may call it; a look-up never waits for a group that is being formed.

    Args:
        cache: The cached runs, forgotten with their group.
        tracer: Whether calls of groups are recorded; a timeline in progress keeps the names of groups that end.

    Attributes:
        notices: The servers that report a failure to form, by the group's name.
        drives: Whether this process has declared a group of that name.
        by_id: The groups that controllers had this process join, also subgroups: only plans use these, so they have no
            name here. An actor of one controller may drive groups of which it is a rank itself, so a process may have
            two controllers.
    """

    def __init__(self, cache: RunCache | None = None, tracer: Tracer | None = None) -> None:
        self._cache = cache or RunCache()
        self.tracer: Tracer = tracer or Tracer()
        self.notices: dict[str, CoordinatorServer] = {}
        self.drives: Callable[[str], bool] = lambda name: False
        self.by_id: dict[str, ProcessGroup] = {}
        self._process_groups: dict[str, ProcessGroup] = {}
        self._claimed: set[str] = set()
        self._hub: Hub | None = None
        self._lock = threading.Lock()

    @property
    def hub(self) -> Hub:
        """The thread that reads the connections to the leaders of this process's groups."""
        with self._lock:
            if self._hub is None:
                self._hub = Hub()
            return self._hub

    def find(self, name: str) -> ProcessGroup | None:
        """The group of that name, or None."""
        return self._process_groups.get(name)

    def all(self) -> tuple[ProcessGroup, ...]:
        """All groups."""
        with self._lock:
            return tuple(self._process_groups.values())

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Reserves a name for a group that is being formed; GroupExistsError: the name is in use."""
        with self._lock:
            self._check_free(name)
            self._claimed.add(name)
            notice = self.notices.pop(name, None)
        try:
            if notice is not None:
                notice.end()
            yield
        finally:
            with self._lock:
                self._claimed.discard(name)

    def add(self, process_group: ProcessGroup) -> None:
        """Adds a group whose name is reserved."""
        with self._lock:
            self._process_groups[process_group.name] = process_group

    def adopt(self, process_group: ProcessGroup, before: ProcessGroup | None = None) -> None:
        """Adds a group that a controller declares; it replaces `before`. Never waits.

        Raises:
            GroupExistsError: The name is in use.
        """
        name = process_group.name
        with self._lock:
            if before is None or self._process_groups.get(name) is not before:
                self._check_free(name)
            self._process_groups[name] = process_group  # at any time a call finds the old group or the new one
        self.by_id[process_group.spec.group_id] = process_group

    def _check_free(self, name: str) -> None:
        if name in self._claimed:
            raise GroupExistsError(group_name=name, detail="this process is just joining a group of that name")
        group = self._process_groups.get(name)
        if group is not None:
            detail = f"this process is rank {group.rank} of a group of that name already"
            raise GroupExistsError(group_name=name, detail=detail)

    def remove(self, process_group: ProcessGroup) -> None:
        """Removes a group; members' calls can't use it any more."""
        with self._lock:
            if self._process_groups.get(process_group.name) is process_group:
                del self._process_groups[process_group.name]
        self._cache.forget(process_group.spec.group_id)

    # ------------------------------------------------------------------------------------------ of controllers

    def of(self, controller: str) -> list[ProcessGroup]:
        """The groups that a controller had this process join."""
        return [group for group in tuple(self.by_id.values()) if group.controller == controller]

    def communicator(self, group_id: str) -> Communicator:
        """The communicator of a group's plans; GroupBrokenError: this process has none."""
        group = self.by_id.get(group_id)
        if group is None:
            raise GroupBrokenError(group_name=group_id, detail="the group was destroyed")
        communicator = group.plans.communicator
        if communicator is None:
            raise group.plans.why_none()
        return communicator

    def received(self, message: Any) -> None:
        """Handles a message of the coordinator of a group."""
        group = self.by_id.get(message.group_id)
        if group is not None:
            group.received(message)

    def end(self, process_group: ProcessGroup, reason: str) -> None:
        """Removes and closes a group; its later plans fail."""
        group_id, ring = process_group.spec.group_id, self.tracer.ring
        self.by_id.pop(group_id, None)
        if ring is not None:  # the timeline keeps the group's name
            ring.groups[group_id] = TracedGroup.of(process_group.spec, process_group.rank)
        self.close(process_group, reason)

    def close(self, process_group: ProcessGroup, reason: str) -> None:
        """Releases all resources of a group. Never waits; may be called twice."""
        self.remove(process_group)
        process_group.close(reason)

    def name_of(self, group_id: str) -> str:
        """The name of a group; its id if the group is unknown."""
        groups = (*tuple(self.by_id.values()), *self.all())
        return next((group.spec.name for group in groups if group.spec.group_id == group_id), group_id)

    def places(self) -> dict[str, TracedGroup]:
        """The groups, by id, for timelines."""
        return {
            group.spec.group_id: TracedGroup.of(group.spec, group.rank)
            for group in (*self.all(), *tuple(self.by_id.values()))
        }
