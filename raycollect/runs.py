"""The runs of a captured step, as their controller sees them: flights that begin and end by the doorbell.

Where a participant sits at the doorbell its success is a word in shared memory, which nobody reads by himself: whoever
waits for a run, or asks how it went, looks. What does not fit there, what other machines say, and every failure comes
over the channel.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol, TypeVar

import msgpack

from raycollect.channel.messages import Abort, Forget, Run
from raycollect.course import Course
from raycollect.doorbell import IN_FLIGHT, Doorbell
from raycollect.errors import (
    CaptureBrokenError,
    CaptureError,
    CollectiveTimeoutError,
    DispatchError,
    FaultError,
    MethodError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    brief,
)
from raycollect.flight import Flight, Orders
from raycollect.group import Membership
from raycollect.model import Key, Member
from raycollect.observe.trace import RUN
from raycollect.peer import Peer

__all__ = ["RunFlight", "Runs", "RunsOwner"]

_SLICE_S = 0.5
"""How long a thread sleeps before it looks again, should it not be woken."""

_FOREVER = float("inf")
_Flight = TypeVar("_Flight", bound=Flight)


class RunsOwner(Protocol):
    """The controller, as far as runs need it."""

    dispatching: threading.Lock
    revision: object

    def take_off(self, make: Callable[[int], _Flight], width: int = 1) -> _Flight:
        """Registers a flight under the next numbers."""
        ...

    def send(self, flight: Flight, orders: Orders) -> None:
        """Carries out what a flight wants said."""
        ...

    def flights(self) -> Iterable[Flight]:
        """The flights that have not landed everywhere."""
        ...

    def crew(self, memberships: Sequence[Membership], participants: Sequence[str]) -> list[Peer]:
        """The leased participants."""
        ...


class RunFlight(Flight):
    """One run of a captured step.

    Args:
        seq: Its number.
        runs: The runs of its capture.
        place: Its place among them, from 1.
        number: Its number at the doorbell; 0: it does not go there.
        timeout_s: After how many seconds it is given up.

    Attributes:
        until_s: When it is given up, by `time.monotonic`.
        results: What each participant has given back, by position.
        is_fenced: Whether it goes through the actors' queues.
    """

    plan: Course
    kind = RUN

    def __init__(self, seq: int, runs: Runs, place: int, number: int, timeout_s: float = _FOREVER) -> None:
        super().__init__(seq, runs.course, runs.memberships, runs.refs)
        self._keys = runs.keys
        self.place = place
        self.number = number
        self.until_s: float = _FOREVER if timeout_s == _FOREVER else monotonic() + timeout_s
        self._timeout_s = timeout_s
        self.results: list[bytes | None] = [None] * len(runs.course.participants)
        self.is_fenced = False
        self._runs = runs
        self._is_chain = True  # methods, and other plans, do not hear that a launch broke
        self._seats = runs.seated if number else ()  # (position, seat) of those who have not answered there

    # ------------------------------------------------------------------------------------------ asking

    @property
    def resolved(self) -> bool:
        """True when the outcome is known."""
        if not self._resolved:
            self._look()
            if not self._pending and not self._resolved:  # a signal came between the last answer and what follows
                self._settle()
        return self._resolved

    @property
    def landed(self) -> bool:
        """True when no participant runs it any more."""
        if self._pending:
            self._look()
        return not self._pending

    def is_pending(self, position: int) -> bool:
        """True while that participant has not ended it."""
        return not self.landed and position in self._pending

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the outcome; False where it is not known in time."""
        return self._runs.wait(self, timeout_s)

    def sleep(self, timeout_s: float) -> None:
        """Waits for what the channel tells."""
        super().wait(timeout_s)

    def writes(self, key: Key) -> bool | None:
        """Whether it may write the tensor of a ref; None where it does not use it."""
        return True if key in self.plan.touched else self._runs.writes.get(key)

    def lapse(self) -> None:
        """Gives it up, where its time is over."""
        if self._resolved or monotonic() < self.until_s:
            return
        homes = self.plan.homes
        late = [homes[at] for at in sorted(self._pending)]
        error = CollectiveTimeoutError(
            op=self.plan.name,
            group_name=self.group_name,
            detail=f"its time is over, and these had not ended their part: {', '.join(one.actor for _, one in late)}",
            missing=tuple(member.rank for group, member in late if group is late[0][0]),
            timeout_s=self._timeout_s,
        )
        self.abort(error)

    def abort(self, error: RaycollectError) -> None:
        """Ends it here and on all participants."""
        self._runs.send(self, self.fail(error))

    # ------------------------------------------------------------------------------------------ events

    def heard(self, position: int, payload: bytes) -> None:
        """A participant has ended it well, and gives this back; any thread."""
        self._take([(position, payload)])

    def _take(self, answers: Sequence[tuple[int, bytes]]) -> None:
        """Some have ended it well: (position, what each gives back)."""
        ended = []
        for position, payload in answers:
            if position in self._pending:
                self.results[position] = payload
                ended.append(position)
        if not ended:
            return
        orders = super().done(ended[0], None, (), others=ended[1:])
        if orders or not self._pending:
            self._runs.send(self, orders)

    def done(
        self, position: int, error: RaycollectError | None, story: Sequence[str], *, others: Sequence[int] = ()
    ) -> Orders:
        """A participant has ended; of others none can tell."""
        return super().done(position, error, story)

    def lost(self, position: int, reason: str) -> Orders:
        """A participant's process is gone; what it has answered before counts."""
        seat = dict(self._runs.seated).get(position, -1)
        payload = self._runs.answer(seat, self.number) if self.number and seat >= 0 else None
        if payload is not None:
            self.heard(position, payload)
        return super().lost(position, reason)

    def _look(self) -> None:
        """Takes the answers that have come by the doorbell, up to the first that has not."""
        seats, came = self._seats, []
        for position, seat in seats:
            payload = self._runs.answer(seat, self.number)
            if payload is None and position in self._pending:
                break
            came.append((position, payload or b""))
        if came:
            self._take(came)
            self._seats = seats[len(came) :]

    def _settle(self) -> None:
        """Tells the outcome, now that all have ended."""
        if self._first is not None:
            self._failed(*self._first)
        else:
            self._resolve(None)

    def _note(self, error: RaycollectError | None) -> None:
        if error is not None and self._runs.failure is None:
            self._runs.failure = error

    def _resolve(self, error: RaycollectError | None) -> None:
        super()._resolve(error)
        self._runs.ended(self)

    def _failed(self, position: int, error: RaycollectError, story: tuple[str, ...]) -> Orders:
        orders = super()._failed(position, error, story)
        if orders or position < 0 or not isinstance(error, RefusedError):
            return orders
        number = max(max((one.call for one in error.violations), default=0), 0)
        stage = next((one for one in reversed(self.plan.stages) if one.first <= number), None)
        know = stage.positions if stage is not None and position in stage.positions else ()
        return [(at, message) for at, message in self._abort(position, error) if at not in know]

    # ------------------------------------------------------------------------------------------ who is who

    def _located(self, position: int, error: RaycollectError, story: tuple[str, ...]) -> RaycollectError:
        if position < 0 and isinstance(error, CollectiveTimeoutError):
            return self._runs.told(error)  # `lapse` has said it all
        method = error.op if isinstance(error, MethodError) else ""
        found = super()._located(position, error, story)
        if method and isinstance(found, FaultError):
            found.op = method
        return self._runs.told(found)

    def _home(self, position: int) -> tuple[Membership, Member]:
        return self.plan.homes[max(position, 0)]

    def _rounds_of(self, seq: int, group_id: str) -> int:
        stage = self.plan.stage_of(seq - self.seq)
        if stage is None:
            return 0
        return stage.plan.rounds if seq - self.seq == stage.offset else 1

    def _crew_of(self, group_id: str, seq: int) -> dict[int, int]:
        stage = None if group_id else self.plan.stage_of(seq - self.seq)
        return super()._crew_of(group_id, seq) if stage is None else dict(enumerate(stage.positions))


class Runs:
    """The runs of one capture: begins them, hears how they end, and closes all of them. Any thread may call it.

    Args:
        owner: The controller.
        capture: The capture's id.
        course: What each run does.
        memberships: The group of each request, and after them those of participants without any.
        keys: The key of each operand, by the numbers that stand for them in the requests.
        refs: The refs whose values the participants have, by key; kept as long as it is open (P5).
        doorbell: How runs begin on this machine; None: by the channel alone.
        seats: Position -> seat at the doorbell; -1: none.
        peers: Those who have their routines, by position.
        told: Puts an error of a run in the words of the step's caller.

    Attributes:
        failure: Why the first run failed that did; there will be no others.
        is_closed: Whether it was closed.
        seated: (position, seat) of those who have one.
        writes: Key -> whether a run writes the tensor.
    """

    def __init__(
        self,
        owner: RunsOwner,
        capture: bytes,
        course: Course,
        memberships: Sequence[Membership],
        keys: Sequence[Key],
        refs: Mapping[Key, Any],
        *,
        doorbell: Doorbell | None = None,
        seats: Sequence[int] = (),
        peers: Sequence[Peer] = (),
        told: Callable[[RaycollectError], RaycollectError] = lambda error: error,
    ) -> None:
        self.course = course
        self.memberships: tuple[Membership, ...] = tuple(memberships)
        self.keys: tuple[Key, ...] = tuple(keys)
        self.refs: dict[Key, Any] = dict(refs)
        self.failure: RaycollectError | None = None
        self.is_closed: bool = False
        self.told = told
        self.writes: dict[Key, bool] = {self.keys[source]: written for source, written in course.uses().items()}  # type: ignore[call-overload]
        self._owner = owner
        self._capture = capture
        self._doorbell = doorbell
        self._seats = tuple(seats) if doorbell is not None else (-1,) * len(course.participants)
        self.seated: tuple[tuple[int, int], ...] = tuple((at, seat) for at, seat in enumerate(self._seats) if seat >= 0)
        self._revision: object = None
        self._crew: list[tuple[Peer, int]] = list(zip(peers, self._seats, strict=False))
        self._under_way: deque[RunFlight] = deque()
        self._begun = 0  # how many runs there were
        self._fences: dict[int, Any] = {}
        self._waiting: set[int] = set()  # the threads that wait at the doorbell

    # ------------------------------------------------------------------------------------------ beginning

    def begin(self, arguments: Sequence[bytes], *, fence: bool = False, timeout_s: float | None = None) -> RunFlight:
        """Begins a run; where `IN_FLIGHT` are under way, waits for the oldest.

        Args:
            arguments: What `payload.pack_values` made, by position.
            fence: Whether it goes through the actors' queues, after all methods submitted before.
            timeout_s: After how many seconds it is given up; None: by the limits of its plans alone.

        Raises:
            CaptureError: It is closed.
            CaptureBrokenError: A run failed.
            UnknownGroupError, GroupBrokenError: A group was destroyed, or a member is gone; nothing was sent.
        """
        while True:
            with self._owner.dispatching:
                self._check()
                oldest = self._oldest()
                if oldest is None or self._begun + 1 - oldest.place < IN_FLIGHT:
                    limit_s = _FOREVER if timeout_s is None else timeout_s
                    return self._send(arguments, fence or self._is_held_up(), limit_s)
            oldest.wait(None)

    def _oldest(self) -> RunFlight | None:
        """The oldest run whose outcome is not known; by looking, those before it take what follows from theirs."""
        for flight in tuple(self._under_way):
            if not flight.resolved:
                return flight
            self.ended(flight)  # where a signal came between its outcome and what follows from that
        return None

    def _check(self) -> None:
        if self.is_closed:
            raise CaptureError(detail="this captured step is closed: capture it again to run it")
        if self.failure is not None:
            detail = "this captured step is broken, as one of its runs failed"
            raise CaptureBrokenError(detail=detail, why=brief(self.failure)) from self.failure
        revision = self._owner.revision
        if revision != self._revision:
            peers = self._owner.crew(self.memberships, self.course.participants)
            self._crew = list(zip(peers, self._seats, strict=True))
            self._revision = revision

    def _is_held_up(self) -> bool:
        """Whether a participant may have to wait for a plan that waits for methods.

        The others would hold up the methods of their own actors meanwhile, one of which that plan may wait for. Behind
        it, in the actors' queues, they do not.
        """
        participants = self.course.positions
        for flight in self._owner.flights():
            if isinstance(flight, RunFlight) and not flight.is_fenced:
                continue
            for actor_id, position in flight.plan.positions.items():
                if actor_id in participants and flight.is_pending(position):
                    return True
        return False

    def _send(self, arguments: Sequence[bytes], fence: bool, timeout_s: float) -> RunFlight:
        owner, doorbell = self._owner, None if fence else self._doorbell
        self._begun = place = self._begun + 1
        made: list[RunFlight] = []  # known here before it is registered, should a signal come then
        at = 0

        def make(seq: int) -> RunFlight:
            made.append(RunFlight(seq, self, place, number, timeout_s))
            return made[0]

        try:
            number = doorbell.begin() if doorbell is not None and self.seated else 0
            flight = owner.take_off(make, self.course.width)
            flight.is_fenced = fence
            self._under_way.append(flight)
            seq = flight.seq
            for at, (peer, seat) in enumerate(self._crew):
                predecessor, payload = peer.last_seq, arguments[at]
                if fence:
                    self._fence(at)(msgpack.packb((self._capture, seq, predecessor, payload)))
                elif seat < 0 or not doorbell.ring(seat, number, seq, predecessor, payload):  # type: ignore[union-attr]
                    peer.send(Run(capture=self._capture, seq=seq, predecessor=predecessor, payload=payload))
                peer.last_seq = seq
        except BaseException as exc:
            self._stop_short(made, at, exc)
            if not made or not isinstance(exc, Exception):
                raise
            return made[0]
        if owner.revision != self._revision:  # one was lost before the flight could hear of it
            for at, (peer, _) in enumerate(self._crew):
                if peer.link is None:
                    owner.send(flight, flight.lost(at, "its connection has ended"))
        return flight

    def _stop_short(self, made: Sequence[RunFlight], at: int, exc: BaseException) -> None:
        """Ends a run that could not be sent from a position on; the step too, where a signal came."""
        is_signal = not isinstance(exc, Exception)
        if is_signal or not made:  # nobody knows who has heard of it
            self.failure = self.failure or PlanAbortedError(detail="a run was interrupted as it began")
        for flight in made:
            self.send(flight, flight.fail(self._unsent(at, exc), unsent=range(at, len(self._crew))))
            if is_signal:
                self._crew[at][0].send(Abort(seq=flight.seq, reason="it was interrupted as it began"))

    def _unsent(self, at: int, exc: BaseException) -> RaycollectError:
        """Why a run could not be sent to all: whatever Ray raises, as of too many pending calls, or a signal."""
        group, member = self.course.homes[at]
        name, detail = group.spec.name, f"{type(exc).__name__}: {exc}"
        error = DispatchError(group_name=name, rank=member.rank, actor=member.actor, detail=detail)
        error.__cause__ = exc
        return error

    def _fence(self, at: int) -> Callable[[bytes], Any]:
        """Submits a run as an actor task of the participant at a position."""
        peer = self._crew[at][0]
        method = self._fences.get(at)
        if method is None:
            method = peer.actor._raycollect_replay.options(num_returns=0, max_task_retries=0, enable_task_events=False)
            self._fences[at] = method
        submit: Callable[[bytes], Any] = method.remote
        return submit

    # ------------------------------------------------------------------------------------------ waiting

    def wait(self, flight: RunFlight, timeout_s: float | None) -> bool:
        """Waits for the outcome of a run; False where it is not known in time."""
        until_s = flight.until_s if timeout_s is None else min(flight.until_s, monotonic() + timeout_s)
        while not flight.resolved:
            left_s = _SLICE_S
            if until_s < _FOREVER:
                left_s = min(left_s, until_s - monotonic())
                if left_s <= 0:
                    flight.lapse()
                    return flight.resolved
            self._sleep(flight, left_s)
        return True

    def _sleep(self, flight: RunFlight, timeout_s: float) -> None:
        """Sleeps until there may be news."""
        if not flight.number:
            flight.sleep(timeout_s)
            return
        me = threading.get_ident()
        self._waiting.add(me)
        try:
            if not flight.resolved:  # after it has said that it is here, so that it is woken
                self._doorbell.wait(timeout_s)  # type: ignore[union-attr]
        finally:
            self._waiting.discard(me)

    def answer(self, seat: int, number: int) -> bytes | None:
        """What a seat has given back by the doorbell; None: nothing yet."""
        return None if self._doorbell is None else self._doorbell.answer(seat, number)

    def ended(self, flight: RunFlight) -> None:
        """The outcome of a run is known: where it failed, those behind it fail too."""
        try:
            self._under_way.remove(flight)
        except ValueError:
            return  # this was told before
        if flight.error is not None:
            detail = f"run {flight.place} of this captured step failed before ({type(flight.error).__name__})"
            for other in reversed(tuple(self._under_way)):
                if other.place > flight.place:
                    other.abort(PlanAbortedError(detail=detail))
        if self._waiting.difference((threading.get_ident(),)):
            self._doorbell.wake()  # type: ignore[union-attr]

    def send(self, flight: RunFlight, orders: Orders) -> None:
        """Carries out what a run wants said."""
        self._owner.send(flight, orders)

    # ------------------------------------------------------------------------------------------ the end

    @property
    def is_idle(self) -> bool:
        """Whether no run is under way."""
        return all(flight.resolved for flight in tuple(self._under_way))

    def close(self) -> None:
        """Lets the participants forget it; runs under way are aborted. May be called twice."""
        with self._owner.dispatching:
            self.let_go()

    def let_go(self) -> bool:
        """Does what `close` does, under `dispatching`; False where it was done before."""
        if self.is_closed:
            return False
        self.is_closed = True
        for flight in tuple(self._under_way):
            flight.resolved  # noqa: B018 - so that those that have ended have ended well
        for flight in reversed(tuple(self._under_way)):
            flight.abort(PlanAbortedError(detail="its captured step was closed"))
        for peer, _ in self._crew:
            peer.send(Forget(capture=self._capture))
        self.refs = {}
        if self._doorbell is not None:
            self._doorbell.close()
        return True
