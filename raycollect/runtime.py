"""The participant's process: its store, communicators, ledger and control endpoint. One per process.

Programs come as actor tasks (`dispatch.send_plan` here becomes `run_program`); everything that must not wait in the
actor's queue comes over the channel, on a thread of its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import ray

from raycollect import backends, fetch, ray_internals
from raycollect.backends import arrays
from raycollect.captures import Captured, Captures, Desk, decode_capture, decode_fenced, open_post, pinned
from raycollect.channel import DataLink, Link, Server
from raycollect.channel.messages import (
    Abort,
    Arrivals,
    Bye,
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
    Message,
    Met,
    Missed,
    Order,
    Publish,
    Refused,
    Run,
    Stored,
    Stuck,
    Survey,
    Surveyed,
    Waiting,
    Welcome,
)
from raycollect.errors import (
    CaptureError,
    ChannelError,
    ConnectionLostError,
    ControllerConflictError,
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
from raycollect.executor import Execution, Outcome
from raycollect.handle import Handle
from raycollect.lane import Lane
from raycollect.ledger import Ledger
from raycollect.model import Communicator, GroupSpec, Key, task_key
from raycollect.orders import Orders
from raycollect.planner import Program, Ticket, decode_order
from raycollect.pos import Container
from raycollect.pos.segments import Segments
from raycollect.rendezvous import ChannelRendezvous, StarExchange
from raycollect.replay import Invoke, Replay
from raycollect.routine import Invocation
from raycollect.seat import Seat
from raycollect.seats import Seats
from raycollect.tokens import TokenPool
from raycollect.watch import Watch

log = logging.getLogger("raycollect")

STORE_LIMIT_WITHOUT_TOKENS = 1024
"""How many values a store holds where Ray can't tell when a ref is gone."""

MOST_VIOLATIONS = 500
"""How many reasons of a refusal the controller is told: thousands of calls, each wrong on all ranks, would be too many
for a message."""

MOST_WAITING = 64
"""How many programs of an actor with coroutines may wait for their predecessors.

Ray may bring these later, where their arguments are long: so they must not wait for the same thread.
"""

STREAMED_KEPT = 64
"""How many of the newest values that generators yielded are kept whatever Ray says of their refs.

Ray 2.60 can lose the count of what is nested in a streamed item, when the item is yielded before its consumer asks for
it (docs/adr/0002-ray-internals.md); without this, an item could be freed before it is first used.
"""


_OVERLAP: AbstractContextManager[None] = nullcontext()
"""Held where methods may overlap."""


@dataclass(slots=True, kw_only=True)
class _Membership:
    """This process's part in one group; without a seat in one that only plans use."""

    spec: GroupSpec
    rank: int
    seat: Seat | None
    rendezvous: ChannelRendezvous
    exchange: StarExchange
    ledger: Ledger
    ordered: bool
    communicator: Communicator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A program under way, and the door that the controller keeps for it, where it does."""

    execution: Execution
    door: StarExchange | None


class Runtime:
    """What a participant's process holds. Made on first use, by `Runtime.current()`."""

    _current: Runtime | None = None
    _making = threading.Lock()

    @classmethod
    def current(cls) -> Runtime:
        """The runtime of this process; any thread."""
        if cls._current is None:
            with cls._making:
                if cls._current is None:
                    cls._current = cls()
        return cls._current

    @classmethod
    def turn_of_methods(cls) -> AbstractContextManager[Any]:
        """What a method that Ray calls holds while it runs: the turn, where methods come in order.

        A process that is no participant yet has nothing that could meet one: what makes it one is a method itself.
        """
        here = cls._current
        return here.turn if here is not None and here.is_ordered else _OVERLAP

    def __init__(self) -> None:
        self._tokens = TokenPool(self._forget)
        self._seats = Seats.current()
        self.instruments = self._seats.instruments
        self.store = self.instruments.store
        self.store.limit(None if self._tokens.supported else STORE_LIMIT_WITHOUT_TOKENS)
        self.recorder = self.instruments.recorder
        self.kernel_threads = ThreadPoolExecutor(MOST_WAITING, thread_name_prefix="raycollect-kernel")
        self.actor_id = ray_internals.current_actor_id()
        self.actor = ray_internals.short_actor(ray_internals.current_class(), self.actor_id)
        self._streamed: deque[Any] = deque(maxlen=STREAMED_KEPT)
        self._groups: dict[str, _Membership] = {}
        self._ledger = Ledger()
        self._running: dict[int, _Running] = {}
        self._begun = 0  # the latest plan that has begun here
        self._captures = Captures()  # those of the lease
        self.is_ordered = False  # whether methods of this actor come one by one; known when it is described
        self.turn = threading.Lock()  # held, on ordered participants, by a method of Ray's or by what must not meet one
        self._orders = Orders(
            self.store, self.turn, self._tell, lambda order: self.run_program(order.payload, None, order)
        )
        self._watch = Watch()
        self._lease: tuple[str, str, Link] | None = None  # controller's id, its description, its link
        self._lock = threading.Lock()
        secret = secrets.token_bytes(32)
        self._server = Server(ray_internals.node_address(), secret, self)
        fetch.register_local(secret, self.store)

    # ------------------------------------------------------------------------------------------ values

    def describe(self, *, ordered: bool) -> dict[str, Any]:
        """Who this participant is, and where it listens: what `Member` holds, less the rank.

        Args:
            ordered: False where the class itself says that its methods overlap.
        """
        context = ray.get_runtime_context()
        self.is_ordered = ordered and ray_internals.is_ordered()
        return {
            "actor_id": self.actor_id,
            "actor": self.actor,
            "address": self._server.address,
            "machine": ray_internals.machine_id(),
            "node_id": context.get_node_id(),
            "pid": os.getpid(),
            "incarnation": context.get_worker_id(),
            "ordered": self.is_ordered,
            "participant": False,
            "accelerators": tuple((kind, tuple(ids)) for kind, ids in context.get_accelerator_ids().items() if ids),
        }

    def keep(self, key: Key, container: Container, *, streamed: bool = False) -> Handle:
        """Keeps a value under a key and makes the handle that stands for it; `streamed`: a generator yielded it."""
        handle = Handle(
            key=key,
            actor_id=self.actor_id,
            actor=self.actor,
            address=self._server.address,
            structure=container.structure,
            infos=tuple(map(arrays.describe, container.tensors)),
            token=self._tokens.take(key),
        )
        self.store.put(key, container)
        if streamed:
            self._streamed.append(handle.token)
        return handle

    def _forget(self, key: Key) -> None:
        self.store.free([key])

    # ------------------------------------------------------------------------------------------ programs

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
        memberships = [self._membership(group_id) for group_id in {share.group_id for share in program.shares}]
        ledger = memberships[0].ledger  # all have the lease's
        reason = ledger.start(ticket.seq, ticket.predecessor)
        self._begun = max(self._begun, ticket.seq)
        handles = []
        try:
            if reason is not None:
                raise PlanAbortedError(detail=reason)
            is_ordered = all(one.ordered for one in memberships)
            between: AbstractContextManager[Any] = nullcontext()
            if order is not None:
                between = self._orders.between_methods(
                    order, ticket.seq, keys, ledger, program.timeout_s, is_ordered=is_ordered
                )
            with between:
                outcome = self._run(ticket, keys, program, memberships)
            if task is not None:
                handles = [self.keep(task_key(task, i + 1), made) for i, made in enumerate(outcome.outputs)]
        except RaycollectError as exc:  # aborted before it came, or the store is full
            outcome = Outcome(error=exc)
        except Exception as exc:
            log.exception("plan %d failed in an unforeseen way", ticket.seq)
            outcome = Outcome(error=InternalError(detail=f"{type(exc).__name__}: {exc}"))
        finally:
            ledger.end(ticket.seq)  # whatever happened, its successors go on
        if order is None or ledger is self._ledger:  # else a later controller would take the number for one of its own
            self._tell_done(ticket.seq, program, outcome)
        if outcome.error is not None and program.makes:
            raise outcome.error
        return handles[0] if len(handles) == 1 else tuple(handles) or None

    def _run(
        self, ticket: Ticket, keys: Sequence[Key], program: Program, memberships: Sequence[_Membership]
    ) -> Outcome:
        seq, ledger = ticket.seq, memberships[0].ledger
        is_ordered = all(one.ordered for one in memberships)  # a method may be late if one group says so
        door = None if program.door.group_id else StarExchange("", program.door.rank, self._tell)
        execution = Execution(
            program,
            keys,
            self._communicator,
            self.instruments,
            seq=seq,
            aborted=lambda: ledger.reason(seq),
            waiting=None if is_ordered else lambda key: self._tell(Waiting(seq=seq, key=key)),
            exchange=door,
        )
        running = self._running[seq] = _Running(execution=execution, door=door)
        try:
            with self._stuck("", "", program.name, (), seq=seq, call=lambda: 0):
                return execution.run()
        finally:
            if self._running.get(seq) is running:  # a later controller counts from 1 again
                del self._running[seq]

    def _membership(self, group_id: str) -> _Membership:
        """This process's part in a group.

        Raises:
            GroupBrokenError: It has none.
        """
        try:
            return self._groups[group_id]
        except KeyError:
            raise GroupBrokenError(group_name=group_id, detail="its controller is gone") from None

    def _communicator(self, group_id: str) -> Communicator:
        """This process's end of a group.

        Raises:
            GroupBrokenError: It has none.
        """
        communicator = self._membership(group_id).communicator
        if communicator is None:
            raise GroupBrokenError(group_name=group_id, detail="this participant never joined")
        return communicator

    def _stuck(
        self, group_id: str, lane: str, op: str, ranks: Sequence[int], *, seq: int, call: Callable[[], int]
    ) -> AbstractContextManager[None]:
        """Around a wait, of which the controller hears if it lasts: it may be for one who waits for this one."""

        def tell(lane: str, op: str, seq: int, number: int) -> None:
            self._tell(
                Stuck(group_id=group_id, lane=lane, call=number, seq=seq, op=op, ranks=list(ranks), begun=self._begun)
            )

        return self._watch.waiting(lambda: tell(lane, op, seq, call()), lambda: tell("", "", 0, 0))

    def _tell_done(self, seq: int, program: Program, outcome: Outcome) -> None:
        """Tells how a plan ended here; where all see each other, the last one tells for all that went well."""
        if outcome.error is not None:
            self._tell(self._failure(seq, outcome.error))
        elif not outcome.ended or len(outcome.ended) == len(program.door.ranks):
            self._tell(Done(seq=seq, ranks=list(outcome.ended), error=None, story=[]))

    def _failure(self, seq: int, error: RaycollectError) -> Done:
        return Done(seq=seq, ranks=[], error=to_wire(_shortened(error)), story=list(self.recorder.tail()))

    def _send(self, message: Message) -> None:
        """Sends to the controller.

        Raises:
            ConnectionLostError: There is none.
        """
        lease = self._lease
        if lease is None:
            raise ConnectionLostError(detail="the controller is gone")
        lease[2].send(message)

    def _tell(self, message: Message) -> None:
        with suppress(ConnectionLostError):  # `closed` deals with a controller that is gone
            self._send(message)

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
            ConnectionLostError: Its controller is gone.
        """
        routine, segment, seat = decode_capture(payload)
        captures, desk = self._captures, self._desk()  # in this order: a lease that ends closes the first
        refs = [pinned(value, self.store, self.actor_id, self.actor) for value in values]
        invoke = invoker([action.method for action in routine.actions if isinstance(action, Invocation)])
        replay = Replay(routine, refs, invoke, self.instruments, self._communicator)
        post = open_post(segment, seat)
        try:
            captures.add(routine.capture, lambda: Captured(replay, desk, post))
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
        """What captured steps of the present lease share.

        Raises:
            ConnectionLostError: There is none.
        """
        lease = self._lease
        if lease is None:
            raise ConnectionLostError(detail="the controller is gone")
        send = lease[2].send  # a later controller would take a run's number for one of its own

        def failed(seq: int, error: RaycollectError) -> None:
            with suppress(ConnectionLostError):
                send(self._failure(seq, error))

        turn = self.turn if self.is_ordered else None
        return Desk(ledger=self._ledger, turn=turn, send=send, failed=failed, begun=self._note_begun)

    def _note_begun(self, seq: int) -> None:
        self._begun = max(self._begun, seq)

    def _run_came(self, message: Run) -> None:
        found = self._captures.find(message.capture)
        if found is None or not found.received(message):
            self._ledger.end(message.seq)  # what comes after it goes on
            self._tell(self._failure(message.seq, CaptureError(detail="this captured step is closed")))

    def _forget_capture(self, message: Forget) -> None:
        self._captures.forget(message.capture, "the captured step was closed")

    # ------------------------------------------------------------------------------------------ channel

    def opened(self, link: Link, hello: dict[str, Any]) -> None:
        """A controller connected: it gets the lease, or hears who has it (P10)."""
        controller, description = str(hello.get("controller")), str(hello.get("description"))
        with self._lock:
            if self._lease is not None and self._lease[0] != controller:
                error = ControllerConflictError(actor=self.actor, holder=self._lease[1])
                link.send(Refused(error=to_wire(error)))
                return
            self._lease = (controller, description, link)
        link.send(Welcome(participant={"actor": self.actor}))

    def received(self, link: Link, message: Message) -> None:
        """A message of the controller; on the channel's thread, so nothing here may wait."""
        if self._lease is None or self._lease[2] is not link:
            raise ProtocolError(detail=f"{type(message).__name__} from a controller without the lease")
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise ProtocolError(detail=f"{type(message).__name__} has no place here")
        handle(self, message)

    def closed(self, link: Link, reason: ChannelError) -> None:
        """A controller is gone: what it drove ends, and another may come."""
        if self._lease is not None and self._lease[2] is link:
            self._end_lease(f"the controller is gone ({reason.detail})")

    def serve_data(self, link: DataLink) -> None:
        """Serves fetches, on a thread per connection."""
        fetch.serve(link, self.store)

    def _join(self, message: Join) -> None:
        spec = GroupSpec(**message.group)
        if spec.group_id in self._groups:  # what the first membership holds would never be given up
            raise ProtocolError(detail="a group is joined once")
        membership = _Membership(
            spec=spec,
            rank=message.rank,
            seat=None if spec.parent else self._make_seat(spec, message),
            rendezvous=ChannelRendezvous(spec.group_id, self._tell),
            exchange=StarExchange(spec.group_id, message.rank, self._tell),
            ledger=self._ledger,
            ordered=message.members[message.rank]["ordered"],
        )
        try:
            if membership.seat is not None:
                self._seats.adopt(membership.seat)
        except GroupExistsError as exc:
            self._tell(Joined(request=message.request, error=to_wire(exc)))
            return
        self._groups[spec.group_id] = membership
        threading.Thread(
            target=self._make_communicator, args=(membership, message.request), name="raycollect-join", daemon=True
        ).start()

    def _make_seat(self, spec: GroupSpec, message: Join) -> Seat:
        """This participant's place in the group, for the calls that its methods make."""

        def watch(lane: Lane, op: str) -> AbstractContextManager[None]:
            return self._stuck(spec.group_id, lane.name, op, lane.ranks, seq=0, call=lambda: lane.call)

        return Seat(
            spec,
            message.rank,
            self._send,
            members=[member["actor"] for member in message.members],
            host=ray_internals.node_address(),
            timeout_s=spec.timeout_s,
            declared=True,
            watch=watch,
        )

    def _make_communicator(self, membership: _Membership, request: int) -> None:
        spec = membership.spec
        try:
            create = backends.load(spec.backend, spec.name)
            made = create(
                spec,
                membership.rank,
                membership.rendezvous,
                membership.exchange,
                host=ray_internals.node_address(),
                segments=Segments.current(),
            )
        except RaycollectError as exc:
            self._tell(Joined(request=request, error=to_wire(exc)))
            return
        except Exception as exc:
            log.exception("joining group %r failed", spec.name)
            self._tell(Joined(request=request, error=to_wire(InternalError(detail=f"{type(exc).__name__}: {exc}"))))
            return
        membership.communicator = made
        if membership.rendezvous.closed:
            made.close()
        self._tell(Joined(request=request, error=None))

    def _leave(self, message: Leave) -> None:
        self._close(message.group_id, "the group was destroyed")

    def _close(self, group_id: str, reason: str) -> None:
        """Gives up what a group holds. Its name stays known while the lease lasts: plans of it may still come."""
        membership = self._groups.get(group_id)
        if membership is None:
            return
        membership.rendezvous.close(reason)
        if membership.seat is not None:
            self._seats.remove(membership.seat)
            membership.seat.close(reason)
        if membership.communicator is not None:
            membership.communicator.close()

    def _abort(self, message: Abort) -> None:
        self.recorder.add("abort", message.seq, message.reason)
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
        self.store.wake()
        self._orders.wake()

    def _order(self, message: Order) -> None:
        self._orders.received(message)

    def _go(self, message: Go) -> None:
        self._orders.go(message)

    def _arrivals(self, message: Arrivals) -> None:
        running, membership = self._running.get(message.seq), self._groups.get(message.group_id)
        if not message.group_id:
            door = running.door if running is not None else self._captures.door(message.seq)
            if door is not None:
                door.arrived(message.seq, message.round, message.blobs, more=message.more)
        elif membership is not None:
            membership.exchange.arrived(message.seq, message.round, message.blobs, more=message.more)

    def _for_seat(self, message: Any) -> None:
        membership = self._groups.get(message.group_id)
        if membership is not None and membership.seat is not None:
            membership.seat.received(message)

    def _gone(self, message: Gone) -> None:
        """A member is gone. Where it has died, the group does no more, and must not keep the memory of the dead."""
        self._for_seat(message)
        for group_id, membership in list(self._groups.items()) if message.died else ():
            within = message.group_id in (group_id, membership.spec.parent)
            if within and membership.communicator is not None:
                membership.communicator.close()

    def _stored(self, message: Stored) -> None:
        membership = self._groups.get(message.group_id)
        if membership is not None:
            membership.rendezvous.stored(message.name, message.value)

    def _survey(self, message: Survey) -> None:
        store, arena = self.store.statistics(), Segments.current().statistics()
        self._tell(Surveyed(request=message.request, **asdict(store), **asdict(arena)))

    def _bye(self, message: Bye) -> None:
        self._end_lease("the controller said goodbye")

    def _end_lease(self, reason: str) -> None:
        for seq in self._ledger.close(reason):
            self._wake(seq)
        self._captures.close(reason)
        for group_id in list(self._groups):
            self._close(group_id, reason)
        with self._lock:
            self._groups.clear()
            self._lease = None
            self._ledger = Ledger()
            self._captures = Captures()
            self._cleared = 0


def _shortened(error: RaycollectError) -> RaycollectError:
    """The error, with no more violations than a message can hold."""
    if not isinstance(error, RefusedError) or len(error.violations) <= MOST_VIOLATIONS:
        return error
    return refusal(error.op, error.group_name, error.violations[:MOST_VIOLATIONS])


_HANDLERS: dict[type, Callable[[Runtime, Any], None]] = {
    Join: Runtime._join,
    Leave: Runtime._leave,
    Abort: Runtime._abort,
    Arrivals: Runtime._arrivals,
    Stored: Runtime._stored,
    Survey: Runtime._survey,
    Run: Runtime._run_came,
    Forget: Runtime._forget_capture,
    Order: Runtime._order,
    Go: Runtime._go,
    Bye: Runtime._bye,
    Gone: Runtime._gone,
    **dict.fromkeys((Deny, Depart, Drop, Met, Missed, Publish), Runtime._for_seat),
}


def mark_written(tensor: Any) -> None:
    """Says that a tensor which a failed collective left half-written is whole again. Inside its actor.

    Args:
        tensor: An array, or a list, tuple or dict of arrays, that the caller has overwritten.
    """
    container = Container.of(tensor, arrays.is_tensor)
    if container is not None:
        Seats.current().instruments.store.mark_written([arrays.byte_range(arrays.memory(t)) for t in container.tensors])
