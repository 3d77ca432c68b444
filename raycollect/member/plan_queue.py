"""Plans that run in a thread of their own: those of the mailbox and the channel, and those of overlapping actor tasks.

They run one after the other, each between two methods if the actor's methods come one by one. A plan then holds up its
actor's methods until the other participants have come. Where methods overlap, Ray has few threads, or an event loop,
and starts actor tasks in any order: plans without outputs that came early would keep these threads from the methods and
plans for which they wait.

What comes one way may overtake what comes the other. A plan whose predecessor has not ended is laid aside until it has,
so that the thread never waits for a plan that it would have to run itself.

A plan waits for the last call before it, and so takes the place that an actor task would have. One whose actor task Ray
never begins, as a method that makes an operand has failed for good, waits for its other operands instead.
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
"""How long a plan waits for a call that has not ended, though no method runs, before it asks the controller."""

IDLE_S = 60.0
"""How long the thread waits at the mailbox, in seconds; whoever needs it wakes it."""


class Came(NamedTuple):
    """A plan that has come."""

    ticket: Ticket
    keys: Sequence[Key]
    program: Program
    order: Order | None = None  # None: an actor task has brought it
    letter: int = 0  # the number of the letter that brought it, if its end is to be marked there
    task: bytes | None = None  # the actor task that has brought it; outputs are kept under its returns
    result: Future[Any] | None = None  # of what that task returns


def _read(letter: Received) -> Came:
    number, flags, after, payload = letter
    order = Order(payload=payload, in_order=bool(flags & IN_ORDER), after=after)
    return Came(*decode_order(payload), order, number if flags & AWAITED else 0)


class PlanQueue:
    """The plans that have come to this participant. Any thread may call it.

    Args:
        methods: Those of the actor.
        mailbox: The controller's; None: all comes over the channel.
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
        self._results: set[Future[Any]] = set()  # those that are not settled
        self._closed = ""
        self._waiting: SimpleQueue[Came | None] = SimpleQueue()  # None: no more will come
        self._thread: threading.Thread | None = None
        self._reached = 0  # the latest plan that an actor task has told to be behind no call any more

    def received(self, message: Order, run: Callable[[Came], object]) -> None:
        """A plan came over the channel; on its thread. ProtocolError: it is malformed. RuntimeError: as of `start`."""
        came = Came(*decode_order(message.payload), message)
        self.start(run)  # first, so that nothing is queued if no thread can be started
        self._put(came)

    def add(self, came: Came, run: Callable[[Came], object]) -> Future[Any]:
        """Runs a plan that an actor task has brought; returns its result. RuntimeError: as of `start`."""
        self.start(run)
        result = Future[Any]()
        with self._lock:
            self._results.add(result)
            closed = self._closed
        if closed:
            self.settle(result, error=PlanAbortedError(detail=closed))
        else:
            self._put(came._replace(result=result))
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

    def start(self, run: Callable[[Came], object]) -> None:
        """Starts the thread, if it has not been. RuntimeError, as `ResourceLimitError`: none can be started.

        `run` carries out all plans that come, and settles their results; it raises nothing.
        """
        with self._lock:  # Ray's threads may begin two actor tasks at once
            if self._thread is None:
                self._thread = threads.start("raycollect-order", self._work, run)

    def drop_mailbox(self) -> None:
        """Takes no letters: the thread could not be started, and the controller gives the slot to others."""
        self._mailbox = None

    def _work(self, run: Callable[[Came], object]) -> None:
        threads.repeat(partial(self._take, run))
        if self._mailbox is not None:
            self._mailbox.close()

    def _put(self, came: Came | None) -> None:
        self._waiting.put(came)
        if self._mailbox is not None:
            self._mailbox.wake()

    def reached(self, seq: int) -> None:
        """All calls before a plan in program order have ended."""
        self._reached = max(self._reached, seq)
        self._methods.wake()

    def pass_fence(self, seq: int) -> None:
        """An actor task came that is behind all calls before a plan, and keeps those after it behind the plan."""
        self.reached(seq)
        self._sequencer.wait(seq)

    def close(self, reason: str) -> None:
        """Ends the thread after what has come, which the sequencer refuses by now; all results are that error."""
        with self._lock:
            self._closed = reason
            left = list(self._results)
        for result in left:
            self.settle(result, error=PlanAbortedError(detail=reason))
        self._put(None)
        self._methods.wake()

    def wait_for_call(self, task: bytes, seq: int) -> None:
        """Waits until a call and all before it have ended, or a plan was aborted that is behind them."""
        methods = self._methods
        if not task or methods.is_over(task):
            return
        run_steps.here().at = run_steps.BEHIND_METHODS

        def goes_on() -> bool:
            return self._reached >= seq or self._sequencer.reason(seq) is not None

        if task == UNKNOWN_TASK:  # an actor task is on its way
            methods.wait_for(goes_on, None)
            return

        def is_told() -> bool:
            return methods.is_over(task) is not None or goes_on()

        while not methods.wait_for(is_told, ASK_S):
            if not methods.lock.locked():
                break
        if not goes_on() and not methods.is_over(task):
            # Ray may be pickling the result, or never begins the call: it was cancelled, or its arguments have failed.
            self._reporter.tell(Behind(seq=seq))
            methods.wait_for(lambda: bool(methods.is_over(task)) or goes_on(), None)
        if self._reached >= seq:  # what is behind the call as well need not ask again
            methods.note(task, is_over=True)

    def wait_for_operands(self, seq: int, keys: Sequence[Key]) -> None:
        """Waits for the operands of a plan; PlanAbortedError: it was aborted meanwhile."""
        sequencer, tell = self._sequencer, self._reporter.tell
        step = run_steps.here()
        for key in keys:
            found = self._store.look(key)
            if isinstance(found, Absence) and found.state is State.ABSENT:
                tell(Waiting(seq=seq, key=key))
                step.at = run_steps.FOR_AN_OPERAND
                self._store.wait(key, lambda: sequencer.reason(seq) is not None)
        reason = sequencer.reason(seq)
        if reason is not None:
            raise PlanAbortedError(detail=reason)

    def _take(self, run: Callable[[Came], object]) -> bool:
        mailbox = self._mailbox
        if mailbox is None or not self._waiting.empty():
            came = self._waiting.get()
            if came is None:
                return False
        else:
            letter = mailbox.take(IDLE_S)
            if letter is None:
                return True
            try:
                came = _read(letter)
            except Exception:  # the letter is lost: as on a connection, which ends then
                self._reporter.link.close()
                raise
        ticket, sequencer = came.ticket, self._sequencer
        if sequencer.has_ended(ticket.predecessor):
            run(came)
        else:
            sequencer.after(ticket.seq, ticket.predecessor, partial(self._put, came))
        return True
