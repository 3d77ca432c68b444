"""The captured steps of a participant: where their runs come from, their order, and how they are answered.

One with a doorbell has a thread, which takes runs from there. Those that come over the channel are for a thread that
all steps share. The sequencer puts all runs and plans in order: each run names its predecessor. If methods come one by
one, a run holds the method lock, so that Ray calls no method beside it; but not while it waits for its predecessor. The
sequencer ends every run that came, also if its step is broken or closed: its successors wait for it.
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
from raycollect.channel.messages import Message, Ran, Run
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
"""The longest results of a run that a message can carry."""

IDLE_S = 60.0
"""How long the thread waits at the doorbell, in seconds; whoever needs it wakes it."""

MOST_DOORBELLS = 32
"""How many steps of a controller may have a doorbell here, and so a thread; runs of further ones use the channel."""

LATE = 1024
"""How many closed steps are remembered, for runs that were on their way to them."""


def open_doorbell(segment: Segment | None, slot: int, *, keeps_core: bool) -> DoorbellClient | None:
    """This participant's end of a controller's doorbell; None if there is none, or it is out of reach."""
    try:
        return None if segment is None else DoorbellClient(segment, slot, keeps_core=keeps_core)
    except (OSError, ValueError):
        return None


def pinned(value: Any, key: Key, store: Store, actor_id: str, actor: str) -> Any:
    """What a captured step keeps of the value of a ref. Raises RefusedError for a tensor that is not here."""
    if not isinstance(value, Handle):
        here = store.look(key)  # tensors that Ray moves itself come as what they are
        return here if isinstance(here, Container) else value
    found = store.look(value.key) if value.actor_id == actor_id else None
    if isinstance(found, Container):
        return found
    if found is None:
        why = MissingOperand(
            "not_member", f"a tensor of {value.actor}", "one of this actor: send it here first, by send_ref"
        )
    else:
        why = missing(found)
    ref = value.key.hex()
    wrong = Violation(kind=why.kind, field="value", found=why.found, expected=why.expected, actor=actor, ref=ref)
    raise refusal("capture", "", (wrong,))


class CapturedStep:
    """One captured step. A thread of the library does its runs; any thread may call it.

    Args:
        runner: What is done in a run.
        doorbell: Where runs come; None: over the channel.
        executor: What carries out runs, in their turn.
        methods: Those that no run may run beside; None if methods overlap anyway.
        send: Sends to the controller; raises ConnectionLostError.
        shared: The thread that does runs that come over the channel, in the order in which they come.
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
        self._came: deque[Run] = deque()
        self._closed = ""
        self._broken = ""
        self._count = 0  # how many runs came
        self._answered = 0  # the latest run that was answered
        self._exchange: tuple[int, ChannelExchange] | None = None  # of a launch, with its number
        self._thread: threading.Thread | None = None
        self._let_go: Future[object] | None = None
        if doorbell is not None:
            self._thread = threads.start("raycollect-capture", self._work)

    # ------------------------------------------------------------------------------------------ any thread

    def received(self, run: Run) -> bool:
        """A run came over the channel; never waits. False if the step is closed, so that it will not run."""
        with self._changed:
            if self._closed:
                return False
            if not self.has_doorbell:
                run_now = partial(self.run_now, run.seq, run.predecessor, run.payload, after=run.after)
                threads.submit(self._shared, run_now)
                return True
            self._came.append(run)
            self._changed.notify_all()
        self._wake_doorbell()
        return True

    def exchange(self, seq: int) -> ChannelExchange | None:
        """The agreement of launch `seq` through the controller, if it is under way here."""
        found = self._exchange
        return found[1] if found is not None and found[0] == seq else None

    def close(self, reason: str) -> None:
        """Aborts the run under way, refuses what comes, and lets go of all values. Never waits."""
        with self._changed:
            if self._closed:
                return
            self._closed = reason
            self._changed.notify_all()
        self.runner.stop()
        if self.has_doorbell:
            self._wake_doorbell()
        else:  # behind the runs that have come
            self._let_go = threads.submit(self._shared, threads.survives, self._end)

    def join(self, timeout_s: float) -> bool:
        """Waits until it has let go of all values after `close`; False if it has not in time."""
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
        closed = bool(self._closed)  # first, as no message comes after it
        # The bell comes before the message, so a run that is here and was not rung for never will be.
        unrung = self._came[0] if self._came else None
        entry = self._doorbell.take(0.0 if unrung or closed else IDLE_S)
        if entry is not None:
            number, seq, predecessor, payload, after = entry
            if payload is None:
                run = self._wait_for(lambda run: run.seq == seq)
                payload = b"" if run is None else run.payload  # else the step is closed, and refuses it
            self.run_now(seq, predecessor, payload, number=number, after=after)
        elif unrung is not None:
            self._came.remove(unrung)
            self.run_now(unrung.seq, unrung.predecessor, unrung.payload, after=unrung.after)
        else:
            return not closed
        return True

    def _wait_for(self, wanted: Callable[[Run], bool]) -> Run | None:
        with self._changed:
            while True:
                run = next(filter(wanted, self._came), None)
                if run is not None:
                    self._came.remove(run)
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
        """Does a run, in the step's thread or the one that steps share.

        `number` is its number at the doorbell, where it is answered; 0: it is answered over the channel. `after` is the
        task of the method call behind which it comes; empty: none.
        """
        ring = self._tracer.ring
        if ring is not None and self.runner.is_single:  # the plan notes all
            ring = None
        came_s = 0.0
        self._count += 1

        def run(step: RunStep) -> None:
            nonlocal came_s
            came_s = 0.0 if ring is None else ring.clock()
            self._run(seq, payload, number, step)

        def ended(error: RaycollectError | None) -> None:
            self._exchange = None
            if ring is not None and came_s:
                name = "" if error is None else type(error).__name__
                threads.survives(partial(ring.add, PART, "captured step", came_s, ring.clock(), seq, error=name))
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
                found = f"takes {len(results)} bytes, and a message carries {MOST_NBYTES}"
                raise CaptureError(detail=f"what the step gives back {found}: let methods return refs instead")
            if self._answered != seq:
                self._answer(seq, number, results)
        finally:
            lock.release()

    def _answer(self, seq: int, number: int, results: bytes) -> None:
        self._answered = seq
        if not number or self._doorbell is None or not self._doorbell.answer(number, results):
            self._send(Ran(seq=seq, payload=results))

    def _make_exchange(self, program: Program, seq: int) -> ChannelExchange:
        made = ChannelExchange("", program.agreement.rank, self._send)
        self._exchange = seq, made
        return made

    def _send(self, message: Message) -> None:
        with suppress(ConnectionLostError):  # the end of the lease closes all
            self._send_or_raise(message)


class CapturedSteps:
    """All captured steps of a lease, by id. Any thread may call it."""

    def __init__(self) -> None:
        self.shared: ThreadPoolExecutor = threads.pool("raycollect-capture", 1)
        self._lock = threading.Lock()
        self._living: dict[bytes, CapturedStep] = {}
        self._late: OrderedDict[bytes, CapturedStep | None] = OrderedDict()  # None: closed before it was made
        self._closed = ""

    @property
    def takes_doorbell(self) -> bool:
        """Whether a further step may have a doorbell."""
        return sum(one.has_doorbell for one in list(self._living.values())) < MOST_DOORBELLS

    def add(self, capture: bytes, make: Callable[[], CapturedStep]) -> CapturedStep:
        """Adds a captured step; CaptureError: it was closed before it came here, or is here already."""
        with self._lock:
            if self._closed or capture in self._late:
                raise CaptureError(detail=f"this step was closed while it was captured {self._closed}".rstrip())
            if capture in self._living:
                raise CaptureError(detail="this step was captured in this actor before")
            made = self._living[capture] = make()
            return made

    def find(self, capture: bytes) -> CapturedStep | None:
        """A captured step, also one that was closed lately; None if there is none."""
        return self._living.get(capture) or self._late.get(capture)

    def forget(self, capture: bytes, reason: str) -> None:
        """Closes a captured step."""
        with self._lock:
            found = self._living.pop(capture, None)
            self._late[capture] = found or self._late.get(capture)
            while len(self._late) > LATE:
                self._late.popitem(last=False)
        if found is not None:
            found.close(reason)

    def close(self, reason: str) -> None:
        """Closes all, and those that will come."""
        with self._lock:
            self._closed = reason
            living, self._living = self._living, {}
            self._late.clear()
        for one in living.values():
            one.close(reason)
        self.shared.shutdown(wait=False)

    def wake(self, seq: int) -> None:
        """Ends the waits of a run that was aborted, if it is under way."""
        for one in list(self._living.values()):
            one.runner.abort(seq)

    def seqs_with(self, group_id: str) -> list[int]:
        """The runs under way that are at a plan that uses a group."""
        return [seq for one in list(self._living.values()) if (seq := one.runner.seq_with(group_id))]

    def exchange(self, seq: int) -> ChannelExchange | None:
        """The agreement of launch `seq` through the controller, if a run is at it."""
        return next(filter(None, (one.exchange(seq) for one in list(self._living.values()))), None)

    def bytes_done(self, seq: int) -> BytesDone | None:
        """How far a run is; None: it is not under way here."""
        return next(
            (found for one in list(self._living.values()) if (found := one.runner.bytes_done(seq)) is not None), None
        )
