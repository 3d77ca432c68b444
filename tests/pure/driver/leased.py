"""Controllers that have leased participants, over links that only remember what they send."""

from __future__ import annotations

from typing import Any

import pytest

from raycollect.channel.messages import encode
from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.driver.controller import Controller
from raycollect.driver.groups import Declared
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import ProtocolError
from raycollect.group.declaration import Declaration
from raycollect.member.runtime import Runtime
from raycollect.planner import Membership
from tests.pure.driver.tracked_plans import asked, flying, group


class Line:
    """A link that sends what fits into a frame."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        nbytes = len(encode(message))
        if nbytes > MAX_FRAME_NBYTES:
            raise ProtocolError(detail=f"{type(message).__name__} has {nbytes} bytes, the limit is {MAX_FRAME_NBYTES}")
        self.sent.append(message)

    def close(self) -> None:
        """Does nothing."""


def declared(membership: Membership) -> Declared:
    """A group as it is stored by its name."""
    spec = membership.spec
    return membership, Declaration(name=spec.name, backend=spec.backend, actors=())


def lease(controller: Controller, *memberships: Membership) -> dict[str, ParticipantLink]:
    """Leases all members, over lines; gives them by the names of their actors."""
    found: dict[str, ParticipantLink] = {}
    for membership in memberships:
        for member in membership.members:
            info: dict[str, Any] = {"participant": True, "actor": member.actor, "actor_id": member.actor_id}
            info["incarnation"] = member.incarnation
            peer = found.setdefault(member.actor, ParticipantLink(controller.messages, info, object()))
            peer.link = peer.link or Line()  # type: ignore[assignment]
            controller.participants.add(peer)
    return found


def said(peer: ParticipantLink) -> list[Any]:
    """What a participant was told since it was last asked."""
    line: Any = peer.link
    sent, line.sent = line.sent, []
    return sent


def registered(controller: Controller) -> PlanTracker:
    """Actors 5, 6, 7 in one group and 7, 8 in another: no group has all, so that the controller keeps the check."""
    left, right = group("left", (5, 6, 7)), group("right", (8, 7))
    lease(controller, left, right)
    tracker = flying(asked(left, (0, 1, 2)), asked(right, (4, 3)))
    return registered_anew(controller, tracker)


def crew(controller: Controller, tracker: PlanTracker) -> list[ParticipantLink]:
    """The participants of a plan, by position."""
    return [controller.participants.leased(actor_id, tracker.groups) for actor_id in tracker.plan.participants]


def registered_anew(controller: Controller, tracker: PlanTracker) -> PlanTracker:
    """The same plan under the next numbers of a controller."""
    made = PlanTracker(next(controller.plans.numbers), tracker.plan, tracker._memberships, dict(tracker.refs))
    controller.plans.register(made)
    return made


@pytest.fixture
def controller() -> Any:
    made = Controller(object(), Runtime())
    yield made
    made.close()
