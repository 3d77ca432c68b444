"""The controlling process: what it sends, and what its participants say. One controller per process and Ray session.

A participant is leased with its control connection and given back when its last group here is destroyed (P10).
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from raycollect import fetch, ray_internals
from raycollect.channel.messages import (
    Arrive,
    Depart,
    Done,
    Drop,
    Joined,
    Measured,
    Meet,
    Publish,
    Ran,
    Seen,
    Store,
    Stuck,
    Surveyed,
    Waiting,
    Withdraw,
)
from raycollect.errors import (
    GroupBrokenError,
    PlanAbortedError,
    ProtocolError,
    UnknownGroupError,
    Violation,
    from_wire,
    refusal,
)
from raycollect.flight import Flight, Orders
from raycollect.gates import Gates
from raycollect.group import Declaration, Membership
from raycollect.handle import Handle
from raycollect.memberships import Memberships
from raycollect.model import Key, Member
from raycollect.observe import Tracer
from raycollect.peer import Peer
from raycollect.peers import Peers
from raycollect.runs import RunFlight, Runs
from raycollect.tracing import Tracing, begin_from_environment

_Flight = TypeVar("_Flight", bound=Flight)


class Controller:
    """What a controlling process holds. `Controller.current()` makes it on first use.

    Attributes:
        dispatching: Held while a plan, or a run of a captured step, is sent to all its participants (P2).
        revision: Changes whenever a group, or a member of one, is gone.
    """

    _current: Controller | None = None
    _making = threading.Lock()

    @classmethod
    def current(cls) -> Controller:
        """The controller of this process and Ray session; starts Ray if need be."""
        ray_internals.ensure_ray()
        session = ray_internals.session()
        with cls._making:
            if cls._current is None or cls._current.session is not session:
                if cls._current is not None:
                    cls._current.close()
                cls._current = cls(session)
            return cls._current

    @classmethod
    def drives(cls, name: str) -> bool:
        """Whether this process has declared a group of that name; starts nothing."""
        current = cls._current
        if current is None or not ray_internals.is_connected():
            return False
        return current.session is ray_internals.session() and current._groups.is_declared(name)

    def __init__(self, session: object) -> None:
        self.session = session
        self.dispatching: threading.Lock = threading.Lock()
        self.revision: object = object()
        self._is_closed = False
        self._seq = itertools.count(1)
        self._flights: dict[int, Flight] = {}
        self._forsaken: deque[tuple[Runs, tuple[Membership, ...]]] = deque()  # captures that nobody has any more
        self._peers = Peers(self, secrets.token_hex(8))
        self._gates = Gates(self._peers)
        self._groups = Memberships(self._peers, self._gates, self._ending)
        self._tracer = Tracer.current()
        begin_from_environment()
        self.observed(Tracing.current())

    def observed(self, tracing: Tracing | None) -> None:
        """Lets a timeline hear of all participants, now and later; None: no more."""
        self._peers.observer = tracing
        if tracing is not None:
            for peer in self._peers.all():
                tracing.leased(peer)

    def close(self) -> None:
        """Gives back all leases."""
        for flight in list(self._flights.values()):
            flight.fail(PlanAbortedError(detail="the controller was closed"))
        self._flights.clear()
        self._is_closed = True
        self.revision = object()
        self._groups.close()
        self._peers.close()
        fetch.close_idle()

    # ------------------------------------------------------------------------------------------ groups

    def declare(self, declaration: Declaration) -> Membership:
        """Forms a named group; returns when every member has joined."""
        return self._groups.declare(declaration)

    def derive(self, actor_ids: tuple[str, ...], timeout_s: float) -> Membership:
        """The group of these actors in this order, formed now or before."""
        return self._groups.derive(actor_ids, timeout_s)

    def hold(self, membership: Membership) -> None:
        """Keeps a derived group, however long it is unused: a call of it was recorded, which is still to be sent."""
        self._groups.hold(membership)

    def release(self, membership: Membership) -> None:
        """Ends what `hold` began."""
        self._groups.release(membership)

    def named(self, name: Any) -> Membership:
        """A declared group.

        Raises:
            UnknownGroupError: There is none of that name.
        """
        return self._groups.named(name)

    def is_declared(self, name: str) -> bool:
        """True where a group of that name is declared."""
        return self._groups.is_declared(name)

    def destroy(self, name: str) -> None:
        """Ends a declared group; plans of it under way are aborted."""
        self._groups.destroy(name)

    def rebuild(
        self, old: Membership, actors: Sequence[Any] | None, timeout_s: float
    ) -> tuple[Membership, tuple[Any, ...]]:
        """Forms a declared group again, over those who live or over other actors; see `Memberships.rebuild`."""
        return self._groups.rebuild(old, actors, timeout_s)

    def as_it_is(self, membership: Membership, timeout_s: float) -> Membership:
        """A group as it is now, where it was rebuilt, or is derived anew."""
        return self._groups.as_it_is(membership, timeout_s)

    def why_broken(self, membership: Membership) -> str:
        """Why a group can't communicate; empty where it can."""
        return self._groups.why_broken(membership)

    def exists(self, membership: Membership) -> bool:
        """False once the group was destroyed."""
        return self._groups.exists(membership)

    def crew(self, memberships: Sequence[Membership], participants: Sequence[str]) -> list[Peer]:
        """The leased participants of a plan, or of a captured step, by position.

        Raises:
            UnknownGroupError, GroupBrokenError: See `check`.
        """
        self.check(memberships)
        return self._groups.crew(memberships, participants)

    def check(self, memberships: Sequence[Membership]) -> None:
        """Whether groups can communicate.

        Raises:
            UnknownGroupError: One was destroyed.
            GroupBrokenError: A member is gone.
        """
        if self._is_closed:
            raise UnknownGroupError(group_name="", detail="its controller was closed: ray was shut down meanwhile")
        self._groups.check(memberships)

    def survey(self, members: Sequence[Member], timeout_s: float) -> list[Surveyed | None]:
        """Asks members what they hold; None for one that is gone, or has not answered in time."""
        return self._peers.survey(members, timeout_s)

    def look(self, members: Sequence[Member], timeout_s: float) -> list[Seen | None]:
        """Asks members what they are doing; None for one that is gone, or has not answered in time."""
        return self._peers.look(members, timeout_s)

    def measure(self, member: Member, seq: int) -> Future[Measured | None] | None:
        """Asks a member how far it is in a plan, and does not wait; None for one that is gone."""
        return self._peers.measure(member, seq)

    def _ending(self, membership: Membership) -> None:
        """A group is dissolved: plans of it are aborted."""
        self.revision = object()
        reason = PlanAbortedError(detail="its group was destroyed")
        for flight in [flight for flight in self.flights() if membership in flight.groups]:
            self.send(flight, flight.fail(reason))

    # ------------------------------------------------------------------------------------------ flights

    def take_off(self, make: Callable[[int], _Flight], width: int = 1) -> _Flight:
        """Registers a new flight under the next numbers, as many as it has launches; called under `dispatching`."""
        if self._forsaken:
            self._close_forsaken()
        flight = make(next(self._seq))
        ring = self._tracer.ring
        if ring is not None:
            flight.ring, flight.began_s = ring, ring.clock()
        for _ in itertools.islice(self._seq, width - 1):
            pass
        self._flights[flight.seq] = flight
        return flight

    def flights(self) -> Iterable[Flight]:
        """The flights that have not landed everywhere. Of runs by the doorbell that shows when somebody looks."""
        found = list(self._flights.values())
        for flight in [one for one in found if one.landed]:
            self._flights.pop(flight.seq, None)
        return [one for one in found if one.seq in self._flights]

    def send(self, flight: Flight, orders: Orders) -> None:
        """Carries out what a flight wants said, and forgets it once it has landed."""
        self._peers.deliver(flight.plan.participants, orders)
        if flight.landed:
            self._flights.pop(flight.seq, None)

    def forsake(self, runs: Runs, held: tuple[Membership, ...]) -> None:
        """Nobody has a capture any more: it is closed when the next plan or run is sent, and its last run has ended.

        Takes no lock: the garbage collector may call it, in any thread at any place.
        """
        self._forsaken.append((runs, held))

    def _close_forsaken(self) -> None:
        """Closes captures that nobody has; called under `dispatching`."""
        for _ in range(len(self._forsaken)):
            runs, held = self._forsaken.popleft()
            if runs.is_idle:
                runs.let_go()
                self._groups.release_later(held)
            else:
                self._forsaken.append((runs, held))

    # ------------------------------------------------------------------------------------------ channel

    def received(self, peer: Peer, message: Any) -> None:
        """A message of a participant; on the hub's thread, so nothing here may wait."""
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise ProtocolError(detail=f"{type(message).__name__} has no place here")
        handle(self, peer, message)

    def lost(self, peer: Peer, reason: str) -> None:
        """A participant's connection has ended; on the hub's thread."""
        if not self._peers.drop(peer):
            return
        self._groups.lost(peer, reason)
        self.revision = object()
        self._peers.give_up(peer, reason)
        for flight in self.flights():
            position = flight.plan.positions.get(peer.info["actor_id"])
            if position is not None:
                self.send(flight, flight.lost(position, reason))

    def parted(self, peer: Peer) -> None:
        """A participant was given back: it ends what it has under way, but nobody hears of that any more."""
        reason = PlanAbortedError(detail=f"{peer.info['actor']} was given back")
        for flight in self.flights():
            position = flight.plan.positions.get(peer.info["actor_id"], -1)
            if flight.is_pending(position):
                self.send(flight, flight.fail(reason, unsent=(position,)))

    def _joined(self, peer: Peer, message: Joined) -> None:
        self._peers.joined(message)

    def _store(self, peer: Peer, message: Store) -> None:
        self._peers.stored(peer, message)

    def _meet(self, peer: Peer, message: Any) -> None:
        """What a member says to the hub of its group."""
        self._gates.receive(peer, message)

    def _stuck(self, peer: Peer, message: Stuck) -> None:
        """A participant waits, or no more."""
        if message.group_id:
            self._gates.receive(peer, message)
            return
        flight = self._flight_of(message.seq)
        if flight is not None or not message.seq:
            self._gates.spread(peer, message, () if flight is None else flight.plan.participants)

    def _depart(self, peer: Peer, message: Depart) -> None:
        """A member has left by itself: it is answered, and the group does no more for the driver either."""
        if message.group_id in self._gates:
            self._groups.breaks(message.group_id, f"{peer.info['actor']} has left: it destroyed the group itself")
            self.revision = object()
            self._gates.receive(peer, message)
        peer.send(message)

    def _flight_of(self, launch: int) -> Flight | None:
        """The flight of a launch."""
        return self._flights.get(launch) or next((one for one in self.flights() if one.has(launch)), None)

    def _arrive(self, peer: Peer, message: Arrive) -> None:
        flight = self._flight_of(message.seq)
        if flight is not None:
            position = flight.plan.positions.get(peer.info["actor_id"], -1)
            self.send(flight, flight.arrive(position, message))

    def _done(self, peer: Peer, message: Done) -> None:
        flight = self._flights.get(message.seq)
        if flight is None:
            return
        error = None if message.error is None else from_wire(message.error)
        if isinstance(error, GroupBrokenError):
            for membership in flight.blamed(error):
                self._groups.breaks(membership.spec.group_id, error.detail)
            self.revision = object()
        position = flight.plan.positions.get(peer.info["actor_id"], -1)
        if position >= 0:
            self.send(flight, flight.done(position, error, message.story, others=message.ranks))

    def _ran(self, peer: Peer, message: Ran) -> None:
        """A participant has ended a run of a captured step; what it gives back is read by whoever waits for it."""
        flight = self._flights.get(message.seq)
        if flight is None:
            return
        if not isinstance(flight, RunFlight):
            raise ProtocolError(detail=f"plan {message.seq} is no run of a captured step")
        position = flight.plan.positions.get(peer.info["actor_id"], -1)
        if position >= 0:
            flight.heard(position, message.payload)

    def _waiting(self, peer: Peer, message: Waiting) -> None:
        """A participant waits for a method that has not ended: watch its ref, which may hold an error instead."""
        flight = self._flights.get(message.seq)
        key = Key(message.key)
        ref = flight.refs.get(key) if flight is not None else None
        if flight is None or ref is None:
            return

        def settled(value: Any) -> None:
            secret = peer.info["address"].secret
            if isinstance(value, Handle) and value.address.secret == secret:
                return  # the participant has it, or freed it, and knows
            call, rank = flight.user_of(key)
            violation = Violation(kind="lost", rank=rank, field="operand", found="not there", ref=ref.hex(), call=call)
            self.send(flight, flight.fail(refusal(flight.plan.name, flight.group_name, (violation,))))

        ray_internals.on_completed(ref, settled)


_HANDLERS: dict[type, Callable[[Controller, Peer, Any], None]] = {
    Joined: Controller._joined,
    Store: Controller._store,
    Arrive: Controller._arrive,
    Depart: Controller._depart,
    Done: Controller._done,
    Ran: Controller._ran,
    Waiting: Controller._waiting,
    Stuck: Controller._stuck,
    **dict.fromkeys((Drop, Meet, Publish, Withdraw), Controller._meet),
}
