"""One controller's time with this participant: the groups, plans and captured steps that it drives.

Programs come as actor tasks (`dispatch.send_plan` there becomes `run_program` here); what must not wait in the actor's
queue comes over the channel, on a thread of its own.

All that is said on its behalf goes to that controller alone: a later one counts from 1 again, and would take the number
of a plan for one of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from raycollect.captures import Captured, Captures, Desk, decode_capture, decode_fenced, open_post, pinned
from raycollect.channel import Link
from raycollect.channel.messages import (
    Abort,
    Arrivals,
    Collect,
    Collected,
    Deny,
    Depart,
    Done,
    Drop,
    Forget,
    Go,
    Gone,
    Join,
    Joined,
    Leave,
    Look,
    Measure,
    Measured,
    Message,
    Met,
    Missed,
    Order,
    Publish,
    Record,
    Run,
    Seen,
    Stored,
    Stuck,
    Survey,
    Surveyed,
    Tick,
    Ticked,
    Waiting,
)
from raycollect.contracts import Communicator
from raycollect.errors import (
    CaptureError,
    ConnectionLostError,
    GroupBrokenError,
    GroupExistsError,
    InternalError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    RefusedError,
    refusal,
    to_wire,
)
from raycollect.executor import Execution, Instruments, Outcome
from raycollect.handle import Handle
from raycollect.lane import Lane
from raycollect.ledger import Ledger, arrivals
from raycollect.metrics import Publisher
from raycollect.model import Key, task_key
from raycollect.observe import Place, Ring, Tracer
from raycollect.observe.clocks import clock_id
from raycollect.observe.trace import MOST, encode_recorded
from raycollect.orders import Orders
from raycollect.participation import Participation, invited
from raycollect.planner import Program, decode_order
from raycollect.pos import Container
from raycollect.pos.segments import Segments
from raycollect.reach import NOWHERE
from raycollect.rendezvous import StarExchange
from raycollect.replay import Invoke, Replay
from raycollect.routine import Invocation
from raycollect.seats import Seats
from raycollect.stacks import what_runs, where_plans_are
from raycollect.watch import Watch

__all__ = ["MOST_VIOLATIONS", "Lease", "Premises"]

log: logging.Logger = logging.getLogger("raycollect")

MOST_VIOLATIONS = 500
"""How many reasons of a refusal the controller is told: thousands of calls, each wrong on all ranks, would be too many
for a message."""

SETTLE_S = 0.25
"""How long what is recorded waits for the end of plans under way, in seconds."""

PART_NBYTES = 512 << 10
"""How much of what was recorded goes into one message."""


class Premises(Protocol):
    """What leases need of the participant's process; see `Runtime`.

    Attributes:
        actor: What a person calls it.
        actor_id: Its actor id.
        is_ordered: Whether its methods come one by one.
        turn: Held, where they do, by a method of Ray's or by what must not meet one.
        instruments: What executions run with.
        seats: The groups of the process.
        watch: What is told of waits.
    """

    actor: str
    actor_id: str
    is_ordered: bool
    turn: threading.Lock
    instruments: Instruments
    seats: Seats
    watch: Watch

    def keep(self, key: Key, container: Container) -> Handle:
        """Keeps a value under a key and makes the handle that stands for it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A program under way, and the door that the controller keeps for it, where it does."""

    execution: Execution
    door: StarExchange | None
    group_ids: frozenset[str]


class Lease:
    """What a controller drives here. Any thread may call it; `received` and `end` are for the channel's.

    Args:
        controller: Its id.
        description: What a person calls it.
        link: Its connection.
        premises: The process.
    """

    def __init__(self, controller: str, description: str, link: Link, premises: Premises) -> None:
        self.controller = controller
        self.description = description
        self.link = link
        self._here = premises
        self._store = premises.instruments.store
        self._groups: dict[str, Participation] = {}
        self._ledger = Ledger()
        self._running: dict[int, _Running] = {}
        self._begun = 0  # the latest plan that has begun here
        self._captures = Captures()
        self._tracer = Tracer.current()
        self._publisher: Publisher | None = None
        self._orders = Orders(self._store, premises.turn, self._tell, self._run_ordered)

    def end(self, reason: str) -> None:
        """Ends all that it drives. Never waits."""
        self._tracer.end(self.controller)
        self._end_publishing()
        for seq in self._ledger.close(reason):
            self._wake(seq)
        self._captures.close(reason)
        self._orders.close()
        groups, self._groups = self._groups, {}
        for participation in groups.values():
            participation.close(reason)

    # ------------------------------------------------------------------------------------------ programs

    @property
    def is_overlapping(self) -> bool:
        """Whether the methods of this actor may overlap, or come in another order than they were submitted in."""
        return not self._here.is_ordered or not all(one.ordered for one in tuple(self._groups.values()))

    def hand_over(self, payload: bytes, submit: Callable[..., object]) -> bool:
        """Lets a plan run in another thread once those before it have ended, where methods overlap.

        Args:
            payload: See `run_program`.
            submit: Takes a function, and what it is called with, for a thread.

        Returns:
            False where it has to run in the actor task: that would keep nobody waiting, or its outputs are returned.
        """
        if not self.is_overlapping:
            return False
        ticket, _, program = decode_order(payload)
        if program.makes:
            return False
        self._ledger.after(ticket.seq, ticket.predecessor, lambda: submit(self.run_program, payload, None))
        return True

    def hand_over_fenced(self, payload: bytes, submit: Callable[..., object]) -> bool:
        """Does for a run of a captured step what `hand_over` does for a plan."""
        if not self.is_overlapping:
            return False
        _, seq, predecessor, _ = decode_fenced(payload)
        self._ledger.after(seq, predecessor, lambda: submit(self.run_fenced, payload))
        return True

    def run_program(self, payload: bytes, task: bytes | None, order: Order | None = None) -> Any:
        """Runs this participant's half of a plan and tells the controller how it ended.

        Args:
            payload: What `planner.encode_order` made.
            task: The id of the actor task that brought it: outputs are kept under its returns.
            order: The message that brought it instead, past the methods that wait in the actor's queue.

        Returns:
            The handles of its outputs, as the actor task returns them.

        Raises:
            RaycollectError: The plan failed and had outputs here: whoever uses their refs gets the error.
        """
        ticket, keys, program = decode_order(payload)
        groups = [self._groups.get(group_id) for group_id in {share.group_id for share in program.shares}]
        # A method may be late if one group says so. Of one that was destroyed nothing runs: the plan takes its turn.
        is_ordered = all(one is None or one.ordered for one in groups)
        ring = self._tracer.ring
        reason = self._ledger.start(ticket.seq, ticket.predecessor)
        self._begun = max(self._begun, ticket.seq)
        handles = []
        try:
            if reason is not None:
                raise PlanAbortedError(detail=reason)
            between: AbstractContextManager[Any] = nullcontext()
            if order is not None:
                came_s = 0.0 if ring is None else ring.clock()
                between = self._orders.between_methods(
                    order, ticket.seq, keys, self._ledger, program.timeout_s, is_ordered=is_ordered
                )
                if ring is not None:
                    ring.waited("operands, and the others", came_s, ticket.seq)
            with between:
                outcome = self._run(ticket.seq, keys, program, is_ordered)
            if task is not None:
                handles = [self._here.keep(task_key(task, i + 1), made) for i, made in enumerate(outcome.outputs)]
        except RaycollectError as exc:  # aborted before it came, or the store is full
            outcome = Outcome(error=exc)
        except Exception as exc:
            log.exception("plan %d failed in an unforeseen way", ticket.seq)
            outcome = Outcome(error=InternalError(detail=f"{type(exc).__name__}: {exc}"))
        finally:
            self._ledger.end(ticket.seq)  # whatever happened, its successors go on
        self._tell_done(ticket.seq, program, outcome)
        if outcome.error is not None and program.makes:
            raise outcome.error
        return handles[0] if len(handles) == 1 else tuple(handles) or None

    def _run_ordered(self, order: Order) -> None:
        self.run_program(order.payload, None, order)

    def _run(self, seq: int, keys: Sequence[Key], program: Program, is_ordered: bool) -> Outcome:
        ledger = self._ledger
        place = program.door
        door = None
        if program.commits or not place.group_id:
            door = StarExchange("", place.ranks.index(place.rank), self._tell)
        execution = Execution(
            program,
            keys,
            self._communicator,
            self._here.instruments,
            seq=seq,
            aborted=lambda: ledger.reason(seq),
            waiting=None if is_ordered else lambda key: self._tell(Waiting(seq=seq, key=key)),
            exchange=door,
        )
        group_ids = frozenset(share.group_id for share in program.shares)
        self._running[seq] = _Running(execution=execution, door=door, group_ids=group_ids)
        try:
            with self._stuck("", "", program.name, (), seq=seq, call=lambda: 0):
                outcome = execution.run()
        finally:
            self._running.pop(seq, None)
        if isinstance(outcome.error, GroupBrokenError) and (reason := ledger.reason(seq)):
            return replace(outcome, error=PlanAbortedError(detail=reason))  # the cause, not what came of it
        return outcome

    def _participation(self, group_id: str) -> Participation:
        """This process's part in a group.

        Raises:
            GroupBrokenError: It has none.
        """
        try:
            return self._groups[group_id]
        except KeyError:
            raise GroupBrokenError(group_name=group_id, detail="the group was destroyed") from None

    def _communicator(self, group_id: str) -> Communicator:
        return self._participation(group_id).communicator

    def _stuck(
        self, group_id: str, lane: str, op: str, ranks: Sequence[int], *, seq: int, call: Callable[[], int]
    ) -> AbstractContextManager[None]:
        """Around a wait, of which the controller hears if it lasts: it may be for one who waits for this one."""

        def tell(lane: str, op: str, seq: int, number: int) -> None:
            self._tell(
                Stuck(group_id=group_id, lane=lane, call=number, seq=seq, op=op, ranks=list(ranks), begun=self._begun)
            )

        return self._here.watch.waiting(lambda: tell(lane, op, seq, call()), lambda: tell("", "", 0, 0))

    def _tell_done(self, seq: int, program: Program, outcome: Outcome) -> None:
        """Tells how a plan ended here; where all see each other, the last one tells for all that went well."""
        if outcome.error is not None:
            self._tell(self._failure(seq, outcome.error))
        elif not outcome.ended or len(outcome.ended) == len(program.door.ranks):
            self._tell(Done(seq=seq, ranks=list(outcome.ended), error=None, story=[]))

    def _failure(self, seq: int, error: RaycollectError) -> Done:
        return Done(
            seq=seq, ranks=[], error=to_wire(_shortened(error)), story=list(self._here.instruments.recorder.tail())
        )

    def _tell(self, message: Message) -> None:
        with suppress(ConnectionLostError):  # the end of the lease deals with a controller that is gone
            self.link.send(message)

    # ------------------------------------------------------------------------------------------ captured steps

    def capture(self, payload: bytes, values: Sequence[Any], invoker: Callable[[Sequence[str]], Invoke]) -> bool:
        """Takes in a captured step, ready to run.

        Args:
            payload: See `captures.decode_capture`.
            values: What its refs stand for, in the order of their slots.
            invoker: Gives what calls the methods of these names.

        Returns:
            Whether its runs may come by the controller's doorbell.

        Raises:
            RefusedError: A value is not there, or that of another participant; there is no such method.
            CaptureError: It was closed before it came here.
        """
        routine, segment, seat = decode_capture(payload)
        here = self._here
        pairs = zip(values, routine.keys, strict=False)  # those of the refs come first
        refs = [pinned(value, key, self._store, here.actor_id, here.actor) for value, key in pairs]
        methods = [action.method for action in routine.actions if isinstance(action, Invocation)]
        invoke = invoker(methods)
        replay = Replay(routine, refs, invoke, here.instruments, self._communicator)
        post = open_post(segment, seat, keeps_core=not methods)  # methods, and their threads, go where they like
        try:
            self._captures.add(routine.capture, lambda: Captured(replay, self._desk(), post))
        except RaycollectError:
            if post is not None:
                post.close()
            raise
        return post is not None

    def run_fenced(self, payload: bytes) -> None:
        """Does a run that comes as an actor task, after all that was submitted before it.

        Args:
            payload: See `captures.decode_fenced`.

        Raises:
            CaptureError: The step is not here.
        """
        capture, seq, predecessor, arguments = decode_fenced(payload)

        def watched() -> AbstractContextManager[None]:
            return self._stuck("", "", "a captured step", (), seq=seq, call=lambda: 0)

        try:
            captured = self._captured(capture)
        except CaptureError as exc:  # what comes after it goes on
            self._ledger.start(seq, predecessor)
            self._ledger.end(seq)
            self._tell(self._failure(seq, exc))
            raise
        captured.run_now(seq, predecessor, arguments, watched)

    def look(self, capture: bytes) -> list[Any]:
        """How the tensors of a captured step look, slot by slot; see `Replay.look`.

        Raises:
            CaptureError: The step is not here.
        """
        return self._captured(capture).look()

    def _captured(self, capture: bytes) -> Captured:
        found = self._captures.find(capture)
        if found is None:
            raise CaptureError(detail="this captured step is not here: it was closed, or its controller is gone")
        return found

    def _desk(self) -> Desk:
        """What its captured steps share."""
        here = self._here
        turn = here.turn if here.is_ordered else None
        return Desk(
            ledger=self._ledger,
            turn=turn,
            send=self.link.send,
            failed=lambda seq, error: self._tell(self._failure(seq, error)),
            begun=self._note_begun,
        )

    def _note_begun(self, seq: int) -> None:
        self._begun = max(self._begun, seq)

    # ------------------------------------------------------------------------------------------ messages

    def received(self, message: Message) -> None:
        """A message of the controller; on the channel's thread, so nothing here may wait.

        Raises:
            ProtocolError: It makes no sense.
        """
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise ProtocolError(detail=f"{type(message).__name__} has no place here")
        handle(self, message)

    def _join(self, message: Join) -> None:
        def watch(lane: Lane, op: str) -> AbstractContextManager[None]:
            return self._stuck(spec.group_id, lane.name, op, lane.ranks, seq=0, call=lambda: lane.call)

        spec = invited(message)
        if spec.group_id in self._groups:  # what the first participation holds would never be given up
            raise ProtocolError(detail="a group is joined once")
        try:
            made = Participation(spec, message.rank, message.members, self._here.seats, self.link.send, watch)
        except GroupExistsError as exc:
            self._tell(Joined(request=message.request, error=to_wire(exc)))
            return
        self._groups[spec.group_id] = made
        threading.Thread(
            target=self._connect, args=(made, message.request), name="raycollect-join", daemon=True
        ).start()

    def _connect(self, participation: Participation, request: int) -> None:
        error = participation.connect()
        self._tell(Joined(request=request, error=None if error is None else to_wire(error)))

    def _leave(self, message: Leave) -> None:
        """Forgets a group, and gives up what it holds; plans of it that still come fail."""
        participation = self._groups.pop(message.group_id, None)
        if participation is not None:
            ring = self._tracer.of(self.controller)
            if ring is not None:
                ring.groups[message.group_id] = _place(participation)
            participation.close("the group was destroyed")

    def _abort(self, message: Abort) -> None:
        self._here.instruments.recorder.add("abort", message.seq, message.reason)
        if self._ledger.abort(message.seq, message.reason):
            # It may have ended without a word, leaving that to a rank that can't speak any more.
            self._tell(Done(seq=message.seq, ranks=[], error=None, story=[]))
        else:
            self._wake(message.seq)

    def _wake(self, seq: int) -> None:
        running = self._running.get(seq)  # else it has not begun, and asks the ledger before each launch
        if running is not None:
            running.execution.abort()
            if running.door is not None:
                running.door.abort(seq)
        else:
            self._captures.wake(seq)
        self._store.wake()
        self._orders.wake()

    def _run_came(self, message: Run) -> None:
        found = self._captures.find(message.capture)
        if found is None or not found.received(message):
            self._ledger.end(message.seq)  # what comes after it goes on
            self._tell(self._failure(message.seq, CaptureError(detail="this captured step is closed")))

    def _forget_capture(self, message: Forget) -> None:
        self._captures.forget(message.capture, "the captured step was closed")

    def _order(self, message: Order) -> None:
        self._orders.received(message)

    def _go(self, message: Go) -> None:
        self._orders.go(message)

    def _arrivals(self, message: Arrivals) -> None:
        running, participation = self._running.get(message.seq), self._groups.get(message.group_id)
        if not message.group_id:
            door = running.door if running is not None else self._captures.door(message.seq)
            if door is not None:
                door.arrived(message.seq, message.round, message.blobs, more=message.more)
        elif participation is not None:
            participation.exchange.arrived(message.seq, message.round, message.blobs, more=message.more)

    def _for_seat(self, message: Any) -> None:
        participation = self._groups.get(message.group_id)
        if participation is not None and participation.seat is not None:
            participation.seat.received(message)

    def _gone(self, message: Gone) -> None:
        """A member is gone. Where it has died, the group does no more, and must not keep the memory of the dead."""
        self._for_seat(message)
        here = self._groups.get(message.group_id)
        if not message.died or here is None:
            return
        who = here.seat.describe(message.rank) if here.seat is not None else f"rank {message.rank}"
        for group_id, participation in list(self._groups.items()):
            if message.group_id in (group_id, participation.spec.parent):
                self._forsake(group_id, f"{who} died: {message.detail}")
                participation.disconnect()

    def _forsake(self, group_id: str, reason: str) -> None:
        """Aborts the plans under way in a group."""
        for seq, running in list(self._running.items()):
            if group_id in running.group_ids and not self._ledger.abort(seq, reason):
                self._wake(seq)

    def _stored(self, message: Stored) -> None:
        participation = self._groups.get(message.group_id)
        if participation is not None:
            participation.rendezvous.stored(message.name, message.value)

    def _look(self, message: Look) -> None:
        instruments, running = self._here.instruments, self._ledger.running()
        recorder, doing, places = instruments.recorder, what_runs(), where_plans_are()
        doors = arrivals(recorder.story(), instruments.clock())
        self._tell(
            Seen(
                request=message.request,
                doing=doing.what,
                stack=list(doing.stack),
                running=list(running),
                steps=[places.get(seq, "") for seq in running],
                doors=list(doors),
                doors_ms=[int(1000 * since_s) for since_s in doors.values()],
                ended=self._ledger.last,
                story=list(recorder.tail()),
            )
        )

    def _measure(self, message: Measure) -> None:
        seq, ledger = message.seq, self._ledger
        running = self._running.get(seq)
        reach = self._captures.reach(seq) if running is None else running.execution.reach()
        has_ended = ledger.has_ended(seq)
        has_begun = has_ended or reach is not None or seq in ledger.running()
        self._tell(
            Measured(request=message.request, has_begun=has_begun, has_ended=has_ended, **(reach or NOWHERE)._asdict())
        )

    def _survey(self, message: Survey) -> None:
        store, arena = self._store.statistics(), Segments.current().statistics()
        self._tell(Surveyed(request=message.request, **asdict(store), **asdict(arena)))

    # ------------------------------------------------------------------------------------------ timelines

    def _record(self, message: Record) -> None:
        """Begins to record for the controller, unless this process records a timeline of its own."""
        ring = self._tracer.begin(self.controller, min(max(message.limit, 1), MOST))
        self._end_publishing()
        if ring is not None and message.metrics:
            self._publisher = Publisher(ring, self._places)
        self._tell_time(message.request, "" if ring is not None else "it records a timeline of its own")

    def _tick(self, message: Tick) -> None:
        self._tell_time(message.request, "")

    def _tell_time(self, request: int, refusal: str) -> None:
        at_s = self._here.instruments.clock()
        self._tell(Ticked(request=request, at_s=at_s, clock=clock_id(), refusal=refusal))

    def _collect(self, message: Collect) -> None:
        ring = self._tracer.end(self.controller) if message.ends else self._tracer.of(self.controller)
        if message.ends:
            self._end_publishing()
        # Packing takes a while, and this is the thread that hears of aborts.
        threading.Thread(
            target=self._send_recorded, args=(message.request, ring), name="raycollect-trace", daemon=True
        ).start()

    def _end_publishing(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _send_recorded(self, request: int, ring: Ring | None) -> None:
        """Tells the controller what was recorded, in parts."""
        packed = b""
        if ring is not None:
            self._ledger.settle(SETTLE_S)  # what has answered early may yet have to note its end
            found = ring.read()
            packed = encode_recorded(found._replace(groups={**found.groups, **self._places()}))
        for at in range(0, max(len(packed), 1), PART_NBYTES):
            part = packed[at : at + PART_NBYTES]
            self._tell(Collected(request=request, payload=part, more=at + PART_NBYTES < len(packed)))

    def _places(self) -> dict[str, Place]:
        """The groups that it has a part in."""
        return {group_id: _place(one) for group_id, one in list(self._groups.items())}


def _place(participation: Participation) -> Place:
    """What a timeline says of a group; in one inside another the user has no rank."""
    spec = participation.spec
    return Place(spec.name, spec.backend, -1 if spec.parent else participation.rank, spec.world_size)


def _shortened(error: RaycollectError) -> RaycollectError:
    """The error, with no more violations than a message can hold."""
    if not isinstance(error, RefusedError) or len(error.violations) <= MOST_VIOLATIONS:
        return error
    return refusal(error.op, error.group_name, error.violations[:MOST_VIOLATIONS])


_HANDLERS: dict[type, Callable[[Lease, Any], None]] = {
    Join: Lease._join,
    Leave: Lease._leave,
    Abort: Lease._abort,
    Arrivals: Lease._arrivals,
    Stored: Lease._stored,
    Survey: Lease._survey,
    Measure: Lease._measure,
    Look: Lease._look,
    Run: Lease._run_came,
    Forget: Lease._forget_capture,
    Order: Lease._order,
    Go: Lease._go,
    Record: Lease._record,
    Tick: Lease._tick,
    Collect: Lease._collect,
    Gone: Lease._gone,
    **dict.fromkeys((Deny, Depart, Drop, Met, Missed, Publish), Lease._for_seat),
}
