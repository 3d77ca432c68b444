"""One member's end of a communicator for the calls that members make themselves.

A communicator is formed on first use, and formed again after anything that may have left its ranks out of step: a rank
that gave up before all agreed, a kernel that failed. First the ranks meet at the hub (`coordinator`), where the lowest
rank's nonce becomes the *generation*. Then the backend's factory runs, over a rendezvous of that generation. Last, all
who have a communicator meet again: a rank that leaves before that ends the forming for all, after it for nobody. All
launches take all ranks of the communicator, so each rank counts them for itself, from 1 in each generation.

What ends an attempt, and what follows:

=====================================================  ====================================================
all ranks agreed and the kernels ran                   the communicator stays
all ranks were refused by the agreement                the communicator stays; the call raises
this rank's time is over before all agreed             it drops the communicator and raises
a signal interrupts this rank, as Ctrl-C does          it drops it; the others wait for its next call
another rank gave up or failed, while this one waited  it drops the communicator and raises the same
another rank had left before this one came             it drops it and waits where that rank comes next
a rank died or departed before its part                it drops the communicator and raises
the hub denied it: the others wait in a plan           it drops the communicator and raises
another thread came before all had agreed              it drops it and begins again, to be refused by all
another thread came in the moment in which all agreed  it drops it and is refused; no kernel has begun here
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
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from raycollect.channel.messages import Drop
from raycollect.core import sockets, threads, timers
from raycollect.core.protocols import Communicator
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
    refusal,
    to_wire,
)
from raycollect.group import communicator_init
from raycollect.group.call_communicator import CallCommunicator
from raycollect.group.call_queue import Callers, CallQueue
from raycollect.group.communicator_init import CLOSE_S
from raycollect.group.hub_client import CAUSE_S, FORM, MADE, HubClient
from raycollect.observe import Label, Place
from raycollect.observe.trace import CALL

if TYPE_CHECKING:
    from raycollect.group.process_group import ProcessGroup

_Result = TypeVar("_Result")

Attempt = Callable[[Communicator, int], Outcome]
"""Runs a call once: with a communicator whose ranks are the group's, as the launch of this number."""

Objection = Callable[[Violation], Attempt]
"""Gives what takes part in the agreement instead of a call, only to tell all ranks what is wrong with it."""

LAST_S = 1.0
"""How long a launch may go on after a rank's process has ended, if the backend does not see how far that came."""


class Standing(NamedTuple):
    """How far a rank has come: the generation, or where it waits at the hub; and the last launch that it has begun."""

    place: str
    seq: int

    def is_with(self, other: Standing) -> bool:
        """Whether it has come to where another rank waits."""
        return self.place == other.place and self.seq >= other.seq


class MemberCommunicator:
    """One member's end. Any thread may call `run` and `start`, one call at a time; the hub's thread calls the rest.

    The lock of `hub` guards the state of this object, too. `since_s` is when `op`, the last call, was made.
    """

    def __init__(self, owner: ProcessGroup, name: str) -> None:
        self.name = name
        self.hub: HubClient = HubClient(owner, name)
        self.ranks: tuple[int, ...] = self.hub.ranks
        self.op: str = ""
        self.since_s: float = 0.0
        self._owner = owner
        self._callers = Callers(owner.rank)
        self._queue = CallQueue(name, self._callers, partial(owner.why_not, self.ranks))
        self._in_use = threading.Lock()  # held by the call that uses the communicator
        self._changed = self.hub.changed
        self._communicator: Communicator | None = None
        self._within: CallCommunicator | None = None  # the same as calls see it
        self._dead: set[int] = set()  # the ranks whose processes have ended
        self._seq = 0
        self._stood = Standing("", 0)  # how far this rank had come when its last attempt failed
        self._objecting: Violation | None = None  # what the attempt under way tells the others, instead of its call

    @property
    def call(self) -> int:
        """The number of the call under way; 0: none."""
        return self.hub.call

    @property
    def standing(self) -> Standing:
        """How far this rank has come."""
        with self._changed:
            if self._communicator is not None:
                return Standing(self.hub.generation, self._seq)
            return Standing(self.hub.place if self.hub.call else "", 0)

    # ------------------------------------------------------------------------------------------ calls

    def run(self, op: str, attempt: Attempt, timeout_s: float, object_to: Objection | None = None) -> Outcome:
        """Runs a call, in this thread or behind those that were started before; the table above says when it raises.

        `object_to` refuses it if another thread calls meanwhile; if that is left out, it is never refused.

        Raises:
            RefusedError: The agreement refused all ranks; no tensor was touched.
            GroupBrokenError: A rank of the communicator is gone, or this end of the group is.
            FaultError: A rank did not come in time, died or failed.
        """
        with self._owner.watch(self, op):
            thread = self._come(op)
            try:
                if self._queue.pending:
                    return self._queue.submit(partial(self._run, op, attempt, timeout_s, object_to), 0).result()
                return self._run(op, attempt, timeout_s, object_to)
            finally:
                self._callers.go(thread)

    def start(self, op: str, attempt: Attempt, timeout_s: float, object_to: Objection | None = None) -> Future[Outcome]:
        """Queues a call for the communicator's thread; see `run`."""
        thread = self._come(op)
        try:
            return self._queue.submit(partial(self._run, op, attempt, timeout_s, object_to), thread)
        except RuntimeError:  # the process has no more threads to give
            self._callers.go(thread)
            raise

    def _come(self, op: str) -> int:
        """Notes a call of this thread. If another thread's call has not ended, that begins again, to be refused too."""
        if self._callers.come(op):
            with self._changed:
                communicator, seq, hub = self._communicator, self._seq, self.hub
                recalls = communicator is not None and hub.call and not hub.agreed and self._objecting is None
                if recalls:
                    hub.recalled = True
                    self._changed.notify_all()
            if recalls and communicator is not None:
                communicator.abort(seq)
        return threading.get_ident()

    def _run(self, op: str, attempt: Attempt, timeout_s: float, object_to: Objection | None) -> Outcome:
        ring, since_s = self._owner.tracer.ring, time.monotonic()
        try:
            return self._under_way(op, timeout_s, since_s, partial(self._attempt, attempt, object_to))
        finally:
            if ring is not None:
                spec, rank = self._owner.spec, self._owner.rank
                ring.groups.setdefault(spec.group_id, Place.of(spec, rank))
                ring.ended(CALL, op, since_s, 0, Label(op, spec.group_id, rank, len(self.ranks)))

    def confer(self, op: str, blob: bytes, timeout_s: float) -> Sequence[bytes]:
        """Exchanges a blob with all ranks, in rank order, before anything is formed; raises as `run`."""

        def meet(_: float) -> Sequence[bytes]:
            self._stood = Standing(op, 0)
            return self.hub.meet(op, blob, timeout_s)

        return self._under_way(op, timeout_s, time.monotonic(), meet)

    def _under_way(self, op: str, timeout_s: float, since_s: float, run: Callable[[float], _Result | None]) -> _Result:
        """Runs a call, with its deadline, until it gives a result."""
        owner = self._owner
        with self._in_use:
            with self._changed:
                self._objecting = None
                self.op, self.since_s = op, since_s
                self.hub.begin()
            owner.watchdog.begun()
            try:
                if not owner.is_whole and (broken := owner.why_not(self.ranks)) is not None:
                    raise anew(broken)
                while (found := run(since_s + timeout_s)) is None:
                    pass
                return found
            except RaycollectError as exc:
                raise self._located(exc, op, timeout_s) from exc.__cause__
            finally:
                with self._changed:
                    self.hub.call, self.hub.place = 0, ""
                    closed = self.hub.closed
                if closed or (not owner.is_whole and owner.why_not(self.ranks) is not None):
                    self._give_up()  # for good: keep no memory of the dead

    def _attempt(self, attempt: Attempt, object_to: Objection | None, deadline_s: float) -> Outcome | None:
        """Runs a call once; None: the others had left before this rank came, so that it has to run again."""
        hub = self.hub
        with self._changed:
            communicator = None if hub.stale else self._communicator
            self._objecting = self._callers.contest if object_to is not None else None
        try:
            if communicator is None:
                self._give_up()
                if (communicator := self._form(deadline_s)) is None:
                    return None
            with self._changed:
                self._seq += 1
                hub.agreed = hub.recalled = False
                hub.place = "check"
                if object_to is not None and (wrong := self._callers.contest) is not None:
                    self._objecting, attempt = wrong, object_to(wrong)
            within = self._within = self._within or CallCommunicator(hub, communicator)
            within.deadline_s = deadline_s
            outcome = attempt(within, self._seq)
        except RaycollectError as exc:
            self._give_up(exc)
            raise
        except Exception as exc:
            self._give_up(unforeseen := InternalError(detail=threads.cause_of(exc)))
            raise anew(unforeseen) from exc
        except BaseException as exc:  # a signal: the others wait for the next call of this rank
            self._give_up(PlanAbortedError(detail=f"it was interrupted: {threads.cause_of(exc)}"))
            raise
        if (failure := outcome.error) is None:
            return outcome
        agreed = hub.agreed
        if agreed and isinstance(failure, RefusedError):
            raise anew(failure)
        if not isinstance(failure, PlanAbortedError) and (agreed or not isinstance(failure, GroupBrokenError)):
            self._give_up(failure)
        raised = self._explained(failure, agreed)
        if hub.recalled:
            again = PlanAbortedError(detail=f"it begins again, to be refused: {self._callers.contest}")
            self._give_up(raised or again)
        # Denied, or the connection to a rank that has said nothing: only this rank knows of it
        self._give_up(raised if isinstance(raised, RefusedError | GroupBrokenError) else None)
        if raised is None:
            return None
        raise anew(raised)

    def _explained(self, error: RaycollectError, agreed: bool) -> RaycollectError | None:
        """Finds the cause of a failure, which may be an echo of another rank's; None as in `_attempt`."""
        hub = self.hub
        is_broken = isinstance(error, GroupBrokenError) and not agreed
        with self._changed:
            if is_broken or isinstance(error, (KernelError, PlanAbortedError)):  # the hub tells the cause, maybe later
                self._changed.wait_for(lambda: hub.stop or hub.stale or hub.recalled, CAUSE_S)
            if hub.stop is not None and (isinstance(error, PlanAbortedError) or isinstance(hub.stop, FaultError)):
                return hub.stop
            if is_broken and hub.stale:  # the connection of a rank that has left was seen to end before its word came
                return None
            if not isinstance(error, PlanAbortedError):
                return error
            if not agreed:
                return None
            if hub.recalled and (wrong := self._callers.contest) is not None:
                return refusal(self.op, "", (wrong,))  # the others do not meet this call again
            if hub.cause is not None:
                rank, cause = hub.cause
                if isinstance(cause, CollectiveTimeoutError) and self._owner.rank not in cause.missing:
                    return cause  # that rank waited for another one, as this one did
                detail = str(getattr(cause, "detail", "")) or str(cause)
                error.rank, error.detail = rank, f"{type(cause).__name__} on rank {rank}: {detail}"
        return error

    def _located(self, error: RaycollectError, op: str, timeout_s: float) -> RaycollectError:
        owner, wrong = self._owner, self._objecting
        if wrong is not None and isinstance(error, CollectiveTimeoutError):
            error = refusal(op, "", (wrong,))  # nobody came to hear of it
        if isinstance(error, RefusedError):
            violations = tuple(replace(v, actor=v.actor or owner.actor(v.rank), ref="") for v in error.violations)
            return type(error)(op=op, group_name=owner.spec.name, violations=violations)
        if isinstance(error, FaultError):
            error.op, error.group_name = op, owner.spec.name
            error.actor = error.actor or (owner.actor(error.rank) if error.rank >= 0 else "")
        if isinstance(error, CollectiveTimeoutError):
            error.cut = error.cut or sockets.cut_links()
        if isinstance(error, CollectiveTimeoutError) and (error.missing or error.within):
            error.timeout_s = error.timeout_s or timeout_s
            error.detail = error.told(*(list(map(owner.describe, side)) for side in (error.missing, error.within)))
            if error.missing:
                error.reports = error.reports or owner.watchdog.reports(self, error.missing, self._stood)
        return error

    # ------------------------------------------------------------------------------------------ forming

    def _form(self, deadline_s: float) -> Communicator | None:
        """Forms the communicator; None: another rank gave up, so that all have to begin again."""
        hub = self.hub
        with self._changed:
            hub.stale, hub.cause, hub.agreed, hub.generation = False, None, False, ""
            hub.is_made, self._seq = False, 0
            self._stood = Standing(FORM, 0)
        hub.meet(FORM, secrets.token_hex(8).encode(), deadline_s - time.monotonic())
        made = self._all_made(communicator_init.form(hub, deadline_s), deadline_s)
        with self._changed:
            self._communicator = made
            dead = tuple(self._dead) if made is not None else ()
        for rank in dead:  # since then
            self._tell_lost(rank)
        return made

    def _all_made(self, made: Communicator | None, deadline_s: float) -> Communicator | None:
        if made is None:
            return None
        try:
            self.hub.meet(f"{MADE} {self.hub.generation}", b"", deadline_s - time.monotonic(), lambda: self.hub.stale)
        except BaseException as exc:
            threads.bounded(made.close, CLOSE_S)
            if isinstance(exc, PlanAbortedError):
                return None
            raise
        return made

    def _give_up(self, error: RaycollectError | None = None, *, between: bool = False, wait_s: float = CLOSE_S) -> None:
        """Closes the communicator, and once tells the other ranks the error with which the launch under way failed.

        `between` launches, the error says why there will be no other. `wait_s`: how long it may wait for the backend.
        """
        hub = self.hub
        with self._changed:
            communicator, self._communicator, self._within = self._communicator, None, None
            generation, seq = hub.generation, self._seq + between if communicator is not None else 0
            told = hub.stale or error is None
            if communicator is not None:
                self._stood = Standing(generation, self._seq)
            if error is not None:
                hub.generation = ""
        if communicator is not None:
            threads.bounded(communicator.close, wait_s)
        if not told and error is not None and generation:
            drop = Drop(
                group_id=self._owner.spec.group_id,
                communicator=self.name,
                generation=generation,
                seq=seq,
                rank=self._owner.rank,
                error=to_wire(error),
            )
            with suppress(ConnectionLostError):  # the hub is gone, and so is the group
                self._owner.send(drop)

    # ------------------------------------------------------------------------------------------ hub's thread

    def dropped(self, message: Drop) -> None:
        """Another rank has left a generation."""
        error = from_wire(message.error)
        if isinstance(error, KernelError) and error.rank < 0:
            error.rank = message.rank
        hub = self.hub
        with self._changed:
            if message.generation != hub.generation:
                return
            hub.stale, hub.cause = True, (message.rank, error)
            # A rank that has heard that all are ready is about to begin its first launch, as the other one was.
            mine = self._seq + hub.place.startswith(MADE)
            same = not hub.is_made or message.seq in (0, mine)
            waits = bool(hub.call) and bool(hub.place) and not hub.agreed
            begins_again = isinstance(error, PlanAbortedError)  # and meets this rank again
            if waits and same and not begins_again and self._owner.rank not in getattr(error, "missing", ()):
                hub.stop = hub.stop or error
            # A rank that is ahead has ended this launch well; one that is behind never came to it.
            abort = bool(hub.call) and (same or (waits and message.seq < self._seq))
            communicator, seq = self._communicator, self._seq
            # In a launch under way such a backend sees by itself what the other rank has not done; what it did counts.
            abort = abort and not (hub.agreed and getattr(communicator, "sees_departures", False))
            self._changed.notify_all()
        if abort and communicator is not None:
            communicator.abort(seq)

    def stop(self, error: RaycollectError, *, call: int = 0) -> None:
        """Ends the call under way with an error; with `call`, only that one, and only before all have agreed."""
        with self._changed:
            if self.hub.call == 0 or (call and (call != self.hub.call or self.hub.agreed)):
                return
            if self.hub.is_refused:
                return  # this error follows from that refusal
            self.hub.stop = self.hub.stop or error
            self.hub.final = self.hub.final or not call
            communicator, seq = self._communicator, self._seq
            self._changed.notify_all()
        if communicator is not None:
            communicator.abort(seq)

    def departed(self, error: RaycollectError) -> None:
        """A rank has departed. It has ended what it had begun and dropped the rest, so only forming has to stop."""
        if not self.hub.is_made:
            self.stop(error)

    def died(self, rank: int, error: RaycollectError) -> None:
        """The process of a rank has ended, perhaps that of rank 0, which has the hub but is not of this communicator.

        What it did before counts: the call under way may yet end well. `error` is for one that fails.
        """
        with self._changed:
            self._dead.add(rank)
            is_idle = self.hub.call == 0
            if not is_idle and not self.hub.is_refused:
                self.hub.stop, self.hub.final = self.hub.stop or error, True  # no meeting can succeed any more
            self._changed.notify_all()
        self._tell_lost(rank)
        if is_idle:  # else that call closes the communicator, and lets go of the dead rank's memory
            self._give_up(wait_s=0.0)

    def _tell_lost(self, rank: int) -> None:
        with self._changed:
            communicator, seq = self._communicator, self._seq
        if communicator is None or rank not in self.ranks:
            return
        if communicator.lost(self.ranks.index(rank)):
            return
        if self.hub.call:  # it may wait for the dead for ever; if it has ended by then, this changes nothing
            timers.soon_or_now(LAST_S, partial(communicator.abort, seq))
        else:
            communicator.abort(0)

    def close(self, error: RaycollectError, wait_s: float = 0.0) -> None:
        """Ends the communicator for good; a call under way was stopped before. Waits for the backend so long."""
        if not self.end():  # else the call under way closes it
            self._give_up(error, between=True, wait_s=wait_s)

    def end(self) -> bool:
        """Lets no call begin any more. Returns whether one is under way."""
        self._queue.close()
        with self._changed:
            self.hub.closed = True
            self._changed.notify_all()
            return bool(self.hub.call)
