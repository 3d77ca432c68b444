"""Participants without Ray: an actor's queue and its connections are threads, its store and its lease the real ones."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from raycollect.channel import Mailbox, MailboxClient
from raycollect.channel.mailbox import Letters, Slot
from raycollect.channel.messages import Order
from raycollect.core import threads
from raycollect.core.model import Key, task_key
from raycollect.driver.participant_link import LinkOwner, ParticipantLink
from raycollect.errors import ConnectionLostError, RaycollectError
from raycollect.member.lease import Lease
from raycollect.member.methods import Methods
from raycollect.member.runtime import Runtime
from raycollect.member.wait_monitor import WaitMonitor
from raycollect.planner import decode_order
from raycollect.ray_bridge.submitted_calls import SubmittedCalls
from tests.pure.fleet import contain

WAIT_S = 60.0
BUFFERS = 3
"""How many arrays each participant has; the last is longer than the others."""
OFTEN = 20
"""How often a method changes a buffer that takes it back each time."""

_tasks = itertools.count(1)


def first_values(number: int) -> list[Any]:
    """The arrays of a participant at the beginning."""
    return [np.arange(3 if at < BUFFERS - 1 else 5, dtype=np.int64) + 10 * number + at for at in range(BUFFERS)]


class Ref:
    """Stands for what an actor task returns."""

    def __init__(self, task: bytes, index: int = 1) -> None:
        self.key: Key = task_key(task, index)

    def binary(self) -> bytes:
        return self.key

    def hex(self) -> str:
        return self.key.hex()

    def _on_completed(self, call: Callable[[Any], None]) -> None:
        """Nobody here loses what a method makes."""


class Line:
    """A connection: a thread carries what is sent, in order; `fail` is called with what raises at its other end."""

    def __init__(self, carry: Callable[[Any], None], fail: Callable[[Exception], None] | None = None) -> None:
        self._sent: SimpleQueue[Any] = SimpleQueue()
        self._carry = carry
        self._fail = fail
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        self._sent.put(message)

    def close(self) -> None:
        self._sent.put(None)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "it hangs"

    def _run(self) -> None:
        while (message := self._sent.get()) is not None:
            try:
                self._carry(message)
            except Exception as exc:
                if self._fail is None:
                    raise
                self._fail(exc)


class Fickle:
    """A slot of a mailbox that leaves every third letter to the channel."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def write(self, letters: Letters, first: bytes, rest: bytes, flags: int) -> bool:
        return dispatch_number(rest) % 3 > 0 and self._slot.write(letters, first, rest, flags)


class Noting(ParticipantLink):
    """One that notes orders as they are sent."""

    note: Callable[[bytes], None]

    def order(self, message: Order, letters: Letters | None = None) -> None:
        if message.in_order:
            self.note(message.payload)
        super().order(message, letters)


class Turn:
    """Whether a call may still be cancelled; as in Ray, that does nothing once it has begun."""

    def __init__(self) -> None:
        self._first = threading.Lock()
        self.is_cancelled = False

    def cancel(self) -> None:
        """Keeps the call from being begun."""
        if self._first.acquire(blocking=False):
            self.is_cancelled = True

    def begin(self) -> bool:
        """Whether it was not cancelled."""
        return self._first.acquire(blocking=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """What came into an actor's queue: a plan, by its ticket's number, or a method, by what it does and its turn."""

    seq: int = 0
    method: Method | None = None
    turn: Turn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What a method does to a buffer: ``x * factor + summand``; and whether it only seems to: it takes it back."""

    buffer: int
    factor: int
    summand: int
    takes_back: bool
    end: str = "sure"  # what is noted of it; "unsure": Ray may still be pickling; "": nothing


class Site:
    """A participant: an actor whose methods and tasks come one by one, its store, and its lease."""

    def __init__(
        self,
        number: int,
        tell: Callable[[ParticipantLink, Any], None],
        owner: LinkOwner,
        mailbox: Mailbox | None,
    ) -> None:
        self.number = number
        self.came: list[Came] = []
        self._entering = threading.Lock()
        runtime = Runtime()
        self.store = runtime.instruments.store
        self.methods = Methods()
        self.methods.is_ordered = True
        self.turn = self.methods.lock
        self.values = first_values(number)
        self.refs = [self.hold(value) for value in self.values]
        holder = SimpleNamespace(
            runtime=runtime,
            actor=f"Worker({number})",
            actor_id=f"{number:032x}",
            host="",
            methods=self.methods,
            watch=WaitMonitor(),
            keep_output=self.store.put,
            task_of=lambda seq: None,
        )
        self._hub = Line(lambda message: tell(self.peer, message), self._cut)
        slot = None if mailbox is None else mailbox.take_slot()
        client = None if mailbox is None or slot is None else MailboxClient(mailbox.segment, slot.at)
        self.lease = Lease("me", "a test", cast(Any, self._hub), cast(Any, holder), client)
        assert self.lease.listen()
        self.queue = Line(lambda task: task())
        info = {"participant": True, "actor": holder.actor, "actor_id": holder.actor_id, "incarnation": "i", "pid": 1}
        self.fences = 0  # how many came
        self.calls = SubmittedCalls()
        actor = SimpleNamespace(_raycollect_run=self, _raycollect_fence=SimpleNamespace(options=self._fence_options))
        self.peer = Noting(owner, info, actor, calls=self.calls)
        self.peer.note = self._note_order
        if slot is not None:
            self.peer.slot = cast(Any, Fickle(slot))
        self._line = Line(self.lease.received, self._cut)
        self.peer.link = self._line  # type: ignore[assignment]

    def close(self) -> None:
        self.queue.close()
        self._line.close()
        self.lease.end("the test is over")
        self._hub.close()

    def _cut(self, exc: Exception) -> None:
        """Ends the connection at both ends, as `ControlLink.fail` does."""
        error = threads.failed("taking in a message", exc)
        self.peer.closed(cast(Any, None), ConnectionLostError(detail=error.detail))
        self.lease.end(error.detail)

    def hold(self, value: Any) -> Ref:
        """Keeps an array; what stands for it."""
        ref = Ref(next(_tasks).to_bytes(24, "little"))
        self.store.put(ref.key, contain(value))
        return ref

    # ------------------------------------------------------------------------------------------ its queue

    def options(self, *, num_returns: int, **_: Any) -> Any:
        """What `ParticipantLink.submit` calls to submit a program as an actor task."""
        return SimpleNamespace(remote=lambda payload: self._submit(payload, num_returns))

    def _submit(self, payload: bytes, outputs: int) -> list[Ref]:
        task = next(_tasks).to_bytes(24, "little")
        refs = [Ref(task, index + 1) for index in range(outputs)]

        def run() -> None:
            try:
                self.lease.run_program(payload, task)
            except RaycollectError:
                pass  # the flight tells

        self._enter(Came(seq=dispatch_number(payload)), run)
        return refs

    def _note_order(self, payload: bytes) -> None:
        """A plan is sent past the queue, under the lock of the calls: it stands behind those so far."""
        self.came.append(Came(seq=dispatch_number(payload)))

    def _fence_options(self, **_: Any) -> Any:
        def fence(controller: str, seq: int) -> None:
            self.fences += 1
            self.queue.send(lambda: self.lease.plan_queue.pass_fence(seq))

        return SimpleNamespace(remote=fence)

    def call(self, method: Method) -> Turn:
        """Submits a method that changes a buffer."""
        ref = Ref(next(_tasks).to_bytes(24, "little"))

        def run() -> None:
            self._do(method)
            self._end(ref, method.end)

        return self._submit_call(method, run, ref)

    def make(self, value: Any, end: str = "sure") -> Ref:
        """Submits a method that makes an array, which is not there before the method's turn."""
        return self.make_or_not(value, end)[0]

    def make_or_not(self, value: Any, end: str) -> tuple[Ref, Turn]:
        """The same, and what can cancel it; None: it raises."""
        ref = Ref(next(_tasks).to_bytes(24, "little"))

        def run() -> None:
            with self.turn:
                if value is not None:
                    self.store.put(ref.key, contain(value))
            self._end(ref, end)

        return ref, self._submit_call(None, run, ref)

    def _submit_call(self, method: Method | None, run: Callable[[], None], ref: Ref) -> Turn:
        turn = Turn()

        def begin() -> None:
            if turn.begin():
                run()

        def submit(handle: object, name: str) -> Ref:
            self._enter(Came(method=method, turn=turn), begin)
            return ref

        self.calls.submit(self, "method", submit, {})
        return turn

    def _end(self, ref: Ref, end: str) -> None:
        if end:
            self.methods.note(ref.binary()[:24], is_over=end == "sure")

    def _enter(self, came: Came, run: Callable[[], None]) -> None:
        with self._entering:  # what is noted is the order of the queue
            self.came.append(came)
            self.queue.send(run)

    def _do(self, method: Method) -> None:
        value = self.values[method.buffer]
        with self.turn:
            for _ in range(OFTEN if method.takes_back else 0):
                before = value.copy()
                change(value, method)
                time.sleep(0)  # whoever must not see it gets every chance to
                value[:] = before
            if not method.takes_back:
                change(value, method)


def change(value: Any, method: Method) -> None:
    value *= method.factor
    value += method.summand


def dispatch_number(payload: bytes) -> int:
    """The number of the plan that a message brings."""
    return decode_order(payload)[0].seq
