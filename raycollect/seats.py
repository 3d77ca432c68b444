"""All groups that this process is a member of, and what their calls run with. One per process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from raycollect import tensors
from raycollect.channel import Hub
from raycollect.contracts import NoFaults
from raycollect.errors import GroupExistsError
from raycollect.executor import Instruments
from raycollect.joining import Fading
from raycollect.observe import Recorder
from raycollect.pos import Store
from raycollect.seat import Seat

__all__ = ["Seats"]


class Seats:
    """The table of a process. Any thread may call it; no look-up ever waits for a group that is being formed."""

    _current: Seats | None = None
    _making = threading.Lock()

    @classmethod
    def current(cls) -> Seats:
        """The table of this process; a forked child begins with an empty one."""
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
        self.fading: dict[str, Fading] = {}
        self._pid = os.getpid()
        self._seats: dict[str, Seat] = {}
        self._claimed: set[str] = set()
        self._hub: Hub | None = None
        self._lock = threading.Lock()

    @property
    def hub(self) -> Hub:
        """The thread that reads this process's connections to the leaders of its groups."""
        with self._lock:
            if self._hub is None:
                self._hub = Hub()
            return self._hub

    def find(self, name: str) -> Seat | None:
        """This process's place in a group; None where it has none."""
        return self._seats.get(name)

    def all(self) -> tuple[Seat, ...]:
        """The places of this process in all its groups."""
        with self._lock:
            return tuple(self._seats.values())

    @contextmanager
    def claim(self, name: str) -> Iterator[None]:
        """Keeps a name for a group that is being formed.

        Raises:
            GroupExistsError: This process is a member of a group of that name, or becomes one.
        """
        with self._lock:
            if name in self._claimed:
                raise GroupExistsError(group_name=name, detail="this process is just joining a group of that name")
            if name in self._seats:
                detail = f"this process is rank {self._seats[name].rank} of a group of that name already"
                raise GroupExistsError(group_name=name, detail=detail)
            self._claimed.add(name)
            fading = self.fading.pop(name, None)
        try:
            if fading is not None:
                fading.end()
            yield
        finally:
            with self._lock:
                self._claimed.discard(name)

    def add(self, seat: Seat) -> None:
        """Adds a seat under its group's name, which was claimed."""
        with self._lock:
            self._seats[seat.name] = seat

    def adopt(self, seat: Seat) -> None:
        """Adds the seat of a group that the driver declares.

        Raises:
            GroupExistsError: This process is a member of a group of that name, or becomes one.
        """
        with self.claim(seat.name):
            self.add(seat)

    def remove(self, seat: Seat) -> None:
        """Forgets a seat."""
        with self._lock:
            if self._seats.get(seat.name) is seat:
                del self._seats[seat.name]
