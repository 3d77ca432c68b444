"""How a communicator is formed: the backend's factory at work, and what it works with."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

from raycollect import backends
from raycollect.backends.streams import current_device, on_device
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
        self._rendezvous = hub.rendezvous(self._generation, deadline_s)
        self._deadline_s = deadline_s
        self._settled = False
        self._made: Communicator | None = None
        self._error: RaycollectError | None = None
        self._left = False
        self._lock = threading.Lock()
        self._device = current_device()  # of the thread that joins
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
        hosts = tuple(owner.spec.hosts[rank] for rank in hub.ranks) if owner.spec.hosts else ()
        spec = replace(owner.spec, group_id=group_id, world_size=len(hub.ranks), hosts=hosts)
        if hub.name != ALL and spec.backend in _ON_TCP:
            spec = replace(spec, backend="tcp", options=())  # the options are the library's
        exchange = CommunicatorExchange(hub, self._generation)
        with on_device(self._device):
            made = make_communicator(spec, hub.ranks.index(owner.rank), self._rendezvous, exchange, owner.host)
        self._rendezvous.deadline_s = math.inf  # a library that connects on first use goes on asking
        return made


def make_communicator(
    spec: GroupSpec, rank: int, rendezvous: Rendezvous, exchange: Exchange, host: str
) -> Communicator:
    """Has a backend make the communicator of a rank; waits for the other ranks, and raises as backends do."""
    create = backends.load(spec.backend, spec.name)
    return create(spec, rank, rendezvous, exchange, host=host, segments=Segments.current())


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
        place = f"check {self._generation}/{launch.seq}/{number}"
        hub = self._hub
        try:
            return hub.meet(place, arrival, launch.timeout_s, lambda: hub.is_off() or self._aborted >= launch.seq)
        except CollectiveTimeoutError as exc:  # backends number the communicator's ranks, the hub the group's
            exc.missing = tuple(map(hub.ranks.index, exc.missing))
            raise
        except RaycollectError as exc:
            raise PlanAbortedError(detail="aborted in the consistency check") from exc

    def abort(self, seq: int) -> None:
        """Wakes whoever waits in this launch, or will."""
        self._aborted = max(self._aborted, seq)
        self._hub.notify()
