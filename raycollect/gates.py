"""Where the members of a controller's groups meet for calls of their own: each group has its `Gate` here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raycollect.channel.messages import Deny, Met, Stuck
from raycollect.errors import ProtocolError, to_wire
from raycollect.gate import Gate, Orders
from raycollect.group import Membership
from raycollect.peer import Peer
from raycollect.peers import Peers

__all__ = ["Gates"]


class Gates:
    """The gates of all groups of one controller. Only the hub's thread goes through them; any may open and close one.

    Args:
        peers: The controller's participants.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._gates: dict[str, tuple[Gate, Membership]] = {}

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._gates

    def open(self, membership: Membership) -> None:
        """Lets the members of a group meet."""
        spec = membership.spec
        self._gates[spec.group_id] = (Gate(spec.group_id, spec.world_size, spec.name), membership)

    def close(self, membership: Membership) -> None:
        """Lets nobody meet any more."""
        self._gates.pop(membership.spec.group_id, None)

    def is_deserted(self, membership: Membership) -> bool:
        """Whether all members of a group have left it."""
        found = self._gates.get(membership.spec.group_id)
        return found is None or len(found[0].gone) == membership.spec.world_size

    def receive(self, peer: Peer, message: Any) -> None:
        """What a member says to the hub of its group."""
        found = self._gates.get(message.group_id)
        if found is not None:  # else the group was destroyed meanwhile
            gate, membership = found
            self.relay(membership, gate.receive(membership.rank_of(peer.info["actor_id"]), message))

    def spread(self, peer: Peer, message: Stuck, actor_ids: Sequence[str]) -> None:
        """Tells all groups of a participant that it waits in a plan, or no more: any may have a call that waits for it.

        Args:
            peer: The participant.
            message: What it said, of no group.
            actor_ids: The participants of the plan.
        """
        for group_id in peer.group_ids & self._gates.keys():
            _, membership = self._gates[group_id]
            ranks = [rank for rank in map(membership.rank_of, actor_ids) if rank >= 0]
            self.receive(peer, replace(message, group_id=group_id, ranks=ranks))

    def lost(self, peer: Peer, group_id: str, reason: str) -> None:
        """A member's process is gone."""
        found = self._gates.get(group_id)
        if found is not None:
            gate, membership = found
            self.relay(membership, gate.lost(membership.rank_of(peer.info["actor_id"]), reason))

    def relay(self, membership: Membership, orders: Orders) -> None:
        """Carries out what a gate wants said; where what all bring to a meeting is too long, their calls end.

        Raises:
            ProtocolError: Something else is too long.
        """
        for rank, message in orders:
            try:
                self._peers.deliver(membership.roster.members, [(rank, message)])
            except ProtocolError as exc:
                if not isinstance(message, Met):
                    raise
                denial = Deny(group_id=message.group_id, lane=message.lane, call=0, error=to_wire(exc))
                self._peers.deliver(membership.roster.members, [(rank, denial)])
