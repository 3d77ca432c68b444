"""One plan under way, as its controller sees it: events in, messages out. No I/O; one lock.

Whatever happens ends in one of three ways. All ranks are done: success. All were refused at the door: an error, and
nobody was touched. Anything else is lopsided: the flight tells every rank that has not ended to abort, and fails with
the first cause, not with an echo of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raycollect.channel.messages import Abort, Arrivals
from raycollect.door import OUTPUT, Door, DoorState
from raycollect.errors import (
    CollectiveTimeoutError,
    FaultError,
    ParticipantDiedError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
)
from raycollect.group import Membership
from raycollect.model import Key
from raycollect.planner import Plan

Orders = list[tuple[int, Any]]
"""(rank, message): what to send, in order."""


class Flight:
    """A plan between its dispatch and the end of its last rank.

    Args:
        seq: The plan's number.
        plan: The plan.
        membership: The group.
        refs: The operand refs by key; held until the plan has ended everywhere (P5). `results` gets the result refs,
            by rank.
    """

    def __init__(self, seq: int, plan: Plan, membership: Membership, refs: dict[Key, Any]) -> None:
        self.seq = seq
        self.plan = plan
        self.membership = membership
        self.refs = refs
        self.results: dict[int, Any] = {}
        self.error: RaycollectError | None = None
        self._pending = set(plan.ranks)
        self._doors: dict[int, Door] = {}
        self._first: tuple[int, RaycollectError, tuple[str, ...]] | None = None  # the first failure that a rank told
        self._told = False  # whether the ranks were told to abort
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
        """True when no rank runs it any more."""
        return not self._pending

    def is_pending(self, rank: int) -> bool:
        """True while that rank has not ended it."""
        return rank in self._pending

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
        self, rank: int, error: RaycollectError | None, story: Sequence[str], *, others: Sequence[int] = ()
    ) -> Orders:
        """A rank has ended, and says so of others that ran all of it."""
        with self._lock:
            self._pending.difference_update((rank, *others))
            waiting = bool(self._pending)
            if error is not None and self._first is None:
                self._first = (rank, error, tuple(story))
            first = self._first
        if error is not None:
            if isinstance(error, PlanAbortedError) and waiting and not self.resolved:
                return []  # an echo: who caused it will tell, or its process is gone
            return self._failed(rank, error, tuple(story))
        if waiting:
            return []
        if first is not None:
            return self._failed(*first)  # an echo of which nobody told the cause
        self._resolve(None)
        return []

    def lost(self, rank: int, reason: str) -> Orders:
        """A rank's process is gone."""
        with self._lock:
            if rank not in self._pending:
                return []
            self._pending.discard(rank)
        error = ParticipantDiedError(rank=rank, detail=f"its process ended while the plan was under way ({reason})")
        return self._failed(rank, error, ())

    def arrive(self, rank: int, turn: int, blob: bytes) -> Orders:
        """A rank is at the door of the star; the last one opens it."""
        with self._lock:
            door = self._doors.setdefault(turn, Door(self.plan.ranks))
            if door.arrive(rank, blob) is not DoorState.COMPLETE:
                return []
            blobs = list(door.blobs)
        group_id = self.membership.spec.group_id
        message = Arrivals(group_id=group_id, seq=self.seq, round=turn, blobs=blobs)
        return [(other, message) for other in self.plan.ranks]

    def fail(self, error: RaycollectError, *, unsent: Sequence[int] = ()) -> Orders:
        """The controller itself ends it; ranks in `unsent` never got it."""
        with self._lock:
            self._pending.difference_update(unsent)
        return self._failed(-1, error, ())

    # ------------------------------------------------------------------------------------------ outcome

    def _failed(self, rank: int, error: RaycollectError, story: tuple[str, ...]) -> Orders:
        self._resolve(self._located(rank, error, story))
        if isinstance(error, RefusedError) and rank >= 0:
            return []  # refused at the door: every rank knows
        with self._lock:
            told, self._told = self._told, True
        if told:
            return []
        message = Abort(seq=self.seq, reason=f"{type(error).__name__} on rank {rank}" if rank >= 0 else str(error))
        return [(other, message) for other in sorted(self._pending)]

    def _resolve(self, error: RaycollectError | None) -> None:
        with self._lock:
            if self._resolved:
                return
            self.error = error
            self._resolved = True
            self._unresolved.release()
            watchers, self._watchers = self._watchers, []
        for call in watchers:
            call()

    def _located(self, rank: int, error: RaycollectError, story: tuple[str, ...]) -> RaycollectError:
        """Adds what only the controller knows: the group's name, actors and refs."""
        name = self.membership.spec.name
        op = self.plan.request.kind.value
        if isinstance(error, RefusedError):
            violations = tuple(self._named(v) for v in error.violations)
            return type(error)(op=op, group_name=name, violations=violations)
        if isinstance(error, FaultError):
            error.op, error.group_name = op, name
            error.rank = rank if error.rank < 0 else error.rank
            error.actor = error.actor or self._actor(error.rank)
            error.story = error.story or story
        if isinstance(error, CollectiveTimeoutError):
            missing = error.missing or self._last_missing()
            names = ", ".join(f"rank {r} ({self._actor(r)})" for r in missing) or "nobody"
            error.missing = tuple(missing)
            error.detail = f"after {error.timeout_s:g} s these had not come: {names}"
        return error

    def _last_missing(self) -> tuple[int, ...]:
        with self._lock:
            return self._doors[max(self._doors)].missing if self._doors else ()

    def _named(self, violation: Any) -> Any:
        ref = violation.ref or self._ref(violation.rank, is_output=OUTPUT in violation.field)
        return replace(violation, actor=violation.actor or self._actor(violation.rank), ref=ref)

    def _ref(self, rank: int, *, is_output: bool) -> str:
        found = (keys for at, *keys in self.plan.request.operands if at == rank)
        src, dst = next(found, (None, None))
        key = dst if is_output or src is None else src
        return key.hex() if key else ""

    def _actor(self, rank: int) -> str:
        return self.membership.members[rank].actor if 0 <= rank < len(self.membership.members) else ""
