"""How a communicator is formed: the backend's factory at work, and what it works with."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raycollect import backends
from raycollect.backends.tcp.communicator import create as create_tcp
from raycollect.core import threads
from raycollect.core.model import GroupSpec, Launch
from raycollect.core.protocols import Communicator, Exchange, Rendezvous
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError, RaycollectError, anew, kept
from raycollect.group.coordinator import ALL
from raycollect.group.hub_client import HubClient
from raycollect.pos.segments import Segments

_ON_TCP = ("gloo", "torch:gloo")
"""Backends whose communicators of two ranks need no library: between two ranks they use plain sockets anyway."""


class CommunicatorInit:
    """A factory at work. It can't be interrupted everywhere, so it runs in a thread that may be left behind."""

    def __init__(self, hub: HubClient, deadline_s: float) -> None:
        self._hub = hub
        self._generation = hub.generation
        self._deadline_s = deadline_s
        self._settled = False
        self._made: Communicator | None = None
        self._error: RaycollectError | None = None
        self._left = False
        self._lock = threading.Lock()
        threads.start("raycollect-form", self._make)

    def wait(self) -> Communicator | None:
        """Waits for the communicator; None if another rank gave up meanwhile."""
        try:
            there = self._hub.wait_made(self._generation, lambda: self._settled, self._deadline_s)
        except RaycollectError:
            self._leave()
            raise
        if not there or isinstance(self._error, PlanAbortedError):
            self._leave()
            return None
        if self._error is not None:
            raise anew(self._error)
        return self._made

    def _leave(self) -> None:
        with self._lock:
            self._left = True
            made = self._made
        if made is not None:
            made.close()

    def _make(self) -> None:
        made: Communicator | None = None
        try:
            made = self._create()
        except RaycollectError as exc:
            self._error = kept(exc)
        except Exception as exc:  # noqa: BLE001 - the library is not ours
            self._error = threads.failed("forming the group", exc)
        with self._lock:
            self._made = made
            left = self._left
        if left and made is not None:
            threads.survives(made.close)
        self._settled = True
        self._hub.notify()

    def _create(self) -> Communicator:
        hub, owner = self._hub, self._hub.owner
        group_id = f"{owner.spec.group_id}/{hub.name}/{self._generation}"
        spec = replace(owner.spec, group_id=group_id, world_size=len(hub.ranks))
        rendezvous = CommunicatorRendezvous(hub, self._generation, self._deadline_s)
        exchange = CommunicatorExchange(hub, self._generation)
        create = backends.load(spec.backend, spec.name)
        if hub.name != ALL and spec.backend in _ON_TCP:
            create = _create_pair
        rank = hub.ranks.index(owner.rank)
        made = create(spec, rank, rendezvous, exchange, host=owner.host, segments=Segments.current())
        rendezvous.deadline_s = math.inf  # a library that connects on first use goes on asking
        return made


def _create_pair(spec: GroupSpec, rank: int, rendezvous: Rendezvous, exchange: Exchange, **where: Any) -> Communicator:
    return create_tcp(replace(spec, options=()), rank, rendezvous, exchange, **where)  # the options are the library's


class CommunicatorRendezvous:
    """The `Rendezvous` of one generation of a communicator."""

    def __init__(self, hub: HubClient, generation: str, deadline_s: float) -> None:
        self._hub = hub
        self._generation = generation
        self.deadline_s = deadline_s

    def put(self, name: str, value: bytes) -> None:
        """Publishes a value to all ranks."""
        self._hub.publish(self._generation, name, value)

    def get(self, name: str, timeout_s: float) -> bytes:
        """Waits for a value, but no longer than the call that forms the communicator."""
        return self._hub.wait_value(self._generation, name, min(timeout_s, self.deadline_s - time.monotonic()))


class CommunicatorExchange:
    """The `Exchange` of one generation of a communicator: ranks agree at the hub."""

    def __init__(self, hub: HubClient, generation: str) -> None:
        self._hub = hub
        self._generation = generation
        self._round: tuple[int, int] = (0, 0)
        self._aborted = 0

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Gives this rank's arrival and waits for all others'."""
        seq, number = self._round
        number = number + 1 if seq == launch.seq else 0
        self._round = (launch.seq, number)
        place = f"door {self._generation}/{launch.seq}/{number}"
        hub = self._hub
        try:
            return hub.meet(place, arrival, launch.timeout_s, lambda: hub.is_off() or self._aborted >= launch.seq)
        except CollectiveTimeoutError as exc:  # backends number the communicator's ranks, the hub the group's
            exc.missing = tuple(map(hub.ranks.index, exc.missing))
            raise
        except RaycollectError as exc:
            raise PlanAbortedError(detail="aborted at the door") from exc

    def abort(self, seq: int) -> None:
        """Wakes whoever waits in this launch, or will."""
        self._aborted = max(self._aborted, seq)
        self._hub.notify()
