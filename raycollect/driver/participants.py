"""The participants that a controller has leased: leases them, makes them join groups, and gives them back."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any

from msgspec.structs import replace

from raycollect.channel import Hub, Mailbox
from raycollect.channel.mailbox import Slot
from raycollect.channel.messages import (
    Bye,
    Join,
    Joined,
    Leave,
    Look,
    Measure,
    Measured,
    Seen,
    Survey,
    Surveyed,
)
from raycollect.core import limits, threads
from raycollect.core.claims import ClaimedError, Claims
from raycollect.core.model import Member
from raycollect.core.signals import waiting
from raycollect.driver.dispatch_lock import answered
from raycollect.driver.participant_link import LinkOwner, ParticipantLink
from raycollect.errors import (
    ActorGoneError,
    CollectiveTimeoutError,
    ConnectionLostError,
    GroupBrokenError,
    RaycollectError,
    copy_error,
    from_wire,
    located,
)
from raycollect.errors.text import listed
from raycollect.group.coordinator import Orders
from raycollect.observe.timeline_session import TimelineSession
from raycollect.planner import Membership
from raycollect.ray_bridge import call_tokens, ray_actors, ray_session
from raycollect.ray_bridge.submitted_calls import SubmittedCalls

UNUSED_S = 0.01
"""How long keys of released values are gathered before their participant is told."""


class _Join:
    """Members that were asked to join a group, by the numbers of the requests."""

    def __init__(self, members: Mapping[int, Member]) -> None:
        self.members = members
        self.missing = set(members)  # those that have not joined
        self.error: RaycollectError | None = None
        self.over = threading.Event()

    def fail(self, error: RaycollectError) -> None:
        """Ends it, as the group can't be formed.

        Once all have joined, the group exists, and later calls report the loss of a member.
        """
        if self.missing and self.error is None:
            self.error = error
            self.over.set()

    def joined(self, request: int) -> None:
        """A member has joined."""
        self.missing.discard(request)
        if not self.missing:
            self.over.set()


class Participants:
    """All participants of one controller. Any thread may call it.

    Attributes:
        owner: Hears what they say; set before the first lease.
        timeline: Records those that are leased; None: nothing does.
        inviting: Held until all members of a group know of it.
    """

    owner: LinkOwner

    def __init__(self, controller_id: str, mailbox: Mailbox | None = None) -> None:
        self.timeline: TimelineSession | None = None
        self._controller_id = controller_id
        self._mailbox = mailbox
        self._left: list[tuple[Slot, int]] = []  # slots that may be taken still, and the processes that may have them
        self._hub = Hub()
        self._due: deque[Callable[[], None]] = deque()  # calls for `_soon`, of all participants
        self._is_due = False
        self._peers: dict[str, ParticipantLink] = {}  # by actor id
        self._lock = threading.RLock()  # guards the leases and their groups; a finalizer may destroy a group
        self._leasing = Claims()  # actor ids: one thread at a time connects to an actor
        self._requests = itertools.count(1)
        self._joins: dict[int, _Join] = {}  # by the requests of their members
        self.inviting: threading.Lock = threading.Lock()

    def close(self) -> None:
        """Ends all leases."""
        self._hub.close()
        self._is_due = False  # calls that are due are dropped
        call_tokens.let_go(waits=True)

    # ------------------------------------------------------------------------------------------ queries

    def add(self, peer: ParticipantLink, group_id: str = "") -> None:
        """Adds a leased participant, for a group if its id is given."""
        with self._lock:
            if group_id:
                peer.group_ids.add(group_id)
            self._peers[peer.info["actor_id"]] = peer

    def all(self) -> tuple[ParticipantLink, ...]:
        """The leased participants."""
        return tuple(self._peers.values())

    def leased(self, actor_id: str, memberships: Iterable[Membership]) -> ParticipantLink:
        """The leased participant of an actor in one of these groups; GroupBrokenError if its process has ended."""
        peer = self._peers.get(actor_id)
        if peer is None or peer.link is None:
            members = (member for membership in memberships for member in membership.members)
            actor = next((member.actor for member in members if member.actor_id == actor_id), f"actor {actor_id[:6]}")
            raise GroupBrokenError(group_name="", detail=f"{actor} is gone")
        return peer

    def joining(self, member: Member) -> ParticipantLink:
        """The leased participant of a member that will join a group; ActorGoneError if its process has ended."""
        peer = self._peers.get(member.actor_id)
        if peer is None or peer.link is None:
            detail = "its process ended before it was asked to join"
            raise ActorGoneError(op="declare", rank=member.rank, actor=member.actor, detail=detail)
        return peer

    def drop(self, peer: ParticipantLink) -> bool:
        """Removes a participant whose connection has ended; False if its lease had ended before."""
        if not self._forget(peer):
            return False
        peer.link = None
        if peer.slot is not None:
            self._left.append((peer.slot, int(peer.info["pid"])))
        return True

    def _give_back_slots(self) -> None:
        """Takes back the slots of participants that have died; those that live do so themselves."""
        for entry in self._left[:]:
            slot, pid = entry
            if self._mailbox is not None and not Path(f"/proc/{pid}").exists():
                self._mailbox.give_back(slot)
                self._left.remove(entry)

    def _forget(self, peer: ParticipantLink) -> bool:
        actor_id = peer.info["actor_id"]
        with self._lock:  # its connection may end while its lease is ended
            return self._peers.get(actor_id) is peer and self._peers.pop(actor_id, None) is peer

    # ------------------------------------------------------------------------------------------ leases

    def lease(
        self,
        member: Member,
        actor: Any,
        info: dict[str, Any],
        calls: SubmittedCalls | None,
        deadline_s: float,
        *,
        group_id: str,
    ) -> ParticipantLink:
        """Leases a member for a group; a member that is leased already gets that group as well.

        Args:
            member: The member.
            actor: Its actor.
            info: Its description.
            calls: Its calls since before the description.
            deadline_s: When to give up, by `time.monotonic`.
            group_id: The id of the group.

        Raises:
            ActorGoneError: Its process has ended.
            CollectiveTimeoutError: It has not answered in time.
            ControllerConflictError: Another process drives it.
        """
        try:
            with self._leasing.claim(member.actor_id, deadline_s):
                with self._lock:
                    leased = self._peers.get(member.actor_id)
                    if leased is not None and leased.info["incarnation"] == member.incarnation:
                        leased.group_ids.add(group_id)
                        return leased
                if leased is not None:
                    _end_former(leased, self._hub, deadline_s)
                calls = calls if info["participant"] and info["ordered"] else None
                link_type = getattr(actor, "link_type", ParticipantLink)
                peer: ParticipantLink = link_type(
                    self.owner, info, actor, controller_id=self._controller_id, calls=calls
                )
                self._connect(peer, member, deadline_s, group_id)
                return peer
        except ClaimedError:
            detail = "another thread is connecting to it, for another group"
            raise CollectiveTimeoutError(op="lease", rank=member.rank, actor=member.actor, detail=detail) from None

    def _connect(self, peer: ParticipantLink, member: Member, deadline_s: float, group_id: str) -> None:
        """Opens the connection with which a lease begins."""
        owner = secrets.token_bytes(8)
        hello: dict[str, Any] = {
            "controller": self._controller_id,
            "description": ray_actors.describe_process(),
            "owner": owner,
            "worker": ray_session.worker_id(),
        }
        is_near = member.machine == ray_session.machine_id() and peer.calls is not None
        mailbox = self._mailbox if is_near else None
        self._give_back_slots()
        slot = None if mailbox is None else mailbox.take_slot()
        if mailbox is not None and slot is not None:
            hello["mailbox"] = mailbox.segment, slot.at
        try:
            peer.link = self._hub.connect(member.address, hello, peer, max(deadline_s - monotonic(), 0.1))
            if peer.welcome(max(deadline_s - monotonic(), 0.1)):
                peer.slot = slot
        except BaseException as exc:
            if peer.link is not None:
                peer.link.close()
            lacking = limits.exhausted(exc.__cause__, f"connecting to rank {member.rank} ({member.actor})")
            if isinstance(exc, ConnectionLostError) and lacking is not None:
                raise copy_error(lacking) from exc
            if isinstance(exc, ConnectionLostError):
                raise ActorGoneError(op="declare", rank=member.rank, actor=member.actor, detail=exc.detail) from exc
            raise
        finally:
            if mailbox is not None and slot is not None and peer.has_mailbox is False:
                mailbox.give_back(slot)
            elif slot is not None and peer.has_mailbox is None:
                # A participant that may have got the slot, and has not answered, returns it itself, or dies
                self._left.append((slot, int(peer.info["pid"])))
        peer.lend_tokens(owner, self._soon)
        self.add(peer, group_id)
        if peer.is_lost:  # perhaps before it was added: no further event reports it
            peer.retire()
            self.drop(peer)
            detail = "its connection ended as it was leased"
            raise ActorGoneError(op="declare", rank=member.rank, actor=member.actor, detail=detail)
        if self.timeline is not None and not peer.is_here:
            self.timeline.leased(peer)

    def later(self, delay_s: float, call: Callable[[], None]) -> bool:
        """Makes a call on the hub's thread later; False if the hub is closed. Takes no lock."""
        return self._hub.later(delay_s, call)

    def _soon(self, call: Callable[[], None]) -> bool:
        """Makes a call on the hub's thread after `UNUSED_S` at most; False if the hub is closed."""
        self._due.append(call)  # before the flag is read: the thread that clears it makes the calls afterwards
        if self._is_due:
            return True
        self._is_due = True

        def make() -> None:
            self._is_due = False
            for _ in range(len(self._due)):  # calls that these add are for the next time
                threads.survives(self._due.popleft())

        if not self._hub.later(UNUSED_S, make):
            self._is_due = False
        return self._is_due

    def part(self, membership: Membership) -> None:
        """Has the members of a group leave it, and ends the leases that no other group needs."""
        group_id = membership.spec.group_id
        peers = [self._peers.get(member.actor_id) for member in membership.members]
        leaving = [peer for peer in peers if peer is not None and group_id in peer.group_ids]
        for peer in leaving:
            peer.send(Leave(group_id=group_id))
        for peer in leaving:
            with self._lock:  # another thread may end its other group, or lease it for a new one
                peer.group_ids.discard(group_id)
                is_last = not peer.group_ids
            if is_last and self.timeline is not None:
                self.timeline.leaving(peer)
            with self._lock:
                is_last = is_last and not peer.group_ids and self._forget(peer)
                if is_last:  # under the lock: before another thread leases the actor again
                    peer.send(Bye())
            if is_last:
                peer.retire()
                self.owner.parted(peer)
        call_tokens.let_go()  # also of members that have died

    # ------------------------------------------------------------------------------------------ joining

    def join(self, membership: Membership, deadline_s: float, replaces: str = "") -> None:
        """Has all members join a group, and waits until they have joined.

        Args:
            membership: The group.
            deadline_s: When to give up, by `time.monotonic`.
            replaces: As in `Join`.
        """
        spec = membership.spec
        join = _Join({next(self._requests): member for member in membership.members})
        members = [replace(member, address=replace(member.address, secret=b"")) for member in membership.members]
        try:
            self._joins.update(dict.fromkeys(join.members, join))
            with self.inviting:
                for request, member in join.members.items():
                    invitation = Join(request=request, group=spec, rank=member.rank, members=members, replaces=replaces)
                    self.joining(member).send(invitation)
            is_over = waiting(join.over.wait, deadline_s - monotonic())
        finally:
            for request in join.members:
                self._joins.pop(request, None)
        if join.error is not None:
            raise copy_error(join.error)
        late = [] if is_over else [member for request, member in join.members.items() if request in join.missing]
        if late:  # else the last one has joined meanwhile
            names = listed(f"rank {member.rank} ({member.actor})" for member in late)
            raise CollectiveTimeoutError(
                op="declare",
                group_name=spec.name,
                detail=f"these have not joined in time: {names}; an actor that is pending or busy can't join",
                missing=tuple(member.rank for member in late),
            )

    def joined(self, message: Joined) -> None:
        """A member has joined, or can't; on the hub's thread."""
        join = self._joins.get(message.request)
        if join is None:
            return
        if message.error is None:
            join.joined(message.request)
        else:
            member = join.members[message.request]
            join.fail(located(from_wire(message.error), member.rank, member.actor))

    def give_up(self, peer: ParticipantLink, reason: str) -> None:
        """Fails the joins of a participant whose connection has ended; on the hub's thread."""
        for join in tuple(self._joins.values()):
            if any(member.actor_id == peer.info["actor_id"] for member in join.members.values()):
                join.fail(ActorGoneError(op="declare", actor=peer.info["actor"], detail=f"it ended ({reason})"))

    # ------------------------------------------------------------------------------------------ messages and questions

    def deliver(self, actor_ids: Sequence[str], outgoing: Orders) -> None:
        """Sends pairs of (place among actors, message) to the actors that are still leased."""
        for at, message in outgoing:
            peer = self._peers.get(actor_ids[at])
            if peer is not None:
                peer.send(message)

    def survey(self, members: Sequence[Member], timeout_s: float) -> list[Surveyed | None]:
        """Asks members for their statistics; None for a member that has ended, or has not answered in time."""
        return _answers([self._ask(member, Survey) for member in members], timeout_s)

    def look(self, members: Sequence[Member], timeout_s: float) -> list[Seen | None]:
        """Asks members for their activity; None for a member that has ended, or has not answered in time."""
        return _answers([self._ask(member, Look) for member in members], timeout_s)

    def begin_look(self, members: Iterable[Member]) -> dict[str, Future[Any] | None]:
        """Asks members for their activity, without waiting; by actor, None for a member that has ended."""
        return {member.actor_id: self._ask(member, Look) for member in members}

    def has_ended(self, member: Member, timeout_s: float) -> bool:
        """Whether a member's process is known to have ended; False for one that does not answer in time."""
        question = self._ask(member, Look)
        return question is None or (question in answered([question], timeout_s) and question.result() is None)

    def measure(self, member: Member, seq: int) -> Future[Measured | None] | None:
        """Asks a member for its progress in a plan, without waiting; None if it has ended."""
        return self._ask(member, Measure, seq=seq)

    def _ask(self, member: Member, question: type[Look | Measure | Survey], **fields: Any) -> Future[Any] | None:
        peer = self._peers.get(member.actor_id)
        if peer is None or peer.info["incarnation"] != member.incarnation:
            return None
        return peer.ask(question, **fields)


def look_answers(looks: Mapping[str, Future[Any] | None], timeout_s: float) -> dict[str, Seen | None]:
    """The answers to `Participants.begin_look`, by actor; None for a member that has ended, or is late."""
    return dict(zip(looks, _answers(looks.values(), timeout_s), strict=True))


def _answers(futures: Collection[Future[Any] | None], timeout_s: float) -> list[Any]:
    done = answered(futures, timeout_s)
    return [future.result() if future in done else None for future in futures]


def _end_former(former: ParticipantLink, hub: Hub, deadline_s: float) -> None:
    """Ends the connection to a process that Ray has replaced; returns when its groups are broken."""
    link, ended = former.link, threading.Event()
    if link is None:
        return

    def end() -> None:
        former.closed(link, ConnectionLostError(detail="Ray has restarted the actor"))
        ended.set()

    if hub.later(0, end):
        waiting(ended.wait, deadline_s - monotonic())
    link.close()
