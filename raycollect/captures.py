"""The captured steps of a participant: whence their runs come, in which order they are done, and how they are answered.

Each has a thread of its own, which takes runs from the doorbell, or from the channel where there is none; a fenced run
comes as an actor task, in Ray's thread. The ledger puts them all in order, among each other and among plans: each run
names its predecessor. On an ordered participant a run holds the turn while it is done, so that it meets no method that
Ray calls; never while it waits for its predecessor.

Every run that came is ended in the ledger, also those of a step that is broken or closed: what comes after them waits
for that.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from raycollect.channel.messages import Message, Ran, Run
from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.doorbell import Entry, Post
from raycollect.errors import (
    CaptureError,
    ConnectionLostError,
    InternalError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    Violation,
    refusal,
)
from raycollect.executor import ABSENCES
from raycollect.handle import Handle
from raycollect.ledger import Ledger
from raycollect.model import Key, Segment
from raycollect.observe import Tracer
from raycollect.observe.trace import PART
from raycollect.planner import Program
from raycollect.pos import Container, Store
from raycollect.reach import Reach
from raycollect.rendezvous import StarExchange
from raycollect.replay import Replay
from raycollect.routine import Routine, decode_routine

__all__ = [
    "MOST_NBYTES",
    "Captured",
    "Captures",
    "Desk",
    "PostLike",
    "decode_capture",
    "decode_fenced",
    "open_post",
    "pinned",
]

log: logging.Logger = logging.getLogger("raycollect")

MOST_NBYTES = MAX_FRAME_NBYTES - 1024
"""The longest results of a run that a message can carry."""

_SLICE_S = 0.1
"""How long a run that waits for a method does not look whether it was aborted, in seconds."""

IDLE_S = 60.0
"""How long the thread waits at the doorbell before it looks around, in seconds; whoever needs it wakes it."""

_UNWATCHED: AbstractContextManager[None] = nullcontext()

_MALFORMED = (ValueError, TypeError, msgpack.UnpackException)

LATE = 1024
"""How many closed captures are remembered, for what was on its way to them."""


def decode_capture(payload: bytes) -> tuple[Routine, Segment | None, int]:
    """Reads what an actor task brings that captures a step: (routine, the controller's doorbell or None, one's seat).

    Raises:
        ProtocolError: The bytes are no such thing.
    """
    try:
        routine, segment, seat = msgpack.unpackb(payload, use_list=False)
        return decode_routine(routine), None if segment is None else Segment(*segment), seat
    except _MALFORMED as exc:
        raise ProtocolError(detail=f"malformed capture: {exc}") from exc


def decode_fenced(payload: bytes) -> tuple[bytes, int, int, bytes]:
    """Reads what the actor task of a fenced run brings: (capture, seq, predecessor, arguments).

    Raises:
        ProtocolError: The bytes are no such thing.
    """
    try:
        capture, seq, predecessor, arguments = msgpack.unpackb(payload)
    except _MALFORMED as exc:
        raise ProtocolError(detail=f"malformed run: {exc}") from exc
    return capture, seq, predecessor, arguments


def open_post(segment: Segment | None, seat: int, *, keeps_core: bool) -> Post | None:
    """One's end of a controller's doorbell, see `Post`; None where there is none, or it is out of reach."""
    try:
        return None if segment is None else Post(segment, seat, keeps_core=keeps_core)
    except (OSError, ValueError):
        return None


def pinned(value: Any, key: Key, store: Store, actor_id: str, actor: str) -> Any:
    """What a captured step keeps of the value of a ref.

    Args:
        value: What Ray made of the ref.
        key: The ref's id.
        store: One's own tensors.
        actor_id: One's own actor id.
        actor: What a person calls it.

    Raises:
        RefusedError: It is a tensor that is not here.
    """
    if not isinstance(value, Handle):
        here = store.look(key)  # tensors that Ray moves itself come as what they are
        return here if isinstance(here, Container) else value
    found = store.look(value.key) if value.actor_id == actor_id else None
    if isinstance(found, Container):
        return found
    kind, text, expected = "not_member", f"a tensor of {value.actor}", "one of this very actor: send_ref it first"
    if found is not None:
        kind, text, expected = ABSENCES[found.state]
        text = text.format(found.detail or "a value that is not kept")
    ref = value.key.hex()
    wrong = Violation(kind=kind, rank=-1, field="value", found=text, expected=expected, actor=actor, ref=ref)
    raise refusal("capture", "", (wrong,))


class PostLike(Protocol):
    """The participant's end of a doorbell; see `doorbell.Post`."""

    def take(self, timeout_s: float) -> Entry | None:
        """Waits for the next run; None: the time is over, or somebody woke it."""
        ...

    def answer(self, number: int, payload: bytes) -> bool:
        """Answers a run; False: the answer is too long."""
        ...

    def wake(self) -> None:
        """Makes `take` return."""
        ...

    def close(self) -> None:
        """Lets go of the memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What the captured steps of a lease share.

    Attributes:
        ledger: The order of the controller's plans and runs here.
        turn: Held by a run while it is done; None where methods overlap anyhow.
        send: Sends to the controller; raises ConnectionLostError.
        failed: Tells the controller that a run, by its number, failed.
        begun: Told of each run that begins.
    """

    ledger: Ledger
    turn: threading.Lock | None
    send: Callable[[Message], None]
    failed: Callable[[int, RaycollectError], None]
    begun: Callable[[int], None]


class Captured:
    """One captured step. Its runs are done by its own thread, or by the caller of `run_now`; any thread may call it.

    Args:
        replay: What is done in a run.
        desk: See `Desk`.
        post: The doorbell; None: runs come over the channel.
    """

    def __init__(self, replay: Replay, desk: Desk, post: PostLike | None) -> None:
        self._replay = replay
        self._desk = desk
        self._post = post
        self._turn = threading.Lock() if desk.turn is None else desk.turn
        self._tracer = Tracer.current()
        self._busy = threading.Lock()  # held while the values are in use
        self._changed = threading.Condition()  # guards what follows
        self._came: deque[Run] = deque()
        self._closed = ""
        self._broken = ""
        self._count = 0  # how many runs came
        self._door: tuple[int, StarExchange] | None = None
        self._thread = threading.Thread(target=self._work, name="raycollect-capture", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ any thread

    def received(self, run: Run) -> bool:
        """A run came over the channel; never waits. False where it will not be done, since all is closed."""
        with self._changed:
            if self._closed:
                return False
            self._came.append(run)
            self._changed.notify_all()
        self._wake_post()
        return True

    def run_now(
        self,
        seq: int,
        predecessor: int,
        payload: bytes,
        watched: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        """Does a run in the caller's thread, after its predecessor; it is answered over the channel.

        Args:
            seq: Its place in the controller's order.
            predecessor: See `Ticket`.
            payload: Its arguments.
            watched: Made and entered around the run itself.
        """
        self._do(0, seq, predecessor, payload, watched)

    def wake(self, seq: int) -> None:
        """Ends the waits of a run that was aborted, if it is under way."""
        self._replay.abort(seq)

    def door(self, seq: int) -> StarExchange | None:
        """The door that the controller keeps for launch `seq`, where a run is at it."""
        door = self._door
        return door[1] if door is not None and door[0] == seq else None

    def reach(self, seq: int) -> Reach | None:
        """How far a run is; None: it is not under way here."""
        return self._replay.reach(seq)

    def look(self) -> list[Any]:
        """See `Replay.look`."""
        return self._replay.look()

    def close(self, reason: str) -> None:
        """Ends it: the run under way is aborted, what comes is refused, all values are let go of. Never waits."""
        with self._changed:
            if self._closed:
                return
            self._closed = reason
            self._changed.notify_all()
        self._replay.abort()
        self._wake_post()

    def join(self, timeout_s: float) -> bool:
        """Waits until its thread has ended; False where it has not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake_post(self) -> None:
        post = self._post
        if post is not None:
            post.wake()

    # ------------------------------------------------------------------------------------------ its thread

    def _work(self) -> None:
        while self._take():
            pass
        with self._busy:  # a fenced run may be under way
            self._replay.close()
        post, self._post = self._post, None
        if post is not None:
            post.close()

    def _take(self) -> bool:
        """Waits for a run and does it; False once it is closed and no run is left."""
        if self._post is None:
            run = self._wait_for(lambda _: True)
            if run is not None:
                self._do(0, run.seq, run.predecessor, run.payload)
            return run is not None
        closed = bool(self._closed)  # first: then no other message comes
        # A run that is here but was not rung for by now never will be: the bell comes before the message.
        unrung = self._came[0] if self._came else None
        entry = self._post.take(0.0 if unrung or closed else IDLE_S)
        if entry is not None:
            self._do_entry(entry)
        elif unrung is not None:
            self._came.remove(unrung)
            self._do(0, unrung.seq, unrung.predecessor, unrung.payload)
        else:
            return not closed
        return True

    def _do_entry(self, entry: Entry) -> None:
        number, seq, predecessor, payload = entry
        if payload is None:
            run = self._wait_for(lambda run: run.seq == seq)
            payload = b"" if run is None else run.payload  # else it is refused, since all is closed
        self._do(number, seq, predecessor, payload)

    def _wait_for(self, wanted: Callable[[Run], bool]) -> Run | None:
        """Takes a run that came over the channel; None once it is closed and there is none."""
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

    def _do(
        self,
        number: int,
        seq: int,
        predecessor: int,
        payload: bytes,
        watched: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        """Does a run in its turn, and answers it."""
        desk = self._desk
        reason = desk.ledger.start(seq, predecessor)
        ring = self._tracer.ring
        if ring is not None and self._replay.is_single:  # the plan notes all that there is to say
            ring = None
        came_s = 0.0 if ring is None else ring.clock()
        self._count += 1
        error: RaycollectError | None = None
        is_answered = False

        def answer(results: bytes) -> None:
            nonlocal is_answered
            is_answered = True
            if not number or self._post is None or not self._post.answer(number, results):
                self._send(Ran(seq=seq, payload=results))

        try:
            desk.begun(seq)
            if reason is not None:
                raise PlanAbortedError(detail=reason)
            with watched() if watched is not None else _UNWATCHED:
                turn = self._take_turn(seq)
                try:
                    with self._busy:
                        results = self._run(seq, payload, answer)
                    if not is_answered:
                        answer(results)
                finally:
                    turn.release()
        except RaycollectError as exc:
            error = exc.with_traceback(None)  # its frames would keep values alive
        except Exception as exc:
            log.exception("run %d of a captured step failed in an unforeseen way", seq)
            error = InternalError(detail=f"{type(exc).__name__}: {exc}")
        finally:
            self._door = None
            if ring is not None:
                name = "" if error is None else type(error).__name__
                ring.add(PART, "captured step", came_s, ring.clock(), seq, error=name)
            if error is not None:  # before the next one may begin
                self._broken = self._broken or f"run {self._count} of this captured step failed before"
            desk.ledger.end(seq)  # whatever happened, what comes after goes on
        if error is not None:
            desk.failed(seq, error)

    def _take_turn(self, seq: int) -> threading.Lock:
        """Waits until no method runs.

        Raises:
            PlanAbortedError: The run was aborted meanwhile.
        """
        turn, ring = self._turn, self._tracer.ring
        if turn.acquire(blocking=False):
            return turn
        began_s = 0.0 if ring is None else ring.clock()
        while not turn.acquire(timeout=_SLICE_S):
            reason = self._closed or self._desk.ledger.reason(seq)
            if reason:
                raise PlanAbortedError(detail=reason)
        if ring is not None:
            ring.waited("a method", began_s, seq)
        return turn

    def _run(self, seq: int, payload: bytes, answer: Callable[[bytes], None]) -> bytes:
        """Does a run; see `Replay.run`.

        Raises:
            RaycollectError: It failed, or must not be done.
        """
        ledger = self._desk.ledger
        reason = self._closed or self._broken or ledger.reason(seq)
        if reason:
            raise PlanAbortedError(detail=reason)
        results = self._replay.run(
            seq, payload, aborted=lambda: self._closed or ledger.reason(seq), exchange=self._exchange, answer=answer
        )
        if len(results) > MOST_NBYTES:
            found = f"{len(results)} bytes, and a message carries {MOST_NBYTES}"
            raise CaptureError(detail=f"what the step gives back takes {found}: let methods return refs instead")
        return results

    def _exchange(self, program: Program, seq: int) -> StarExchange:
        door = StarExchange("", program.door.rank, self._send)
        self._door = seq, door
        return door

    def _send(self, message: Message) -> None:
        try:
            self._desk.send(message)
        except ConnectionLostError:
            pass  # the end of the lease closes all


class Captures:
    """All captured steps of a lease, by id. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._living: dict[bytes, Captured] = {}
        self._late: OrderedDict[bytes, Captured | None] = OrderedDict()  # None: closed before it was made
        self._closed = ""

    def add(self, capture: bytes, make: Callable[[], Captured]) -> Captured:
        """Adds a captured step.

        Raises:
            CaptureError: It was closed before it came here, or is here already.
        """
        with self._lock:
            if self._closed or capture in self._late:
                raise CaptureError(detail=f"this step was closed while it was captured {self._closed}".rstrip())
            if capture in self._living:
                raise CaptureError(detail="this step was captured here before")
            made = self._living[capture] = make()
            return made

    def find(self, capture: bytes) -> Captured | None:
        """A captured step, also one that was closed of late; None where there is none."""
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

    def wake(self, seq: int) -> None:
        """Ends the waits of a run that was aborted."""
        for one in list(self._living.values()):
            one.wake(seq)

    def door(self, seq: int) -> StarExchange | None:
        """The door that the controller keeps for launch `seq` of a run under way."""
        return next(filter(None, (one.door(seq) for one in list(self._living.values()))), None)

    def reach(self, seq: int) -> Reach | None:
        """How far a run is; None: none of that number is under way."""
        return next((found for one in list(self._living.values()) if (found := one.reach(seq)) is not None), None)
