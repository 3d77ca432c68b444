"""One member's end of one lane: a communicator of its own for the calls that members make themselves.

A lane is formed on first use, and formed anew after anything that may have left its ranks out of step: a rank that gave
up at the door, a kernel that failed. Forming starts with a meeting at the hub (`raycollect.gate`), where the lowest
rank's nonce becomes the *generation*; then the backend's factory runs, over a rendezvous of that generation. All
launches of a lane take all of its ranks, so each counts them for itself, from 1 in each generation.

What ends an attempt, and what follows:

=====================================================  ====================================================
the door was passed and the kernels ran                the lane goes on
all ranks were refused at the door                     the lane goes on; the call raises
this rank's time at the door is over                   it drops the lane and raises
another rank gave up or failed, while this one waited  it drops the lane and raises the same
another rank had left before this one came             it drops the lane and waits where that rank comes next
a rank of the lane died or departed                    it drops the lane and raises
the hub denied it: the others wait in a plan           it drops the lane and raises
=====================================================  ====================================================
"""

from __future__ import annotations

import itertools
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

from raycollect.channel.messages import Deny, Drop, Meet, Message, Met, Missed, Publish, Withdraw
from raycollect.contracts import Communicator, CommunicatorFactory
from raycollect.errors import (
    CollectiveTimeoutError,
    ConnectionLostError,
    FaultError,
    InternalError,
    KernelError,
    PlanAbortedError,
    RankReport,
    RaycollectError,
    RefusedError,
    from_wire,
    to_wire,
)
from raycollect.executor import Outcome
from raycollect.forming import LaneExchange, LaneRendezvous, Making
from raycollect.gate import ranks_of
from raycollect.model import GroupSpec
from raycollect.observe import Label, Place, Ring, Tracer
from raycollect.observe.trace import CALL
from raycollect.pos.segments import Segments
from raycollect.turn import Turn

__all__ = ["Attempt", "Lane", "LaneOwner", "Standing"]

Attempt = Callable[[Communicator, int], Outcome]
"""Runs a call once: with a communicator whose ranks are the group's, as the launch of this number."""

_ANSWER_S = 5.0
"""How long the hub may take to answer, or to tell why something failed, before it is taken to be gone."""
_CAUSE_S = 2.0
_FORM = "form"


class LaneOwner(Protocol):
    """What a lane needs of its seat."""

    spec: GroupSpec
    rank: int
    host: str

    def send(self, message: Message) -> None:
        """Sends to the hub.

        Raises:
            ConnectionLostError: The hub is gone.
        """
        ...

    def factory(self, lane: str) -> CommunicatorFactory:
        """Makes the communicators of a lane."""
        ...

    def flush(self) -> None:
        """Waits until all that the hub has said is on its way, where the hub is in this process."""
        ...

    def why_not(self, ranks: Sequence[int]) -> RaycollectError | None:
        """Why these ranks can't communicate any more; None where they can."""
        ...

    def actor(self, rank: int) -> str:
        """What a person calls the actor of a rank; empty: unknown."""
        ...

    def describe(self, rank: int) -> str:
        """What a person calls a rank: ``rank 1 (Worker(3f2a91))``."""
        ...

    def begun(self) -> None:
        """A call has begun; it may last. Never waits."""
        ...

    def reports(self, lane: Lane, ranks: Sequence[int], mine: Standing) -> tuple[RankReport, ...]:
        """Asks what ranks are doing that have not come in time; see `Vigil.reports`."""
        ...


class Standing(NamedTuple):
    """How far a rank has come on a lane.

    Attributes:
        place: The generation of its communicator; without one, the place of the hub where it waits, or nothing.
        seq: The last launch of that generation that it has begun.
    """

    place: str
    seq: int

    def is_with(self, other: Standing) -> bool:
        """Whether it has come to where another rank waits."""
        return self.place == other.place and self.seq >= other.seq


class Lane:
    """One member's end of a lane. `run` and `start` by any thread, one call at a time; the rest by the hub's thread.

    Args:
        owner: The seat.
        name: The lane; see `raycollect.gate`.

    Attributes:
        name: See above.
        ranks: Its ranks, ascending.
        op: The call under way, or the last one.
        since_s: When that was made, by `time.monotonic`.
    """

    def __init__(self, owner: LaneOwner, name: str) -> None:
        self.name = name
        self.ranks: tuple[int, ...] = ranks_of(name, owner.spec.world_size)
        self.op: str = ""
        self.since_s: float = 0.0
        self._owner = owner
        self._turn = threading.Lock()  # held by the call that uses the lane
        self._changed = threading.Condition()  # guards everything below
        self._calls = itertools.count(1)
        self._call = 0  # the call under way; 0: none
        self._place = ""
        self._meeting = 0
        self._answer: Met | Missed | None = None
        self._generation = ""
        self._communicator: Communicator | None = None
        self._seq = 0
        self._stood = Standing("", 0)  # how far this rank had come where its last attempt failed
        self._agreed = False
        self._stale = False  # another rank has left this generation
        self._cause: tuple[int, RaycollectError] | None = None  # why it left
        self._stop: RaycollectError | None = None  # what the call under way has to raise
        self._final = False  # the hub will answer no more
        self._values: dict[tuple[str, str], bytes] = {}
        self._closed = False
        self._queue: deque[tuple[Future[Outcome], str, Attempt, float]] = deque()
        self._pending = 0
        self._worker: threading.Thread | None = None

    @property
    def generation(self) -> str:
        """The nonce of its communicator; empty: it has none."""
        return self._generation

    @property
    def call(self) -> int:
        """The number of the call under way; 0: none."""
        return self._call

    @property
    def standing(self) -> Standing:
        """How far this rank has come."""
        with self._changed:
            if self._communicator is not None:
                return Standing(self._generation, self._seq)
            return Standing(self._place if self._call else "", 0)

    # ------------------------------------------------------------------------------------------ calls

    def run(self, op: str, attempt: Attempt, timeout_s: float) -> Outcome:
        """Runs a call, behind those that were started before.

        Raises:
            RaycollectError: It failed; see the table above.
        """
        if self._pending:
            return self.start(op, attempt, timeout_s).result()
        return self._run(op, attempt, timeout_s)

    def start(self, op: str, attempt: Attempt, timeout_s: float) -> Future[Outcome]:
        """Queues a call for the lane's communication thread."""
        future: Future[Outcome] = Future()
        with self._changed:
            if self._closed:  # its thread may have ended
                broken = self._owner.why_not(self.ranks) or InternalError(detail="a call on a lane that was closed")
                future.set_exception(broken)
                return future
            self._queue.append((future, op, attempt, timeout_s))
            self._pending += 1
            if self._worker is None:
                name = f"raycollect-lane-{self.name}"
                self._worker = threading.Thread(target=self._work, name=name, daemon=True)
                self._worker.start()
            self._changed.notify_all()
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                future, op, attempt, timeout_s = self._queue.popleft()
            try:
                future.set_result(self._run(op, attempt, timeout_s))
            except BaseException as exc:  # noqa: BLE001 - whoever waits gets it
                future.set_exception(exc)
            finally:
                with self._changed:
                    self._pending -= 1

    def _run(self, op: str, attempt: Attempt, timeout_s: float) -> Outcome:
        ring, since_s = Tracer.current().ring, time.monotonic()
        deadline_s = since_s + timeout_s
        try:
            with self._under_way(op, timeout_s, since_s):
                while True:
                    outcome = self._attempt(attempt, deadline_s)
                    if outcome is not None:
                        return outcome
        finally:
            if ring is not None:
                self._note(ring, op, since_s)

    def _note(self, ring: Ring, op: str, since_s: float) -> None:
        """Notes a call in the timeline."""
        spec, rank = self._owner.spec, self._owner.rank
        if spec.group_id not in ring.groups:
            ring.groups[spec.group_id] = Place(spec.name, spec.backend, rank, spec.world_size)
        ring.ended(CALL, op, since_s, 0, Label(op, spec.group_id, rank, len(self.ranks)))

    def confer(self, op: str, blob: bytes, timeout_s: float) -> Sequence[bytes]:
        """Gives one's word to all ranks of the lane and gets everybody's, in rank order, before anything is formed.

        Raises:
            RaycollectError: As `run`.
        """
        with self._under_way(op, timeout_s, time.monotonic()):
            self._stood = Standing(op, 0)
            return self.meet(op, blob, timeout_s)

    @contextmanager
    def _under_way(self, op: str, timeout_s: float, since_s: float) -> Iterator[None]:
        with self._turn:
            with self._changed:
                self._stop, self._final, self._agreed = None, False, False
                self.op, self.since_s = op, since_s
                self._call = next(self._calls)
            self._owner.begun()
            try:
                broken = self._owner.why_not(self.ranks)
                if broken is not None:
                    raise broken
                yield
            except RaycollectError as exc:
                raise self._located(exc, op, timeout_s) from exc.__cause__
            finally:
                with self._changed:
                    self._call, self._place = 0, ""
                    closed = self._closed
                if closed or self._owner.why_not(self.ranks) is not None:  # for good: nothing of the dead is kept
                    self._give_up()

    def _attempt(self, attempt: Attempt, deadline_s: float) -> Outcome | None:
        """Runs a call once; None where the others had left before this rank came, so that it has to be run again."""
        with self._changed:
            communicator = None if self._stale else self._communicator
        if communicator is None:
            self._give_up()
            communicator = self._form(deadline_s)
            if communicator is None:
                return None
        with self._changed:
            self._seq += 1
            self._agreed = False
            self._place = "door"
        try:
            outcome = attempt(Turn(self, communicator, deadline_s), self._seq)
        except BaseException as exc:
            error = InternalError(detail=f"{type(exc).__name__}: {exc}")
            self._give_up(error)
            if isinstance(exc, Exception):
                raise error from exc
            raise
        failure, agreed = outcome.error, self._agreed
        if failure is None:
            return outcome
        if agreed and isinstance(failure, RefusedError):
            raise failure
        if not isinstance(failure, PlanAbortedError):
            self._give_up(failure)
        raised = self._explained(failure, agreed)
        self._give_up(raised if isinstance(raised, RefusedError) else None)  # denied: only this rank knows of it
        if raised is None:
            return None
        raise raised

    def _explained(self, error: RaycollectError, agreed: bool) -> RaycollectError | None:
        """Why an attempt failed: what this end saw may be an echo. None: the others had left before this rank came."""
        with self._changed:
            if isinstance(error, (KernelError, PlanAbortedError)):  # the cause is told by another way, maybe later
                self._changed.wait_for(lambda: self._stop or self._stale, _CAUSE_S)
            if self._stop is not None and (isinstance(error, PlanAbortedError) or isinstance(self._stop, FaultError)):
                return self._stop
            if not isinstance(error, PlanAbortedError):
                return error
            if not agreed:
                return None
            if self._cause is not None:
                rank, cause = self._cause
                if isinstance(cause, CollectiveTimeoutError) and self._owner.rank not in cause.missing:
                    return cause  # that rank waited for another one, as this one did
                error.rank, error.detail = rank, f"{type(cause).__name__} on rank {rank}: {_detail(cause)}"
        return error

    def _located(self, error: RaycollectError, op: str, timeout_s: float) -> RaycollectError:
        """Adds what a user needs to know."""
        owner = self._owner
        if isinstance(error, RefusedError):
            violations = tuple(
                replace(v, actor=v.actor or owner.describe(v.rank).partition(" (")[2].removesuffix(")"), ref="")
                for v in error.violations
            )
            return type(error)(op=op, group_name=owner.spec.name, violations=violations)
        if isinstance(error, FaultError):
            error.op, error.group_name = op, owner.spec.name
            error.actor = error.actor or (owner.actor(error.rank) if error.rank >= 0 else "")
        if isinstance(error, CollectiveTimeoutError) and error.missing:
            error.timeout_s = error.timeout_s or timeout_s
            names = ", ".join(map(owner.describe, error.missing))
            error.detail = f"after {error.timeout_s:g} s these had not come: {names}"
            error.reports = error.reports or owner.reports(self, error.missing, self._stood)
        return error

    # ------------------------------------------------------------------------------------------ forming

    def _form(self, deadline_s: float) -> Communicator | None:
        """Forms the lane; None where another rank that had begun to form it gave up, so that it is begun again."""
        owner = self._owner
        with self._changed:
            self._stale, self._cause, self._agreed, self._generation = False, None, False, ""
            self._stood = Standing(_FORM, 0)
        # The generation is set by `answered`, in the hub's thread, so that what follows on the link finds it.
        self.meet(_FORM, secrets.token_hex(8).encode(), deadline_s - time.monotonic())
        spec = replace(
            owner.spec,
            group_id=f"{owner.spec.group_id}/{self.name}/{self._generation}",
            world_size=len(self.ranks),
        )
        making = Making(self, self._generation, spec, deadline_s)
        try:
            made = making.wait()
        except RaycollectError as exc:
            self._give_up(exc)
            raise
        with self._changed:
            if made is not None:
                self._communicator, self._seq = made, 0
        return made

    def _give_up(self, error: RaycollectError | None = None, *, between: bool = False) -> None:
        """Lets go of the communicator; with an error, the other ranks are told, once.

        Args:
            error: Why the launch under way failed; or, `between` two launches, why there will be no other.
            between: See there.
        """
        with self._changed:
            communicator, self._communicator = self._communicator, None
            generation, seq = self._generation, self._seq + between if communicator is not None else 0
            told = self._stale or error is None
            if communicator is not None:
                self._stood = Standing(generation, self._seq)
            if error is not None:
                self._generation = ""
        if communicator is not None:
            communicator.close()
        if not told and error is not None and generation:
            drop = Drop(
                group_id=self._owner.spec.group_id,
                lane=self.name,
                generation=generation,
                seq=seq,
                rank=self._owner.rank,
                error=to_wire(error),
            )
            try:
                self._owner.send(drop)
            except ConnectionLostError:
                pass  # the hub is gone, and so is the group

    # ------------------------------------------------------------------------------------------ meeting

    def meet(
        self, place: str, blob: bytes, timeout_s: float, halted: Callable[[], bool] = lambda: False
    ) -> Sequence[bytes]:
        """Waits at a place of the hub for all ranks of the lane.

        Args:
            place: Where; all ranks name the same.
            blob: What this rank brings.
            timeout_s: How long to wait, in seconds.
            halted: Whether to stop waiting; asked under the lock.

        Returns:
            What all brought, in rank order.

        Raises:
            CollectiveTimeoutError: Naming who had not come, when this rank's time was over or another's.
            PlanAbortedError: It was halted.
            RaycollectError: What the call has to raise.
        """
        group_id = self._owner.spec.group_id
        with self._changed:
            self._meeting = call = next(self._calls)
            self._place = place
            self._forget_answer()

        def answered() -> bool:
            return self._answer is not None

        self._tell(Meet(group_id=group_id, lane=self.name, place=place, call=call, blob=blob))
        with self._changed:
            self._changed.wait_for(lambda: answered() or self._stop or halted(), max(timeout_s, 0))
            timed_out = not (answered() or self._stop or halted())
            pending = not answered()
        if pending:
            self._tell(Withdraw(group_id=group_id, lane=self.name, call=call, timed_out=timed_out))
            with self._changed:
                self._changed.wait_for(lambda: answered() or self._final, _ANSWER_S)
        with self._changed:
            self._meeting = 0
            answer, stop = self._answer, self._stop
        if isinstance(answer, Met):
            self._owner.flush()
            return answer.blobs
        with self._changed:
            if stop is not None:
                raise stop
            if answer is None and pending:
                raise CollectiveTimeoutError(detail="the hub of the group does not answer")
            if timed_out or not halted():
                raise CollectiveTimeoutError(missing=tuple(answer.missing if answer else ()))
            raise PlanAbortedError(detail="the others have left")

    def _forget_answer(self) -> None:
        self._answer = None

    def _tell(self, message: Message) -> None:
        try:
            self._owner.send(message)
        except ConnectionLostError as exc:
            with self._changed:
                self._changed.wait_for(lambda: self._stop, _CAUSE_S)  # `closed` says more than this does
                raise self._stop or exc from None

    # ------------------------------------------------------------------------------------------ hub's thread

    def answered(self, message: Met | Missed) -> None:
        """The hub answers `Meet`."""
        with self._changed:
            if message.call != self._meeting:
                return
            self._answer = message
            if isinstance(message, Met) and self._place == _FORM:
                self._generation, self._stale, self._cause = message.blobs[0].decode(), False, None
                self._values = {key: v for key, v in self._values.items() if key[0] == self._generation}
            self._changed.notify_all()

    def dropped(self, message: Drop) -> None:
        """Another rank has left a generation."""
        error = from_wire(message.error)
        if isinstance(error, KernelError) and error.rank < 0:
            error.rank = message.rank
        with self._changed:
            if message.generation != self._generation:
                return
            self._stale, self._cause = True, (message.rank, error)
            forming = self._communicator is None
            same = forming or message.seq in (0, self._seq)
            waits = bool(self._call) and bool(self._place) and not self._agreed
            if waits and same and self._owner.rank not in getattr(error, "missing", ()):
                self._stop = self._stop or error
            # One that is ahead has ended this launch well; one that is behind never came to it.
            abort = bool(self._call) and (same or (waits and message.seq < self._seq))
            communicator, seq = self._communicator, self._seq
            self._changed.notify_all()
        if abort and communicator is not None:
            communicator.abort(seq)

    def published(self, message: Publish) -> None:
        """A value of the rendezvous came."""
        with self._changed:
            self._values[message.generation, message.name] = message.value
            self._changed.notify_all()

    def denied(self, message: Deny) -> None:
        """The hub sees that the call can't come about."""
        self.stop(from_wire(message.error), call=message.call)

    def stop(self, error: RaycollectError, *, call: int = 0) -> None:
        """Ends the call under way by an error; with `call`, only that one, and only before the door."""
        with self._changed:
            if self._call == 0 or (call and (call != self._call or self._agreed)):
                return
            if self._meeting and isinstance(self._answer, Missed):
                return  # the call ends by that answer, of which this is a consequence
            self._stop = self._stop or error
            self._final = self._final or not call
            communicator, seq = self._communicator, self._seq
            self._changed.notify_all()
        if communicator is not None:
            communicator.abort(seq)

    def left(self, error: RaycollectError, *, died: bool) -> None:
        """A rank of the lane has died; or departed, and then it has ended all that it had begun.

        What it had not begun it has dropped, so that only what is being formed has to be stopped here.
        """
        if died or self._communicator is None:
            self.stop(error)
        with self._changed:
            is_idle = self._call == 0
        if died and is_idle:  # else that call lets go of the communicator, and with it of the memory of the dead
            self._give_up()

    def close(self, error: RaycollectError) -> None:
        """Ends the lane for good; a call under way was stopped before."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            under_way = bool(self._call)
        if not under_way:  # else that call lets go of the communicator
            self._give_up(error, between=True)

    # ------------------------------------------------------------------------------------- for `forming` and `turn`

    def wait_value(self, generation: str, name: str, timeout_s: float) -> bytes:
        """Waits for a value of the rendezvous."""
        with self._changed:
            key = (generation, name)
            self._changed.wait_for(lambda: key in self._values or self._is_over(generation), max(timeout_s, 0))
            if key in self._values:
                return self._values[key]
            if self._is_over(generation):
                raise PlanAbortedError(op="join", detail="this forming of the group was given up")
        raise CollectiveTimeoutError(op="join", detail=f"nobody published {name!r}", timeout_s=timeout_s)

    def publish(self, generation: str, name: str, value: bytes) -> None:
        """Publishes a value of the rendezvous."""
        message = Publish(
            group_id=self._owner.spec.group_id, lane=self.name, generation=generation, name=name, value=value
        )
        self.published(message)
        self._tell(message)

    def _is_over(self, generation: str) -> bool:
        return generation != self._generation or self._stale or self._stop is not None or self._closed

    def wait_made(self, making: Making, deadline_s: float) -> bool:
        """Waits for the factory; False where it is in vain."""
        with self._changed:
            self._changed.wait_for(
                lambda: making.settled or self._is_over(making.generation), max(deadline_s - time.monotonic(), 0)
            )
            if making.settled:
                return True
            if self._stop is not None:
                raise self._stop
            if self._stale:
                return False
        raise CollectiveTimeoutError(op="join", detail="the members could not connect to each other in time")

    def notify(self) -> None:
        """Lets all waits of this lane look again."""
        with self._changed:
            self._changed.notify_all()

    def is_off(self) -> bool:
        """Whether the launch that waits at the door has to stop."""
        return self._stale or self._stop is not None

    def pass_door(self) -> None:
        """Notes that all ranks have come."""
        with self._changed:
            self._agreed = True

    def make(self, making: Making, spec: GroupSpec, deadline_s: float) -> Communicator:
        """Runs the backend's factory, in a thread of its own."""
        owner = self._owner
        rendezvous = LaneRendezvous(self, making.generation, deadline_s)
        exchange = LaneExchange(self, making.generation)
        create = owner.factory(self.name)
        rank = self.ranks.index(owner.rank)
        made = create(spec, rank, rendezvous, exchange, host=owner.host, segments=Segments.current())
        rendezvous.deadline_s = math.inf  # a library that connects on first use goes on asking
        return made


def _detail(error: RaycollectError) -> str:
    return str(getattr(error, "detail", "")) or str(error)
