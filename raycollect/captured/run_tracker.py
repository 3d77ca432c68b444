"""State machine of one run of a captured step: a plan that begins and ends by the doorbell.

A participant at the doorbell reports success by a word in shared memory, which no thread of the driver watches: whoever
waits for a run, or asks how it went, reads it. What does not fit there, what other machines say, and every failure
comes over the channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING

from raycollect.captured.step_plan import StepPlan
from raycollect.core.model import Key
from raycollect.driver.error_location import ErrorLocator, RankNames
from raycollect.driver.plan_arrivals import PlanArrivals
from raycollect.driver.plan_tracker import Outgoing, PlanTracker
from raycollect.errors import CollectiveTimeoutError, FaultError, MethodError, RaycollectError, RefusedError
from raycollect.errors.text import listed
from raycollect.observe.trace import RUN

if TYPE_CHECKING:
    from raycollect.captured.runs import StepRuns

FOREVER = float("inf")


class RunTracker(PlanTracker):
    """One run of a captured step."""

    plan: StepPlan
    kind = RUN

    def __init__(self, seq: int, runs: StepRuns, place: int, number: int, timeout_s: float = FOREVER) -> None:
        super().__init__(seq, runs.step_plan, runs.memberships, runs.refs)
        self._keys = runs.keys
        self.place = place
        self.number = number
        self.until_s: float = FOREVER if timeout_s == FOREVER else monotonic() + timeout_s
        self._timeout_s = timeout_s
        self.results: list[bytes | None] = [None] * len(runs.step_plan.participants)
        self.is_fenced = False
        self._runs = runs
        self._is_chain = True  # methods, and other plans, do not hear that a launch broke
        self._slots = runs.in_slots if number else ()  # (position, slot) of those who have not answered there

    # ------------------------------------------------------------------------------------------ queries

    @property
    def resolved(self) -> bool:
        """True when the outcome is known."""
        if not self._resolved:
            self._look()
            if not self._pending and not self._resolved:  # a signal came between the last answer and what follows
                if self._first is not None:
                    self._failed(*self._first)
                else:
                    self._resolve(None)
        return self._resolved

    @property
    def awaited(self) -> int:
        """The first slot of the doorbell that has not answered; -1: there is none."""
        slots = self._slots
        return slots[0][1] if slots else -1

    @property
    def has_ended(self) -> bool:
        """True when no participant runs it any more."""
        if self._pending:
            self._look()
        return not self._pending

    @cached_property
    def location(self) -> ErrorLocator:
        """Maps positions and sources to what users know."""
        runs = self._runs
        return _RunLocator(self.plan, runs.memberships, runs.keys, self.plan.homes, told=runs.told)

    @cached_property
    def arrivals(self) -> PlanArrivals:
        """The agreements that the controller gathers; used under the lock."""
        return _RunArrivals(self.seq, self.plan, self.location)

    @cached_property
    def writes(self) -> Mapping[Key, bool]:
        """Key -> whether it may write the tensor, for each ref that it uses."""
        return self._runs.writes

    def is_pending(self, position: int) -> bool:
        """True while that participant has not ended it."""
        return not self.has_ended and position in self._pending

    def is_at(self, position: int, launch: int) -> bool:
        """Whether a participant takes part in one of its launches: not all have all plans."""
        stage = self.plan.stage_of(launch - self.seq)
        return stage is not None and position in stage.positions

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the outcome; False where it is not known in time."""
        return self._runs.wait(self, timeout_s)

    def wait_for_channel(self, timeout_s: float) -> None:
        """Waits for the outcome without reading the doorbell."""
        super().wait(timeout_s)

    def expire(self) -> None:
        """Fails it if its time is over."""
        if self._resolved or monotonic() < self.until_s:
            return
        homes = self.plan.homes
        late = [homes[at] for at in sorted(self._pending)]
        error = CollectiveTimeoutError(
            op=self.plan.name,
            group_name=self.group_name,
            detail=f"its time is over, and these had not ended their part: {listed(one.actor for _, one in late)}",
            missing=tuple(member.rank for group, member in late if group is late[0][0]),
            timeout_s=self._timeout_s,
        )
        self.abort(error)

    def abort(self, error: RaycollectError) -> None:
        """Ends it here and on all participants."""
        self._runs.controller.send(self, self.fail(error))

    # ------------------------------------------------------------------------------------------ events

    def answered(self, position: int, payload: bytes) -> None:
        """A participant has ended it well and returns this; any thread may call it."""
        self._take([(position, payload)])

    def _take(self, answers: Sequence[tuple[int, bytes]]) -> None:
        ended = []
        for position, payload in answers:
            if position in self._pending:
                self.results[position] = payload
                ended.append(position)
        if not ended:
            return
        outgoing = super().done(ended[0], None, (), others=ended[1:])
        if outgoing or not self._pending:
            self._runs.controller.send(self, outgoing)

    def done(
        self, position: int, error: RaycollectError | None, story: Sequence[str], *, others: Sequence[int] = ()
    ) -> Outgoing:
        """A participant has ended; it can't report others."""
        return super().done(position, error, story)

    def lost(self, position: int, reason: str) -> Outgoing:
        """A participant's process is gone; what it has answered before counts."""
        slot = dict(self._runs.in_slots).get(position, -1)
        doorbell = self._runs.doorbell if self.number and slot >= 0 else None
        payload = None if doorbell is None else doorbell.answer(slot, self.number)
        if payload is not None:
            self.answered(position, payload)
        return super().lost(position, reason)

    def _look(self) -> None:
        slots, came, doorbell = self._slots, [], self._runs.doorbell
        if doorbell is None:
            return
        for position, slot in slots:
            payload = doorbell.answer(slot, self.number)
            if payload is None and position in self._pending:
                break
            came.append((position, payload or b""))
        if came:
            self._take(came)
            self._slots = slots[len(came) :]

    def _note(self, error: RaycollectError | None) -> None:
        if error is not None and self._runs.failure is None:
            self._runs.failure = error

    def _resolve(self, error: RaycollectError | None) -> None:
        super()._resolve(error)
        self._runs.ended(self)

    def _failed(self, position: int, error: RaycollectError, story: tuple[str, ...]) -> Outgoing:
        outgoing = super()._failed(position, error, story)
        if outgoing or position < 0 or not isinstance(error, RefusedError):
            return outgoing
        number = max(max((one.call for one in error.violations), default=0), 0)
        stage = next((one for one in reversed(self.plan.stages) if one.first <= number), None)
        know = stage.positions if stage is not None and position in stage.positions else ()
        return [(at, message) for at, message in self._abort(position, error) if at not in know]


@dataclass(frozen=True, eq=False)
class _RunLocator(ErrorLocator):
    """Also names the calls and values of the step."""

    told: Callable[[RaycollectError], RaycollectError] = field(kw_only=True)

    def locate(
        self, position: int, error: RaycollectError, story: tuple[str, ...], missing_now: RankNames
    ) -> RaycollectError:
        if position < 0 and isinstance(error, CollectiveTimeoutError):
            return self.told(error)  # `expire` has said it all
        method = error.op if isinstance(error, MethodError) else ""
        found = super().locate(position, error, story, missing_now)
        if method and isinstance(found, FaultError):
            found.op = method
        return self.told(found)


class _RunArrivals(PlanArrivals):
    """Knows which participants and rounds each plan of the step has."""

    _plan: StepPlan

    def rounds_of(self, launch: int, group_id: str) -> int:
        stage = self._plan.stage_of(launch - self._seq)
        if stage is None:
            return 0
        return stage.plan.rounds if launch - self._seq == stage.offset else 1

    def positions_of(self, launch: int, group_id: str) -> dict[int, int]:
        stage = None if group_id else self._plan.stage_of(launch - self._seq)
        return super().positions_of(launch, group_id) if stage is None else dict(enumerate(stage.positions))
