"""One plan under way, as its controller sees it: events in, messages out. No I/O; one lock.

Whatever happens ends in one of three ways. All participants are done: success. All were refused at the door: an error,
and nobody was touched. Anything else is lopsided: the flight tells everyone who has not ended to abort, and fails with
the first cause, not with an echo of it. Where a plan has several launches, an echo is enough to tell everyone: who
waits in another launch than the one that broke would not hear of it there.

Participants go by their positions in the plan; in errors they are ranks of the user's groups.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from raycollect.channel.messages import Abort, Arrivals, Arrive
from raycollect.door import OUTPUT, Door, DoorState
from raycollect.errors import (
    CollectiveTimeoutError,
    FaultError,
    GroupBrokenError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    RefusedError,
    Violation,
)
from raycollect.group import Membership
from raycollect.model import Key, Member
from raycollect.observe import Label, Place, Ring
from raycollect.observe.trace import PLAN
from raycollect.planner import Made, Plan
from raycollect.planner.ir import Operands

log: logging.Logger = logging.getLogger("raycollect")

Orders = list[tuple[int, Any]]
"""(position, message): what to send, in order."""

ABSENT = ("lost", "producer_failed")
"""The kinds of violations of operands that are not there."""

ANSWER_NBYTES = 1 << 19
"""How much of what all gave to a door goes into one message, which has to fit into a frame of the channel; each alone
did, on its way here."""

_LONGEST = 1000
"""How many characters of a reason are sent."""

_Door = tuple[int, int, str, tuple[int, ...]]
"""(launch, round, group id, ranks)."""


class Flight:
    """A plan between its dispatch and the end of its last participant.

    Args:
        seq: The first of the plan's numbers.
        plan: The plan; its sources are places in `refs`.
        memberships: The group of each request.
        refs: The operand refs by key.

    Attributes:
        refs: The operand refs by key, held until the plan has ended everywhere (P5); after it, those that say more
            about why it failed, until `explain`.
        groups: The groups of its requests, each once.
        made: (request, position) -> the ref of what the request makes there.
        error: Why it failed.
        ring: The timeline that it is noted in, where one is recorded.
        began_s: When it was dispatched, by that one's clock.
    """

    kind: ClassVar[str] = PLAN  # what timelines call it

    def __init__(self, seq: int, plan: Plan, memberships: Sequence[Membership], refs: dict[Key, Any]) -> None:
        self.seq = seq
        self.plan = plan
        self.refs: Mapping[Key, Any] = refs
        self.groups: tuple[Membership, ...] = tuple(dict.fromkeys(memberships))
        self.made: dict[tuple[int, int], Any] = {}
        self.error: RaycollectError | None = None
        self.ring: Ring | None = None
        self.began_s: float = 0.0
        self._memberships = memberships
        self._keys = tuple(refs)
        self._is_explained = False  # whether the refs have told what they know of the failure
        self._is_chain = plan.width > 1  # who waits in one launch does not hear that another one broke
        self._pending = set(range(len(plan.participants)))
        self._doors: dict[_Door, Door] = {}
        self._first: tuple[int, RaycollectError, tuple[str, ...]] | None = None  # the first failure that one told
        self._abandoned: list[bool] = []  # holds something until the failure that nobody waits for is logged
        self._told = False  # whether the participants were told to abort
        self._is_committed = False
        self._resolved = False
        self._unresolved = threading.Lock()  # held until the outcome is known: a wait costs one hand-over
        self._unresolved.acquire()
        self._watchers: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------ asking

    @property
    def resolved(self) -> bool:
        """True when the outcome is known."""
        return self._resolved

    @property
    def landed(self) -> bool:
        """True when no participant runs it any more."""
        return not self._pending

    @property
    def group_name(self) -> str:
        """What to call its groups in messages."""
        return ", ".join(group.spec.name for group in self.groups)

    @property
    def is_committed(self) -> bool:
        """Whether all participants were told to overwrite what they gave: those who live hold their results."""
        return self._is_committed

    def is_pending(self, position: int) -> bool:
        """True while that participant has not ended it."""
        return position in self._pending

    def member(self, position: int) -> Member:
        """A participant, as a member of the group of the first request that it takes part in."""
        return self._home(position)[1]

    def rank_of(self, position: int) -> int:
        """What rank a participant is in the group of the first request that it takes part in."""
        return self._home(position)[1].rank

    def user_of(self, key: Key) -> tuple[int, int]:
        """(call, rank) of the first use of a ref; the call is -1 where there is but one."""
        source = self._keys.index(key)
        for number, request in enumerate(self.plan.requests):
            for rank, *sources in request.operands:
                if source in sources:
                    return (number if len(self.plan.requests) > 1 else -1), rank
        return -1, -1

    def has(self, seq: int) -> bool:
        """Whether a launch of that number is one of its."""
        return self.seq <= seq < self.seq + self.plan.width

    def writes(self, key: Key) -> bool | None:
        """Whether it writes the tensor of a ref; None where it does not use it."""
        return self._uses.get(key)

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the outcome; False where it is not known in time."""
        if not self._unresolved.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0)):
            return False
        self._unresolved.release()
        return True

    def when_resolved(self, call: Callable[[], None]) -> None:
        """Calls back once the outcome is known: now, or later on the channel's thread."""
        with self._lock:
            if not self._resolved:
                self._watchers.append(call)
                return
        call()

    # ------------------------------------------------------------------------------------------ events

    def done(
        self, position: int, error: RaycollectError | None, story: Sequence[str], *, others: Sequence[int] = ()
    ) -> Orders:
        """A participant has ended, and says so of others that ran all of it."""
        with self._lock:
            self._pending.difference_update((position, *others))
            waiting = bool(self._pending)
            if error is not None and self._first is None:
                self._first = (position, error, tuple(story))
            first = self._first
        if isinstance(error, PlanAbortedError) and not self._resolved:  # an echo
            several = self._is_chain
            if waiting:  # who caused it will tell, or its process is gone
                return self._abort(position, error) if several else []
            if first is not None and several:
                return self._failed(*first)  # later ones may be echoes of that abort
        if error is not None:
            return self._failed(position, error, tuple(story))
        if waiting:
            return []
        if first is not None:
            return self._failed(*first)  # an echo of which nobody told the cause
        self._resolve(None)
        return []

    def lost(self, position: int, reason: str) -> Orders:
        """A participant's process is gone."""
        with self._lock:
            if position not in self._pending:
                return []
            self._pending.discard(position)
        error = ParticipantDiedError(
            detail=f"its process, or the connection to it, ended while the plan was under way ({reason})"
        )
        return self._failed(position, error, ())

    def arrive(self, position: int, message: Arrive) -> Orders:
        """A participant is at a door that the controller keeps; the last one opens it.

        Raises:
            ProtocolError: It can't be there, or was there before; or there is no such door.
        """
        ranks = tuple(message.ranks)
        crew = self._crew_of(message.group_id, message.seq)
        places = [crew.get(rank, -1) for rank in ranks]
        if min(places, default=-1) < 0 or crew.get(message.rank) != position or ranks != tuple(sorted(set(ranks))):
            raise ProtocolError(detail=f"rank {message.rank} has no part in launch {message.seq} of ranks {ranks}")
        rounds = self._rounds_of(message.seq, message.group_id)
        if not 0 <= message.round < rounds:
            raise ProtocolError(detail=f"launch {message.seq} has no round {message.round} at its door")
        with self._lock:
            door = self._doors.setdefault((message.seq, message.round, message.group_id, ranks), Door(ranks))
            if door.arrive(message.rank, message.blob) is not DoorState.COMPLETE:
                return []
            if self.plan.commits and not message.group_id and message.round == rounds - 1:
                if self._told or self._resolved:  # the others have given up, or will
                    return []
                self._is_committed = True
            blobs = list(door.blobs)
        answers = _answers(message, blobs)
        return [(place, answer) for place in places for answer in answers]

    def fail(self, error: RaycollectError, *, unsent: Sequence[int] = ()) -> Orders:
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

    def _failed(self, position: int, error: RaycollectError, story: tuple[str, ...]) -> Orders:
        self._resolve(self._located(position, error, story))
        if isinstance(error, RefusedError) and position >= 0:
            return []  # refused at the door: everyone knows
        return self._abort(position, error)

    def _abort(self, position: int, error: RaycollectError) -> Orders:
        """Tells everyone who has not ended to abort, once; nobody who does not wait for others any more."""
        with self._lock:
            told, self._told = self._told or self._is_committed, True
        if told:
            return []
        reason = str(error)[:_LONGEST] if position < 0 else f"{type(error).__name__} on {self._describe(position)}"
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
        if self.ring is not None:
            self._time(self.ring)
        for call in watchers:
            call()
        if self._abandoned:
            self._log_failure()

    def _time(self, ring: Ring) -> None:
        """Notes in a timeline that the outcome is known."""
        plan, error = self.plan, self.error
        known = ring.labelled.get((id(plan),))  # of plans that come again, which may take some 60 us
        number = ring.label_of(lambda: self._label(ring), plan) if known is None else known[1]
        failed = "" if error is None else type(error).__name__
        ring.put(self.kind, "", self.began_s, ring.clock(), self.seq, number, failed)

    def _label(self, ring: Ring) -> Label:
        """What a timeline says of its plan; the groups are noted, too."""
        specs = [one.spec for one in self.groups]
        for spec in specs:
            ring.groups.setdefault(spec.group_id, Place(spec.name, spec.backend, -1, spec.world_size))
        plan, groups = self.plan, ",".join([spec.group_id for spec in specs])
        return Label(plan.name, groups, -1, len(plan.participants), 0, len(plan.requests))

    def _note(self, error: RaycollectError | None) -> None:
        """The outcome, just before anybody knows it; called under the lock."""

    def abandon(self) -> None:
        """Nobody will ask for the outcome any more: a failure is logged, now or later.

        Takes no lock: the garbage collector may call it, in any thread at any place.
        """
        self._abandoned.append(True)
        if self._resolved:
            self._log_failure()

    def _log_failure(self) -> None:
        try:
            self._abandoned.pop()
        except IndexError:
            return  # it was logged
        if self.error is not None and not isinstance(self.error, PlanAbortedError):
            log.error("%s failed, and nobody waited for it: %s", self.plan.name, self.error)

    def _let_go(self) -> None:
        """Drops the refs once nobody runs it, but for those that say more about why it failed."""
        with self._lock:
            if self._pending or not self._resolved:
                return
            dropped, self.refs = self.refs, {} if self._is_explained else self._telling()
        del dropped  # not under the lock

    def _telling(self) -> dict[Key, Any]:
        """The refs of operands that were not there: Ray knows what became of the methods that should have made them."""
        if not isinstance(self.error, RefusedError):
            return {}
        named = {violation.ref for violation in self.error.violations if violation.kind in ABSENT}
        return {key: ref for key, ref in self.refs.items() if key.hex() in named}

    def _located(self, position: int, error: RaycollectError, story: tuple[str, ...]) -> RaycollectError:
        """Adds what only the controller knows: the groups' names, actors and refs."""
        if isinstance(error, RefusedError):
            return type(error)(op=self.plan.name, group_name=self.group_name, violations=self.named(error.violations))
        if isinstance(error, GroupBrokenError):
            error.group_name = self.blamed(error)[0].spec.name
        if not isinstance(error, FaultError):
            return error
        found = self._trees.get(error.group_name)
        group, inner = found or (self._home(position)[0], None)
        if inner is not None:
            error.rank = _outer(error.rank, inner, group)
        error.op = self.plan.name if len(self.plan.requests) == 1 else error.op or self.plan.name
        error.group_name = group.spec.name if position >= 0 or found else self.group_name
        if error.rank < 0 and position >= 0 and not isinstance(error, CollectiveTimeoutError):  # it says who is missing
            error.rank = group.rank_of(self.plan.participants[position])
        error.actor = error.actor or (group.members[error.rank].actor if 0 <= error.rank < len(group.members) else "")
        error.story = error.story or story
        if isinstance(error, CollectiveTimeoutError):
            ranks = tuple(_outer(rank, inner, group) for rank in error.missing) if inner else tuple(error.missing)
            known = [rank for rank in ranks if 0 <= rank < len(group.members)]
            missing = [(rank, group.members[rank].actor) for rank in known] or self._last_missing()
            names = ", ".join(f"rank {rank} ({actor})" for rank, actor in missing) or "nobody"
            error.missing = tuple(rank for rank, _ in missing)
            if position >= 0 or not error.detail:
                error.detail = f"after {error.timeout_s:g} s these had not come: {names}"
        return error

    def blamed(self, error: GroupBrokenError) -> tuple[Membership, ...]:
        """The group that an error means; where it names none of the plan, all."""
        found = self._trees.get(error.group_name)
        return self.groups if found is None else (found[0],)

    def named(self, violations: Sequence[Violation]) -> tuple[Violation, ...]:
        """Adds to violations the actor of the rank, and its ref."""
        return tuple(map(self._named, violations))

    def _last_missing(self) -> list[tuple[int, str]]:
        """(rank, actor) of those whom others wait for at the latest door."""
        with self._lock:
            if not self._doors:
                return []
            place = max(self._doors)
            missing = self._doors[place].missing
        crew = self._crew_of(place[2], place[0])
        return [(group.rank_of(one.actor_id), one.actor) for group, one in (self._home(crew[at]) for at in missing)]

    def _named(self, violation: Violation) -> Violation:
        number = max(violation.call, 0)
        if not 0 <= number < len(self.plan.requests):
            return violation
        operands = self.plan.requests[number].operands
        return described(violation, self._memberships[number], operands, lambda source: self._keys[source])

    # ------------------------------------------------------------------------------------------ who is who

    def _home(self, position: int) -> tuple[Membership, Member]:
        """The group of the first request that a participant takes part in, and its member there."""
        number, rank = self.plan.involved[max(position, 0)][0]
        membership = self._memberships[number]
        return membership, membership.members[rank]

    def _describe(self, position: int) -> str:
        _, member = self._home(position)
        return f"rank {member.rank}" if len(self.groups) == 1 else member.actor

    def _rounds_of(self, seq: int, group_id: str) -> int:
        """How often the participants may meet here at the door of a launch; 0 where it is none of its."""
        if seq != self.seq:
            return int(self.has(seq))
        is_own = bool(group_id) == (self.plan.door is not None)  # else they meet in a group, and here only to commit
        return self.plan.rounds * is_own + (self.plan.commits and not group_id)

    def _crew_of(self, group_id: str, seq: int) -> dict[int, int]:
        """Rank -> position of those members of a group who take part; without a group: of all at that launch's door."""
        if not group_id:
            return {at: at for at in range(len(self.plan.participants))}
        outer, inner = self._trees.get(group_id, (None, None))
        group, positions = inner or outer, self.plan.positions
        members = () if group is None else group.members
        return {member.rank: positions[member.actor_id] for member in members if member.actor_id in positions}

    @cached_property
    def _trees(self) -> dict[str, tuple[Membership, Membership | None]]:
        """Group id, or name -> the user's group, and which of those inside it is meant."""
        found: dict[str, tuple[Membership, Membership | None]] = {}
        for outer in self.groups:
            for one in outer.tree:
                inner = None if one is outer else one
                found[one.spec.group_id] = found[one.spec.name] = (outer, inner)
        return found

    @cached_property
    def _uses(self) -> dict[Key, bool]:
        keys = self._keys
        return {keys[source]: written for source, written in self.plan.uses().items()}  # type: ignore[call-overload]


def described(
    violation: Violation, membership: Membership, operands: Sequence[Operands], key: Callable[[Any], Key]
) -> Violation:
    """Adds to a violation what neither the planner nor a participant knows: the rank's actor, and its ref.

    Args:
        violation: The violation.
        membership: The group.
        operands: Those of the request.
        key: Gives the key of a source.
    """
    members = membership.members
    actor = members[violation.rank].actor if 0 <= violation.rank < len(members) else ""
    src, dst = next(((src, dst) for rank, src, dst in operands if rank == violation.rank), (None, None))
    is_output = OUTPUT in violation.field or violation.field == "output" or src is None
    source = dst if is_output else src
    ref = "" if source is None or isinstance(source, Made) else key(source).hex()
    return replace(violation, actor=violation.actor or actor, ref=violation.ref or ref)


def _outer(rank: int, inner: Membership, outer: Membership) -> int:
    """The rank in a group of a rank of one inside it."""
    return outer.rank_of(inner.members[rank].actor_id) if 0 <= rank < len(inner.members) else -1


def _answers(message: Arrive, blobs: Sequence[bytes]) -> list[Arrivals]:
    """What all gave to a door, in parts."""
    parts, filled = list[list[bytes]]([[]]), 0
    for blob in blobs:
        if filled and filled + len(blob) > ANSWER_NBYTES:
            parts.append([])
            filled = 0
        parts[-1].append(blob)
        filled += len(blob)
    return [
        Arrivals(
            group_id=message.group_id, seq=message.seq, round=message.round, blobs=part, more=part is not parts[-1]
        )
        for part in parts
    ]
