"""The plans and runs of a controller that are under way: their numbers, their order, and their messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from raycollect.core.signals import Deferred
from raycollect.driver.dispatch_lock import DispatchLock
from raycollect.driver.participants import Participants
from raycollect.driver.plan_tracker import Outgoing, PlanTracker
from raycollect.errors import PlanAbortedError, RaycollectError
from raycollect.observe import Tracer
from raycollect.planner import Membership


class PlansUnderWay:
    """The plans and runs of one controller. Any thread may call it.

    Attributes:
        dispatching: Held while a plan, or a run of a captured step, is sent to all its participants (P2).
        revision: Changes whenever a group or a member ends, and when a group's members begin to change.
        numbers: The numbers of plans, one per launch; taken under `dispatching`.
    """

    def __init__(self, participants: Participants, tracer: Tracer) -> None:
        self.dispatching: DispatchLock = DispatchLock()
        self.revision: object = object()
        self.numbers: Iterator[int] = itertools.count(1)
        self._participants = participants
        self._tracer = tracer
        self._trackers: dict[int, PlanTracker] = {}  # those that had not ended when they were last looked at

    def register(self, tracker: PlanTracker) -> None:
        """Adds a plan, or a run, under the number that was taken last, and takes those of its other launches."""
        ring = self._tracer.ring
        if ring is not None:
            tracker.ring, tracker.began_s = ring, ring.clock()
        for _ in range(tracker.plan.width - 1):
            next(self.numbers)
        self._trackers[tracker.seq] = tracker

    def remove(self, tracker: PlanTracker) -> None:
        """Removes a plan that has ended, or was never sent."""
        self._trackers.pop(tracker.seq, None)

    def find(self, seq: int) -> PlanTracker | None:
        """The plan, or run, of that number."""
        return self._trackers.get(seq)

    def with_launch(self, launch: int) -> PlanTracker | None:
        """The plan, or run, that has that launch."""
        return self.find(launch) or next((tracker for tracker in self.trackers() if launch in tracker.launches), None)

    def trackers(self) -> list[PlanTracker]:
        """The plans that have not ended everywhere; marks in shared memory are read here."""
        under_way = []
        for tracker in tuple(self._trackers.values()):
            if tracker.has_ended:
                self.remove(tracker)
            elif tracker.seq in self._trackers:
                under_way.append(tracker)
        return under_way

    def of_group(self, membership: Membership) -> list[PlanTracker]:
        """The plans of a group that have not ended everywhere."""
        return [tracker for tracker in self.trackers() if membership in tracker.groups]

    def send(self, tracker: PlanTracker, outgoing: Outgoing) -> None:
        """Sends a plan's messages, and removes the plan once it has ended everywhere."""
        if outgoing:
            self._participants.deliver(tracker.plan.participants, outgoing)
        if tracker.has_ended:
            self.remove(tracker)

    def fail(self, tracker: PlanTracker, error: RaycollectError, *, unsent: Sequence[int] = ()) -> None:
        """Ends a plan on all its participants, but for those in `unsent`, which never got it."""
        with Deferred():
            self.send(tracker, tracker.fail(error, unsent=unsent))

    @contextmanager
    def none_begins(self) -> Iterator[list[Membership]]:
        """A block in which no plan begins, and groups may end; yields the groups of the plans under way."""
        with Deferred(), self.dispatching:
            yield [group for tracker in self.trackers() if not tracker.resolved for group in tracker.groups]
            self.revision = object()

    def close(self) -> None:
        """Fails all plans; runs that have ended well are not failed."""
        for tracker in self.trackers():
            tracker.fail(PlanAbortedError(detail="the controller was closed"))
        self._trackers.clear()
