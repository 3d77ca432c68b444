"""State machine of one plan under way: events in, outgoing messages out. No I/O; one lock.

A plan ends in one of three ways. All participants succeed. All refuse it in the agreement before the launch: an error,
and no tensor was touched. In every other case the tracker tells all who have not ended to abort, and fails with the
first cause, not with an abort that it led to. Where a plan has several launches, such an abort is passed on, too: a
rank that waits in another launch than the one that broke would not hear of it there.

Participants are positions in the plan here; errors name ranks of the user's groups (`error_location`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from raycollect.channel import CompletionBell
from raycollect.channel.messages import Abort, Arrive
from raycollect.core.model import Key, Member
from raycollect.driver.error_location import ErrorLocator, RankNames
from raycollect.driver.plan_arrivals import PlanArrivals
from raycollect.errors import (
    CollectiveTimeoutError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    RefusedError,
)
from raycollect.group.membership import Membership
from raycollect.observe import Label, Place, Ring
from raycollect.observe.trace import PLAN
from raycollect.planner import Plan

_log = logging.getLogger("raycollect")

Outgoing = list[tuple[int, Any]]  # (position, message), in the order of sending

ABSENT = ("lost", "producer_failed")  # kinds of violations whose operand is not there

_MAX_REASON_CHARS = 1000


class Ringing(NamedTuple):
    """How a plan's end is told to the thread that waits for it."""

    bell: CompletionBell
    slots: tuple[int, ...]  # the words of its participants

    def has_rung(self, seq: int) -> bool:
        """Whether one of them has said that all have ended it well."""
        return self.bell.has_rung(seq, self.slots)


class PlanTracker:
    """A plan between its dispatch and the end of its last participant.

    Attributes:
        refs: The operand refs by key, held until the plan has ended everywhere (P5); after a refusal those that tell
            more about it, until `explain`.
        made: (request, position) -> the ref of what the request makes there.
        bell: What is rung when it has gone well everywhere, where the thread that waits for it has claimed the bell.
        is_committed: Whether all participants were told to overwrite what they gave: all that live have results.
    """

    kind: ClassVar[str] = PLAN  # what timelines call it

    def __init__(self, seq: int, plan: Plan, memberships: Sequence[Membership], refs: dict[Key, Any]) -> None:
        self.seq = seq
        self.plan = plan
        self.refs: Mapping[Key, Any] = refs
        self.groups: tuple[Membership, ...] = tuple(dict.fromkeys(memberships))
        self.made: dict[tuple[int, int], Any] = {}
        self.error: RaycollectError | None = None
        self.is_committed: bool = False
        self.bell: Ringing | None = None
        self.ring: Ring | None = None
        self.began_s: float = 0.0
        self._memberships = memberships
        self._keys = tuple(refs)
        self._is_explained = False  # whether the refs have told what they know of the failure
        self._is_chain = plan.width > 1  # a rank that waits in one launch does not hear that another one broke
        self._pending = set(range(len(plan.participants)))
        self._first: tuple[int, RaycollectError, tuple[str, ...]] | None = None  # the first failure that was reported
        self._abandoned: list[bool] = []  # not empty until the failure that nobody waits for is logged
        self._told = False  # whether the participants were told to abort
        self._resolved = False
        self._unresolved = threading.Lock()  # held until the outcome is known: cheaper to wait for than an event
        self._unresolved.acquire()
        self._watchers: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------ queries

    @property
    def resolved(self) -> bool:
        """True when the outcome is known."""
        return self._resolved

    @property
    def has_ended(self) -> bool:
        """True when no participant runs it any more."""
        return not self._pending

    @property
    def group_name(self) -> str:
        """The names of its groups, for messages."""
        return ", ".join(group.spec.name for group in self.groups)

    @cached_property
    def location(self) -> ErrorLocator:
        """Maps positions and sources to what users know."""
        return ErrorLocator(self.plan, self._memberships, self._keys)

    @cached_property
    def arrivals(self) -> PlanArrivals:
        """The agreements that the controller gathers; used under the lock."""
        return PlanArrivals(self.seq, self.plan, self.location)

    def is_pending(self, position: int) -> bool:
        """True while that participant has not ended it."""
        return position in self._pending

    def member(self, position: int) -> Member:
        """A participant, as a member of the group of its first request."""
        return self.location.home(position)[1]

    def has(self, seq: int) -> bool:
        """Whether one of its launches has that number."""
        return self.seq <= seq < self.seq + self.plan.width

    def is_at(self, position: int, launch: int) -> bool:
        """Whether a participant takes part in one of its launches."""
        return True

    @cached_property
    def writes(self) -> Mapping[Key, bool]:
        """Key -> whether it writes the tensor, for each ref that it uses."""
        keys = self._keys
        return {keys[source]: written for source, written in self.plan.uses().items()}  # type: ignore[call-overload]

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the outcome; False where it is not known in time."""
        if self.bell is not None and self.bell.bell.is_mine:
            return self._wait_for(self.bell, timeout_s)
        if not self._unresolved.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0)):
            return False
        self._unresolved.release()
        return True

    def _wait_for(self, ringing: Ringing, timeout_s: float | None) -> bool:
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._resolved:
            if ringing.has_rung(self.seq):
                self._all_done()
            elif (left_s := until_s - time.monotonic()) > 0:
                ringing.bell.wait(left_s)
            else:
                return False
        return True

    def _all_done(self) -> Outgoing:
        everybody = range(len(self.plan.participants))
        return self.done(0, None, (), others=everybody)  # nobody is left who could be told of anything

    def when_resolved(self, call: Callable[[], None]) -> None:
        """Calls back once the outcome is known: now, or later on the channel's thread."""
        with self._lock:
            if not self._resolved:
                self._watchers.append(call)
                return
        call()

    def abandon(self) -> None:
        """Nobody will ask for the outcome any more: a failure is logged, now or later.

        Takes no lock: the garbage collector may call it, in any thread at any place.
        """
        self._abandoned.append(True)
        if self._resolved:
            _log_abandoned(self._abandoned, self.plan.name, self.error)

    # ------------------------------------------------------------------------------------------ events

    def answered(self, position: int, payload: bytes) -> None:
        """A participant has ended it well and returns values; only runs of captured steps do."""
        raise ProtocolError(detail=f"plan {self.seq} is no run of a captured step")

    def done(
        self, position: int, error: RaycollectError | None, story: Sequence[str], *, others: Sequence[int] = ()
    ) -> Outgoing:
        """A participant has ended, and reports `others` that ran all of it."""
        with self._lock:
            self._pending.difference_update((position, *others))
            waiting = bool(self._pending)
            if error is not None and self._first is None:
                self._first = (position, error, tuple(story))
            first = self._first
        if isinstance(error, PlanAbortedError) and not self._resolved:  # the consequence of another failure
            several = self._is_chain
            if waiting:  # who caused it will report, or its process is gone
                return self._abort(position, error) if several else []
            if first is not None and several:
                return self._failed(*first)  # later ones may be consequences of that abort
        if error is not None:
            return self._failed(position, error, tuple(story))
        if waiting:
            return []
        if first is not None:
            return self._failed(*first)  # aborted, and nobody reported the cause
        self._resolve(None)
        return []

    def lost(self, position: int, reason: str) -> Outgoing:
        """A participant's process is gone."""
        with self._lock:
            if position not in self._pending:
                return []
        if self.bell is not None and self.bell.has_rung(self.seq):
            return self._all_done()
        with self._lock:
            self._pending.discard(position)
        error = ParticipantDiedError(
            detail=f"its process, or the connection to it, ended while the collective was under way ({reason})"
        )
        return self._failed(position, error, ())

    def arrive(self, position: int, message: Arrive) -> Outgoing:
        """A participant arrives at an agreement that the controller gathers; the last arrival completes it."""
        with self._lock:
            gathered = self.arrivals.arrive(position, message)
            if gathered is None:
                return []
            if self.plan.commits and not message.group_id and gathered.is_last_round:
                if self._told or self._resolved:  # the others have given up, or will
                    return []
                self.is_committed = True
        answers = gathered.answers()
        return [(place, answer) for place in gathered.places for answer in answers]

    def fail(self, error: RaycollectError, *, unsent: Sequence[int] = ()) -> Outgoing:
        """The controller itself ends it; participants in `unsent` never got it."""
        with self._lock:
            self._pending.difference_update(unsent)
        return self._failed(-1, error, ())

    def explain(self, error: RaycollectError) -> None:
        """Takes the error as its refs explain it; they are not needed any more."""
        with self._lock:
            self.error, self._is_explained = error, True
        self._let_go()

    # ------------------------------------------------------------------------------------------ outcome

    def _failed(self, position: int, error: RaycollectError, story: tuple[str, ...]) -> Outgoing:
        missing: RankNames = []
        if isinstance(error, CollectiveTimeoutError):
            with self._lock:
                missing = self.arrivals.missing()
        self._resolve(self.location.locate(position, error, story, missing))
        if isinstance(error, RefusedError) and position >= 0:
            return []  # refused in the agreement: everyone knows
        return self._abort(position, error)

    def _abort(self, position: int, error: RaycollectError) -> Outgoing:
        """Tells all who have not ended to abort, once; not after the commit, when nobody waits for others."""
        with self._lock:
            told, self._told = self._told or self.is_committed, True
        if told:
            return []
        if position < 0:
            reason = str(error)[:_MAX_REASON_CHARS]
        else:
            reason = f"{type(error).__name__} on {self.location.describe(position)}"
        message = Abort(seq=self.seq, reason=reason)
        return [(other, message) for other in sorted(self._pending)]

    def _resolve(self, error: RaycollectError | None) -> None:
        with self._lock:
            known = self._resolved
            if not known:
                self.error = error
                self._note(error)
                self._resolved = True
                watchers, self._watchers = self._watchers, []
        self._let_go()
        if known:
            return
        self._unresolved.release()
        if self.bell is not None and not self.bell.bell.is_mine:
            self.bell.bell.wake()
        if self.ring is not None:
            _record(self, self.ring)
        for call in watchers:
            call()
        if self._abandoned:
            _log_abandoned(self._abandoned, self.plan.name, self.error)

    def _note(self, error: RaycollectError | None) -> None:
        """The outcome, just before it becomes visible; called under the lock."""

    def _let_go(self) -> None:
        """Drops the refs once nobody runs it, except those of absent operands: Ray knows what their methods did."""
        with self._lock:
            if self._pending or not self._resolved:
                return
            kept: dict[Key, Any] = {}
            if isinstance(self.error, RefusedError) and not self._is_explained:
                named = {violation.ref for violation in self.error.violations if violation.kind in ABSENT}
                kept = {key: ref for key, ref in self.refs.items() if key.hex() in named}
            dropped, self.refs = self.refs, kept
        del dropped  # not under the lock


def retrieve_errors(refs: Iterable[Any]) -> None:
    """Asks for what refs hold, or will hold: Ray logs an error as unhandled where nobody does."""
    for ref in tuple(refs):
        ref.future()


def _log_abandoned(abandoned: list[bool], name: str, error: RaycollectError | None) -> None:
    try:
        abandoned.pop()
    except IndexError:
        return  # it was logged
    if error is not None and not isinstance(error, PlanAbortedError):
        _log.error("%s failed, and nobody waited for it: %s", name, error)


def _record(tracker: PlanTracker, ring: Ring) -> None:
    plan, error = tracker.plan, tracker.error
    known = ring.labelled.get((id(plan),))  # of plans that are repeated; a new label may take some 60 us
    number = ring.label_of(lambda: _label(tracker, ring), plan) if known is None else known[1]
    failed = "" if error is None else type(error).__name__
    ring.put(tracker.kind, "", tracker.began_s, ring.clock(), tracker.seq, number, failed)


def _label(tracker: PlanTracker, ring: Ring) -> Label:
    specs = [one.spec for one in tracker.groups]
    for spec in specs:
        ring.groups.setdefault(spec.group_id, Place.of(spec))
    plan, groups = tracker.plan, ",".join([spec.group_id for spec in specs])
    return Label(plan.name, groups, -1, len(plan.participants), 0, len(plan.requests))
