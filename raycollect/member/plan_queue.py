"""The thread for plans of the mailbox and the channel, and for plans of overlapping actor tasks.

Plans run one after the other, each between two methods if the actor's methods run one by one. A started plan then
blocks its actor's methods until all ranks have arrived. If methods overlap, Ray has few threads, or an event loop, and
starts actor tasks in any order: early plans without outputs would keep these threads from the methods and plans for
which they wait.

Plans may arrive out of order, as they arrive by different channels. A plan whose predecessor has not ended is set aside
until then, so that the thread never waits for a plan that it would have to run itself.

A plan waits for the last call before it, and so has the position of an actor task. Ray never starts an actor task with
a failed argument; such a plan waits for its other operands instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from raycollect.channel import MailboxClient
from raycollect.channel.mailbox import AWAITED, IN_ORDER, Received
from raycollect.channel.messages import Behind, Order, Waiting
from raycollect.core import threads
from raycollect.core.model import UNKNOWN_TASK, Key
from raycollect.errors import PlanAbortedError
from raycollect.member.methods import Methods
from raycollect.member.reporter import Reporter
from raycollect.member.sequencer import PlanSequencer
from raycollect.observe import run_steps
from raycollect.planner import Program, Ticket, decode_order
from raycollect.pos import Absence, State, Store

ASK_S = 0.05
"""How long a plan waits for a pending call while no method runs, before it asks the controller, in seconds."""

IDLE_S = 60.0
"""How long the thread waits at the mailbox, in seconds; a wake-up ends the wait."""


class ReceivedPlan(NamedTuple):
    """A plan that has arrived."""

    ticket: Ticket
    keys: Sequence[Key]
    program: Program
    order: Order | None = None  # None: it arrived as an actor task
    letter: int = 0  # the number of its letter, if the letter gets the answer
    task: bytes | None = None  # its actor task, whose return ids are the keys of outputs
    result: Future[Any] | None = None  # of the actor task


def _read(letter: Received) -> ReceivedPlan:
    number, flags, after, payload = letter
    order = Order(payload=payload, in_order=bool(flags & IN_ORDER), after=after)
    return ReceivedPlan(*decode_order(payload), order, number if flags & AWAITED else 0)


class PlanQueue:
    """The plans that have arrived at this participant. Any thread may call it.

    Args:
        methods: The methods of the actor.
        mailbox: The controller's mailbox; None: all plans arrive over the channel.
    """

    def __init__(
        self,
        store: Store,
        sequencer: PlanSequencer,
        reporter: Reporter,
        methods: Methods,
        mailbox: MailboxClient | None = None,
    ) -> None:
        self._store = store
        self._methods = methods
        self._sequencer = sequencer
        self._reporter = reporter
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._results: set[Future[Any]] = set()  # without the settled ones
        self._closed = ""
        self._waiting: SimpleQueue[ReceivedPlan | None] = SimpleQueue()  # None: the end
        self._thread: threading.Thread | None = None
        self._reached = 0  # the latest plan whose preceding calls have all ended, according to an actor task

    def received(self, message: Order, run: Callable[[ReceivedPlan], object]) -> None:
        """Queues a plan of the channel, on its thread. ProtocolError: malformed message. RuntimeError: see `start`."""
        plan = ReceivedPlan(*decode_order(message.payload), message)
        self.start(run)  # before queueing: starting a thread may fail
        self._put(plan)

    def add(self, plan: ReceivedPlan, run: Callable[[ReceivedPlan], object]) -> Future[Any]:
        """Queues the plan of an actor task; returns a future of its result. RuntimeError: see `start`."""
        self.start(run)
        result = Future[Any]()
        with self._lock:
            self._results.add(result)
            closed = self._closed
        if closed:
            self.settle(result, error=PlanAbortedError(detail=closed))
        else:
            self._put(plan._replace(result=result))
        return result

    def settle(self, result: Future[Any], value: Any = None, *, error: BaseException | None = None) -> None:
        """Sets a result, once."""
        with self._lock:
            if result not in self._results:
                return
            self._results.discard(result)
        if not result.set_running_or_notify_cancel():  # the coroutine that awaits it was cancelled
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def start(self, run: Callable[[ReceivedPlan], object]) -> None:
        """Starts the thread, once. RuntimeError, as `ResourceLimitError`: the thread can't be started.

        `run` executes the plans and settles their results; it never raises.
        """
        with self._lock:  # Ray's threads may begin two actor tasks at once
            if self._thread is None:
                self._thread = threads.start("raycollect-order", self._work, run)

    def drop_mailbox(self) -> None:
        """Stops using the mailbox: the thread could not be started, and the controller reuses the slot."""
        self._mailbox = None

    def _work(self, run: Callable[[ReceivedPlan], object]) -> None:
        threads.repeat(partial(self._take, run))
        if self._mailbox is not None:
            self._mailbox.close()

    def _put(self, plan: ReceivedPlan | None) -> None:
        self._waiting.put(plan)
        if self._mailbox is not None:
            self._mailbox.wake()

    def reached(self, seq: int) -> None:
        """Notes that all calls before a plan in program order have ended."""
        self._reached = max(self._reached, seq)
        self._methods.wake()

    def pass_fence(self, seq: int) -> None:
        """Runs a fence: an actor task that follows all calls before a plan, and keeps later calls behind the plan."""
        self.reached(seq)
        self._sequencer.wait(seq)

    def close(self, reason: str) -> None:
        """Ends the thread after the queued plans, which the sequencer refuses; their results are PlanAbortedError."""
        with self._lock:
            self._closed = reason
            left = list(self._results)
        for result in left:
            self.settle(result, error=PlanAbortedError(detail=reason))
        self._put(None)
        self._methods.wake()

    def wait_for_call(self, task: bytes, seq: int) -> None:
        """Waits until a call and all calls before it have ended, or the plan behind them is aborted."""
        methods = self._methods
        if not task or methods.is_over(task):
            return
        run_steps.here().at = run_steps.BEHIND_METHODS

        def goes_on() -> bool:
            return self._reached >= seq or self._sequencer.reason(seq) is not None

        if task == UNKNOWN_TASK:  # an actor task will follow
            methods.wait_for(goes_on, None)
            return

        def is_told() -> bool:
            return methods.is_over(task) is not None or goes_on()

        while not methods.wait_for(is_told, ASK_S):
            if not methods.lock.locked():
                break
        if not goes_on() and not methods.is_over(task):
            # Ray may be pickling the result, or may never begin the call: it was cancelled, or an argument has failed.
            self._reporter.tell(Behind(seq=seq))
            methods.wait_for(lambda: bool(methods.is_over(task)) or goes_on(), None)
        if self._reached >= seq:  # later plans behind the call need not ask again
            methods.note(task, is_over=True)

    def wait_for_operands(self, seq: int, keys: Sequence[Key]) -> None:
        """Waits for the operands of a plan; PlanAbortedError: the plan was aborted meanwhile."""
        sequencer, tell = self._sequencer, self._reporter.tell
        step = run_steps.here()
        for key in keys:
            operand = self._store.look(key)
            if isinstance(operand, Absence) and operand.state is State.ABSENT:
                tell(Waiting(seq=seq, key=key))
                step.at = run_steps.FOR_AN_OPERAND
                self._store.wait(key, lambda: sequencer.reason(seq) is not None)
        reason = sequencer.reason(seq)
        if reason is not None:
            raise PlanAbortedError(detail=reason)

    def _take(self, run: Callable[[ReceivedPlan], object]) -> bool:
        mailbox = self._mailbox
        if mailbox is None or not self._waiting.empty():
            plan = self._waiting.get()
            if plan is None:
                return False
        else:
            letter = mailbox.take(IDLE_S)
            if letter is None:
                return True
            try:
                plan = _read(letter)
            except Exception:  # the letter is lost: end the connection, as for a malformed message
                self._reporter.link.close()
                raise
        ticket, sequencer = plan.ticket, self._sequencer
        if sequencer.has_ended(ticket.predecessor):
            run(plan)
        else:
            sequencer.after(ticket.seq, ticket.predecessor, partial(self._put, plan))
        return True
