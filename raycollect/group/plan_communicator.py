"""A member's end of the communicator that the driver's plans run on."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from raycollect.channel.messages import Message, Publish
from raycollect.core import threads
from raycollect.core.protocols import Communicator
from raycollect.errors import ConnectionLostError, GroupBrokenError, RaycollectError, anew, kept
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.group.communicator_init import make_communicator
from raycollect.group.coordinator import PLANS
from raycollect.group.hub_client import HubClient, HubRendezvous

if TYPE_CHECKING:
    from raycollect.group.process_group import ProcessGroup


class PlanCommunicator:
    """One member's end. Any thread may call it.

    The controller has all members connect once, and orders the launches by the plans' numbers.

    Attributes:
        exchange: The agreement through the controller.
        communicator: The backend's; None before `connect` has made it, and after `refuse` or `close`: see `why_none`.
    """

    def __init__(self, owner: ProcessGroup) -> None:
        send = owner.send  # neither this object nor its owner, which the exchange would keep

        def tell(message: Message) -> None:
            with suppress(ConnectionLostError):  # the end of the lease ends what waits
                send(message)

        self.exchange: ChannelExchange = ChannelExchange(owner.spec.group_id, owner.rank, tell)
        self.communicator: Communicator | None = None
        self._owner = owner
        self._actor_ids = owner.actor_ids
        self._group_name = owner.name
        self._hub = HubClient(owner, PLANS)
        self._hub.generation = owner.spec.group_id  # the only one

    def connect(self) -> RaycollectError | None:
        """Makes the communicator, which waits for the other members. Returns the error if that fails."""
        owner, hub = self._owner, self._hub
        rendezvous = HubRendezvous(hub, hub.generation)
        try:
            made = make_communicator(owner.spec, owner.rank, rendezvous, self.exchange, owner.host)
        except RaycollectError as exc:
            return kept(exc)
        with hub.changed:
            if hub.stop is None:
                self.communicator = made
                return None
        made.close()
        return self.why_none()

    def why_none(self) -> RaycollectError:
        """Why there is no communicator, or none any more."""
        stop = self._hub.stop
        if stop is not None:
            return anew(stop)
        return GroupBrokenError(group_name=self._group_name, detail="this participant never joined")

    def published(self, message: Publish) -> None:
        """Another member has published what this one needs to connect; on the channel's thread."""
        self._hub.published(message)

    def lost(self, actor_id: str) -> bool:
        """An actor's process has ended. Returns False if the caller has to end what is under way."""
        communicator = self.communicator
        if actor_id not in self._actor_ids:
            return True
        return communicator is not None and communicator.lost(self._actor_ids.index(actor_id))

    def give_up(self, reason: str) -> None:
        """Ends all waits for what other members publish."""
        hub = self._hub
        with hub.changed:
            hub.stop = hub.stop or GroupBrokenError(group_name=self._group_name, detail=reason)
            hub.changed.notify_all()

    def refuse(self, reason: str) -> Communicator | None:
        """Plans that begin from now on get no communicator, and hear why; returns what the caller has to close."""
        self.give_up(reason)
        with self._hub.changed:
            communicator, self.communicator = self.communicator, None
        return communicator

    def close(self, reason: str) -> None:
        """Lets go of all that plans hold here. Never waits; may be called twice."""
        communicator = self.refuse(reason)
        if communicator is not None:
            threads.bounded(communicator.close)
