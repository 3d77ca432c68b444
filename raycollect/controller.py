"""The controlling process: its participants, groups and flights. One per process and Ray session.

A participant is leased with its control connection and given back when its last group here is destroyed (P10).
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait as wait_for
from dataclasses import asdict, replace
from time import monotonic
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from raycollect import backends, costs, fetch, plain, ray_internals
from raycollect.channel import Hub
from raycollect.channel.messages import (
    Arrive,
    Bye,
    Deny,
    Depart,
    Done,
    Drop,
    Join,
    Joined,
    Leave,
    Meet,
    Met,
    Publish,
    Ran,
    Store,
    Stored,
    Stuck,
    Surveyed,
    Waiting,
    Withdraw,
)
from raycollect.errors import (
    ActorGoneError,
    CollectiveTimeoutError,
    ConnectionLostError,
    GroupBrokenError,
    GroupExistsError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    SelfDrivenError,
    UnknownGroupError,
    Violation,
    from_wire,
    refusal,
    to_wire,
)
from raycollect.flight import Flight
from raycollect.gate import Gate, Orders
from raycollect.group import Declaration, Membership, is_participant
from raycollect.handle import Handle
from raycollect.inner import inner_groups
from raycollect.model import Key, Member
from raycollect.peer import Peer
from raycollect.runs import RunFlight, Runs

_log = logging.getLogger("raycollect")

_Flight = TypeVar("_Flight", bound=Flight)

DERIVED_LIMIT = 16
"""How many derived groups are kept; the one unused for longest is given back first."""


class _Joining:
    """A member that was asked to join."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.settled = threading.Event()
        self.error: RaycollectError | None = None


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

    def __init__(self, session: object) -> None:
        self.session = session
        self.controller_id = secrets.token_hex(8)
        self.dispatching = threading.Lock()
        self.revision = object()
        self._is_closed = False
        self._changing = threading.RLock()  # groups and leases
        self._seq = itertools.count(1)
        self._requests = itertools.count(1)
        self._hub = Hub()
        self._peers: dict[str, Peer] = {}
        self._named: dict[str, Membership] = {}
        self._derived: OrderedDict[tuple[str, ...], Membership] = OrderedDict()
        self._in_use: Counter[str] = Counter()  # group id -> how many calls are being recorded that need it
        self._broken: dict[str, str] = {}  # group id -> why
        self._joining: dict[int, _Joining] = {}
        self._held: dict[str, tuple[Any, ...]] = {}  # group id -> its actors' handles, which keep them alive (P5)
        self._flights: dict[int, Flight] = {}
        self._gates: dict[str, tuple[Gate, Membership]] = {}  # group id -> where its members' own calls meet
        self._forsaken: deque[tuple[Runs, tuple[Membership, ...]]] = deque()  # captures that nobody has any more
        self._unheld: deque[Membership] = deque()  # what these held

    def close(self) -> None:
        """Gives back all leases."""
        for flight in list(self._flights.values()):
            flight.fail(PlanAbortedError(detail="the controller was closed"))
        self._flights.clear()
        self._is_closed = True
        self.revision = object()
        self._hub.close()
        fetch.close_idle()

    # ------------------------------------------------------------------------------------------ groups

    def declare(self, declaration: Declaration) -> Membership:
        """Forms a named group; returns when every member has joined."""
        with self._changing:
            if declaration.name in self._named:
                self._give_up(declaration.name)
            membership = self._form(declaration)
            self._held[membership.spec.group_id] = declaration.actors
            self._named[declaration.name] = membership
            return membership

    def derive(self, actor_ids: tuple[str, ...], timeout_s: float) -> Membership:
        """The group of these actors in this order, formed now or before."""
        with self._changing:
            while self._unheld:
                self.release(self._unheld.popleft())
            known = self._derived.get(actor_ids)
            if known is not None and known.spec.group_id not in self._broken:
                self._derived.move_to_end(actor_ids)
                return known
            if known is not None:
                self._dissolve(self._derived.pop(actor_ids))
            name = f"derived-{secrets.token_hex(3)}"
            actors = tuple(ray_internals.actor_handle(actor_id) for actor_id in actor_ids)
            declaration = Declaration(name=name, backend="auto", actors=actors, timeout_s=timeout_s)
            membership = self._form(declaration)
            self._derived[actor_ids] = membership
            spare = [ids for ids, one in self._derived.items() if not self._in_use[one.spec.group_id]]
            for ids in spare[: max(len(self._derived) - DERIVED_LIMIT, 0)]:
                if ids != actor_ids:
                    self._dissolve(self._derived.pop(ids))
            return membership

    def hold(self, membership: Membership) -> None:
        """Keeps a derived group, however long it is unused: a call of it was recorded, which is still to be sent."""
        with self._changing:
            self._in_use[membership.spec.group_id] += 1

    def release(self, membership: Membership) -> None:
        """Ends what `hold` began."""
        with self._changing:
            self._in_use.subtract([membership.spec.group_id])
            self._in_use = +self._in_use

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
                self._unheld.extend(held)
            else:
                self._forsaken.append((runs, held))

    def named(self, name: Any) -> Membership:
        """A declared group.

        Raises:
            UnknownGroupError: There is none of that name.
        """
        try:
            return self._named[name]
        except KeyError:
            detail = f"not declared; there are {sorted(self._named)}"
            if not isinstance(name, str):
                detail = f"a {type(name).__name__} is no group's name; look at the order of the arguments"
            raise UnknownGroupError(group_name=str(name), detail=detail) from None

    def is_declared(self, name: str) -> bool:
        """True where a group of that name is declared."""
        return name in self._named

    def destroy(self, name: str) -> None:
        """Ends a declared group; plans of it under way are aborted."""
        with self._changing:
            membership = self.named(name)
            del self._named[name]
            self._dissolve(membership)

    def _give_up(self, name: str) -> None:
        """Ends a declared group that all its members have left.

        Raises:
            GroupExistsError: Some are members still.
        """
        membership = self._named[name]
        gate, _ = self._gates[membership.spec.group_id]
        if len(gate.gone) < membership.spec.world_size:
            raise GroupExistsError(group_name=name)
        self.destroy(name)

    def why_broken(self, membership: Membership) -> str:
        """Why a group can't communicate; empty where it can."""
        return self._broken.get(membership.spec.group_id, "")

    def exists(self, membership: Membership) -> bool:
        """False once the group was destroyed."""
        return any(m is membership for m in (*self._named.values(), *self._derived.values()))

    def crew(self, memberships: Sequence[Membership], participants: Sequence[str]) -> list[Peer]:
        """The leased participants of a plan, or of a captured step, by position.

        Raises:
            UnknownGroupError: A group was destroyed.
            GroupBrokenError: A member is gone.
        """
        if self._is_closed:
            raise UnknownGroupError(group_name="", detail="its controller was closed: ray was shut down meanwhile")
        for membership in dict.fromkeys(memberships):
            name = membership.spec.name
            if not self.exists(membership):
                raise UnknownGroupError(group_name=name, detail="it was destroyed before the call was sent")
            broken = self.why_broken(membership)
            if broken:
                raise GroupBrokenError(group_name=name, detail=broken)
        return [self.peer(actor_id) for actor_id in participants]

    def peer(self, actor_id: str) -> Peer:
        """The leased participant behind an actor.

        Raises:
            GroupBrokenError: Its process is gone.
        """
        peer = self._peers.get(actor_id)
        if peer is None or peer.link is None:
            members = (one for _, group in list(self._gates.values()) for one in group.members)
            actor = next((one.actor for one in members if one.actor_id == actor_id), f"actor {actor_id[:6]}")
            raise GroupBrokenError(group_name="", detail=f"{actor} is gone")
        return peer

    def survey(self, membership: Membership, timeout_s: float) -> list[Surveyed | None]:
        """Asks all members what they hold; None for one that is gone, or has not answered in time."""
        pairs = [(member, self._peers.get(member.actor_id)) for member in membership.members]
        asked = [
            peer.survey() if peer is not None and peer.info["incarnation"] == member.incarnation else None
            for member, peer in pairs
        ]
        answered = wait_for(filter(None, asked), timeout_s).done
        return [one.result() if one in answered else None for one in asked]

    # ------------------------------------------------------------------------------------------ forming

    def _form(self, declaration: Declaration) -> Membership:
        deadline = monotonic() + declaration.timeout_s
        me = ray_internals.current_actor_id()
        for actor in declaration.actors:
            if me and actor._actor_id.hex() == me:
                raise SelfDrivenError(actor=ray_internals.describe_actor(actor))
        if declaration.backend != "auto":
            backends.get(declaration.backend, declaration.name)  # unknown names are refused before anybody is asked
        infos = _describe(declaration, deadline)
        members = declaration.ranked(infos)
        spec = declaration.spec(secrets.token_hex(8), _choose_backend(declaration, members))
        membership = Membership(spec=spec, members=members, costs=costs.current())
        actors = {actor._actor_id.hex(): actor for actor in declaration.actors}
        self._gates[spec.group_id] = (Gate(spec.group_id, spec.world_size, spec.name), membership)
        try:
            for info in infos:
                member = members[membership.rank_of(info["actor_id"])]
                self._lease(member, actors[member.actor_id], info, deadline).group_ids.add(spec.group_id)
            self._join([membership], deadline)
            membership = self._with_inner(membership, deadline)
        except BaseException:
            self._dissolve(membership)
            raise
        return membership

    def _with_inner(self, membership: Membership, deadline: float) -> Membership:
        """The group with those inside it, where plans may go host by host; as it was where these can't be formed."""
        inner = inner_groups(membership)
        if not inner:
            return membership
        for one in inner:
            for member in one.members:
                self.peer(member.actor_id).group_ids.add(one.spec.group_id)
        whole = replace(membership, inner=inner)
        try:
            self._join([one for one in inner if one.spec.world_size > 1], deadline)
        except RaycollectError as exc:
            for one in inner:
                self._part(one)
            if isinstance(exc, (ActorGoneError, CollectiveTimeoutError)):
                raise
            _log.warning("group %r goes without host-by-host plans: %s", membership.spec.name, exc)
            return membership
        gate, _ = self._gates[membership.spec.group_id]
        self._gates[membership.spec.group_id] = (gate, whole)
        return whole

    def _lease(self, member: Member, actor: Any, info: dict[str, Any], deadline: float) -> Peer:
        peer = self._peers.get(member.actor_id)
        if peer is not None and peer.info["incarnation"] == member.incarnation:
            return peer
        peer = Peer(self, info, actor, plain.run_program)
        hello = {"controller": self.controller_id, "description": ray_internals.describe_process()}
        try:
            peer.link = self._hub.connect(member.address, hello, peer, max(deadline - monotonic(), 0.1))
            peer.welcome(max(deadline - monotonic(), 0.1))
        except BaseException as exc:
            if peer.link is not None:
                peer.link.close()
            if isinstance(exc, ConnectionLostError):
                raise ActorGoneError(op="declare", rank=member.rank, actor=member.actor, detail=exc.detail) from exc
            raise
        self._peers[member.actor_id] = peer
        return peer

    def _join(self, memberships: Sequence[Membership], deadline: float) -> None:
        waiting: dict[int, _Joining] = {}
        for membership in memberships:
            members = [asdict(replace(m, address=replace(m.address, secret=b""))) for m in membership.members]
            asked = {next(self._requests): _Joining(member) for member in membership.members}
            self._joining.update(asked)
            waiting.update(asked)
            for request, joining in asked.items():
                self.peer(joining.member.actor_id).send(
                    Join(request=request, group=asdict(membership.spec), rank=joining.member.rank, members=members)
                )
        try:
            late = [one for one in waiting.values() if not one.settled.wait(max(deadline - monotonic(), 0))]
        finally:
            for request in waiting:
                del self._joining[request]
        errors = [one.error for one in waiting.values() if one.error is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, PlanAbortedError)), errors[0])
        if late:
            names = ", ".join(f"rank {one.member.rank} ({one.member.actor})" for one in late)
            raise CollectiveTimeoutError(
                op="declare",
                group_name=memberships[0].spec.name,
                detail=f"not joined in time: {names}",
                missing=tuple(one.member.rank for one in late),
            )

    def _dissolve(self, membership: Membership) -> None:
        """Ends a group everywhere, and the leases that no other group needs."""
        group_id = membership.spec.group_id
        self.revision = object()
        reason = PlanAbortedError(detail="its group was destroyed")
        for flight in [flight for flight in self.flights() if membership in flight.groups]:
            self.send(flight, flight.fail(reason))
        for one in reversed(membership.tree):
            self._part(one)
        self._gates.pop(group_id, None)
        self._held.pop(group_id, None)

    def _part(self, membership: Membership) -> None:
        """Lets the members of a group leave it, and ends the leases that no other group needs."""
        group_id = membership.spec.group_id
        for member in membership.members:
            peer = self._peers.get(member.actor_id)
            if peer is None or group_id not in peer.group_ids:
                continue
            peer.group_ids.discard(group_id)
            peer.send(Leave(group_id=group_id))
            if not peer.group_ids:
                peer.send(Bye())
                del self._peers[member.actor_id]
                if peer.link is not None:
                    peer.link.close()
        self._broken.pop(group_id, None)

    # ------------------------------------------------------------------------------------------ flights

    def take_off(self, make: Callable[[int], _Flight], width: int = 1) -> _Flight:
        """Registers a new flight under the next numbers, as many as it has launches; called under `dispatching`."""
        if self._forsaken:
            self._close_forsaken()
        flight = make(next(self._seq))
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
        self._deliver(flight.plan.participants, orders)
        if flight.landed:
            self._flights.pop(flight.seq, None)

    def _relay(self, membership: Membership, orders: Orders) -> None:
        """Carries out what a gate wants said; where what all bring to a meeting is too long, their calls end."""
        for rank, message in orders:
            try:
                self._deliver(membership.roster.members, [(rank, message)])
            except ProtocolError as exc:
                if not isinstance(message, Met):
                    raise
                denial = Deny(group_id=message.group_id, lane=message.lane, call=0, error=to_wire(exc))
                self._deliver(membership.roster.members, [(rank, denial)])

    def _deliver(self, actor_ids: Sequence[str], orders: Orders) -> None:
        """Sends messages.

        Raises:
            ProtocolError: One is too long; it and those after it were not sent.
        """
        for at, message in orders:
            peer = self._peers.get(actor_ids[at])
            if peer is not None:
                peer.send(message)

    # ------------------------------------------------------------------------------------------ channel

    def received(self, peer: Peer, message: Any) -> None:
        """A message of a participant; on the hub's thread, so nothing here may wait."""
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise ProtocolError(detail=f"{type(message).__name__} has no place here")
        handle(self, peer, message)

    def lost(self, peer: Peer, reason: str) -> None:
        """A participant's connection has ended; on the hub's thread."""
        actor_id = peer.info["actor_id"]
        if self._peers.get(actor_id) is not peer:
            return
        del self._peers[actor_id]
        peer.link = None
        for group_id in peer.group_ids:
            self._broken[group_id] = f"{peer.info['actor']} died ({reason})"
            if group_id in self._gates:
                gate, membership = self._gates[group_id]
                self._relay(membership, gate.lost(membership.rank_of(actor_id), reason))
        self.revision = object()
        gone = ActorGoneError(op="declare", actor=peer.info["actor"], detail=f"it ended ({reason})")
        if any(one.member.actor_id == actor_id for one in list(self._joining.values())):
            self._fail_join(gone)
        for flight in self.flights():
            position = flight.plan.positions.get(actor_id)
            if position is not None:
                self.send(flight, flight.lost(position, reason))

    def _joined(self, peer: Peer, message: Joined) -> None:
        joining = self._joining.get(message.request)
        if joining is None:
            return
        if message.error is not None:
            self._fail_join(from_wire(message.error))
        joining.settled.set()

    def _fail_join(self, error: RaycollectError) -> None:
        """Ends the wait for all members: only one group is formed at a time, and it can't be any more."""
        for joining in list(self._joining.values()):
            joining.error = joining.error or error
            joining.settled.set()

    def _store(self, peer: Peer, message: Store) -> None:
        stored = Stored(group_id=message.group_id, name=message.name, value=message.value)
        for other in list(self._peers.values()):
            if message.group_id in other.group_ids and other is not peer:
                other.send(stored)

    def _meet(self, peer: Peer, message: Any) -> None:
        """What a member says to the hub of its group; only this thread uses the gates."""
        found = self._gates.get(message.group_id)
        if found is not None:  # else the group was destroyed meanwhile
            gate, membership = found
            self._relay(membership, gate.receive(membership.rank_of(peer.info["actor_id"]), message))

    def _stuck(self, peer: Peer, message: Stuck) -> None:
        """A participant waits, or no more. Of a plan all groups hear that it is in: any may have a call that waits."""
        if message.group_id:
            self._meet(peer, message)
            return
        flight = self._flight_of(message.seq)
        if message.seq and flight is None:
            return
        for group_id in peer.group_ids & self._gates.keys():
            _, membership = self._gates[group_id]
            actors = () if flight is None else flight.plan.participants
            ranks = [rank for rank in map(membership.rank_of, actors) if rank >= 0]
            self._meet(peer, replace(message, group_id=group_id, ranks=ranks))

    def _depart(self, peer: Peer, message: Depart) -> None:
        """A member has left by itself: it is answered, and the group does no more for the driver either."""
        if message.group_id in self._gates:
            self._broken.setdefault(message.group_id, f"{peer.info['actor']} has left: it destroyed the group itself")
            self.revision = object()
            self._meet(peer, message)
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
                self._broken.setdefault(membership.spec.group_id, error.detail)
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

        ref._on_completed(settled)


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


def _describe(declaration: Declaration, deadline: float) -> list[dict[str, Any]]:
    """Asks every member who it is: an actor task each, so a member that is busy or pending is waited for."""
    refs = [
        actor._raycollect_describe.remote() if is_participant(actor) else actor.__ray_call__.remote(plain.describe)
        for actor in declaration.actors
    ]
    _, late = ray.wait(refs, num_returns=len(refs), timeout=max(deadline - monotonic(), 0))
    names = [ray_internals.describe_actor(actor) for actor in declaration.actors]
    if late:
        missing = tuple(rank for rank, ref in enumerate(refs) if ref in late)
        raise CollectiveTimeoutError(
            op="declare",
            group_name=declaration.name,
            detail=f"after {declaration.timeout_s:g} s still pending or busy: "
            + ", ".join(f"rank {rank} ({names[rank]})" for rank in missing),
            missing=missing,
            timeout_s=declaration.timeout_s,
        )
    infos = []
    for rank, ref in enumerate(refs):
        try:
            info = ray.get(ref)
            in_order = not getattr(declaration.actors[rank], "_ray_allow_out_of_order_execution", False)
            infos.append({**info, "ordered": info["ordered"] and in_order})
        except RayActorError as exc:
            raise ActorGoneError(
                op="declare", group_name=declaration.name, rank=rank, actor=names[rank], detail="the actor is dead"
            ) from exc
    return infos


def _choose_backend(declaration: Declaration, members: tuple[Member, ...]) -> str:
    machines = [member.machine for member in members]
    chosen = backends.choose(machines) if declaration.backend == "auto" else declaration.backend
    backends.check_placement(chosen, machines, declaration.name)
    return chosen
