"""This process's part in one declared group: how it joins, and what it gives up when it leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from raycollect import backends, ray_internals
from raycollect.channel.messages import Join, Message
from raycollect.contracts import Communicator
from raycollect.errors import ConnectionLostError, GroupBrokenError, InternalError, ProtocolError, RaycollectError
from raycollect.model import GroupSpec
from raycollect.pos.segments import Segments
from raycollect.rendezvous import ChannelRendezvous, StarExchange
from raycollect.seat import Seat, Watch
from raycollect.seats import Seats

__all__ = ["Participation", "invited"]

log: logging.Logger = logging.getLogger("raycollect")


def invited(message: Join) -> GroupSpec:
    """The group that a message invites to.

    Raises:
        ProtocolError: The invitation makes no sense.
    """
    try:
        spec = GroupSpec(**message.group)
    except (TypeError, ValueError) as exc:
        raise ProtocolError(detail=f"malformed group: {exc}") from exc
    named = [isinstance(member.get("actor"), str) and "ordered" in member for member in message.members]
    if not 0 <= message.rank < spec.world_size or len(named) != spec.world_size or not all(named):
        raise ProtocolError(detail=f"no rank {message.rank} in a group of {spec.world_size} with {len(named)} members")
    return spec


class Participation:
    """One's part in a group, and its seat there, if members call it themselves. Any thread may call it.

    Args:
        spec: The group.
        rank: One's rank.
        members: What `Join` says of all, in rank order.
        seats: The groups of this process.
        send: Sends to the controller that declared the group; raises ConnectionLostError where it is gone.
        watch: What is told of imperative calls that block.

    Attributes:
        spec: See above.
        rank: See above.
        ordered: Whether one's methods come one by one.
        rendezvous: Where its backend's ends find each other.
        exchange: The door that the controller keeps.
        seat: What imperative calls run on; None in a group that only plans use.

    Raises:
        GroupExistsError: This process has a seat in a group of that name.
    """

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        members: Sequence[Mapping[str, Any]],
        seats: Seats,
        send: Callable[[Message], None],
        watch: Watch,
    ) -> None:
        def tell(said: Message) -> None:
            with suppress(ConnectionLostError):  # whoever is gone ends its groups
                send(said)

        self.spec = spec
        self.rank = rank
        self.ordered: bool = bool(members[rank]["ordered"])
        self.rendezvous: ChannelRendezvous = ChannelRendezvous(spec.group_id, tell)
        self.exchange: StarExchange = StarExchange(spec.group_id, rank, tell)
        self.seat: Seat | None = None
        self._seats = seats
        self._communicator: Communicator | None = None
        if not spec.parent:
            self.seat = Seat(
                spec,
                rank,
                send,
                members=[member["actor"] for member in members],
                host=ray_internals.node_address(),
                timeout_s=spec.timeout_s,
                declared=True,
                watch=watch,
            )
            seats.adopt(self.seat)

    @property
    def communicator(self) -> Communicator:
        """This process's end of the group.

        Raises:
            GroupBrokenError: It has none.
        """
        if self._communicator is None:
            raise GroupBrokenError(group_name=self.spec.group_id, detail="this participant never joined")
        return self._communicator

    def connect(self) -> RaycollectError | None:
        """Makes the communicator, which waits for the other members; gives why it could not."""
        spec = self.spec
        try:
            create = backends.load(spec.backend, spec.name)
            made = create(
                spec,
                self.rank,
                self.rendezvous,
                self.exchange,
                host=ray_internals.node_address(),
                segments=Segments.current(),
            )
        except RaycollectError as exc:
            return exc
        except Exception as exc:
            log.exception("joining group %r failed", spec.name)
            return InternalError(detail=f"{type(exc).__name__}: {exc}")
        self._communicator = made
        if self.rendezvous.closed:
            made.close()
        return None

    def disconnect(self) -> None:
        """Closes the communicator: a member has died, and the group must not keep the memory of the dead."""
        if self._communicator is not None:
            self._communicator.close()

    def close(self, reason: str) -> None:
        """Gives up what the group holds here. Never waits; may be called twice."""
        self.rendezvous.close(reason)
        if self.seat is not None:
            self._seats.remove(self.seat)
            self.seat.close(reason)
        self.disconnect()
