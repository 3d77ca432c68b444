"""One member's end of a communicator, on which its own calls run, or the driver's plans.

Plans are numbered by their controller, which has all members connect once (`connect`). Members' calls are numbered by
the ranks themselves, from the meeting in which they got in step (`coordinator_client.State`): all launches take all
ranks of the communicator, so each counts them. First they meet at the coordinator. If all still have the backend's
communicator of that time, and it `resumes` (`Capabilities`), they go on with it, above the highest number that any of
them has seen. Else the backend's factory makes new ones, and all who have one meet again: a rank that leaves before
that ends the forming for all, after it for nobody.

What ends an attempt of a call, and what follows:

=====================================================  ====================================================
all ranks agreed and the kernels ran                   the ranks stay in step
all ranks were refused by the agreement                they stay in step; the call raises
this rank's time is over before all agreed             it is out of step and raises
a signal interrupts this rank, as Ctrl-C does          it is out of step; the others wait for its next call
another rank gave up or failed, while this one waited  it is out of step and raises the same
another rank had left before this one came             it is out of step, and waits where that rank comes next
a rank died or departed before its part                the communicator is broken; the call raises
the coordinator denied it: the others wait in a plan   it is out of step and raises
another thread came before all had agreed              it is out of step and begins again, to be refused by all
another thread came in the moment in which all agreed  it is out of step and refused; no kernel has begun here
=====================================================  ====================================================

What a rank did before it died counts: a launch that needs no more of it runs to its end, and only the next call hears
of the death. Some backends see how far a rank came (`Communicator.lost`); the others get `LAST_S` to end well.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from raycollect import backends
from raycollect.channel.messages import Drop, Message, Met, Publish
from raycollect.core import sockets, threads, timers
from raycollect.core.protocols import Communicator, Exchange, Surviving
from raycollect.engine.execution import Outcome
from raycollect.errors import (
    CollectiveTimeoutError,
    ConnectionLostError,
    FaultError,
    GroupBrokenError,
    InternalError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    Violation,
    anew,
    from_wire,
    kept,
    refusal,
    to_wire,
)
from raycollect.group import communicator_init
from raycollect.group.call_communicator import CallCommunicator
from raycollect.group.call_queue import Callers, CallQueue
from raycollect.group.communicator_init import CLOSE_S
from raycollect.group.coordinator_client import (
    CAUSE_S,
    CHECK,
    FORM,
    MADE,
    PRESENCES,
    Call,
    CoordinatorClient,
    CoordinatorRendezvous,
    Position,
    Presence,
    State,
)
from raycollect.group.group_member import GroupMember
from raycollect.group.watchdog import Watchdog
from raycollect.observe import Label, Place, Tracer
from raycollect.observe.trace import CALL

_Result = TypeVar("_Result")

Attempt = Callable[[Communicator, int], Outcome]
"""Runs a call once: with a communicator whose ranks are the group's, as the launch of this number."""

Objection = Callable[[Violation], Attempt]
"""Gives what takes part in the agreement instead of a call, only to tell all ranks what is wrong with it."""

WatchWait = Callable[["GroupCommunicator", str], AbstractContextManager[Any]]
"""Around a call that blocks a thread: (its communicator, its op)."""

LAST_S = 1.0
"""How long a launch may go on after a rank's process has ended, if the backend does not see how far that came."""


class GroupCommunicator:
    """One member's end. Any thread may call `run` and `start`, one call at a time.

    `coordinator_client` has the state that messages change, and the lock of all of it. The coordinator's thread calls
    `received`, `stop`, `departed` and `died`. `since_s` is when `op`, the last call, was made.
    """

    def __init__(self, member: GroupMember, name: str, watchdog: Watchdog, watch: WatchWait) -> None:
        self.name = name
        self.client: CoordinatorClient = CoordinatorClient(member, name)
        self.ranks: tuple[int, ...] = self.client.ranks
        self.op: str = ""
        self.since_s: float = 0.0
        self._member = member
        self._watchdog = watchdog
        self._watch = watch
        self._callers = Callers(member.rank)
        self._queue = CallQueue(name, self._callers, partial(getattr, self.client, "broken"))
        self._in_use = threading.Lock()  # held by the call that uses the communicator
        self._changed = self.client.changed
        self._backend: Communicator | None = None
        self._within: CallCommunicator | None = None  # the same as calls see it
        self._sees = self._resumes = False  # as `Capabilities` says of the backend
        self._dead: set[int] = set()  # the ranks whose processes have ended
        self._stood = Position("", 0)  # how far this rank was when its last attempt failed
        self._objecting: Violation | None = None  # what the attempt under way tells the others, instead of its call

    @property
    def call(self) -> int:
        """The number of the call under way; 0: none."""
        call = self.client.call
        return 0 if call is None else call.number

    @property
    def position(self) -> Position:
        """How far this rank is."""
        return self.client.position

    @property
    def communicator(self) -> Communicator | None:
        """The backend's communicator; None: there is none now."""
        return self._backend

    # ------------------------------------------------------------------------------------------ calls

    def run(self, op: str, attempt: Attempt, timeout_s: float, object_to: Objection | None = None) -> Outcome:
        """Runs a call, in this thread or behind those that were started before; the table above says when it raises.

        `object_to` refuses it if another thread calls meanwhile; if that is left out, it is never refused.

        Raises:
            RefusedError: The agreement refused all ranks; no tensor was touched.
            GroupBrokenError: A rank of the communicator is gone, or this end of the group is.
            FaultError: A rank did not come in time, died or failed.
        """
        with self._watch(self, op):
            thread = self._enter(op)
            try:
                if self._queue.pending:
                    return self._queue.submit(partial(self._run, op, attempt, timeout_s, object_to), 0).result()
                return self._run(op, attempt, timeout_s, object_to)
            finally:
                self._callers.leave(thread)

    def start(self, op: str, attempt: Attempt, timeout_s: float, object_to: Objection | None = None) -> Future[Outcome]:
        """Queues a call for the communicator's thread; see `run`."""
        thread = self._enter(op)
        try:
            return self._queue.submit(partial(self._run, op, attempt, timeout_s, object_to), thread)
        except RuntimeError:  # the process has no more threads to give
            self._callers.leave(thread)
            raise

    def _enter(self, op: str) -> int:
        """Notes a call of this thread. If another thread's call has not ended, that begins again, to be refused too."""
        if self._callers.enter(op):
            with self._changed:
                backend, seq, call = self._backend, self.client.seq, self.client.call
                recalled = backend is not None and call is not None and not call.agreed and self._objecting is None
                if recalled and call is not None:
                    call.recalled = True
                    self._changed.notify_all()
            if recalled and backend is not None:
                backend.abort(seq)
        return threading.get_ident()

    def _run(self, op: str, attempt: Attempt, timeout_s: float, object_to: Objection | None) -> Outcome:
        ring, since_s = Tracer.current().ring, time.monotonic()
        try:
            return self._under_way(op, timeout_s, since_s, partial(self._attempt, attempt, object_to))
        finally:
            if ring is not None:
                spec, rank = self._member.spec, self._member.rank
                ring.groups.setdefault(spec.group_id, Place.of(spec, rank))
                ring.ended(CALL, op, since_s, 0, Label(op, spec.group_id, rank, len(self.ranks)))

    def confer(self, op: str, blob: bytes, timeout_s: float) -> Sequence[bytes]:
        """Exchanges a blob with all ranks, in rank order, before anything is formed; raises as `run`."""

        def meet(call: Call, deadline_s: float) -> Sequence[bytes]:
            self._stood = Position(op, 0)
            return self.client.meet(call, op, blob, timeout_s)

        return self._under_way(op, timeout_s, time.monotonic(), meet)

    def _under_way(
        self, op: str, timeout_s: float, since_s: float, run: Callable[[Call, float], _Result | None]
    ) -> _Result:
        """Runs a call, with its deadline, until it gives a result."""
        client = self.client
        with self._in_use:
            with self._changed:
                self._objecting = None
                self.op, self.since_s = op, since_s
                call = client.begin()
            self._watchdog.begun()
            try:
                while True:
                    if client.broken is not None:
                        raise anew(call.stop or client.broken)
                    if (found := run(call, since_s + timeout_s)) is not None:
                        return found
            except RaycollectError as exc:
                raise self._located(exc, op, timeout_s) from exc.__cause__
            finally:
                with self._changed:
                    client.call = None
                if client.broken is not None:
                    self._leave()  # for good: keep no memory of the dead

    def _attempt(self, attempt: Attempt, object_to: Objection | None, call: Call, deadline_s: float) -> Outcome | None:
        """Runs a call once; None: the others had left before this rank came, so that it has to run again."""
        client = self.client
        try:
            with self._changed:
                in_step = client.state is State.OK
                self._objecting = self._callers.conflict if object_to is not None else None
            if not in_step and not self._get_in_step(call, deadline_s):
                return None
            with self._changed:
                client.seq += 1
                call.agreed = call.recalled = False
                call.place = CHECK
                if object_to is not None and (wrong := self._callers.conflict) is not None:
                    self._objecting, attempt = wrong, object_to(wrong)
                within = self._within
            if within is None:
                raise InternalError(detail="a communicator whose ranks are in step has none of the backend")
            within.call, within.deadline_s = call, deadline_s
            outcome = attempt(within, client.seq)
        except RaycollectError as exc:
            self._leave(exc)
            raise
        except Exception as exc:
            self._leave(unforeseen := InternalError(detail=threads.cause_of(exc)))
            raise anew(unforeseen) from exc
        except BaseException as exc:  # a signal: the others wait for the next call of this rank
            self._leave(PlanAbortedError(detail=f"it was interrupted: {threads.cause_of(exc)}"))
            raise
        if (failure := outcome.error) is None:
            return outcome
        agreed = call.agreed
        if agreed and isinstance(failure, RefusedError):
            raise anew(failure)
        self._fail(call, failure, agreed)
        return None

    def _fail(self, call: Call, failure: RaycollectError, agreed: bool) -> None:
        """Leaves the launch that has failed, and raises its cause; returns where the call has to run again."""
        leave = partial(self._leave, keep=self._resumes and not isinstance(failure, GroupBrokenError | InternalError))
        if not isinstance(failure, PlanAbortedError) and (agreed or not isinstance(failure, GroupBrokenError)):
            leave(failure)
        raised = self._explained(call, failure, agreed)
        if call.recalled:
            leave(raised or PlanAbortedError(detail=f"it begins again, to be refused: {self._callers.conflict}"))
        # Denied, or the connection to a rank that has said nothing: only this rank knows of it
        leave(raised if isinstance(raised, RefusedError | GroupBrokenError) else None)
        if raised is not None:
            raise anew(raised)

    def _explained(self, call: Call, error: RaycollectError, agreed: bool) -> RaycollectError | None:
        """Finds the cause of a failure, which may be an echo of another rank's; None as in `_attempt`."""
        client = self.client
        is_broken = isinstance(error, GroupBrokenError) and not agreed
        with self._changed:
            if is_broken or isinstance(
                error, (KernelError, PlanAbortedError)
            ):  # the others tell the cause, maybe later
                self._changed.wait_for(lambda: call.stop or client.cause or call.recalled, CAUSE_S)
            if call.stop is not None and (isinstance(error, PlanAbortedError) or isinstance(call.stop, FaultError)):
                return call.stop
            if is_broken and client.cause is not None:  # the connection of a rank that has left ended before its word
                return None
            if not isinstance(error, PlanAbortedError):
                return error
            if not agreed:
                return None
            if call.recalled and (wrong := self._callers.conflict) is not None:
                return refusal(self.op, "", (wrong,))  # the others do not meet this call again
            if client.cause is not None:
                rank, cause = client.cause
                if isinstance(cause, CollectiveTimeoutError) and self._member.rank not in cause.missing:
                    return cause  # that rank waited for another one, as this one did
                detail = str(getattr(cause, "detail", "")) or str(cause)
                error.rank, error.detail = rank, f"{type(cause).__name__} on rank {rank}: {detail}"
        return error

    def _located(self, error: RaycollectError, op: str, timeout_s: float) -> RaycollectError:
        member, wrong = self._member, self._objecting
        if wrong is not None and isinstance(error, CollectiveTimeoutError):
            error = refusal(op, "", (wrong,))  # nobody came to hear of it
        if isinstance(error, RefusedError):
            violations = tuple(replace(v, actor=v.actor or member.actor(v.rank), ref="") for v in error.violations)
            return type(error)(op=op, group_name=member.spec.name, violations=violations)
        if isinstance(error, FaultError):
            error.op, error.group_name = op, member.spec.name
            error.actor = error.actor or (member.actor(error.rank) if error.rank >= 0 else "")
        if isinstance(error, CollectiveTimeoutError):
            error.cut = error.cut or sockets.cut_links()
        if isinstance(error, CollectiveTimeoutError) and (error.missing or error.within):
            error.timeout_s = error.timeout_s or timeout_s
            error.detail = error.told(*(list(map(member.describe, side)) for side in (error.missing, error.within)))
            if error.missing:
                error.reports = error.reports or self._watchdog.reports(self, error.missing, self._stood)
        return error

    # ------------------------------------------------------------------------------------------ in step, out of step

    def _get_in_step(self, call: Call, deadline_s: float) -> bool:
        """Meets the other ranks, and makes the communicator; False: one gave up, so that all have to begin again."""
        client = self.client
        self._leave(keep=self._resumes)
        with self._changed:
            if client.state is not State.BROKEN:
                client.state = State.FORMING
            client.epoch, client.cause, call.agreed = "", None, False
            self._stood = Position(FORM, 0)
            presence = Presence(secrets.token_hex(8), client.made_in, client.seq)
        client.meet(call, FORM, PRESENCES.encode(presence), deadline_s - time.monotonic())
        if not client.made_in and not self._make(call, deadline_s):
            return False
        with self._changed:
            if self._backend is None:
                return False  # a rank has died meanwhile
            self._within = CallCommunicator(client, self._backend)
            dead = tuple(self._dead)
        for rank in dead:
            self._tell_lost(rank)
        return True

    def _make(self, call: Call, deadline_s: float) -> bool:
        """Has the backend make a communicator, and waits until all ranks have one; False as in `_get_in_step`."""
        client = self.client
        self._close(CLOSE_S)
        spec = communicator_init.spec_of(self._member.spec, self.name)
        capabilities = backends.get(spec.backend, spec.name)
        made = communicator_init.form(client, deadline_s)
        if made is None:
            return False
        try:
            place, left_s = f"{MADE} {client.epoch}", deadline_s - time.monotonic()
            client.meet(call, place, b"", left_s, lambda: client.state is State.OUT_OF_STEP)
        except BaseException as exc:
            threads.bounded(made.close, CLOSE_S)
            if isinstance(exc, PlanAbortedError):
                return False
            raise
        with self._changed:
            self._backend, client.made_in = made, client.epoch
            self._sees, self._resumes = capabilities.sees_failures, capabilities.resumes
        return True

    def _leave(
        self,
        error: RaycollectError | None = None,
        *,
        keep: bool = False,
        between: bool = False,
        wait_s: float = CLOSE_S,
    ) -> None:
        """Gets out of step; once tells the other ranks the error with which the launch under way failed.

        `keep`: the backend's communicator is for the next launches, too. `between` launches, the error says why there
        will be no other. `wait_s`: how long it may wait for the backend.
        """
        client, member = self.client, self._member
        with self._changed:
            epoch, seq = client.epoch, client.seq + between if client.formed else 0
            untold = error is not None and client.cause is None and epoch
            if client.formed:
                self._stood, client.formed = Position(epoch, client.seq), False
            if client.state is not State.BROKEN:
                client.state = State.OUT_OF_STEP
            if error is not None:
                client.epoch = ""
        if not keep:
            self._close(wait_s)
        if untold and error is not None:
            drop = Drop(
                group_id=member.spec.group_id,
                communicator=self.name,
                epoch=epoch,
                seq=seq,
                rank=member.rank,
                error=to_wire(error),
            )
            with suppress(ConnectionLostError):  # the coordinator is gone, and so is the group
                member.send(drop)

    def _close(self, wait_s: float) -> None:
        """Closes the backend's communicator, if there is one."""
        with self._changed:
            backend, self._backend, self._within, self.client.made_in = self._backend, None, None, ""
        if backend is not None:
            threads.bounded(backend.close, wait_s)

    # ------------------------------------------------------------------------------------------ coordinator's thread

    def received(self, message: Message) -> None:
        """A message of the coordinator for this communicator."""
        client = self.client
        if isinstance(message, Met) and message.error is not None:
            self._stop(from_wire(message.error), message.call)
        elif isinstance(message, Met):
            client.answered(message)
        elif isinstance(message, Publish):
            client.published(message)
        elif isinstance(message, Drop):
            with self._changed:
                aborts, backend, seq = client.left(message, sees=self._sees), self._backend, client.seq
            if aborts and backend is not None:
                backend.abort(seq)

    def stop(self, error: RaycollectError) -> None:
        """The group has ended here: ends the call under way with an error."""
        self._stop(error, breaks=True)

    def _stop(self, error: RaycollectError, number: int = 0, *, breaks: bool = False) -> None:
        with self._changed:
            if breaks:
                self._break(error)
            stops, backend, seq = self.client.stop(error, number), self._backend, self.client.seq
        if stops and backend is not None:
            backend.abort(seq)

    def _break(self, error: RaycollectError) -> None:
        self.client.fail(self._member.broken(self.ranks) or error)

    def departed(self, error: RaycollectError) -> None:
        """A rank has departed. It has ended what it had begun and left the rest, so only forming has to stop."""
        with self._changed:
            self._break(error)
            is_forming = not self.client.formed
        if is_forming:
            self._stop(error)

    def died(self, rank: int, error: RaycollectError) -> None:
        """The process of a rank has ended, perhaps that of rank 0, which coordinates but is not of this communicator.

        What it did before counts: the call under way may yet end well. `error` is for one that fails.
        """
        with self._changed:
            self._dead.add(rank)
            self._break(error)
            is_idle = self.client.call is None
            self.client.stop(error)  # no meeting can succeed any more
        self._tell_lost(rank)
        if is_idle:  # else that call closes the communicator, and lets go of the dead rank's memory
            self._leave(wait_s=0.0)

    def _tell_lost(self, rank: int) -> None:
        with self._changed:
            backend, seq, is_idle = self._backend, self.client.seq, self.client.call is None
        if backend is None or rank not in self.ranks:
            return
        if isinstance(backend, Surviving):
            backend.lost(self.ranks.index(rank))
        elif is_idle:
            backend.abort(0)
        else:  # it may wait for the dead for ever; if it has ended by then, this changes nothing
            timers.soon_or_now(LAST_S, partial(backend.abort, seq))

    def close(self, error: RaycollectError, wait_s: float = 0.0) -> None:
        """Ends the communicator for good; a call under way was stopped before. Waits for the backend so long."""
        if not self.end(error):  # else the call under way closes it
            self._leave(error, between=True, wait_s=wait_s)

    def end(self, error: RaycollectError) -> bool:
        """Lets no call begin any more. Returns whether one is under way."""
        self._queue.close()
        with self._changed:
            self._break(error)
            return self.client.call is not None

    # ------------------------------------------------------------------------------------------ plans

    def connect(self, exchange: Exchange) -> RaycollectError | None:
        """Makes the communicator of the driver's plans, which waits for the other members.

        Returns:
            The error if that fails.
        """
        client, member = self.client, self._member
        rendezvous = CoordinatorRendezvous(client)
        try:
            made = communicator_init.make_communicator(member.spec, member.rank, rendezvous, exchange, member.host)
        except RaycollectError as exc:
            return kept(exc)
        with self._changed:
            if client.broken is None:
                client.state, self._backend = State.OK, made
                return None
        made.close()
        return self.why_none()

    def why_none(self) -> RaycollectError:
        """Why there is no communicator for plans, or none any more."""
        broken = self.client.broken
        if broken is not None:
            return anew(broken)
        return GroupBrokenError(group_name=self._member.spec.name, detail="this participant never joined")

    def lost(self, rank: int) -> bool:
        """A rank's process has ended. Returns False if the caller has to end the plans under way."""
        backend: object = self._backend
        if isinstance(backend, Surviving):
            backend.lost(rank)
        return isinstance(backend, Surviving)

    def refuse(self, reason: str) -> Communicator | None:
        """Plans that begin from now on get no communicator, and hear why; returns what the caller has to close."""
        self.client.fail(GroupBrokenError(group_name=self._member.spec.name, detail=reason))
        with self._changed:
            backend, self._backend = self._backend, None
        return backend
