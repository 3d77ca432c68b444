"""Forming a communicator: the call of the backend's factory, and its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future

from msgspec.structs import replace

from raycollect import backends
from raycollect.backends.streams import current_device, on_device
from raycollect.core import threads
from raycollect.core.model import GroupSpec, Launch
from raycollect.core.protocols import Communicator, Exchange, Joining, Rendezvous
from raycollect.errors import (
    CollectiveTimeoutError,
    InternalError,
    PlanAbortedError,
    RaycollectError,
    copy_error,
    strip_traceback,
)
from raycollect.group.coordinator import ALL, PLANS
from raycollect.group.coordinator_client import CHECK, CoordinatorClient, CoordinatorRendezvous
from raycollect.pos.segments import Segments

CLOSE_S = 5.0
"""How long a user's thread waits for a backend to release a communicator, which continues in a helper thread."""


def form(client: CoordinatorClient, deadline_s: float) -> Communicator | None:
    """Has the backend's factory make the communicator for which the ranks have met; None: another rank gave up.

    Some factories can't be interrupted, so the factory runs in a helper thread that may be abandoned.
    """
    epoch = client.epoch
    exchange = CommunicatorExchange(client)
    # The current device of the joining thread
    making = threads.call_in_helper(
        _make, client, exchange, CoordinatorRendezvous(client, deadline_s), current_device()
    )
    making.add_done_callback(lambda _: client.notify())
    try:
        is_made = client.wait_made(epoch, making.done, deadline_s)
    except BaseException:  # also a signal
        making.add_done_callback(_close)
        raise
    error = making.exception() if is_made else None
    if not is_made or isinstance(error, PlanAbortedError):
        making.add_done_callback(_close)
        return None
    if isinstance(error, RaycollectError):
        if isinstance(error, CollectiveTimeoutError):  # the backend counts the ranks of the communicator
            error.missing = tuple(client.ranks[rank] for rank in error.missing)
        raise copy_error(strip_traceback(error))
    return making.result()


def _close(making: Future[Communicator]) -> None:
    if making.exception() is None:
        threads.survives(making.result().close)


def _make(
    client: CoordinatorClient, exchange: CommunicatorExchange, rendezvous: CoordinatorRendezvous, device: int | None
) -> Communicator:
    member, ranks = client.member, client.ranks
    spec = spec_of(member.spec, client.name)
    hosts = tuple(spec.hosts[rank] for rank in ranks) if spec.hosts else ()
    group_id = f"{spec.group_id}/{client.name}/{exchange.epoch}"
    spec = replace(spec, group_id=group_id, world_size=len(ranks), hosts=hosts)
    try:
        with on_device(device):
            communicator = make_communicator(spec, ranks.index(member.rank), rendezvous, exchange, member.host)
    except RaycollectError:
        raise
    except Exception as exc:  # noqa: BLE001 - the library is not ours
        raise threads.failed("forming the group", exc) from None
    rendezvous.deadline_s = math.inf  # a library that connects on first use still reads values
    return communicator


def spec_of(spec: GroupSpec, name: str) -> GroupSpec:
    """The group with the backend of one of its communicators."""
    pairs = "" if name in (ALL, PLANS) else backends.get(spec.backend, spec.name).pairs
    return replace(spec, backend=pairs, options=()) if pairs else spec  # the options are the library's


def make_communicator(
    spec: GroupSpec, rank: int, rendezvous: Rendezvous, exchange: Exchange, host: str
) -> Communicator:
    """Has a backend make the communicator of a rank. Waits for the other ranks; raises the backend's errors."""
    create = backends.load(spec.backend, spec.name)
    return create(Joining(spec, rank, rendezvous, exchange, host, Segments.current()))


class CommunicatorExchange:
    """The `Exchange` of a backend's communicator, through the coordinator."""

    def __init__(self, client: CoordinatorClient) -> None:
        self.epoch: str = client.epoch
        self._client = client
        self._round: tuple[int, int] = (0, 0)
        self._aborted = 0

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Sends this rank's arrival and waits for the arrivals of all ranks."""
        seq, number = self._round
        number = number + 1 if seq == launch.seq else 0
        self._round = (launch.seq, number)
        client, call = self._client, self._client.call
        if call is None:
            raise InternalError(detail="a launch without a call")

        def halted() -> bool:
            return client.is_off(call) or self._aborted >= launch.seq

        try:
            return client.meet(call, f"{CHECK} {self.epoch}/{launch.seq}/{number}", arrival, launch.timeout_s, halted)
        except CollectiveTimeoutError as exc:  # the coordinator uses the group's ranks, backends the communicator's
            exc.missing = tuple(map(client.ranks.index, exc.missing))
            raise
        except RaycollectError as exc:
            raise PlanAbortedError(detail="aborted in the consistency check") from exc

    def abort(self, seq: int) -> None:
        """Ends the waits of a launch, also later ones."""
        self._aborted = max(self._aborted, seq)
        self._client.notify()
