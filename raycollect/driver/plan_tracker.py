"""State machine of one plan under way: events in, outgoing messages out. One lock.

A plan ends in one of three ways. All participants succeed. All refuse it in the agreement before the launch: an error,
and no tensor was touched. In every other case the tracker tells all who have not ended to abort, and fails with the
first cause, not with an abort that it led to. Where a plan has several launches, such an abort is passed on, too: a
rank that waits in another launch than the one that broke would not hear of it there. After a commit it tells them to
report their ends instead: a good end is reported by the last participant for all, which may be the one that failed.

A run of a captured step is a plan with more to it: `step_runs.RunTracker`.

Participants are positions in the plan here; errors name ranks of the user's groups (`error_location`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

from raycollect.channel.mailbox import Letters
from raycollect.channel.messages import Abort, Arrivals, Arrive, Seen
from raycollect.core.deadline import NEVER, Deadline
from raycollect.core.model import Key, Member
from raycollect.core.signals import Deferred, deliver, waiting
from raycollect.driver.arrival_gather import ArrivalGather
from raycollect.driver.dispatch_lock import Inside
from raycollect.driver.error_location import ErrorLocator, RankNames
from raycollect.engine.long_arrivals import most_parts
from raycollect.errors import (
    CollectiveTimeoutError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    RefusedError,
)
from raycollect.observe import Label, Ring, TracedGroup
from raycollect.observe.trace import PLAN
from raycollect.planner import Membership, Plan

_log = logging.getLogger("raycollect")

Outgoing = list[tuple[int, Any]]  # (position, message), in the order of sending

ABSENT = ("lost", "producer_failed")  # kinds of violations whose operand is not there

ANSWER_NBYTES = 1 << 19  # how many bytes go into one message, which has to fit into a frame; each arrival alone did

_MAX_REASON_CHARS = 1000

_AgreementKey = tuple[int, str, tuple[int, ...]]  # (launch, group id, ranks)


class Overdue(NamedTuple):
    """A plan at its deadline.

    Attributes:
        late: The participants that have not ended it.
        looks: The answers of all participants about their activity, by actor; None for one that has ended.
        stuck: The positions that have not left it `LEAVE_S` after the abort.
    """

    late: tuple[Member, ...]
    looks: Mapping[str, Future[Seen | None] | None]
    stuck: Future[tuple[int, ...]]


class PlanTracker:
    """A plan between its dispatch and the end of its last participant.

    Attributes:
        launches: The numbers of its launches.
        refs: The operand refs by key, held until the plan has ended everywhere (P5); after a refusal those that explain
            it, until `explain`.
        keys: Those of the refs, in the order of the plan's sources.
        outputs: (request, position) -> the ref of the request's output there.
        letters: The letters that carried it, if a thread waits for their marks.
        deadline: The end of its caller's time limit.
        overdue: The state at the deadline, if it had not ended by then; otherwise None.
        is_known: Whether the outcome is known; `resolved` looks at what is in shared memory first.
        is_committed: Whether all participants were told to overwrite what they gave: all that live have results.
    """

    # Defaults on the class: a tracker is made for each call
    error: RaycollectError | None = None
    is_known: bool = False
    is_committed: bool = False
    letters: Letters | None = None
    _waiting: frozenset[int] = frozenset()  # the threads that wait at its letters
    ring: Ring | None = None
    began_s: float = 0.0
    overdue: Overdue | None = None
    _first: tuple[int, RaycollectError, tuple[str, ...]] | None = None  # the first failure that was reported
    _is_aborted = False  # whether the participants were told to abort
    _is_explained = False  # whether `error` is the final explanation

    _KIND: ClassVar[str] = PLAN  # in timelines

    def __init__(
        self,
        seq: int,
        plan: Plan,
        memberships: Sequence[Membership],
        refs: Mapping[Key, Any],
        deadline: Deadline = NEVER,
    ) -> None:
        self.seq = seq
        self.plan = plan
        self.deadline = deadline
        self.launches: range = range(seq, seq + plan.width)
        self.refs: Mapping[Key, Any] = refs
        self.groups: tuple[Membership, ...] = tuple(dict.fromkeys(memberships))
        self.outputs: dict[tuple[int, int], Any] = {}
        self._memberships = memberships
        self.keys: tuple[Key, ...] = tuple(refs)
        self._is_chain = plan.width > 1  # a rank that waits in one launch does not hear that another one broke
        self._gathers: dict[_AgreementKey, ArrivalGather] = {}  # of agreements that no group carries
        self._pending = set(range(len(plan.participants)))
        self._abandoned: list[bool] = []  # not empty after `abandon`, until the failure is logged
        self._unresolved = threading.Lock()  # held until the outcome is known: cheaper than an event
        self._unresolved.acquire()
        self._watchers: list[Callable[[], None]] = []
        self._lock = threading.RLock()  # a finalizer may ask, or end it, in a thread that has it

    # ------------------------------------------------------------------------------------------ queries

    @property
    def resolved(self) -> bool:
        """True when the outcome is known."""
        if not self.is_known:
            self.look()
        return self.is_known

    @property
    def has_ended(self) -> bool:
        """True when it has ended on all participants."""
        if self._pending:
            self.look()
        return not self._pending

    @property
    def group_name(self) -> str:
        """The names of its groups, for messages."""
        return ", ".join(group.spec.name for group in self.groups)

    @cached_property
    def location(self) -> ErrorLocator:
        """Maps positions and sources to ranks, actors and refs."""
        return ErrorLocator(self.plan, self._memberships, self.keys)

    def is_pending(self, position: int) -> bool:
        """True while that participant has not ended it."""
        return not self.has_ended and position in self._pending

    def member(self, position: int) -> Member:
        """A participant, as a member of the group of its first request."""
        return self.location.home(position)[1]

    @cached_property
    def writes(self) -> Mapping[Key, bool]:
        """Key -> whether it writes the tensor, for each ref that it uses."""
        return {self.keys[source]: written for source, written in self.plan.uses().items()}  # type: ignore[call-overload]

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the outcome; False: it is not known in time."""
        letters = self.letters
        if letters is None:
            return self.wait_for_word(timeout_s)
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._waiting |= {threading.get_ident()}  # before it looks, so that it is woken
        while True:
            seen = letters.mailbox.seen()
            if self.resolved:
                return True
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            letters.mailbox.wait(seen, left_s)  # or until a signal arrives
            deliver()

    def wait_for_word(self, timeout_s: float | None) -> bool:
        """Waits for an outcome that another thread resolves."""
        with Deferred():
            if not self.is_known and waiting(partial(self._unresolved.acquire, True), timeout_s):
                self._unresolved.release()
        return self.is_known

    def look(self) -> None:
        """Takes the participants' marks in shared memory."""
        letters = self.letters
        if letters is not None and letters.look is not None and letters.have_ended:
            self._ended(range(len(self.plan.participants)), None, ())

    def when_resolved(self, call: Callable[[], None]) -> None:
        """Calls back once the outcome is known: now, or later on the channel's thread."""
        with self._lock:
            if not self.is_known:
                self._watchers.append(call)
                return
        call()

    def abandon(self) -> None:
        """Has a failure logged, now or later: the caller has dropped its `Work`.

        Takes no lock: the garbage collector may call it, in any thread at any place.
        """
        self._abandoned.append(True)
        if self.is_known:
            _log_abandoned(self._abandoned, self.plan.name, self.error)

    # ------------------------------------------------------------------------------------------ events

    def answered(self, position: int, payload: bytes) -> None:
        """A participant has ended a run well and returns values; any thread may call it."""
        raise ProtocolError(detail=f"plan {self.seq} is no run of a captured step")

    def done(
        self, position: int, error: RaycollectError | None, story: Sequence[str], *, others: Sequence[int] = ()
    ) -> Outgoing:
        """A participant has ended, and reports `others` that ran all of a plan."""
        return self._ended((position, *others), error, story)

    def _ended(self, positions: Sequence[int], error: RaycollectError | None, story: Sequence[str]) -> Outgoing:
        with Inside():  # a finalizer that waits in here would hold up the hub, for which it waits
            position = positions[0]
            with self._lock:
                self._pending.difference_update(positions)
                waiting = bool(self._pending)
                if error is not None and self._first is None:
                    self._first = (position, error, tuple(story))
                first = self._first
            if isinstance(error, PlanAbortedError) and not self.is_known:  # the consequence of another failure
                several = self._is_chain
                if waiting:  # the participant that caused it will report, or its process has ended
                    return self._abort(position, error) if several else []
                if first is not None and several:
                    return self._failed(*first)  # later ones may be consequences of that abort
            if error is not None:
                return self._failed(position, error, tuple(story))
            if waiting:
                return []
            if first is not None:
                return self._failed(*first)  # aborted, and no participant reported the cause
            self._resolve(None)
            return []

    def lost(self, position: int, reason: str) -> Outgoing:
        """A participant's process has ended; its earlier marks and messages count."""
        self.look()
        with self._lock:
            if position not in self._pending:
                return []
            self._pending.discard(position)
        detail = f"its process, or the connection to it, ended while the collective was under way ({reason})"
        return self._failed(position, ParticipantDiedError(detail=detail), ())

    def arrive(self, position: int, message: Arrive) -> Outgoing:
        """A participant arrives at an agreement that no group of all gathers; the last arrival completes it."""
        ranks, at, plan = tuple(message.ranks), message.seq - self.seq, self.plan
        with self._lock:
            by_rank = self._by_rank(message.seq, message.group_id)
            places = [by_rank.get(rank, -1) for rank in ranks]
            if min(places, default=-1) < 0 or by_rank.get(message.rank) != position or ranks != tuple(sorted({*ranks})):
                raise ProtocolError(detail=f"rank {message.rank} has no part in launch {message.seq} of ranks {ranks}")
            rounds = plan.rounds_at(at, in_group=bool(message.group_id))
            commits = plan.commits and not message.group_id
            # Long arrivals travel in parts, a round each.
            if not 0 <= message.round < (rounds - commits) * most_parts(len(ranks)) + commits:
                raise ProtocolError(detail=f"launch {message.seq} has no round {message.round} to agree in")
            gather = self._gathers.setdefault((message.seq, message.group_id, ranks), ArrivalGather(ranks))
            blobs = gather.arrive(message.round, message.rank, message.blob)
            if blobs is None:
                return []
            if commits and not message.blob:
                if self._is_aborted or self.is_known:  # the others have given up, or will
                    return []
                self.is_committed = True
        answers = _answers(message, blobs)
        return [(place, answer) for place in places for answer in answers]

    def _by_rank(self, launch: int, group_id: str) -> dict[int, int]:
        """Rank -> position of a group's members that take part; without a group, of all in that launch."""
        if group_id:
            return self.location.positions_of(group_id)
        return dict(enumerate(self.plan.places_at(launch - self.seq)))

    def fail(self, error: RaycollectError, *, unsent: Sequence[int] = ()) -> Outgoing:
        """The controller itself ends it; participants in `unsent` never got it."""
        with self._lock:
            self._pending.difference_update(unsent)
        return self._failed(-1, error, ())

    def explain(self, error: RaycollectError) -> None:
        """Sets the error as its refs explain it, and releases the refs."""
        with self._lock:
            self.error, self._is_explained = error, True
        self._let_go()

    # ------------------------------------------------------------------------------------------ outcome

    def _failed(self, position: int, error: RaycollectError, story: tuple[str, ...]) -> Outgoing:
        missing: RankNames = []  # at the latest agreement
        if isinstance(error, CollectiveTimeoutError) and self._gathers:
            with self._lock:
                key = max(self._gathers)
                by_rank = self._by_rank(*key[:2])
                homes = [self.location.home(by_rank[rank]) for rank in self._gathers[key].missing]
            missing = [(group.rank_of(member.actor_id), member.actor) for group, member in homes]
        self._resolve(self.location.locate(position, error, story, missing))
        know = self.location.heard(position, error) if isinstance(error, RefusedError) and position >= 0 else ()
        if len(know) == len(self.plan.participants):
            return []  # refused in the agreement: everyone knows
        return [(at, message) for at, message in self._abort(position, error) if at not in know]

    def _abort(self, position: int, error: RaycollectError) -> Outgoing:
        """Tells participants that have not ended to abort, once; after the commit, only to report their ends."""
        with self._lock:
            was_aborted, self._is_aborted = self._is_aborted, True
        if was_aborted:
            return []
        if self.is_committed:  # none waits for others
            reason = ""
        elif position < 0:
            reason = str(error)[:_MAX_REASON_CHARS]
        else:
            reason = f"{type(error).__name__} on {self.location.describe(position)}"
        message = Abort(seq=self.seq, reason=reason)
        return [(other, message) for other in sorted(self._pending)]

    def _resolve(self, error: RaycollectError | None) -> None:
        with self._lock:
            was_known = self.is_known
            if not was_known:
                self.error = error
                self.is_known = True
                watchers, self._watchers = self._watchers, []
        if self.refs:
            self._let_go()
        if not was_known:
            self._unresolved.release()
            if self.letters is not None:
                self.letters.close()
                if self._waiting - {threading.get_ident()}:
                    self.letters.mailbox.wake()
            if self.ring is not None:
                _record(self, self.ring)
            for call in watchers:
                call()
            if self._abandoned:
                _log_abandoned(self._abandoned, self.plan.name, self.error)

    def _let_go(self) -> None:
        """Drops the refs once no participant runs it, except those of absent operands, which have the errors."""
        with self._lock:
            if self._pending or not self.is_known:
                return
            absent: dict[Key, Any] = {}
            if isinstance(self.error, RefusedError) and not self._is_explained:
                named = {violation.ref for violation in self.error.violations if violation.kind in ABSENT}
                absent = {key: ref for key, ref in self.refs.items() if key.hex() in named}
            dropped, self.refs = self.refs, absent
        del dropped  # not under the lock


def retrieve_errors(refs: Iterable[Any]) -> None:
    """Retrieves the values of refs, now or later, as Ray logs an error that is never retrieved."""
    for ref in tuple(refs):
        ref.future()


def _answers(message: Arrive, blobs: Sequence[bytes]) -> list[Arrivals]:
    """The answer to each participant of an agreement, in parts that fit into frames."""
    parts, filled = list[list[bytes]]([[]]), 0
    for blob in blobs:
        if filled and filled + len(blob) > ANSWER_NBYTES:
            parts.append([])
            filled = 0
        parts[-1].append(blob)
        filled += len(blob)
    group_id, seq, number = message.group_id, message.seq, message.round
    return [
        Arrivals(group_id=group_id, seq=seq, round=number, blobs=part, more=part is not parts[-1]) for part in parts
    ]


def _log_abandoned(abandoned: list[bool], name: str, error: RaycollectError | None) -> None:
    try:
        abandoned.pop()
    except IndexError:
        return  # it was logged
    if error is not None and not isinstance(error, PlanAbortedError):
        _log.error("%s failed, and nobody waited for it: %s", name, error)


def _record(tracker: PlanTracker, ring: Ring) -> None:
    plan, error = tracker.plan, tracker.error
    number = ring.label_of(lambda: _label(tracker, ring), plan)
    failed = "" if error is None else type(error).__name__
    ring.put(tracker._KIND, "", tracker.began_s, ring.clock(), tracker.seq, number, failed)


def _label(tracker: PlanTracker, ring: Ring) -> Label:
    specs = [group.spec for group in tracker.groups]
    for spec in specs:
        ring.groups.setdefault(spec.group_id, TracedGroup.of(spec))
    plan, groups = tracker.plan, ",".join([spec.group_id for spec in specs])
    return Label(plan.name, groups, -1, len(plan.participants), 0, len(plan.requests))
