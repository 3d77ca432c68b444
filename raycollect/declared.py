"""A declared group, as the process that declared it holds it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from raycollect import diagnosis, imperative, ray_internals
from raycollect import group as groups
from raycollect.channel.messages import Seen, Surveyed
from raycollect.controller import Controller
from raycollect.errors import InvalidGroupError, UnknownGroupError
from raycollect.flight import Flight
from raycollect.group import Declaration, Membership
from raycollect.model import Member
from raycollect.pos import StoreStatistics
from raycollect.pos.arena import ArenaStatistics
from raycollect.rank_table import Place, RankTable

_log = logging.getLogger("raycollect")
_Statistics = TypeVar("_Statistics", StoreStatistics, ArenaStatistics)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One rank, at the moment of asking.

    Attributes:
        rank: Its rank.
        actor: What a person calls it.
        node_id: The Ray node that it runs on.
        pid: Its process.
        ordered: True: its methods run one at a time, and collectives take their place among them, or between them
            where the group's ordering is ``"data"``. False (async and threaded actors): collectives run after their
            operands' methods and after earlier collectives, and may overlap other methods.
        plans: The collectives of this controller that it has not ended.
        steps: For each of them where it is in it: at the door, or in which bundle of calls; of a captured step which
            call; empty where it has not begun it.
        awaited_s: How long others have waited for it, from the first arrival at a door to which it has not come, in
            seconds; 0: nobody waits for it.
        answers: Whether its process has said what follows; it does while methods run, but not where it is gone, or
            stopped, or a call in it holds the interpreter's lock.
        doing: The outermost call of the user's that is under way there: name, file and line; empty for none.
        stack: From there on a line per frame, the innermost last.
        ended: The last collective of this controller that it has ended; 0: none.
        story: The tail of its recorder, oldest first.
    """

    rank: int
    actor: str
    node_id: str
    pid: int
    ordered: bool
    plans: tuple[int, ...]
    steps: tuple[str, ...]
    awaited_s: float
    answers: bool
    doing: str
    stack: tuple[str, ...]
    ended: int
    story: tuple[str, ...]

    def __str__(self) -> str:
        text = f"rank {self.rank} ({self.actor}, pid {self.pid}): "
        if not self.answers:
            text += "no answer"
        else:
            text += f"in {self.doing}" if self.doing else "in no method"
            text += f", has ended {self.ended}" if self.ended else ""
        if self.plans:
            places = zip(self.plans, self.steps, strict=True)
            text += f", has not ended {', '.join(f'{plan} ({step})' if step else str(plan) for plan, step in places)}"
        if self.awaited_s:
            text += f", awaited for {self.awaited_s:.1f} s"
        return "\n    ".join((text, *(self.stack if self.doing else ())))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GroupStatus:
    """A group, at the moment of asking.

    Attributes:
        state: ``"alive"``, ``"broken"`` or ``"destroyed"``.
        detail: Why it is broken.
        members: By rank.
    """

    state: str
    detail: str
    members: tuple[MemberStatus, ...]

    def __repr__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return "\n  ".join((f"<GroupStatus {self.state}{detail}", *map(str, self.members))) + ">"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatistics:
    """What one rank's process holds, for all groups that it is in, at the moment of its answer.

    Attributes:
        rank: Its rank.
        actor: What a person calls it.
        store: The tensors that its methods returned.
        arena: Its shared memory, and what it has mapped of others'.
    """

    rank: int
    actor: str
    store: StoreStatistics
    arena: ArenaStatistics

    def __str__(self) -> str:
        store, arena = self.store, self.arena
        text = f"rank {self.rank} ({self.actor}): {store.held} refs held, {store.freed} freed, {store.dirty} dirty; "
        if arena.limit:
            text += f"arena: {_size(arena.in_use)} in {arena.blocks} blocks, {_size(arena.backed)} backed, "
            text += f"limit {_size(arena.limit)}"
        else:
            text += "no arena"
        return f"{text}, {_size(arena.mapped)} mapped of others"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GroupStatistics:
    """What the members of a group hold, at the moment of asking.

    Attributes:
        members: By rank; None for one that is gone, or did not answer in time.
    """

    members: tuple[MemberStatistics | None, ...]

    def __repr__(self) -> str:
        lines = (str(one or f"rank {rank}: gone, or silent") for rank, one in enumerate(self.members))
        return "\n  ".join(("<GroupStatistics", *lines)) + ">"


class Group:
    """A declared group, in the process that declared it. Holds its actors' handles."""

    def __init__(self, controller: Controller, membership: Membership, actors: Sequence[Any]) -> None:
        self._controller = controller
        self._hold(membership, actors)

    def _hold(self, membership: Membership, actors: Sequence[Any]) -> None:
        by_id = {actor._actor_id.hex(): actor for actor in actors}
        self._membership = membership
        self._actors = tuple(by_id[member.actor_id] for member in membership.members)

    @property
    def name(self) -> str:
        """Its name."""
        return self._membership.spec.name

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return self._membership.spec.world_size

    @property
    def backend(self) -> str:
        """The backend that it uses, never ``"auto"``."""
        return self._membership.spec.backend

    @property
    def ordering(self) -> str:
        """What orders its collectives: ``"program"`` or ``"data"``."""
        return self._membership.spec.ordering

    @property
    def actors(self) -> tuple[Any, ...]:
        """The actor handles by rank."""
        return self._actors

    @property
    def epoch(self) -> int:
        """How often it was rebuilt."""
        return self._membership.epoch

    def rank_table(self) -> RankTable:
        """Which rank runs on which device of which node; ``group.rank_table().write(path)`` writes the file.

        A device is the accelerator that Ray gave the actor; where the actors of a node do not have one each, devices
        are counted from 0 on.
        """
        members = self._membership.members
        return RankTable.of_places([Place.of(m.node_id, dict(m.accelerators), m.actor) for m in members])

    def status(self, timeout_s: float = 2.0) -> GroupStatus:
        """Where it stands, and what its members are doing. They answer from a thread of their own, also while busy.

        Args:
            timeout_s: How long to wait for their answers, in seconds; 0: they are not asked.
        """
        membership, controller = self._membership, self._controller
        state, detail = self._state()
        asked = membership.members if timeout_s > 0 else ()
        answers = controller.look(asked, timeout_s) if asked else [None] * self.world_size
        flights = [flight for flight in controller.flights() if membership in flight.groups and not flight.landed]
        by_actor = dict(zip((m.actor_id for m in membership.members), answers, strict=True))
        members = tuple(_member_status(m, flights, by_actor) for m in membership.members)
        return GroupStatus(state=state, detail=detail, members=members)

    def _state(self) -> tuple[str, str]:
        """Its state, and why it is broken."""
        if not self._controller.exists(self._membership):
            return groups.DESTROYED, ""
        detail = self._controller.why_broken(self._membership)
        return (groups.BROKEN if detail else groups.ALIVE), detail

    def statistics(self, timeout_s: float = 10.0) -> GroupStatistics:
        """What its members hold. They answer from a thread of their own, so that busy ones do as well.

        Args:
            timeout_s: How long to wait for their answers, in seconds.

        Raises:
            UnknownGroupError: It was destroyed.
        """
        if not self._controller.exists(self._membership):
            raise UnknownGroupError(group_name=self.name, detail="it was destroyed")
        answers = self._controller.survey(self._membership.members, timeout_s)
        pairs = zip(self._membership.members, answers, strict=True)
        return GroupStatistics(
            members=tuple(None if one is None else _statistics(member, one) for member, one in pairs)
        )

    def rebuild(self, actors: Sequence[Any] | None = None, *, timeout_s: float = 60.0) -> Group:
        """Forms the group again under its name, after a member has died or a collective has broken it.

        It has a new epoch: whatever the old one still has under way is aborted, and its messages are nobody's any more.
        Captured steps have to be recorded again, members' own calls go on in the new group.

        Args:
            actors: The actor handles by rank: old members, in any order, and new ones. None: the members that live, in
                the order of their ranks. One that Ray restarts (`max_restarts`) is waited for; it has lost its tensors.
            timeout_s: How long to wait for the members, in seconds.

        Returns:
            This group.

        Raises:
            UnknownGroupError: It was destroyed. Nothing has changed, as with all errors but the last.
            InvalidGroupError: The actors can't form a group; with every reason.
            GroupBrokenError: No member lives.
            ActorGoneError: One of `actors` is dead.
            CollectiveTimeoutError: One is busy, or pending; the error names it. Rebuild it without that one.
            RaycollectError: A member could not join. The group is broken, and may be rebuilt again.
        """
        self._hold(*self._controller.rebuild(self._membership, actors, timeout_s))
        return self

    def destroy(self) -> None:
        """Ends the group; the actors live on. Collectives of it under way are aborted."""
        self._controller.destroy(self.name)

    def __repr__(self) -> str:
        members = ", ".join(member.actor for member in self._membership.members)
        order = f"{self.ordering} order"
        return f"<Group {self.name!r} of {members}; backend {self.backend}, {order}, {self._state()[0]}>"


def _member_status(member: Member, flights: Sequence[Flight], seen: Mapping[str, Seen | None]) -> MemberStatus:
    pending = [one for one in flights if one.is_pending(one.plan.positions.get(member.actor_id, -1))]
    mine = seen[member.actor_id]
    return MemberStatus(
        rank=member.rank,
        actor=member.actor,
        node_id=member.node_id,
        pid=member.pid,
        ordered=member.ordered,
        plans=tuple(one.seq for one in pending),
        steps=tuple(diagnosis.step_of(one, mine) for one in pending),
        awaited_s=max((diagnosis.awaited_s(one, member.actor_id, seen) for one in pending), default=0.0),
        **diagnosis.told(mine),
    )


def _statistics(member: Member, answer: Surveyed) -> MemberStatistics:
    def part(cls: type[_Statistics]) -> _Statistics:
        return cls(**{field.name: getattr(answer, field.name) for field in fields(cls)})

    return MemberStatistics(
        rank=member.rank, actor=member.actor, store=part(StoreStatistics), arena=part(ArenaStatistics)
    )


def _size(nbytes: int) -> str:
    """``1.5 MiB``: for a person."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 4)
    return f"{nbytes / (1 << 10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def declare_collective_group(
    actors: Sequence[Any],
    world_size: int | None = None,
    ranks: Sequence[int] | None = None,
    backend: str = "auto",
    group_name: str = "default",
    gloo_timeout: float = 30_000,
    *,
    options: Mapping[str, Any] | None = None,
    rank_table: Any = None,
    pg_options: Any = None,
    ordering: str = "program",
    timeout_s: float = 60.0,
) -> Group:
    """Declares actors to be a group; returns when every member has joined.

    Actors whose classes inherit `CollectiveParticipant` can do all that there is. Any other actor can be a member, too:
    it makes imperative calls and takes part in barriers, but has no tensors that refs could stand for.

    Args:
        actors: The actor handles.
        world_size: The number of actors, if given.
        ranks: The rank of each actor, a permutation of 0 to n-1; by default their order.
        backend: ``"auto"`` takes shared memory where all members share a host and sockets otherwise; others by name.
        group_name: What to call it; the verbs use ``"default"`` unless told otherwise.
        gloo_timeout: How long imperative calls of the members wait for each other where they do not say, in
            milliseconds; on every backend, for all its name.
        options: The same arguments as a dict, ``rank`` for ``ranks`` too.
        rank_table: The ranks by node and device instead: the path of a file, its content as a dict, or a `RankTable`.
            Where neither this nor `ranks` is given, the file that ``RANK_TABLE_FILE`` names is used.
        pg_options: Options for the backend: a dict of plain values, or an object with such attributes. To
            ``"torch:sccl"`` a rank table's ``chip_map`` is added.
        ordering: ``"program"``: collectives take their place in each actor's queue. ``"data"``: they overtake methods
            that wait there, and run after the methods that return their operands, after earlier collectives, and
            never while a method of an ordered actor runs.
        timeout_s: How long to wait for the members, in seconds; an actor that is still pending is named.

    Returns:
        The group.

    Raises:
        InvalidGroupError: The arguments can't form a group; with every reason.
        GroupExistsError: A group of that name is declared.
        UnknownBackendError, BackendNotInstalledError, BackendUnavailableError: The backend can't be used.
        ActorGoneError, ParticipantDiedError, CollectiveTimeoutError: A member did not join.
        ControllerConflictError: Another process drives one of the actors.
        SelfDrivenError: The calling actor is among them.
        RayClientError: This process is connected by ray://.
    """
    asked: dict[str, Any] = {
        "world_size": world_size,
        "ranks": ranks,
        "backend": backend,
        "group_name": group_name,
        "gloo_timeout": gloo_timeout,
        "rank_table": rank_table,
        "pg_options": pg_options,
        "ordering": ordering,
        "timeout_s": timeout_s,
    }
    controller = Controller.current()
    declaration = Declaration.of(actors, **_with_options(asked, options))
    membership = controller.declare(declaration)
    return Group(controller, membership, declaration.actors)


create_collective_group = declare_collective_group


def _with_options(asked: dict[str, Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
    given = dict(options or {})
    if "rank" in given:
        given["ranks"] = given.pop("rank")
    strange = sorted(set(given) - set(asked))
    if strange:
        detail = f"unknown options {strange}; there are {sorted([*asked, 'rank'])}"
        raise InvalidGroupError(group_name=str(asked["group_name"]), detail=detail)
    return {**asked, **given}


def destroy_collective_group(group_name: str = "default") -> None:
    """Ends a declared group; the actors live on. Collectives of it under way are aborted.

    Inside a member it leaves that group. Where the driver declared it, the driver's verbs then raise GroupBrokenError;
    once all members have left, its name is free there. In an actor or task that is no member (any more) it only logs a
    warning, as in `ray.util.collective`, so that cleaning up twice does no harm.

    Raises:
        UnknownGroupError: On the driver: there is none of that name.
    """
    if imperative.is_group_initialized(group_name):
        imperative.destroy_collective_group(group_name)
        return
    controller = Controller.current()
    if ray_internals.is_worker() and not controller.is_declared(group_name):
        _log.warning("there is no group %r to destroy in this process", group_name)
    else:
        controller.destroy(group_name)


destroy_group = destroy_collective_group
