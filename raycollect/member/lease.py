"""What one controller drives in this participant: groups, plans and captured steps.

Programs come by the mailbox, over the channel, or as actor tasks. What must not wait comes over the channel, on a
thread of its own. All answers go to the controller that holds the lease: a later one counts plans from 1 again, and
would take the number of an earlier one's plan for one of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

from raycollect.channel import Link, MailboxClient, messages
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
    anew,
    kept,
)
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.group.communicator import LAST_S
from raycollect.group.process_group import ProcessGroup
from raycollect.member import introspection, joining
from raycollect.member.captured_steps import CapturedStep, CapturedSteps, open_doorbell, pinned
from raycollect.member.executor import Executor
from raycollect.member.methods import Methods
from raycollect.member.plan_queue import Came, PlanQueue
from raycollect.member.reporter import Reporter
from raycollect.member.runtime import Runtime
from raycollect.member.sequencer import PlanSequencer
from raycollect.member.wait_monitor import WaitMonitor
from raycollect.observe.run_steps import RunStep
from raycollect.planner import Program, decode_order
from raycollect.pos import Container
from raycollect.pos.handle import Handle


class Holder(Protocol):
    """Who is driven; implemented by `member.participant`."""

    runtime: Runtime
    actor_id: str
    actor: str
    host: str
    methods: Methods
    watch: WaitMonitor

    def keep_output(self, key: Key, container: Container) -> Handle | None:
        """Keeps what a plan has made; returns its handle where a task of Ray's returns that."""

    def task_of(self, seq: int) -> bytes | None:
        """Under the returns of which task the outputs of a plan are kept that no actor task has brought."""

    def exits(self) -> None:
        """The process is about to end."""


class Lease:
    """What one controller drives. Any thread may call it; `received` and `end` are for the channel's."""

    def __init__(
        self,
        controller: str,
        description: str,
        link: Link,
        holder: Holder,
        mailbox: MailboxClient | None = None,
    ) -> None:
        self.controller = controller
        self.description = description
        self.link = link
        runtime = holder.runtime
        self._holder = holder
        self._methods = holder.methods
        self._runtime = runtime
        self._store = runtime.instruments.store
        self._sequencer = PlanSequencer(runtime.tracer)
        self._reporter = Reporter(link, runtime.instruments.recorder, self._sequencer, holder.watch)
        self._mailbox = mailbox
        self._groups = runtime.process_groups
        self._running: dict[int, Run] = {}  # by the plan's number
        self._exchanges: dict[int, ChannelExchange] = {}  # their agreements through the controller, if they have one
        self._captures = CapturedSteps()
        self._recording = introspection.RecordingAgent(controller, runtime, self._reporter, self._sequencer)
        self.plan_queue: PlanQueue = PlanQueue(self._store, self._sequencer, self._reporter, holder.methods, mailbox)
        self._executor = Executor(self._sequencer, self._reporter, self.plan_queue)

    def end(self, reason: str) -> None:
        """Ends all that the controller drives, even if a part of that fails. Never waits."""
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
        """Whether the methods of this actor may overlap, or run in another order than they were submitted."""
        return not self._methods.is_ordered or not all(one.ordered for one in self._groups.of(self.controller))

    def hand_over(self, payload: bytes, task: bytes | None) -> Future[Any] | None:
        """Runs a plan in the thread of `PlanQueue`; None: methods come one by one, and so it runs in the caller's.

        Args:
            payload: What `planner.encode_order` made.
            task: The id of the actor task that brought it; outputs are kept under its returns.

        Returns:
            What the task returns, once that is there: at once where the plan makes nothing here.

        Raises:
            InternalError, ResourceLimitError: The thread can't be started.
        """
        if not self.is_overlapping:
            return None
        came = Came(*decode_order(payload), task=task)
        ticket = came.ticket
        try:
            result = self.plan_queue.add(came, self.run_ordered)
        except RuntimeError as exc:
            error = threads.failed("starting the thread for plans", exc)
            self.not_begun(ticket.seq, error, ticket.predecessor)
            raise anew(error) from exc
        if not came.program.makes:
            result = Future()
            result.set_result(None)
        return result

    def run_program(self, payload: bytes, task: bytes | None) -> Any:
        """Runs this participant's part in a plan, tells the controller how it ended, and returns its outputs' handles.

        Args:
            payload: What `planner.encode_order` made.
            task: The id of the actor task that brought it; outputs are kept under its returns.

        Raises:
            RaycollectError: The plan failed and had outputs here, so that users of their refs get the error.
        """
        came = Came(*decode_order(payload), task=task)
        self.plan_queue.reached(came.ticket.seq)
        try:
            return self._carry_out(came)
        except SystemExit:
            self._holder.exits()
            raise

    def _carry_out(self, came: Came) -> Any:
        ticket, keys, program, order, letter, task, _ = came
        seq = ticket.seq
        is_in_turn = order is not None and order.in_order
        handles, outcome = list[Handle | None](), Outcome()

        def keep(outputs: Sequence[Container]) -> None:
            by = task or self._holder.task_of(seq)
            assert by is not None  # a program with outputs is an actor task, or the driver's own
            handles.extend(self._holder.keep_output(task_key(by, at), one) for at, one in enumerate(outputs, 1))

        def run(_: RunStep) -> RaycollectError | None:
            nonlocal outcome
            # One group suffices to say that methods may be late. A group that was destroyed has nothing to say.
            is_ordered, by_id = True, self._groups.by_id
            for group_id in program.group_ids:
                group = by_id.get(group_id)
                is_ordered = is_ordered and (group is None or group.ordered)
            if order is not None and not is_in_turn:
                self.plan_queue.wait_for_operands(seq, keys)
            is_apart = is_in_turn or (order is not None and is_ordered)
            with self._methods.without(seq, partial(self._sequencer.reason, seq)) if is_apart else nullcontext():
                outcome = self._run(came, is_ordered, keep)
            return outcome.error

        after = order.after if order is not None and is_in_turn else b""
        error, was_aborted = self._executor.carry_out(seq, ticket.predecessor, run, what="plan {}", after=after)
        if error is None:
            self._tell_well(seq, program, outcome.ended, letter=letter, was_aborted=was_aborted)
        elif program.makes:
            if isinstance(error, GroupBrokenError):  # by a death, before this plan was aborted for it
                raise PlanAbortedError(detail=error.detail)
            raise anew(error)
        return handles[0] if len(handles) == 1 else tuple(handles) or None

    def listen(self) -> bool:
        """Takes letters from the mailbox from now on; False: no more threads can be started."""
        try:
            self.plan_queue.start(self.run_ordered)
        except RuntimeError:
            self._mailbox = None
            self.plan_queue.drop_mailbox()
            return False
        return True

    def run_ordered(self, came: Came) -> None:
        """Does what `run_program` does in the thread of `PlanQueue`, and raises nothing."""
        returned, error = None, None
        try:
            returned = self._carry_out(came)
        except RaycollectError as exc:
            error = kept(exc)  # the controller was told
        except SystemExit:  # as in an actor task it ends the actor, and not just this thread
            self._holder.exits()
            os._exit(1)
        except Exception as exc:  # noqa: BLE001 - any: the controller waits
            error = threads.failed("carrying out an order", exc)
            self.not_begun(came.ticket.seq, error)
        if came.result is not None:
            self.plan_queue.settle(came.result, returned, error=error)

    def _run(self, came: Came, is_ordered: bool, keep: Keep) -> Outcome:
        seq, program, order = came.ticket.seq, came.program, came.order
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
                keys=came.keys,
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
        # If all see each other, the last one tells for all that it went well. Who was told to abort answers for itself.
        is_last = len(ended) == len(program.agreement.ranks)
        if letter and self._mailbox is not None and is_last and not was_aborted:
            self._mailbox.ended(letter)
        elif was_aborted or is_last or not ended:
            self._reporter.tell(messages.Done(seq=seq, ranks=list(ended), error=None, story=[]))

    # ------------------------------------------------------------------------------------------ captured steps

    def capture(self, payload: bytes, values: Sequence[Any], invoker: Callable[[Sequence[str]], Invoke]) -> bool:
        """Takes in a captured step. Returns whether its runs may come by the controller's doorbell.

        Args:
            payload: Of `step_program.CAPTURES`.
            values: What its refs stand for, in the order of their slots.
            invoker: Gives what calls the methods of these names.

        Raises:
            RefusedError: A value is not there, or is another participant's; or there is no such method.
            CaptureError: It was closed before it came here.
        """
        step_program, segment, slot = CAPTURES.decode(payload)
        here = self._holder
        pairs = zip(values, step_program.keys, strict=False)  # those of the refs come first
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
        """A captured step; CaptureError: there is none."""
        found = self._captures.find(capture)
        if found is None:
            raise CaptureError(detail="this captured step is not here: it was closed, or its driver has ended")
        return found

    # ------------------------------------------------------------------------------------------ messages

    def received(self, message: messages.Message) -> None:
        """A message of the controller; on the channel's thread, so nothing here may wait."""
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise ProtocolError(detail=f"unexpected message {type(message).__name__}")
        handle(self, message)

    def not_begun(self, seq: int, error: threads.Failure, predecessor: int = 0) -> None:
        """A plan, or a run, can't begin here: what comes after it goes on, but behind what comes before it."""
        self._sequencer.after(seq, predecessor, partial(self._sequencer.end, seq))
        self._reporter.tell_failure(seq, error)

    def _order(self, message: messages.Order) -> None:
        try:
            self.plan_queue.received(message, self.run_ordered)
        except ResourceLimitError as exc:  # there are no more threads
            self.not_begun(decode_order(message.payload)[0].seq, exc)

    def _abort(self, message: messages.Abort) -> None:
        self._runtime.instruments.recorder.add("abort", message.seq, message.reason)
        if self._sequencer.abort(message.seq, message.reason):
            # It may have ended silently, as it left the report to a rank that is gone by now.
            self._reporter.tell(messages.Done(seq=message.seq, ranks=[], error=None, story=[]))
        else:
            self._wake(message.seq)

    def _wake(self, seq: int) -> None:
        running = self._running.get(seq)  # else it has not begun, and asks the sequencer before each launch
        if running is not None:
            running.abort()
        else:
            self._captures.wake(seq)
        self._store.wake()
        self._methods.wake()

    def _run_came(self, message: messages.Run) -> None:
        found = self._captures.find(message.capture)
        if found is None or not found.received(message):
            self._sequencer.end(message.seq)  # what comes after it goes on
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
        """A member is gone. If it has died, the group ends, and must not keep its memory.

        What it did before counts: a plan under way that needs no more of it runs to its end. The controller, which
        knows who had ended, aborts any other.
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
        communicator = group.plans.refuse(reason)  # first: a plan has begun, and is aborted, or gets none
        try:
            self._abort_plans(group.spec.group_id, reason)
        finally:
            if communicator is not None:  # it keeps no memory of the dead, and waits for none of them to close it too
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
        lease._groups, lease._holder.host, lease.controller, lease._reporter, message
    ),
    messages.Leave: lambda lease, message: joining.leave(lease._groups, message),
    messages.Abort: Lease._abort,
    messages.Arrivals: Lease._arrivals,
    messages.Survey: lambda lease, message: lease._reporter.tell(introspection.survey(message, lease._store)),
    messages.Measure: _measure,
    messages.Look: lambda lease, message: lease._reporter.tell(
        introspection.look(message, lease._runtime.instruments, lease._sequencer)
    ),
    messages.Run: Lease._run_came,
    messages.Forget: lambda lease, message: lease._captures.forget(message.capture, "the captured step was closed"),
    messages.Order: Lease._order,
    messages.Record: lambda lease, message: lease._recording.record(message),
    messages.Tick: lambda lease, message: lease._recording.tick(message),
    messages.Collect: lambda lease, message: lease._recording.collect(message),
    messages.Gone: Lease._gone,
    **dict.fromkeys(_OF_GROUPS, lambda lease, message: lease._groups.received(message)),
}
