"""The lease of one controller on this participant: groups, plans and captured steps.

Programs arrive by the mailbox, over the channel, or as actor tasks. Messages that must not wait arrive over the
channel, which has its own thread. All answers go to the controller that holds the lease: a later controller numbers
its plans from 1 again, so answers to an earlier controller's plans would be ambiguous.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

from raycollect.channel import ControlLink, MailboxClient, messages
from raycollect.core import threads, timers
from raycollect.core.model import Key, task_key
from raycollect.engine.run import Keep, Outcome, Run
from raycollect.engine.step_actions import Invoke
from raycollect.engine.step_program import CAPTURES, Invocation
from raycollect.engine.step_runner import StepRunner
from raycollect.errors import (
    CaptureError,
    GroupBrokenError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    ResourceLimitError,
    copy_error,
    strip_traceback,
)
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.group.communicator import LAST_S
from raycollect.group.process_group import ProcessGroup
from raycollect.member import introspection, joining
from raycollect.member.captured_steps import CapturedStep, CapturedSteps, open_doorbell, pinned
from raycollect.member.executor import Executor
from raycollect.member.methods import Methods
from raycollect.member.plan_queue import PlanQueue, ReceivedPlan
from raycollect.member.reporter import Reporter
from raycollect.member.runtime import Runtime
from raycollect.member.sequencer import PlanSequencer
from raycollect.member.wait_monitor import WaitMonitor
from raycollect.observe.run_steps import RunStep
from raycollect.planner import Program, decode_order
from raycollect.pos import Container
from raycollect.pos.handle import Handle


class LeasedParticipant(Protocol):
    """The leased participant; implemented by `member.participant`."""

    runtime: Runtime
    actor_id: str
    actor: str
    host: str
    methods: Methods
    watch: WaitMonitor

    def keep_output(self, key: Key, container: Container) -> Handle | None:
        """Stores an output of a plan; returns its handle if a task of Ray returns the handle."""

    def task_of(self, seq: int) -> bytes | None:
        """The task whose return ids are the keys of a plan's outputs, for a plan without an actor task."""

    def exits(self) -> None:
        """Notes that the process is about to exit."""


class Lease:
    """The lease of one controller. Any thread may call it; the channel's thread calls `received` and `end`."""

    def __init__(
        self,
        controller: str,
        description: str,
        link: ControlLink,
        participant: LeasedParticipant,
        mailbox: MailboxClient | None = None,
    ) -> None:
        self.controller = controller
        self.description = description
        self.link = link
        runtime = participant.runtime
        self._participant = participant
        self._methods = participant.methods
        self._runtime = runtime
        self._store = runtime.instruments.store
        self._sequencer = PlanSequencer(runtime.tracer)
        self._reporter = Reporter(link, runtime.instruments.recorder, self._sequencer, participant.watch)
        self._mailbox = mailbox
        self._groups = runtime.process_groups
        self._running: dict[int, Run] = {}  # plan number -> its run
        self._exchanges: dict[int, ChannelExchange] = {}  # plan number -> its agreement through the controller
        self._captures = CapturedSteps()
        self._recording = introspection.RecordingAgent(controller, runtime, self._reporter, self._sequencer)
        self.plan_queue: PlanQueue = PlanQueue(
            self._store, self._sequencer, self._reporter, participant.methods, mailbox
        )
        self._executor = Executor(self._sequencer, self._reporter, self.plan_queue)

    def end(self, reason: str) -> None:
        """Ends all groups, plans and steps of the controller, even if some of them raise. Never waits."""
        for seq in self._sequencer.close(reason):
            threads.survives(self._wake, seq)
        threads.survives(self._captures.close, reason)
        threads.survives(self.plan_queue.close, reason)
        for group in self._groups.of(self.controller):
            threads.survives(self._groups.end, group, reason)
        self._recording.end()

    # ------------------------------------------------------------------------------------------ programs

    @property
    def is_overlapping(self) -> bool:
        """Whether the methods of this actor may overlap, or run out of submission order."""
        return not self._methods.is_ordered or not all(group.ordered for group in self._groups.of(self.controller))

    def hand_over(self, payload: bytes, task: bytes | None) -> Future[Any] | None:
        """Runs a plan in the thread of `PlanQueue`; None: methods run one by one, so the caller's thread runs the plan.

        Args:
            payload: From `planner.encode_order`.
            task: The id of the plan's actor task; its return ids are the keys of outputs.

        Returns:
            A future of the task's result; already set if the plan has no outputs here.

        Raises:
            InternalError, ResourceLimitError: The thread can't be started.
        """
        if not self.is_overlapping:
            return None
        received = ReceivedPlan(*decode_order(payload), task=task)
        ticket = received.ticket
        try:
            result = self.plan_queue.add(received, self.run_ordered)
        except RuntimeError as exc:
            error = threads.failed("starting the thread for plans", exc)
            self.not_begun(ticket.seq, error, ticket.predecessor)
            raise copy_error(error) from exc
        if not received.program.makes:
            result = Future()
            result.set_result(None)
        return result

    def run_program(self, payload: bytes, task: bytes | None) -> Any:
        """Runs this participant's part of a plan, reports its end to the controller, and returns its outputs' handles.

        Args:
            payload: From `planner.encode_order`.
            task: The id of the plan's actor task; its return ids are the keys of outputs.

        Raises:
            RaycollectError: The plan failed and had outputs here; users of their refs get the error.
        """
        received = ReceivedPlan(*decode_order(payload), task=task)
        self.plan_queue.reached(received.ticket.seq)
        try:
            return self._carry_out(received)
        except SystemExit:
            self._participant.exits()
            raise

    def _carry_out(self, received: ReceivedPlan) -> Any:
        ticket, keys, program, order, letter, task, _ = received
        seq = ticket.seq
        is_in_turn = order is not None and order.in_order
        handles, outcome = list[Handle | None](), Outcome()

        def keep(outputs: Sequence[Container]) -> None:
            by = task or self._participant.task_of(seq)
            assert by is not None  # a program with outputs is an actor task, or the driver's
            handles.extend(
                self._participant.keep_output(task_key(by, at), container) for at, container in enumerate(outputs, 1)
            )

        def run(_: RunStep) -> RaycollectError | None:
            nonlocal outcome
            # Methods may be late if any group says so. Destroyed groups don't count.
            is_ordered, by_id = True, self._groups.by_id
            for group_id in program.group_ids:
                group = by_id.get(group_id)
                is_ordered = is_ordered and (group is None or group.ordered)
            if order is not None and not is_in_turn:
                self.plan_queue.wait_for_operands(seq, keys)
            is_apart = is_in_turn or (order is not None and is_ordered)
            with self._methods.without(seq, partial(self._sequencer.reason, seq)) if is_apart else nullcontext():
                outcome = self._run(received, is_ordered, keep)
            return outcome.error

        after = order.after if order is not None and is_in_turn else b""
        error, was_aborted = self._executor.carry_out(seq, ticket.predecessor, run, what="plan {}", after=after)
        if error is None:
            self._tell_well(seq, program, outcome.ended, letter=letter, was_aborted=was_aborted)
        elif program.makes:
            if isinstance(error, GroupBrokenError):  # after a death, before this plan was aborted
                raise PlanAbortedError(detail=error.detail)
            raise copy_error(error)
        return handles[0] if len(handles) == 1 else tuple(handles) or None

    def listen(self) -> bool:
        """Starts taking letters from the mailbox; False: no more threads can be started."""
        try:
            self.plan_queue.start(self.run_ordered)
        except RuntimeError:
            self._mailbox = None
            self.plan_queue.drop_mailbox()
            return False
        return True

    def run_ordered(self, received: ReceivedPlan) -> None:
        """Runs a plan as `run_program` does, in the thread of `PlanQueue`; never raises."""
        returned, error = None, None
        try:
            returned = self._carry_out(received)
        except RaycollectError as exc:
            error = strip_traceback(exc)  # the controller has the error
        except SystemExit:  # ends the actor, as in an actor task, and not only this thread
            self._participant.exits()
            os._exit(1)
        except Exception as exc:  # noqa: BLE001 - the controller waits
            error = threads.failed("carrying out an order", exc)
            self.not_begun(received.ticket.seq, error)
        if received.result is not None:
            self.plan_queue.settle(received.result, returned, error=error)

    def _run(self, received: ReceivedPlan, is_ordered: bool, keep: Keep) -> Outcome:
        seq, program, order = received.ticket.seq, received.program, received.order
        place, exchange = program.agreement, None
        if program.commits or not place.group_id:
            exchange = ChannelExchange("", place.ranks.index(place.rank), self._reporter.tell)
            self._exchanges[seq] = exchange
        try:
            running = self._running[seq] = Run(
                program,
                seq,
                self._groups.communicator,
                self._runtime.instruments,
                keys=received.keys,
                aborted=partial(self._sequencer.reason, seq),
                waiting=None if is_ordered else lambda key: self._reporter.tell(messages.Waiting(seq=seq, key=key)),
                exchange=exchange,
                keep=keep,
            )
            holds_up = order is not None and order.in_order
            with self._reporter.waiting("", "", program.name, (), seq=seq, call=lambda: 0, holds_up=holds_up):
                return running.run()
        finally:
            self._running.pop(seq, None)
            if exchange is not None:
                self._exchanges.pop(seq, None)

    def _tell_well(self, seq: int, program: Program, ended: Sequence[int], *, letter: int, was_aborted: bool) -> None:
        # If all ranks see each other, the last one reports success for all. An aborted rank answers for itself.
        is_last = len(ended) == len(program.agreement.ranks)
        if letter and self._mailbox is not None and is_last and not was_aborted:
            self._mailbox.ended(letter)
        elif was_aborted or is_last or not ended:
            self._reporter.tell(messages.Done(seq=seq, ranks=list(ended), error=None, story=[]))

    # ------------------------------------------------------------------------------------------ captured steps

    def capture(self, payload: bytes, values: Sequence[Any], invoker: Callable[[Sequence[str]], Invoke]) -> bool:
        """Installs a captured step. Returns whether its runs may arrive by the controller's doorbell.

        Args:
            payload: From `step_program.CAPTURES`.
            values: The values of its refs, in the order of their slots.
            invoker: Returns the function that calls the methods of these names.

        Raises:
            RefusedError: A value is missing or another participant's, or the actor lacks a method.
            CaptureError: The step was closed before it arrived.
        """
        step_program, segment, slot = CAPTURES.decode(payload)
        here = self._participant
        pairs = zip(values, step_program.keys, strict=False)  # the refs' keys are first
        refs = [pinned(value, key, self._store, here.actor_id, here.actor) for value, key in pairs]
        methods = [action.method for action in step_program.actions if isinstance(action, Invocation)]
        invoke = invoker(methods)
        runner = StepRunner(step_program, refs, invoke, self._runtime.instruments, self._groups.communicator)
        segment = segment if self._captures.takes_doorbell else None
        doorbell = open_doorbell(segment, slot, keeps_core=not methods)  # methods' threads may run on any core
        guarded = self._methods if self._methods.is_ordered else None
        try:
            make = partial(
                CapturedStep, runner, doorbell, self._executor, guarded, self.link.send, self._captures.shared
            )
            self._captures.add(step_program.capture, make)
        except RaycollectError:
            if doorbell is not None:
                doorbell.close()
            raise
        return doorbell is not None

    def captured_step(self, capture: bytes) -> CapturedStep:
        """A captured step; CaptureError: no such step."""
        step = self._captures.find(capture)
        if step is None:
            raise CaptureError(detail="this captured step is not here: it was closed, or its driver has ended")
        return step

    # ------------------------------------------------------------------------------------------ messages

    def received(self, message: messages.Message) -> None:
        """Handles a message of the controller, on the channel's thread, so this must not wait."""
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise ProtocolError(detail=f"unexpected message {type(message).__name__}")
        handle(self, message)

    def not_begun(self, seq: int, error: threads.Failure, predecessor: int = 0) -> None:
        """Ends a plan or run that can't begin here, in its order, so that its successors continue."""
        self._sequencer.after(seq, predecessor, partial(self._sequencer.end, seq))
        self._reporter.tell_failure(seq, error)

    def _order(self, message: messages.Order) -> None:
        try:
            self.plan_queue.received(message, self.run_ordered)
        except ResourceLimitError as exc:  # no more threads can be started
            self.not_begun(decode_order(message.payload)[0].seq, exc)

    def _abort(self, message: messages.Abort) -> None:
        if message.reason:
            self._runtime.instruments.recorder.add("abort", message.seq, message.reason)
        if self._sequencer.abort(message.seq, message.reason):
            # The plan may have ended without a report, as a rank that is dead by now had to report it.
            self._reporter.tell(messages.Done(seq=message.seq, ranks=[], error=None, story=[]))
        elif message.reason:
            self._wake(message.seq)

    def _wake(self, seq: int) -> None:
        running = self._running.get(seq)  # None: not begun; a run checks the sequencer before each launch
        if running is not None:
            running.abort()
        else:
            self._captures.wake(seq)
        self._store.wake()
        self._methods.wake()

    def _receive_run(self, message: messages.BeginRun) -> None:
        step = self._captures.find(message.capture)
        if step is None or not step.received(message):
            self._sequencer.end(message.seq)  # its successors continue
            self._reporter.tell_failure(message.seq, CaptureError(detail="this captured step is closed"))

    def _arrivals(self, message: messages.Arrivals) -> None:
        group = self._groups.by_id.get(message.group_id)
        if message.group_id:
            exchange = group.exchange if group is not None else None
        else:
            exchange = self._exchanges.get(message.seq) or self._captures.exchange(message.seq)
        if exchange is not None:
            exchange.arrived(message.seq, message.round, message.blobs, more=message.more)

    def _gone(self, message: messages.Gone) -> None:
        """Handles the death or departure of a member. After a death the group ends, and releases the member's memory.

        A plan in progress that needs nothing more of the member still completes. The controller, which knows which
        participants had ended, aborts the other plans.
        """
        self._groups.received(message)
        here = self._groups.by_id.get(message.group_id)
        if not message.died or here is None:
            return
        reason = f"{here.member.describe(message.rank)} died: {message.detail}"
        under_way = self._sequencer.running()
        end = partial(self._end_group, here, reason)
        if not here.plans.lost(message.rank):
            timers.soon_or_now(LAST_S, end)
        self._sequencer.when_ended(under_way, end)

    def _end_group(self, group: ProcessGroup, reason: str) -> None:
        communicator = group.plans.refuse(reason)  # first: each plan is either aborted below, or refused
        try:
            self._abort_plans(group.spec.group_id, reason)
        finally:
            if communicator is not None:  # releases the dead member's memory; closing must not wait for it
                threads.survives(communicator.abort, 0)  # the library may not be ours
                threads.bounded(communicator.close)

    def _abort_plans(self, group_id: str, reason: str) -> None:
        plans = [seq for seq, running in list(self._running.items()) if group_id in running.program.group_ids]
        for seq in (*plans, *self._captures.seqs_with(group_id)):
            if not self._sequencer.abort(seq, reason):
                self._wake(seq)


def _measure(lease: Lease, message: messages.Measure) -> None:
    running = lease._running.get(message.seq)
    bytes_done = lease._captures.bytes_done(message.seq) if running is None else running.bytes_done()
    lease._reporter.tell(introspection.measure(message, lease._sequencer, bytes_done))


_OF_GROUPS: tuple[type, ...] = (*(messages.Answer, messages.Ask, messages.Drop, messages.Met, messages.Publish),)

_HANDLERS: dict[type, Callable[[Lease, Any], None]] = {
    messages.Join: lambda lease, message: joining.join(
        lease._groups, lease._participant.host, lease.controller, lease._reporter, message
    ),
    messages.Leave: lambda lease, message: joining.leave(lease._groups, message),
    messages.Abort: Lease._abort,
    messages.Arrivals: Lease._arrivals,
    messages.Survey: lambda lease, message: lease._reporter.tell(introspection.survey(message, lease._store)),
    messages.Measure: _measure,
    messages.Look: lambda lease, message: lease._reporter.tell(
        introspection.look(message, lease._runtime.instruments, lease._sequencer)
    ),
    messages.BeginRun: Lease._receive_run,
    messages.Forget: lambda lease, message: lease._captures.forget(message.capture, "the captured step was closed"),
    messages.Order: Lease._order,
    messages.Record: lambda lease, message: lease._recording.record(message),
    messages.Tick: lambda lease, message: lease._recording.tick(message),
    messages.Collect: lambda lease, message: lease._recording.collect(message),
    messages.Gone: Lease._gone,
    **dict.fromkeys(_OF_GROUPS, lambda lease, message: lease._groups.received(message)),
}
