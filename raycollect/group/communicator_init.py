"""How a communicator is formed: the backend's factory at work, and what it works with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future

from msgspec.structs import replace

from raycollect import backends
from raycollect.backends.streams import current_device, on_device
from raycollect.core import threads
from raycollect.core.model import GroupSpec, Launch
from raycollect.core.protocols import Communicator, Exchange, Rendezvous
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError, RaycollectError, anew, kept
from raycollect.group.coordinator import ALL
from raycollect.group.hub_client import HubClient, HubRendezvous
from raycollect.pos.segments import Segments

CLOSE_S = 5.0
"""How long a thread of the user's waits until a backend has released a communicator; that goes on aside."""


def form(hub: HubClient, deadline_s: float) -> Communicator | None:
    """Has the backend's factory make the communicator for which the ranks have met; None: another rank gave up.

    The factory can't be interrupted everywhere, so it runs in a thread that may be left behind.
    """
    generation = hub.generation
    exchange = CommunicatorExchange(hub, generation)
    # The device is that of the thread that joins
    making = threads.apart(_make, hub, exchange, HubRendezvous(hub, generation, deadline_s), current_device())
    making.add_done_callback(lambda _: hub.notify())
    try:
        is_made = hub.wait_made(generation, making.done, deadline_s)
    except BaseException:  # also a signal
        making.add_done_callback(_close)
        raise
    error = making.exception() if is_made else None
    if not is_made or isinstance(error, PlanAbortedError):
        making.add_done_callback(_close)
        return None
    if isinstance(error, RaycollectError):
        if isinstance(error, CollectiveTimeoutError):  # the backend counts the ranks of the communicator
            error.missing = tuple(hub.ranks[rank] for rank in error.missing)
        raise anew(kept(error))
    return making.result()


def _close(making: Future[Communicator]) -> None:
    if making.exception() is None:
        threads.survives(making.result().close)


def _make(
    hub: HubClient, exchange: CommunicatorExchange, rendezvous: HubRendezvous, device: int | None
) -> Communicator:
    owner = hub.owner
    group_id = f"{owner.spec.group_id}/{hub.name}/{exchange.generation}"
    hosts = tuple(owner.spec.hosts[rank] for rank in hub.ranks) if owner.spec.hosts else ()
    spec = replace(owner.spec, group_id=group_id, world_size=len(hub.ranks), hosts=hosts)
    if hub.name != ALL and (other := backends.get(spec.backend).pairs):
        spec = replace(spec, backend=other, options=())  # the options are the library's
    try:
        with on_device(device):
            made = make_communicator(spec, hub.ranks.index(owner.rank), rendezvous, exchange, owner.host)
    except RaycollectError:
        raise
    except Exception as exc:  # noqa: BLE001 - the library is not ours
        raise threads.failed("forming the group", exc) from None
    rendezvous.deadline_s = math.inf  # a library that connects on first use goes on asking
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
        self.generation = generation
        self._hub = hub
        self._round: tuple[int, int] = (0, 0)
        self._aborted = 0

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Gives this rank's arrival and waits for all others'."""
        seq, number = self._round
        number = number + 1 if seq == launch.seq else 0
        self._round = (launch.seq, number)
        place = f"check {self.generation}/{launch.seq}/{number}"
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
