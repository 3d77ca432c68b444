"""The participants that a controller has leased: how they are leased, join groups, and are given back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import asdict, replace
from time import monotonic
from typing import Any, Protocol

from raycollect import plain, ray_internals
from raycollect.channel import Hub
from raycollect.channel.messages import Bye, Join, Joined, Leave, Measured, Seen, Store, Stored, Surveyed
from raycollect.errors import (
    ActorGoneError,
    CollectiveTimeoutError,
    ConnectionLostError,
    GroupBrokenError,
    PlanAbortedError,
    RaycollectError,
    from_wire,
)
from raycollect.gate import Orders
from raycollect.group import Membership
from raycollect.model import Member
from raycollect.peer import Peer, PeerOwner

__all__ = ["Peers", "PeersObserver"]


class PeersObserver(Protocol):
    """Who is told of leases; see `tracing.Tracing`."""

    def leased(self, peer: Peer) -> None:
        """A participant was leased; never waits."""
        ...

    def leaving(self, peer: Peer) -> None:
        """A participant is about to be given back; may wait for what it has to say."""
        ...


class _Joining:
    """A member that was asked to join."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.settled = threading.Event()
        self.error: RaycollectError | None = None


class Peers:
    """All participants of one controller. One thread at a time leases, joins and parts; any may do the rest.

    Args:
        owner: Who hears what they say.
        controller_id: Who leases them, as they know it.

    Attributes:
        observer: Who is told of leases, if anybody is.
    """

    def __init__(self, owner: PeerOwner, controller_id: str) -> None:
        self.observer: PeersObserver | None = None
        self._owner = owner
        self._controller_id = controller_id
        self._hub = Hub()
        self._peers: dict[str, Peer] = {}  # actor id -> who was leased
        self._requests = itertools.count(1)
        self._joining: dict[int, _Joining] = {}
        self._inviting = threading.Lock()  # until all members of a group know of it

    def close(self) -> None:
        """Gives all back."""
        self._hub.close()

    # ------------------------------------------------------------------------------------------ who they are

    def add(self, peer: Peer) -> None:
        """Keeps one that was leased."""
        self._peers[peer.info["actor_id"]] = peer

    def get(self, actor_id: str) -> Peer | None:
        """The leased participant behind an actor; None: there is none."""
        return self._peers.get(actor_id)

    def all(self) -> tuple[Peer, ...]:
        """Those that are leased now."""
        return tuple(self._peers.values())

    def leased(self, actor_id: str, memberships: Iterable[Membership]) -> Peer:
        """The leased participant behind an actor, which is a member of one of these groups.

        Raises:
            GroupBrokenError: Its process is gone.
        """
        peer = self._peers.get(actor_id)
        if peer is None or peer.link is None:
            members = (one for membership in memberships for one in membership.members)
            actor = next((one.actor for one in members if one.actor_id == actor_id), f"actor {actor_id[:6]}")
            raise GroupBrokenError(group_name="", detail=f"{actor} is gone")
        return peer

    def of_group(self, group_id: str) -> Iterator[Peer]:
        """Those that are in a group."""
        return (peer for peer in list(self._peers.values()) if group_id in peer.group_ids)

    def drop(self, peer: Peer) -> bool:
        """Forgets one whose connection has ended; False where it is none of them, or was given back."""
        actor_id = peer.info["actor_id"]
        if self._peers.get(actor_id) is not peer:
            return False
        del self._peers[actor_id]
        peer.link = None
        return True

    # ------------------------------------------------------------------------------------------ leases

    def lease(self, member: Member, actor: Any, info: dict[str, Any], deadline_s: float) -> Peer:
        """The leased participant behind a member, leased now or before.

        Args:
            member: The member.
            actor: Its actor's handle.
            info: What it said of itself (`Runtime.describe`).
            deadline_s: When it has to have answered, by `time.monotonic`.

        Raises:
            ActorGoneError: Its process is gone.
            ControllerConflictError: Another process drives it.
            CollectiveTimeoutError: It gave no answer.
        """
        peer = self._peers.get(member.actor_id)
        if peer is not None and peer.info["incarnation"] == member.incarnation:
            return peer
        peer = Peer(self._owner, info, actor, plain.run_program)
        hello = {"controller": self._controller_id, "description": ray_internals.describe_process()}
        try:
            peer.link = self._hub.connect(member.address, hello, peer, max(deadline_s - monotonic(), 0.1))
            peer.welcome(max(deadline_s - monotonic(), 0.1))
        except BaseException as exc:
            if peer.link is not None:
                peer.link.close()
            if isinstance(exc, ConnectionLostError):
                raise ActorGoneError(op="declare", rank=member.rank, actor=member.actor, detail=exc.detail) from exc
            raise
        self.add(peer)
        if self.observer is not None:
            self.observer.leased(peer)
        return peer

    def part(self, membership: Membership) -> None:
        """Lets the members of a group leave it, and ends the leases that no other group needs."""
        group_id = membership.spec.group_id
        for member in membership.members:
            peer = self._peers.get(member.actor_id)
            if peer is None or group_id not in peer.group_ids:
                continue
            peer.group_ids.discard(group_id)
            peer.send(Leave(group_id=group_id))
            if not peer.group_ids:
                if self.observer is not None:
                    self.observer.leaving(peer)
                peer.send(Bye())
                del self._peers[member.actor_id]
                if peer.link is not None:
                    peer.link.close()
                self._owner.parted(peer)

    # ------------------------------------------------------------------------------------------ joining

    def join(self, memberships: Sequence[Membership], deadline_s: float) -> None:
        """Lets all members of groups join these, and waits until they have.

        Args:
            memberships: The groups.
            deadline_s: When they have to have joined, by `time.monotonic`.

        Raises:
            CollectiveTimeoutError: Some have not joined in time.
            RaycollectError: One could not join, or is gone.
        """
        waiting: dict[int, _Joining] = {}
        try:
            for membership in memberships:
                members = [asdict(replace(m, address=replace(m.address, secret=b""))) for m in membership.members]
                asked = {next(self._requests): _Joining(member) for member in membership.members}
                waiting.update(asked)
                self._joining.update(asked)
                with self._inviting:
                    for request, joining in asked.items():
                        rank = joining.member.rank
                        join = Join(request=request, group=asdict(membership.spec), rank=rank, members=members)
                        self.leased(joining.member.actor_id, [membership]).send(join)
            late = [one for one in waiting.values() if not one.settled.wait(max(deadline_s - monotonic(), 0))]
        finally:
            for request in waiting:
                self._joining.pop(request, None)
        errors = [one.error for one in waiting.values() if one.error is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, PlanAbortedError)), errors[0])
        if late:
            names = ", ".join(f"rank {one.member.rank} ({one.member.actor})" for one in late)
            raise CollectiveTimeoutError(
                op="declare",
                group_name=memberships[0].spec.name,
                detail=f"not joined in time: {names}",
                missing=tuple(one.member.rank for one in late),
            )

    def stored(self, peer: Peer, message: Store) -> None:
        """A member publishes something: all others get it, and not before they were invited; on the hub's thread."""
        stored = Stored(group_id=message.group_id, name=message.name, value=message.value)
        with self._inviting:
            for other in self.of_group(message.group_id):
                if other is not peer:
                    other.send(stored)

    def joined(self, message: Joined) -> None:
        """One has joined, or can't; on the hub's thread."""
        joining = self._joining.get(message.request)
        if joining is None:
            return
        if message.error is not None:
            self._fail_join(from_wire(message.error))
        joining.settled.set()

    def give_up(self, peer: Peer, reason: str) -> None:
        """Ends the wait for all who join, where one that is gone is among them; on the hub's thread."""
        if any(one.member.actor_id == peer.info["actor_id"] for one in list(self._joining.values())):
            self._fail_join(ActorGoneError(op="declare", actor=peer.info["actor"], detail=f"it ended ({reason})"))

    def _fail_join(self, error: RaycollectError) -> None:
        """Ends the wait for all members: only one group is formed at a time, and it can't be any more."""
        for joining in list(self._joining.values()):
            joining.error = joining.error or error
            joining.settled.set()

    # ------------------------------------------------------------------------------------------ telling, asking

    def deliver(self, actor_ids: Sequence[str], orders: Orders) -> None:
        """Sends messages to those who are still there, each by its place among actors.

        Raises:
            ProtocolError: One is too long; it and those after it were not sent.
        """
        for at, message in orders:
            peer = self._peers.get(actor_ids[at])
            if peer is not None:
                peer.send(message)

    def survey(self, members: Sequence[Member], timeout_s: float) -> list[Surveyed | None]:
        """Asks members what they hold; None for one that is gone, or has not answered in time."""
        return self._ask(members, Peer.survey, timeout_s)

    def look(self, members: Sequence[Member], timeout_s: float) -> list[Seen | None]:
        """Asks members what they are doing; None for one that is gone, or has not answered in time."""
        return self._ask(members, Peer.look, timeout_s)

    def measure(self, member: Member, seq: int) -> Future[Measured | None] | None:
        """Asks a member how far it is in a plan, and does not wait; None for one that is gone."""
        peer = self._peer_of(member)
        return None if peer is None else peer.measure(seq)

    def _peer_of(self, member: Member) -> Peer | None:
        """The participant that a member is; None where it is gone."""
        peer = self._peers.get(member.actor_id)
        return peer if peer is not None and peer.info["incarnation"] == member.incarnation else None

    def _ask(self, members: Sequence[Member], question: Callable[[Peer], Future[Any]], timeout_s: float) -> list[Any]:
        asked = [None if peer is None else question(peer) for peer in map(self._peer_of, members)]
        answered = wait_for(filter(None, asked), timeout_s).done
        return [one.result() if one in answered else None for one in asked]
