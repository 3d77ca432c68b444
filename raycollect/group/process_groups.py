"""All groups that this process is a member of, and what their calls and plans run with."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raycollect.channel import Hub
from raycollect.core.protocols import Communicator, NoFaults
from raycollect.engine.instruments import Instruments
from raycollect.errors import GroupBrokenError, GroupExistsError
from raycollect.group.coordinator_server import CoordinatorServer
from raycollect.group.process_group import ProcessGroup
from raycollect.observe import Place, Recorder
from raycollect.pos import Store, tensors


class ProcessGroups:
    """The groups of one process. Any thread may call it; no look-up waits for a group that is being formed.

    Attributes:
        by_id: Those that controllers have this process join, groups inside a group too: they have no name here, as
            only plans use them. There may be two: another one's actor that is a rank of groups which it drives itself.
    """

    _current: ProcessGroups | None = None
    _making = threading.Lock()

    @classmethod
    def current(cls) -> ProcessGroups:
        """Those of this process; a forked child begins with none."""
        with cls._making:
            if cls._current is None or cls._current._pid != os.getpid():
                cls._current = cls()
            return cls._current

    def __init__(self) -> None:
        self.instruments: Instruments = Instruments(
            store=Store(),
            recorder=Recorder(time.monotonic),
            clock=time.monotonic,
            faults=NoFaults(),
            allocate=tensors.allocate,
        )
        self.notices: dict[str, CoordinatorServer] = {}  # those that tell others why a group of that name did not form
        self.drives: Callable[[str], bool] = lambda name: False  # whether this process has declared such a group
        self._pid = os.getpid()
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
        """The group of that name; None: there is none."""
        return self._process_groups.get(name)

    def all(self) -> tuple[ProcessGroup, ...]:
        """All groups."""
        with self._lock:
            return tuple(self._process_groups.values())

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Reserves a name for a group that is being formed; GroupExistsError: it is taken."""
        with self._lock:
            if name in self._claimed:
                raise GroupExistsError(group_name=name, detail="this process is just joining a group of that name")
            if name in self._process_groups:
                detail = f"this process is rank {self._process_groups[name].rank} of a group of that name already"
                raise GroupExistsError(group_name=name, detail=detail)
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
        """Adds a group that a controller declares, in the place of `before`; GroupExistsError: its name is taken."""
        name, spec = process_group.name, process_group.spec
        with self._lock:
            is_next = before is not None and self._process_groups.get(name) is before
            if is_next:
                self._process_groups[name] = process_group  # a call finds one of the two at any time
        if not is_next:
            with self.request(name):
                self.add(process_group)
        self.by_id[spec.group_id] = process_group

    def remove(self, process_group: ProcessGroup) -> None:
        """Forgets a group, which members' calls can't use any more."""
        with self._lock:
            if self._process_groups.get(process_group.name) is process_group:
                del self._process_groups[process_group.name]
        self.instruments.shapes.forget(process_group.spec.group_id)

    # ------------------------------------------------------------------------------------------ of controllers

    def of(self, controller: str) -> list[ProcessGroup]:
        """Those that a controller has this process join."""
        return [one for one in tuple(self.by_id.values()) if one.controller == controller]

    def communicator(self, group_id: str) -> Communicator:
        """What plans of a group run on; GroupBrokenError if there is none."""
        group = self.by_id.get(group_id)
        if group is None:
            raise GroupBrokenError(group_name=group_id, detail="the group was destroyed")
        communicator = group.plans.communicator
        if communicator is None:
            raise group.plans.why_none()
        return communicator

    def received(self, message: Any) -> None:
        """A message of the hub of a group."""
        group = self.by_id.get(message.group_id)
        if group is not None:
            group.received(message)

    def end(self, process_group: ProcessGroup, reason: str) -> None:
        """Forgets a group, whose plans fail from now on, and closes it."""
        group_id, ring = process_group.spec.group_id, self.instruments.tracer.ring
        self.by_id.pop(group_id, None)
        if ring is not None:  # it still tells of the group
            ring.groups[group_id] = Place.of(process_group.spec, process_group.rank)
        self.close(process_group, reason)

    def close(self, process_group: ProcessGroup, reason: str) -> None:
        """Lets go of all that a group holds here. Never waits; may be called twice."""
        self.remove(process_group)
        process_group.close(reason)

    def places(self) -> dict[str, Place]:
        """The groups, by id, for timelines."""
        return {one.spec.group_id: Place.of(one.spec, one.rank) for one in (*self.all(), *tuple(self.by_id.values()))}


def places() -> dict[str, Place]:
    """The groups of this process, by id, for timelines."""
    return ProcessGroups.current().places()
