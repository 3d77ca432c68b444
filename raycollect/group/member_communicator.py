"""A communicator on which a member makes its own calls.

The ends of an attempt of a call, and their consequences:

=====================================================  ====================================================
all ranks agreed and the kernels ran                   the ranks stay in step
the agreement refused all ranks                        the ranks stay in step; the call raises
this rank times out before all agreed                  this rank is out of step and raises
a signal interrupts this rank, as Ctrl-C does          this rank is out of step; the others wait for its next call
another rank gave up or failed, while this one waited  this rank is out of step and raises the same error
another rank had left before this rank arrived         this rank is out of step; it waits at that rank's next place
a rank died or departed before its part                the communicator is broken; the call raises
the coordinator denied it: the others wait in a plan   this rank is out of step and raises
another thread calls before all have agreed            this rank is out of step and repeats, for all to refuse
another thread calls while the last rank agrees        this rank is out of step and refused; no kernel has begun
=====================================================  ====================================================
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from raycollect.core import sockets, threads
from raycollect.core.protocols import Communicator
from raycollect.engine.run import Outcome
from raycollect.errors import (
    CollectiveTimeoutError,
    FaultError,
    GroupBrokenError,
    InternalError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    Violation,
    copy_error,
    refusal,
)
from raycollect.group.call_queue import Callers, CallQueue
from raycollect.group.communicator import GroupCommunicator
from raycollect.group.coordinator_client import CAUSE_S, CHECK, ActiveCall, CommunicatorState, RankPosition
from raycollect.group.group_member import GroupMember
from raycollect.group.watchdog import Watchdog
from raycollect.observe import Label, Ring, TracedGroup
from raycollect.observe.trace import CALL

_Result = TypeVar("_Result")

Attempt = Callable[[Communicator, int], Outcome]
"""Runs a call once, with a communicator addressed by the group's ranks, as the launch of this number."""

Objection = Callable[[Violation], Attempt]
"""Returns an attempt that only reports a violation to all ranks, in the agreement of a call."""

WatchWait = Callable[["MemberCommunicator", str], AbstractContextManager[Any]]
"""(communicator, op) -> a context around a call that blocks a thread."""


class MemberCommunicator(GroupCommunicator):
    """A communicator with its calls. Any thread may call `run` and `start`, one call at a time."""

    def __init__(self, member: GroupMember, name: str, watchdog: Watchdog, watch: WatchWait) -> None:
        super().__init__(member, name)
        self._watchdog = watchdog
        self._watch = watch
        self._callers = Callers(member.rank)
        self._queue = CallQueue(name, partial(getattr, self.client, "broken"))
        self._in_use = threading.Lock()  # held by the call in progress
        self._objecting: Violation | None = None  # reported by the attempt in progress instead of its call

    def end(self, error: RaycollectError) -> bool:
        """Refuses later calls. Returns whether a call is in progress."""
        self._queue.close()
        return super().end(error)

    def run(self, op: str, attempt: Attempt, timeout_s: float, object_to: Objection | None = None) -> Outcome:
        """Runs a call in this thread, after the calls started before; see the table above.

        `object_to` refuses the call if another thread calls meanwhile; None: the call is never refused.

        Raises:
            RefusedError: The agreement refused all ranks; no tensor was touched.
            GroupBrokenError: A rank of the communicator has died or departed, or this process has left the group.
            FaultError: A rank timed out, died or failed.
        """
        with self._watch(self, op):
            thread = self._enter(op)
            try:
                if self._queue.is_busy:
                    self._queue.drain()  # here, so that a signal can end this wait, and the call never begins
                return self._run(op, attempt, timeout_s, object_to)
            finally:
                self._callers.leave(thread)

    def start(self, op: str, attempt: Attempt, timeout_s: float, object_to: Objection | None = None) -> Future[Outcome]:
        """Queues a call for the communicator's thread; see `run`."""
        thread = self._enter(op)
        try:
            run = partial(self._run, op, attempt, timeout_s, object_to)
            return self._queue.submit(run, partial(self._callers.leave, thread))
        except RuntimeError:  # no more threads can be started
            self._callers.leave(thread)
            raise

    def _enter(self, op: str) -> int:
        """Notes a call of this thread. Restarts the call in progress of another thread, for all ranks to refuse it."""
        if self._callers.enter(op):
            with self._lock:
                backend, seq, call = self._backend, self.client.seq, self.client.call
                restarts = backend is not None and call is not None and not call.agreed and self._objecting is None
                if restarts and call is not None:
                    call.restarts = True
                    self.client.changed.notify_all()
            if restarts and backend is not None:
                backend.abort(seq)
        return threading.get_ident()

    def _run(self, op: str, attempt: Attempt, timeout_s: float, object_to: Objection | None) -> Outcome:
        ring, since_s = self._member.tracer.ring, time.monotonic()
        try:
            return self._under_way(op, timeout_s, since_s, partial(self._attempt, attempt, object_to))
        finally:
            if ring is not None:
                number = ring.label_of(partial(self._label, ring, op), self.ranks, op, self._member.spec.group_id)
                ring.put(CALL, op, since_s, ring.clock(), 0, number)

    def _label(self, ring: Ring, op: str) -> Label:
        spec, rank = self._member.spec, self._member.rank
        ring.groups.setdefault(spec.group_id, TracedGroup.of(spec, rank))
        return Label(op, spec.group_id, rank, len(self.ranks))

    def confer(self, op: str, blob: bytes, timeout_s: float) -> Sequence[bytes]:
        """Exchanges a blob with all ranks, in rank order, without a backend's communicator; raises as `run`."""

        def meet(call: ActiveCall) -> Sequence[bytes]:
            self._stood = RankPosition(op, 0)
            return self.client.meet(call, op, blob, timeout_s)

        return self._under_way(op, timeout_s, time.monotonic(), meet)

    def _under_way(
        self, op: str, timeout_s: float, since_s: float, run: Callable[[ActiveCall], _Result | None]
    ) -> _Result:
        """Repeats attempts of a call until one has a result."""
        client = self.client
        with self._in_use:
            try:
                with self._lock:
                    self._objecting = None
                    call = client.begin(op, since_s, timeout_s)
                self._watchdog.begun()
                while True:
                    if client.broken is not None:
                        raise copy_error(call.stop or client.broken)
                    if (result := run(call)) is not None:
                        return result
            except RaycollectError as exc:
                raise self._located(exc, op, timeout_s) from exc.__cause__
            finally:
                with self._lock:
                    client.call = None
                if client.broken is not None:
                    self._leave()  # releases the memory of dead ranks

    def _attempt(self, attempt: Attempt, object_to: Objection | None, call: ActiveCall) -> Outcome | None:
        """Runs a call once; None: the others had left before this rank arrived, so the call has to run again."""
        client = self.client
        try:
            with self._lock:
                in_step = client.state is CommunicatorState.OK
                self._objecting = self._callers.conflict if object_to is not None else None
            if not in_step and not self._get_in_step(call):
                return None
            with self._lock:
                client.seq += 1
                call.agreed = call.restarts = False
                call.place = CHECK
                if object_to is not None and (wrong := self._callers.conflict) is not None:
                    self._objecting, attempt = wrong, object_to(wrong)
                within = self._within
            if within is None:
                raise InternalError(detail="a communicator whose ranks are in step has none of the backend")
            within.call = call
            outcome = attempt(within, client.seq)
        except RaycollectError as exc:
            self._leave(exc, keep=self._resumes and isinstance(exc, CollectiveTimeoutError))
            raise
        except Exception as exc:  # a bug: the other ranks must not wait for this rank
            self._leave(unforeseen := InternalError(detail=threads.cause_of(exc)))
            raise copy_error(unforeseen) from exc
        except BaseException as exc:  # a signal: the other ranks wait for the next call of this rank
            self._leave(PlanAbortedError(detail=f"it was interrupted: {threads.cause_of(exc)}"))
            raise
        if (failure := outcome.error) is None:
            return outcome
        agreed = call.agreed
        if agreed and isinstance(failure, RefusedError):
            raise copy_error(failure)
        self._fail(call, failure, agreed)
        return None

    def _fail(self, call: ActiveCall, failure: RaycollectError, agreed: bool) -> None:
        """Leaves a failed launch, and raises the cause; returns if the call has to run again."""
        leave = partial(self._leave, keep=self._resumes and not isinstance(failure, GroupBrokenError | InternalError))
        if not isinstance(failure, PlanAbortedError) and (agreed or not isinstance(failure, GroupBrokenError)):
            leave(failure)
        raised = self._explained(call, failure, agreed)
        if call.restarts:
            leave(raised or PlanAbortedError(detail=f"it restarts, to be refused: {self._callers.conflict}"))
        # Denied, or the connection to a rank has ended without a message: only this rank knows the error
        leave(raised if isinstance(raised, RefusedError | GroupBrokenError | PlanAbortedError) else None)
        if raised is not None:
            raise copy_error(raised)

    def _explained(self, call: ActiveCall, error: RaycollectError, agreed: bool) -> RaycollectError | None:
        """Finds the cause of a failure, which may be another rank's failure; None as in `_attempt`."""
        client = self.client
        is_broken = isinstance(error, GroupBrokenError) and not agreed
        # A library's kernel may fail because another rank's has. If the backend resumes, ranks fail by themselves.
        is_echo = isinstance(error, PlanAbortedError) or (isinstance(error, KernelError) and not self._resumes)
        with self._lock:
            if is_broken or is_echo:  # the other ranks send the cause, maybe later
                self.client.changed.wait_for(lambda: call.stop or client.cause or call.restarts, CAUSE_S)
            if call.stop is not None and (isinstance(error, PlanAbortedError) or isinstance(call.stop, FaultError)):
                return call.stop
            if is_broken and client.cause is not None:  # the connection of the rank that left ended before its message
                return None
            if not isinstance(error, PlanAbortedError):
                return error
            if not agreed:
                return None
            if call.restarts and (wrong := self._callers.conflict) is not None:
                return refusal(call.op, "", (wrong,))  # the other ranks do not repeat this call
            if client.cause is not None:
                rank, cause = client.cause
                if isinstance(cause, CollectiveTimeoutError) and self._member.rank not in cause.missing:
                    return cause  # that rank waited for a third rank, as this rank did
                detail = str(getattr(cause, "detail", "")) or str(cause)
                error.rank, error.detail = rank, f"{type(cause).__name__} on rank {rank}: {detail}"
        return error

    def _located(self, error: RaycollectError, op: str, timeout_s: float) -> RaycollectError:
        member, wrong = self._member, self._objecting
        if wrong is not None and isinstance(error, CollectiveTimeoutError):
            error = refusal(op, "", (wrong,))  # no other rank arrived
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
            error.detail = error.describe_missing(
                *(list(map(member.describe, side)) for side in (error.missing, error.within))
            )
            if error.missing:
                error.reports = error.reports or self._watchdog.reports(self.client, error.missing, self._stood)
        return error
