"""The coordinators of a controller's groups, which match the members' own (imperative) calls, and relay values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from raycollect.channel.messages import Met, Stuck
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.participants import Participants
from raycollect.errors import ProtocolError, to_wire
from raycollect.group.coordinator import Coordinator, Orders
from raycollect.planner import Membership


class Coordinators:
    """One `Coordinator` per group. Only the hub's thread uses them; any thread may open and close one."""

    def __init__(self, peers: Participants) -> None:
        self._peers = peers
        self._coordinators: dict[str, tuple[Coordinator, Membership]] = {}

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._coordinators

    def open(self, membership: Membership) -> None:
        """Adds the coordinator of a group."""
        spec = membership.spec
        self._coordinators[spec.group_id] = (Coordinator(spec.group_id, spec.world_size, spec.name), membership)

    def close(self, membership: Membership) -> None:
        """Removes the coordinator of a group."""
        self._coordinators.pop(membership.spec.group_id, None)

    def is_deserted(self, membership: Membership) -> bool:
        """Whether all members of a group have left it."""
        entry = self._coordinators.get(membership.spec.group_id)
        return entry is None or len(entry[0].gone) == membership.spec.world_size

    def receive(self, peer: ParticipantLink, message: Any) -> None:
        """Handles a member's message; ignored where the group was destroyed."""
        entry = self._coordinators.get(message.group_id)
        if entry is not None:
            coordinator, membership = entry
            self.relay(membership, coordinator.receive(membership.rank_of(peer.info["actor_id"]), message))

    def spread(self, peer: ParticipantLink, message: Stuck, actor_ids: Sequence[str]) -> None:
        """Tells all groups of a participant whether it waits in a plan, as a member's call may wait for it."""
        for group_id in peer.group_ids & self._coordinators.keys():
            _, membership = self._coordinators[group_id]
            ranks = [rank for rank in map(membership.rank_of, actor_ids) if rank >= 0]
            self.receive(peer, replace(message, group_id=group_id, ranks=ranks))

    def lost(self, peer: ParticipantLink, group_id: str, reason: str) -> None:
        """A member's process has ended."""
        entry = self._coordinators.get(group_id)
        if entry is not None:
            coordinator, membership = entry
            self.relay(membership, coordinator.lost(membership.rank_of(peer.info["actor_id"]), reason))

    def relay(self, membership: Membership, outgoing: Orders) -> None:
        """Sends a coordinator's messages; a result that is too long for a frame fails its calls."""
        for rank, message in outgoing:
            try:
                self._peers.deliver(membership.participants, [(rank, message)])
            except ProtocolError as exc:
                if not isinstance(message, Met):
                    raise
                denial = replace(message, call=0, blobs=[], error=to_wire(exc))
                self._peers.deliver(membership.participants, [(rank, denial)])
