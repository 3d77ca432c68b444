"""Handles the messages of a controller's participants, on the hub's thread, so nothing here may wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raycollect.channel import messages
from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.driver.groups import Groups
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.participants import Participants
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.driver.plans import PlansUnderWay
from raycollect.errors import (
    GroupBrokenError,
    PlanAbortedError,
    ProtocolError,
    Violation,
    from_wire,
    located,
    refusal,
)
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import direct_transport


class ControllerMessages:
    """The owner of a controller's participant links: passes each message to its plan, group or join."""

    def __init__(self, participants: Participants, plans: PlansUnderWay, groups: Groups) -> None:
        self._participants = participants
        self._plans = plans
        self._groups = groups

    def received(self, peer: ParticipantLink, message: Any) -> None:
        """A message of a participant."""
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise ProtocolError(detail=f"unexpected message {type(message).__name__}")
        handle(self, peer, message)

    def lost(self, peer: ParticipantLink, reason: str) -> None:
        """A participant's connection has ended."""
        plans = self._plans
        if not self._participants.drop(peer):
            return
        threads.survives(self._groups.lost, peer, reason)
        plans.revision = object()
        threads.survives(self._participants.give_up, peer, reason)
        for tracker in plans.trackers():
            position = tracker.plan.positions.get(peer.info["actor_id"])
            if position is not None:
                try:
                    plans.send(tracker, tracker.lost(position, reason))
                except Exception as exc:  # noqa: BLE001 - any: a caller waits for the plan
                    plans.fail(tracker, threads.failed("telling who is gone", exc))
        threads.survives(self._groups.bury, peer)

    def parted(self, peer: ParticipantLink) -> None:
        """The calling thread has ended a participant's lease: the participant aborts its plans, without a report."""
        reason = PlanAbortedError(detail=f"{peer.info['actor']} was given back")
        for tracker in self._plans.trackers():
            position = _position(tracker, peer)
            if tracker.is_pending(position):
                self._plans.fail(tracker, reason, unsent=(position,))

    # ------------------------------------------------------------------------------------------ groups

    def _meet(self, peer: ParticipantLink, message: Any) -> None:
        self._groups.coordinators.receive(peer, message)

    def _publish(self, peer: ParticipantLink, message: messages.Publish) -> None:
        """A member publishes a value: the others get it after their invitation."""
        with self._participants.inviting:
            self._meet(peer, message)

    def _stuck(self, peer: ParticipantLink, message: messages.Stuck) -> None:
        coordinators = self._groups.coordinators
        if message.group_id:
            coordinators.receive(peer, message)
            return
        tracker = self._plans.with_launch(message.seq)
        if tracker is not None or not message.seq:
            coordinators.spread(peer, message, () if tracker is None else tracker.plan.participants)

    def _depart(self, peer: ParticipantLink, message: messages.Gone) -> None:
        """A member has left by itself: the group is broken for the driver, and the member gets an answer."""
        groups = self._groups
        if message.group_id in groups.coordinators:
            groups.breaks(message.group_id, f"{peer.info['actor']} has left: it destroyed the group itself")
            self._plans.revision = object()
            groups.coordinators.receive(peer, message)
        peer.send(message)

    # ------------------------------------------------------------------------------------------ plans

    def _arrive(self, peer: ParticipantLink, message: messages.Arrive) -> None:
        tracker = self._plans.with_launch(message.seq)
        if tracker is not None:
            self._plans.send(tracker, tracker.arrive(_position(tracker, peer), message))

    def _done(self, peer: ParticipantLink, message: messages.Done) -> None:
        tracker = self._plans.find(message.seq)
        if tracker is None:
            return
        position = _position(tracker, peer)
        error = None if message.error is None else from_wire(message.error)
        if error is not None and position >= 0:
            error = located(error, tracker.member(position).rank, peer.info["actor"])
        if isinstance(error, GroupBrokenError):
            for membership in tracker.location.blamed(error):
                self._groups.breaks(membership.spec.group_id, error.detail)
            self._plans.revision = object()
        if position >= 0:
            self._plans.send(tracker, tracker.done(position, error, message.story, others=message.ranks))

    def _ran(self, peer: ParticipantLink, message: messages.Ran) -> None:
        """A participant has ended a run; the waiter of the run decodes the values."""
        tracker = self._plans.find(message.seq)
        if tracker is not None and (position := _position(tracker, peer)) >= 0:
            tracker.answered(position, message.payload)

    def _behind(self, peer: ParticipantLink, message: messages.Behind) -> None:
        """A participant can't tell whether a call has ended: an actor task behind all calls so far tells it."""
        tracker = self._plans.find(message.seq)
        if tracker is None:
            return
        try:
            peer.fence(message.seq)
        except Exception as exc:  # noqa: BLE001 - whatever Ray raises
            rank = tracker.member(_position(tracker, peer)).rank
            self._plans.fail(tracker, peer.unsent(exc, rank))

    def _waiting(self, peer: ParticipantLink, message: messages.Waiting) -> None:
        """A participant waits for a method that has not ended: watch its ref, which may hold an error instead."""
        tracker = self._plans.find(message.seq)
        key = Key(message.key)
        ref = tracker.refs.get(key) if tracker is not None else None
        if tracker is None or ref is None:
            return

        def settled(value: Any) -> None:
            secret = peer.info["address"].secret
            if isinstance(value, Handle) and value.address.secret == secret:
                return  # the participant has it, or has freed it
            call, rank = tracker.location.first_use(key)
            violation = Violation(kind="lost", rank=rank, field="operand", found="not there", ref=ref.hex(), call=call)
            error = refusal(tracker.plan.name, tracker.group_name, (violation,))
            self._plans.fail(tracker, error)

        direct_transport.on_completed(ref, settled)


def _position(tracker: PlanTracker, peer: ParticipantLink) -> int:
    return tracker.plan.positions.get(peer.info["actor_id"], -1)


_HANDLERS: dict[type, Callable[[ControllerMessages, ParticipantLink, Any], None]] = {
    messages.Joined: lambda mine, peer, message: mine._participants.joined(message),
    messages.Arrive: ControllerMessages._arrive,
    messages.Behind: ControllerMessages._behind,
    messages.Done: ControllerMessages._done,
    messages.Ran: ControllerMessages._ran,
    messages.Waiting: ControllerMessages._waiting,
    messages.Gone: ControllerMessages._depart,
    messages.Stuck: ControllerMessages._stuck,
    messages.Publish: ControllerMessages._publish,
    **dict.fromkeys(
        (messages.Answer, messages.Ask, messages.Drop, messages.Meet, messages.Withdraw), ControllerMessages._meet
    ),
}
