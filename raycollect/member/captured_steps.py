"""The captured steps of a participant: how their runs arrive, their order, and the answers.

A step with a doorbell has a thread that takes runs from the doorbell. Runs over the channel use a thread that all steps
share. The sequencer orders all runs and plans: each run names its predecessor. If methods run one by one, a run holds
the method lock, so that Ray calls no method during the run, but not while the run waits for its predecessor. The
sequencer ends every run, also of a broken or closed step, as later runs wait for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from raycollect.channel.doorbell import DoorbellClient
from raycollect.channel.messages import BeginRun, Message, Ran
from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.core import threads
from raycollect.core.model import Key, Segment
from raycollect.engine.missing_operand import MissingOperand, missing
from raycollect.engine.progress import BytesDone
from raycollect.engine.step_runner import StepRunner
from raycollect.errors import (
    CaptureError,
    ConnectionLostError,
    PlanAbortedError,
    RaycollectError,
    Violation,
    refusal,
)
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.member.executor import Executor
from raycollect.member.methods import Methods
from raycollect.observe.run_steps import RunStep
from raycollect.observe.trace import PART
from raycollect.planner import Program
from raycollect.pos import Container, Store
from raycollect.pos.handle import Handle

MOST_NBYTES = MAX_FRAME_NBYTES - 1024
"""The largest results of a run that a message can carry, in bytes."""

IDLE_S = 60.0
"""How long the thread waits at the doorbell, in seconds; a wake-up ends the wait."""

MOST_DOORBELLS = 32
"""How many steps of a controller may have a doorbell, and so a thread, here; other steps use the channel."""

LATE = 1024
"""How many closed steps are remembered, for their runs in transit."""


def open_doorbell(segment: Segment | None, slot: int, *, keeps_core: bool) -> DoorbellClient | None:
    """This participant's end of a controller's doorbell; None if it is missing or unreachable."""
    try:
        return None if segment is None else DoorbellClient(segment, slot, keeps_core=keeps_core)
    except (OSError, ValueError):
        return None


def pinned(value: Any, key: Key, store: Store, actor_id: str, actor: str) -> Any:
    """The value of a ref, for a captured step to hold. Raises RefusedError for a tensor of another participant."""
    if not isinstance(value, Handle):
        here = store.look(key)  # a tensor that Ray has moved arrives as a plain value
        return here if isinstance(here, Container) else value
    operand = store.look(value.key) if value.actor_id == actor_id else None
    if isinstance(operand, Container):
        return operand
    if operand is None:
        why = MissingOperand(
            "not_member", f"a tensor of {value.actor}", "one of this actor: send it here first, by send_ref"
        )
    else:
        why = missing(operand)
    ref = value.key.hex()
    wrong = Violation(kind=why.kind, field="value", found=why.actual, expected=why.expected, actor=actor, ref=ref)
    raise refusal("capture", "", (wrong,))


class CapturedStep:
    """One captured step. A helper thread executes its runs; any thread may call it.

    Args:
        runner: Executes the actions of a run.
        doorbell: The doorbell from which runs arrive; None: the channel.
        executor: Executes runs in order.
        methods: The methods that must not overlap a run; None if methods overlap anyway.
        send: Sends to the controller; raises ConnectionLostError.
        shared: The thread for runs that arrive over the channel, in order of arrival.
    """

    def __init__(
        self,
        runner: StepRunner,
        doorbell: DoorbellClient | None,
        executor: Executor,
        methods: Methods | None,
        send: Callable[[Message], None],
        shared: ThreadPoolExecutor,
    ) -> None:
        self.runner = runner
        self.has_doorbell: bool = doorbell is not None
        self._shared = shared
        self._doorbell = doorbell
        self._executor = executor
        self._sequencer = executor.sequencer
        self._methods = Methods() if methods is None else methods
        self._send_or_raise = send
        self._tracer = runner.tracer
        self._changed = threading.Condition()  # guards what follows
        self._arrived: deque[BeginRun] = deque()
        self._closed = ""
        self._broken = ""
        self._count = 0  # the number of runs
        self._answered = 0  # the last answered run
        self._exchange: tuple[int, ChannelExchange] | None = None  # the exchange of a launch, with its number
        self._thread: threading.Thread | None = None
        self._let_go: Future[object] | None = None
        if doorbell is not None:
            self._thread = threads.start("raycollect-capture", self._work)

    # ------------------------------------------------------------------------------------------ any thread

    def received(self, run: BeginRun) -> bool:
        """Handles a run from the channel; never waits. Returns False if the step is closed, and so does not run."""
        with self._changed:
            if self._closed:
                return False
            if not self.has_doorbell:
                run_now = partial(self.run_now, run.seq, run.predecessor, run.payload, after=run.after)
                threads.submit(self._shared, run_now)
                return True
            self._arrived.append(run)
            self._changed.notify_all()
        self._wake_doorbell()
        return True

    def exchange(self, seq: int) -> ChannelExchange | None:
        """The agreement of launch `seq` through the controller, if it is in progress here."""
        exchange = self._exchange
        return exchange[1] if exchange is not None and exchange[0] == seq else None

    def close(self, reason: str) -> None:
        """Aborts the run in progress, refuses later runs, and releases all values. Never waits."""
        with self._changed:
            if self._closed:
                return
            self._closed = reason
            self._changed.notify_all()
        self.runner.stop()
        if self.has_doorbell:
            self._wake_doorbell()
        else:  # after the runs that have arrived
            self._let_go = threads.submit(self._shared, threads.survives, self._end)

    def join(self, timeout_s: float) -> bool:
        """Waits until `close` has released all values; False on a timeout."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return self._let_go is not None and threads.has_ended(self._let_go, timeout_s)

    def _wake_doorbell(self) -> None:
        doorbell = self._doorbell
        if doorbell is not None:
            doorbell.wake()

    # ------------------------------------------------------------------------------------------ its thread

    def _work(self) -> None:
        threads.repeat(self._take)
        self._end()

    def _end(self) -> None:
        threads.survives(self.runner.close)
        doorbell, self._doorbell = self._doorbell, None
        if doorbell is not None:
            doorbell.close()

    def _take(self) -> bool:
        assert self._doorbell is not None
        closed = bool(self._closed)  # read first: no message arrives after `close`
        # The bell precedes the message, so a run without a bell by now never gets one.
        unrung = self._arrived[0] if self._arrived else None
        entry = self._doorbell.take(0.0 if unrung or closed else IDLE_S)
        if entry is not None:
            number, seq, predecessor, payload, after = entry
            if payload is None:
                run = self._wait_for(lambda run: run.seq == seq)
                payload = b"" if run is None else run.payload  # None: the step is closed, and refuses the run
            self.run_now(seq, predecessor, payload, number=number, after=after)
        elif unrung is not None:
            self._arrived.remove(unrung)
            self.run_now(unrung.seq, unrung.predecessor, unrung.payload, after=unrung.after)
        else:
            return not closed
        return True

    def _wait_for(self, wanted: Callable[[BeginRun], bool]) -> BeginRun | None:
        with self._changed:
            while True:
                run = next(filter(wanted, self._arrived), None)
                if run is not None:
                    self._arrived.remove(run)
                    return run
                if self._closed:
                    return None
                self._changed.wait()

    # ------------------------------------------------------------------------------------------ one run

    def run_now(
        self,
        seq: int,
        predecessor: int,
        payload: bytes,
        number: int = 0,
        after: bytes = b"",
    ) -> None:
        """Executes a run, in the step's thread or the shared one.

        `number` is the run's number at the doorbell, which gets the answer; 0: the channel gets it. `after` is the task
        of the method call that must end before the run; empty: none.
        """
        ring = self._tracer.ring
        if ring is not None and self.runner.is_single:  # the plan records the whole run
            ring = None
        began_s = 0.0
        self._count += 1

        def run(step: RunStep) -> None:
            nonlocal began_s
            began_s = 0.0 if ring is None else ring.clock()
            self._run(seq, payload, number, step)

        def ended(error: RaycollectError | None) -> None:
            self._exchange = None
            if ring is not None and began_s:
                name = "" if error is None else type(error).__name__
                threads.survives(partial(ring.add, PART, "captured step", began_s, ring.clock(), seq, error=name))
            if error is not None:
                self._broken = self._broken or f"run {self._count} of this captured step failed before"

        self._executor.carry_out(seq, predecessor, run, what="run {} of a captured step", after=after, ended=ended)

    def _run(self, seq: int, payload: bytes, number: int, step: RunStep) -> None:
        lock = self._methods.lock
        if not lock.acquire(blocking=False):
            self._methods.keep_out(seq, lambda: self._closed or self._sequencer.reason(seq))
        try:
            if reason := self._closed or self._broken:
                raise PlanAbortedError(detail=reason)
            results = self.runner.run(
                seq,
                payload,
                aborted=self._sequencer.aborted,
                exchange=self._make_exchange,
                succeeded=partial(self._answer, seq, number, b""),
                step=step,
            )
            if len(results) > MOST_NBYTES:
                actual = f"take {len(results)} bytes, and a message carries {MOST_NBYTES}"
                raise CaptureError(detail=f"the step's results {actual}: let methods return refs instead")
            if self._answered != seq:
                self._answer(seq, number, results)
        finally:
            lock.release()

    def _answer(self, seq: int, number: int, results: bytes) -> None:
        self._answered = seq
        if not number or self._doorbell is None or not self._doorbell.answer(number, results):
            self._send(Ran(seq=seq, payload=results))

    def _make_exchange(self, program: Program, seq: int) -> ChannelExchange:
        exchange = ChannelExchange("", program.agreement.rank, self._send)
        self._exchange = seq, exchange
        return exchange

    def _send(self, message: Message) -> None:
        with suppress(ConnectionLostError):  # the end of the lease closes all steps
            self._send_or_raise(message)


class CapturedSteps:
    """All captured steps of a lease, by id. Any thread may call it."""

    def __init__(self) -> None:
        self.shared: ThreadPoolExecutor = threads.pool("raycollect-capture", 1)
        self._lock = threading.Lock()
        self._living: dict[bytes, CapturedStep] = {}
        self._late: OrderedDict[bytes, CapturedStep | None] = OrderedDict()  # None: closed before it was captured
        self._closed = ""

    @property
    def takes_doorbell(self) -> bool:
        """Whether a further step may have a doorbell."""
        return sum(step.has_doorbell for step in list(self._living.values())) < MOST_DOORBELLS

    def add(self, capture: bytes, make: Callable[[], CapturedStep]) -> CapturedStep:
        """Adds a captured step; CaptureError: the step was closed before it arrived, or exists already."""
        with self._lock:
            if self._closed or capture in self._late:
                raise CaptureError(detail=f"this step was closed while it was captured {self._closed}".rstrip())
            if capture in self._living:
                raise CaptureError(detail="this step was captured in this actor before")
            step = self._living[capture] = make()
            return step

    def find(self, capture: bytes) -> CapturedStep | None:
        """A captured step, also a recently closed one, or None."""
        return self._living.get(capture) or self._late.get(capture)

    def forget(self, capture: bytes, reason: str) -> None:
        """Closes a captured step."""
        with self._lock:
            step = self._living.pop(capture, None)
            self._late[capture] = step or self._late.get(capture)
            while len(self._late) > LATE:
                self._late.popitem(last=False)
        if step is not None:
            step.close(reason)

    def close(self, reason: str) -> None:
        """Closes all steps, also later ones."""
        with self._lock:
            self._closed = reason
            living, self._living = self._living, {}
            self._late.clear()
        for step in living.values():
            step.close(reason)
        self.shared.shutdown(wait=False)

    def wake(self, seq: int) -> None:
        """Ends the waits of an aborted run, if it is in progress."""
        for step in list(self._living.values()):
            step.runner.abort(seq)

    def seqs_with(self, group_id: str) -> list[int]:
        """The runs in progress whose current plan uses a group."""
        return [seq for step in list(self._living.values()) if (seq := step.runner.seq_with(group_id))]

    def exchange(self, seq: int) -> ChannelExchange | None:
        """The agreement of launch `seq` through the controller, if a run is in it."""
        return next(filter(None, (step.exchange(seq) for step in list(self._living.values()))), None)

    def bytes_done(self, seq: int) -> BytesDone | None:
        """The progress of a run; None: the run is not in progress here."""
        return next(
            (
                bytes_done
                for step in list(self._living.values())
                if (bytes_done := step.runner.bytes_done(seq)) is not None
            ),
            None,
        )
