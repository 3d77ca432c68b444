"""Fails plans and runs whose caller's time limit is over, also if no thread waits for them.

The participants are asked for their activity before the abort, so that the error can name it. A participant that
only waits for others in a kernel leaves at the abort; if all are in a kernel, those that stay are hanging.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future

from raycollect.core import threads, timers
from raycollect.core.signals import Deferred
from raycollect.driver.participants import Participants
from raycollect.driver.plan_tracker import Overdue, PlanTracker
from raycollect.driver.plans import PlansUnderWay
from raycollect.errors import CollectiveTimeoutError

LEAVE_S = 1.0
"""How long a participant may take to leave an aborted plan, in seconds; after that it counts as hanging."""

_LOOK_S = 0.05  # how often to check which participants have left, in seconds


class PlanTimeouts(timers.Watcher):
    """The deadlines of one controller's plans and runs. Any thread may call it; no method waits."""

    def __init__(self, plans: PlansUnderWay, participants: Participants) -> None:
        super().__init__()
        self._plans = plans
        self._participants = participants
        self._expiring = threading.RLock()  # a finalizer may run in between

    def watch(self, tracker: PlanTracker) -> None:
        """Fails a plan at its deadline, also if no thread waits for it."""
        left_s = tracker.deadline.left_s()
        if left_s is not None and not tracker.is_known:
            threads.survives(self.look_after, left_s)  # without a thread, the waiter fails it

    def look(self) -> float:
        """Fails overdue plans; in the timer's thread."""
        watched = self._plans.trackers()
        for tracker in watched:
            self.expire(tracker)
        ends = [tracker.deadline.until_s for tracker in watched if not tracker.is_known]
        return min(ends, default=math.inf) - time.monotonic()

    def expire(self, tracker: PlanTracker) -> bool:
        """Fails a plan if its time is over; returns whether its outcome is known."""
        if tracker.resolved or not tracker.deadline.is_over:
            return tracker.resolved
        with Deferred(), self._expiring:  # else a second thread would ask after the first one's abort
            if tracker.overdue is None:
                self._fail(tracker)
        return tracker.resolved

    def _fail(self, tracker: PlanTracker) -> None:
        positions = range(len(tracker.plan.participants))
        homes = [tracker.location.home(at) for at in positions if tracker.is_pending(at)]
        late = tuple([member for _, member in homes])
        everyone = self._participants.begin_look(map(tracker.member, positions))
        tracker.overdue = Overdue(late, everyone, Future())
        error = CollectiveTimeoutError(
            op=tracker.plan.name,
            group_name=tracker.group_name,
            missing=tuple([member.rank for group, member in homes if group is homes[0][0]]),
            timeout_s=tracker.deadline.timeout_s,
        )
        error.detail = error.unfinished([f"rank {member.rank} ({member.actor})" for member in late])
        self._plans.fail(tracker, error)
        self._look_for_stuck(tracker, tracker.overdue.stuck, time.monotonic() + LEAVE_S)

    def _look_for_stuck(self, tracker: PlanTracker, stuck: Future[tuple[int, ...]], until_s: float) -> None:
        """Finds the participants that do not leave an aborted plan, in the hub's thread."""

        def look() -> None:
            left = tuple([at for at in range(len(tracker.plan.participants)) if tracker.is_pending(at)])
            if left and time.monotonic() < until_s:
                self._look_for_stuck(tracker, stuck, until_s)
            elif not stuck.done():
                stuck.set_result(left)

        if not self._participants.later(_LOOK_S, look) and not stuck.done():
            stuck.set_result(())
