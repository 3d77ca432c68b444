"""Reports the ranks that a slow or late plan waits for, and their activity."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

from raycollect.channel.messages import Seen
from raycollect.core import sockets, threads, timers
from raycollect.core.deadline import NEVER
from raycollect.core.model import Member
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch_lock import answered
from raycollect.driver.participants import look_answers
from raycollect.driver.plan_tracker import Overdue, PlanTracker
from raycollect.driver.progress import Bar, around_s
from raycollect.errors import CollectiveTimeoutError, RankReport
from raycollect.errors.text import listed
from raycollect.group.watchdog import QUIET_S, report_of
from raycollect.observe.run_steps import BEGINS, BEHIND_METHODS, ENDS, FOR_AN_OPERAND, IN_CHECK

_log = logging.getLogger("raycollect")

FIRST_S = 1.0  # how long a wait goes on before anything is watched, in seconds

_NOT_READY = (BEGINS, BEHIND_METHODS, FOR_AN_OPERAND)  # the steps of a rank that has not begun the collective
LOOK_S = 2.0  # how long participants may take to report their activity, in seconds


def wait(
    controller: Controller, tracker: PlanTracker, timeout_s: float | None, *, progress: bool | None = None
) -> bool:
    """Waits for a plan's outcome in the calling thread, with `Attention`; False if it is not known in time.

    A plan whose own deadline is earlier fails at that deadline.
    """
    limit_s = None if tracker.deadline is NEVER else tracker.deadline.left_s()
    left_s = min(math.inf if timeout_s is None else timeout_s, math.inf if limit_s is None else limit_s)
    if progress or (progress is None and around_s.get()):
        is_known = _wait_with_bar(controller, tracker, left_s)
    else:
        first_s = min(FIRST_S, QUIET_S, left_s)
        is_known = tracker.wait(first_s) or _wait_long(controller, tracker, first_s, left_s)
    return is_known or (limit_s is not None and controller.timeouts.expire(tracker))


def _wait_long(controller: Controller, tracker: PlanTracker, first_s: float, left_s: float) -> bool:
    """Goes on with a wait that has lasted for `first_s`."""
    until_s = time.monotonic() - first_s + left_s
    with Attention(controller, tracker, first_s, left_s):
        return tracker.wait(_finite(max(until_s - time.monotonic(), 0.0)))


def _wait_with_bar(controller: Controller, tracker: PlanTracker, within_s: float) -> bool:
    bar, until_s = Bar(controller.participants, tracker), time.monotonic() + within_s
    if tracker.resolved:
        return True
    with Attention(controller, tracker, within_s=within_s), bar:
        while (left_s := until_s - time.monotonic()) > 0:
            if tracker.wait(_finite(max(min(left_s, bar.left_s), 0.0))):
                return True
            if bar.left_s <= 0 and time.monotonic() < until_s:
                bar.look()
    return tracker.resolved


def _finite(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds


class Attention(timers.Watcher):
    """Watches a plan during a wait: warns once if the wait is long, and ends a plan that hangs.

    A plan hangs if some participants have ended it and others, which arrived at the agreement as well, have not
    for its time limit: no rank waits for these, so no other limit ends it.

    Args:
        controller: The plan's.
        tracker: The plan.
        waited_s: How long the wait has lasted, in seconds.
        within_s: The limit of the wait; checks that are due later are left out.
    """

    def __init__(
        self, controller: Controller, tracker: PlanTracker, waited_s: float = 0.0, within_s: float = math.inf
    ) -> None:
        super().__init__()
        self._controller = controller
        self._tracker = tracker
        self._began_s = time.monotonic() - waited_s
        self._within_s = within_s
        self._limit_s = tracker.plan.timeout_s
        self._warn_s, self._hung_s = QUIET_S, self._limit_s  # when each is due, since it began
        self._hung: frozenset[int] = frozenset()

    def __enter__(self) -> None:
        threads.survives(self._look_later)  # without a thread the wait goes on

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def look(self) -> float:
        """Starts the checks that are due, in another thread: the participants may take long."""
        if not self._tracker.resolved:
            threads.call_in_helper(threads.survives, self._look_apart)
        return math.inf

    def _look_later(self) -> None:
        next_s = min(self._warn_s, self._hung_s)
        if next_s < self._within_s:
            self.look_after(self._began_s + next_s - time.monotonic())

    def _look_apart(self) -> None:
        waited_s = time.monotonic() - self._began_s
        if waited_s >= self._warn_s:
            self._warn_s = math.inf
            threads.survives(_warn, self._controller, self._tracker)
        if waited_s >= self._hung_s:
            threads.survives(self._look_for_hung)
            self._hung_s = time.monotonic() - self._began_s + self._limit_s
        self._look_later()

    def _look_for_hung(self) -> None:
        hung = self._hang()
        if hung & self._hung:
            self._end(sorted(hung & self._hung))
        self._hung = hung

    def _hang(self) -> frozenset[int]:
        tracker = self._tracker
        members = [tracker.member(at) for at in range(len(tracker.plan.participants))]
        seen = self._controller.participants.look(members, LOOK_S)
        left = [at for at, answer in enumerate(seen) if tracker.is_pending(at) and not _is_past(tracker, answer)]
        return frozenset(left if len(left) < len(seen) else ())

    def _end(self, positions: Sequence[int]) -> None:
        tracker = self._tracker
        names = listed(f"rank {member.rank} ({member.actor})" for member in map(tracker.member, positions))
        error = CollectiveTimeoutError(
            missing=tuple(tracker.member(at).rank for at in positions),
            timeout_s=self._limit_s,
            detail=f"for {self._limit_s:g} s these have not ended what others have: {names}",
        )
        self._controller.plans.fail(tracker, error)


def _warn(controller: Controller, tracker: PlanTracker) -> None:
    late = _pending(tracker)
    reports = listed(_reports(tracker, late, _ask(controller, tracker, late, LOOK_S)), "\n  - ")
    if tracker.resolved:  # meanwhile
        return
    _log.warning(
        "%s on group %r, plan %d, is still under way after %g s; these have not ended it:\n  - %s",
        tracker.plan.name,
        tracker.group_name,
        tracker.seq,
        QUIET_S,
        reports,
    )


def explain_delay(
    controller: Controller, tracker: PlanTracker, error: CollectiveTimeoutError, timeout_s: float = LOOK_S
) -> None:
    """Adds reports to an error, once: of the ranks that it names, or of all that have not ended."""
    if not error.reports:
        threads.survives(_explain_delay, controller, tracker, error, timeout_s)  # the error matters more


def _explain_delay(
    controller: Controller, tracker: PlanTracker, error: CollectiveTimeoutError, timeout_s: float
) -> None:
    overdue = tracker.overdue if error is tracker.error else None
    if overdue is not None:
        seen = look_answers(overdue.looks, min(timeout_s, LOOK_S))
        left = [member for member in overdue.late if not _is_past(tracker, seen[member.actor_id])]
        _name(error, tracker, overdue, left, seen, timeout_s)
    else:
        group = next((group for group in tracker.groups if group.spec.name == error.group_name), None)
        members = group.members if group is not None else ()
        named = [members[rank] for rank in error.missing if rank < len(members)]
        told_of = named or _pending(tracker)
        seen = _ask(controller, tracker, told_of, timeout_s)
        error.reports = _reports(tracker, told_of, seen)
    cut = {link for answer in seen.values() if answer is not None for link in answer.cut}
    error.cut = tuple(sorted({*error.cut, *sockets.cut_links(), *cut}))


def _name(
    error: CollectiveTimeoutError,
    tracker: PlanTracker,
    overdue: Overdue,
    late: Sequence[Member],
    seen: Mapping[str, Seen | None],
    timeout_s: float,
) -> None:
    """Sets the ranks of an error that never arrived, or did not leave; without any, it reports all late ranks."""
    reports = _reports(tracker, late, seen)
    absent = _absent(reports)
    named = absent or _reports(tracker, _stuck(tracker, overdue, timeout_s), seen)
    error.reports, error.missing = named or reports, tuple([report.rank for report in named])
    names = [f"rank {report.rank} ({report.actor})" for report in error.reports]
    error.detail = error.describe_missing(names, ()) if absent else error.unfinished(names)


def _stuck(tracker: PlanTracker, overdue: Overdue, timeout_s: float) -> list[Member]:
    """The ranks that did not leave an overdue plan at its abort; empty if no rank left."""
    positions = overdue.stuck.result() if answered([overdue.stuck], min(timeout_s, LOOK_S)) else ()
    return [tracker.member(at) for at in positions] if len(positions) < len(tracker.plan.participants) else []


def _absent(reports: Sequence[RankReport]) -> tuple[RankReport, ...]:
    """The ranks that never arrived, of those that have not ended a plan in time; empty if all are in its kernels."""
    some_wait = any(report.step.endswith(IN_CHECK) for report in reports)

    def is_here(report: RankReport) -> bool:
        if not report.answers or not report.has_begun or not report.step or report.step.endswith(_NOT_READY):
            return False
        return report.step.endswith((IN_CHECK, ENDS)) or not some_wait

    return tuple([report for report in reports if not is_here(report)])


def _ask(
    controller: Controller, tracker: PlanTracker, members: Sequence[Member], timeout_s: float
) -> dict[str, Seen | None]:
    """The activity of members and of all participants, by actor: waiting ranks report how long they have waited."""
    everyone = [tracker.member(at) for at in range(len(tracker.plan.participants))]
    everybody = list({member.actor_id: member for member in (*members, *everyone)}.values())
    said = controller.participants.look(everybody, min(timeout_s, LOOK_S))
    return dict(zip((member.actor_id for member in everybody), said, strict=True))


def _reports(
    tracker: PlanTracker, members: Sequence[Member], seen: Mapping[str, Seen | None]
) -> tuple[RankReport, ...]:
    """The reports of members that take part in a plan; those that have not begun it are first."""
    reports = [
        report_of(
            member.rank,
            member.actor,
            seen[member.actor_id],
            has_begun=_has_begun(tracker, seen[member.actor_id]),
            step=step_of(tracker, seen[member.actor_id]),
            awaited_s=awaited_s(tracker, member.actor_id, seen),
        )
        for member in members
    ]
    return tuple(sorted(reports, key=lambda report: report.has_begun))


def step_of(tracker: PlanTracker, seen: Seen | None) -> str:
    """The step of a plan in which a participant is, in words; empty if it does not run the plan."""
    return "" if seen is None else dict(zip(seen.running, seen.steps, strict=False)).get(tracker.seq, "")


def awaited_s(tracker: PlanTracker, actor_id: str, seen: Mapping[str, Seen | None]) -> float:
    """How long others have waited for a participant at an agreement, in seconds; 0: no rank waits for it.

    `seen` are the participants' answers by actor; a participant without an answer has arrived nowhere.
    """
    position, mine = tracker.plan.positions.get(actor_id, -1), seen.get(actor_id)
    if position < 0 or _has_done(tracker, mine):
        return 0.0
    last = max(_checks(tracker, mine), default=-1)
    others = [_checks(tracker, answer).items() for other, answer in seen.items() if other != actor_id]
    at = {check: position in tracker.plan.places_at(check - tracker.seq) for checks in others for check, _ in checks}
    waits = [s for checks in others for check, s in checks if check > last and at[check]]
    return max(waits, default=0.0)


def _checks(tracker: PlanTracker, seen: Seen | None) -> dict[int, float]:
    """The launches whose agreement a participant has arrived at, and how many seconds ago."""
    if seen is None or not _has_begun(tracker, seen):  # members' own calls have numbers, too
        return {}
    return {
        check: since_ms / 1000
        for check, since_ms in zip(seen.checks, seen.checks_ms, strict=False)
        if check in tracker.launches
    }


def _has_begun(tracker: PlanTracker, seen: Seen | None) -> bool:
    return seen is not None and (
        tracker.seq in seen.running
        or _has_done(tracker, seen)
        or (seen.ended >= tracker.seq and any(map(tracker.launches.__contains__, seen.checks)))
    )


def _is_past(tracker: PlanTracker, seen: Seen | None) -> bool:
    """Whether it has ended a plan, in any way."""
    return seen is not None and seen.ended >= tracker.seq


def _has_done(tracker: PlanTracker, seen: Seen | None) -> bool:
    """Whether it has ended a plan that did not fail: after a failure, ranks that never began count as ended, too."""
    return tracker.error is None and _is_past(tracker, seen)


def _pending(tracker: PlanTracker) -> list[Member]:
    return [tracker.member(at) for at in range(len(tracker.plan.participants)) if tracker.is_pending(at)]
