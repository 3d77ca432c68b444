"""The runs of one captured step: how they begin, are waited for, and end with the step.

A participant with a doorbell ends its part of a run by a word in shared memory, which no thread of the driver watches:
the waiter of a run reads it. Answers that do not fit there, answers of other machines, and every
failure arrive over the channel.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, ClassVar
from weakref import ref

from raycollect.channel.doorbell import IN_FLIGHT, Doorbell
from raycollect.channel.messages import BeginRun, Forget
from raycollect.core.deadline import NEVER, Deadline
from raycollect.core.model import UNKNOWN_TASK, Key, Member
from raycollect.core.signals import Deferred, deliver
from raycollect.driver.controller import Controller
from raycollect.driver.error_location import ErrorLocator, RankNames
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.plan_tracker import Outgoing, PlanTracker
from raycollect.driver.plans import PlansUnderWay
from raycollect.driver.step_plan import StepPlan
from raycollect.errors import (
    CaptureBrokenError,
    CaptureError,
    CollectiveTimeoutError,
    FaultError,
    MethodError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    UnknownGroupError,
    brief,
    strip_traceback,
)
from raycollect.errors.text import listed
from raycollect.observe.trace import RUN
from raycollect.planner import Membership
from raycollect.ray_bridge import ray_actors
from raycollect.ray_bridge.submitted_calls import NOTHING, AllHeld, SubmittedCalls

_SLICE_S = 0.5  # the longest sleep of a waiting thread, in seconds


class RunTracker(PlanTracker):
    """A run between its beginning and the end of its last participant.

    Args:
        number: The run's number at the doorbell; 0: it is not rung for.

    Attributes:
        place: Which of the step's runs it is, from 1.
        results: What the participants have answered, by position.
    """

    _KIND: ClassVar[str] = RUN

    def __init__(self, seq: int, runs: StepRuns, number: int, deadline: Deadline) -> None:
        super().__init__(seq, runs.step_plan, runs.memberships, runs.refs, deadline)
        self._runs = runs
        self.location = runs.location
        self.writes = runs.writes
        self._is_chain = True  # methods do not learn that a rank has failed
        self.number = number
        self.place: int = runs.begun
        self.results: list[bytes | None] = [None] * len(runs.step_plan.participants)
        # Position -> slot of those whose answer at the doorbell was not taken
        self._slots: Mapping[int, int] = runs.in_slots if number else {}

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the outcome; False: it is not known in time."""
        until_s = inf if timeout_s is None else monotonic() + timeout_s
        doorbell, me = self._runs.doorbell if self.number else None, threading.get_ident()
        with Deferred():
            try:
                while True:
                    self._runs.waiting.add(me)  # before `look`, so that no wake-up is missed
                    if self.is_known:
                        return True
                    left_s = _SLICE_S if until_s == inf else min(_SLICE_S, until_s - monotonic())
                    if left_s <= 0:
                        return self.resolved
                    if doorbell is None:
                        self.wait_for_word(left_s)
                    else:
                        doorbell.wait(left_s, self.number, self._slots.values())
                        deliver()
                    self.look()
            finally:
                self._runs.waiting.discard(me)

    def look(self) -> None:
        """Takes the participants' answers in shared memory."""
        doorbell = self._runs.doorbell
        if doorbell is None or not self._slots:
            return
        slots, ended, left = self._slots, [], {}
        for position, payload in zip(slots, doorbell.answers(self.number, slots.values()), strict=True):
            if position not in self._pending:  # it has reported its end over the channel
                continue
            if payload is None:
                left[position] = slots[position]
            else:
                self.results[position] = payload
                ended.append(position)
        if ended:
            self._ended(ended, None, ())
        self._slots = left

    def answered(self, position: int, payload: bytes) -> None:
        """A participant has ended well and returns values; any thread may call it."""
        if position in self._pending:
            self.results[position] = payload
            self._ended((position,), None, ())

    def done(
        self, position: int, error: RaycollectError | None, story: Sequence[str], *, others: Sequence[int] = ()
    ) -> Outgoing:
        """A participant has ended; each reports itself alone."""
        return self._ended((position,), error, story)

    def _resolve(self, error: RaycollectError | None) -> None:
        super()._resolve(error)
        self._runs.ended(self)


@dataclass(frozen=True, eq=False)
class _StepErrorLocator(ErrorLocator):
    """Also names the calls and values of the step, by `reword`."""

    plan: StepPlan
    reword: Callable[[RaycollectError], RaycollectError]

    def home(self, position: int) -> tuple[Membership, Member]:
        return self.plan.homes[max(position, 0)]

    def heard(self, position: int, error: RefusedError) -> Sequence[int]:
        return self.plan.heard(position, error)

    def locate(
        self, position: int, error: RaycollectError, story: tuple[str, ...], missing_now: RankNames
    ) -> RaycollectError:
        if position < 0 and isinstance(error, CollectiveTimeoutError):
            return self.reword(error)  # it says all
        method = error.op if isinstance(error, MethodError) else ""
        located = super().locate(position, error, story, missing_now)
        if method and isinstance(located, FaultError):
            located.op = method
        return self.reword(located)


class StepRuns:
    """The runs of one capture. Any thread may call it."""

    def __init__(
        self,
        controller: Controller,
        capture: bytes,
        step_plan: StepPlan,
        memberships: Sequence[Membership],
        keys: Sequence[Key],
        refs: Mapping[Key, Any],
        *,
        doorbell: Doorbell | None = None,
        slots: Sequence[int] = (),
        peers: Sequence[ParticipantLink] = (),
        reword: Callable[[RaycollectError], RaycollectError] = lambda error: error,
    ) -> None:
        self.step_plan = step_plan
        self.memberships: tuple[Membership, ...] = tuple(memberships)
        self.refs: dict[Key, Any] = dict(refs)
        self.is_closed: bool = False
        self.location: ErrorLocator = _StepErrorLocator(step_plan, self.memberships, tuple(keys), reword)
        self._failure: RaycollectError | None = None
        written = {keys[source]: writes for source, writes in step_plan.uses().items()}  # type: ignore[call-overload]
        self.writes: dict[Key, bool] = {**written, **dict.fromkeys(step_plan.touched, True)}
        self.plans: PlansUnderWay = controller.plans
        self._groups = controller.groups
        self._capture = capture
        self.doorbell = doorbell
        self._slots = tuple(slots) if doorbell is not None else (-1,) * len(step_plan.participants)
        self.in_slots: dict[int, int] = {at: slot for at, slot in enumerate(self._slots) if slot >= 0}
        self._revision: object = None
        self._links: list[tuple[ParticipantLink, int]] = list(zip(peers, self._slots, strict=False))
        self._calls: list[SubmittedCalls] = []  # of the participants; found with `_links`
        self._under_way: deque[RunTracker] = deque()
        self.begun: int = 0  # how many runs there were
        self.waiting: set[int] = set()  # the threads that wait for runs
        self._after: dict[int, list[bytes]] = {}  # the calls that runs under way wait for, by run and position
        self._passed = [NOTHING] * len(self._slots)  # by position, the last call that is known to have ended
        self._calls = _ordered(self._links)

    # ------------------------------------------------------------------------------------------ beginning

    def begin(self, arguments: Sequence[bytes], deadline: Deadline = NEVER) -> RunTracker:
        """Begins a run, inside of `Deferred`; waits for the oldest where `IN_FLIGHT` are under way."""
        while True:
            calls = self._calls
            # All locks at once, as in `send`
            with AllHeld(calls), self.plans.dispatching:
                if self.is_closed or self.failure is not None or self.plans.revision is not self._revision:
                    self._check()
                if self._calls is not calls:
                    continue
                oldest = self._oldest() if self._under_way else None
                if oldest is None or self.begun + 1 - oldest.place < IN_FLIGHT:
                    return self._send(arguments, deadline, self._calls_before())
            if not oldest.wait(deadline.left_s()):
                raise self._crowded(oldest, deadline)

    def _crowded(self, oldest: RunTracker, deadline: Deadline) -> CollectiveTimeoutError:
        """No run could begin in time, as as many as may be under way are."""
        late = [home for at, home in enumerate(self.step_plan.homes) if oldest.is_pending(at)]
        names = listed(f"rank {member.rank} ({member.actor})" for _, member in late)
        return CollectiveTimeoutError(
            op=self.step_plan.name,
            group_name=oldest.group_name,
            detail=f"{IN_FLIGHT} runs are under way, and run {oldest.place} has not ended in time on {names}",
            missing=tuple([member.rank for group, member in late if group is late[0][0]]),
            timeout_s=deadline.timeout_s,
        )

    def read(self, position: int, submit: Callable[[Any], Any]) -> Any:
        """Submits a call to a participant's actor that later runs need not wait for; returns the result of `submit`."""
        actor = ray_actors.actor_handle(self.step_plan.participants[position])  # the lease may have ended
        calls = self._links[position][0].calls if self._links else None
        if calls is None:
            return submit(actor)
        with calls.lock:
            is_passed = calls.last in (NOTHING, self._passed[position])
            submitted = submit(actor)
            if is_passed and calls.last is not None:
                self._passed[position] = calls.last
        return submitted

    def _oldest(self) -> RunTracker | None:
        """The oldest run whose outcome is not known; those before it are ended by asking."""
        return next((tracker for tracker in tuple(self._under_way) if not tracker.resolved), None)

    def _check(self) -> None:
        """Raises the reason why the step can't run, and finds the participants again after a change of groups."""
        if self.is_closed:
            raise CaptureError(detail="this captured step is closed: capture it again to run it")
        if self.failure is not None:
            detail = "this captured step is broken, as one of its runs failed"
            raise CaptureBrokenError(detail=detail, why=brief(self.failure)) from self.failure
        revision = self.plans.revision
        try:
            peers = self._groups.links(self.memberships, self.step_plan.participants)
        except UnknownGroupError as exc:
            if not self._groups.is_declared(exc.group_name):
                raise  # as by any other call of a destroyed group
            raise CaptureBrokenError(detail="a group of this captured step has changed", why=brief(exc)) from exc
        self._links = list(zip(peers, self._slots, strict=True))
        self._calls = _ordered(self._links)
        self._revision = revision

    def _calls_before(self) -> list[bytes]:
        """The last call of each actor, which the next run follows."""
        preceding = []
        for (peer, _), passed in zip(self._links, self._passed, strict=True):
            calls = peer.calls
            last = NOTHING if calls is None else calls.last  # NOTHING: its methods have no order
            preceding.append(UNKNOWN_TASK if last is None else NOTHING if last == passed else last)
        return preceding

    def _send(self, arguments: Sequence[bytes], deadline: Deadline, after: list[bytes]) -> RunTracker:
        """Sends a run to all, behind the calls `after`."""
        plans, doorbell = self.plans, self.doorbell
        self.begun += 1
        number = doorbell.begin() if doorbell is not None and self.in_slots else 0
        seq = next(plans.numbers)
        tracker = RunTracker(seq, self, number, deadline)
        plans.register(tracker)
        self._under_way.append(tracker)
        if any(after):
            self._after[seq] = after
        try:
            self._tell(tracker, arguments, after)
        except Exception as exc:  # noqa: BLE001 - any of Ray's: participants that got the run are told of its end
            self._stop_short(tracker, exc)
            return tracker
        if plans.revision is not self._revision:  # the thread that ended a group meanwhile may not have seen this run
            self._look_again(tracker)
        return tracker

    def _look_again(self, tracker: RunTracker) -> None:
        for at, (peer, _) in enumerate(self._links):
            if peer.link is None:
                self.plans.send(tracker, tracker.lost(at, "its connection has ended"))
        try:
            self._groups.check(self.memberships)
        except RaycollectError as exc:
            given_back = [at for at, (peer, _) in enumerate(self._links) if peer.actor is None]
            self.plans.fail(tracker, strip_traceback(exc), unsent=given_back)

    def _tell(self, tracker: RunTracker, arguments: Sequence[bytes], after: list[bytes]) -> None:
        seq, number, doorbell = tracker.seq, tracker.number, self.doorbell
        behind: ref[PlanTracker] = ref(tracker)
        rings = [] if doorbell is None else doorbell.runs
        try:
            for at, (peer, slot) in enumerate(self._links):
                predecessor, payload, call = peer.last_seq, arguments[at], after[at]
                if call == UNKNOWN_TASK and peer.calls is not None:
                    peer.fence(seq)  # methods are behind it, and plans after it wait for the run
                    peer.calls.last, peer.calls.before = NOTHING, None
                else:
                    peer.keep_behind(behind, at)
                if slot < 0 or not rings[slot].write(number, seq, predecessor, payload, call):
                    capture = self._capture
                    peer.send(BeginRun(capture=capture, seq=seq, predecessor=predecessor, payload=payload, after=call))
                peer.last_seq = seq
        finally:
            if doorbell is not None and number:
                doorbell.ring(number)

    def _stop_short(self, tracker: RunTracker, exc: Exception) -> None:
        """Ends a run that could not be sent to all."""
        last = len(self._links) - 1
        at = next((at for at, (peer, _) in enumerate(self._links) if peer.last_seq != tracker.seq), last)
        error = self._links[at][0].unsent(exc, tracker.member(at).rank)
        self.plans.fail(tracker, error, unsent=range(at, last + 1))

    # ------------------------------------------------------------------------------------------ the end

    @property
    def failure(self) -> RaycollectError | None:
        """The error of the first run that has failed."""
        under_way = (tracker.error for tracker in tuple(self._under_way))
        return self._failure or next((error for error in under_way if error is not None), None)

    def ended(self, tracker: RunTracker) -> None:
        """The outcome of a run is known: if it failed, those after it fail too."""
        if tracker.error is not None:  # before the run leaves `_under_way`
            self._failure = self._failure or tracker.error
        try:
            self._under_way.remove(tracker)
        except ValueError:
            return  # a repeated call
        for at, call in enumerate(self._after.pop(tracker.seq, ())):
            if call and tracker.error is None:
                self._passed[at] = call
        if tracker.error is not None:
            detail = f"run {tracker.place} of this captured step failed before ({type(tracker.error).__name__})"
            for other in reversed(tuple(self._under_way)):
                if other.place > tracker.place:
                    self.plans.fail(other, PlanAbortedError(detail=detail))
        if tracker.error is None or tracker.has_ended:  # a run succeeds only after all have ended
            self.plans.remove(tracker)
        if self.doorbell is not None and self.waiting.difference((threading.get_ident(),)):
            self.doorbell.wake()

    @property
    def is_idle(self) -> bool:
        """Whether no run is under way."""
        return all(tracker.resolved for tracker in tuple(self._under_way))

    def close(self) -> None:
        """Makes the participants forget the step, and aborts runs under way. Never waits; may be called twice."""
        self.plans.dispatching.soon(self.let_go)

    def let_go_idle(self) -> bool:
        """`let_go` if no run is under way; False otherwise."""
        if not self.is_idle:
            return False
        self.let_go()
        return True

    def let_go(self) -> None:
        """`close`, for a caller that holds `dispatching`."""
        if self.is_closed:
            return
        self.is_closed = True
        for tracker in tuple(self._under_way):
            tracker.resolved  # noqa: B018 - so that those that have ended have ended well
        for tracker in reversed(tuple(self._under_way)):
            self.plans.fail(tracker, PlanAbortedError(detail="its captured step was closed"))
        for peer, _ in self._links:
            peer.send(Forget(capture=self._capture))
        self.refs = {}
        self._links, self._calls = [], []  # which hold the actors
        if self.doorbell is not None:
            self.doorbell.close()


def _ordered(links: Sequence[tuple[ParticipantLink, int]]) -> list[SubmittedCalls]:
    """The calls of those participants whose methods have an order."""
    return [peer.calls for peer, _ in links if peer.calls is not None]
