"""A declared group, as the process that declared it holds it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from raycollect import group as groups
from raycollect import imperative, ray_internals
from raycollect.channel.messages import Surveyed
from raycollect.controller import Controller
from raycollect.errors import InvalidGroupError, UnknownGroupError
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
            text += f", has not ended {', '.join(map(str, self.plans))}"
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
        self._membership = membership
        by_id = {actor._actor_id.hex(): actor for actor in actors}
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
        members = tuple(
            MemberStatus(
                rank=m.rank,
                actor=m.actor,
                node_id=m.node_id,
                pid=m.pid,
                ordered=m.ordered,
                plans=tuple(one.seq for one in flights if one.is_pending(one.plan.positions.get(m.actor_id, -1))),
                answers=seen is not None,
                doing="" if seen is None else seen.doing,
                stack=() if seen is None else tuple(seen.stack),
                ended=0 if seen is None else seen.ended,
                story=() if seen is None else tuple(seen.story),
            )
            for m, seen in zip(membership.members, answers, strict=True)
        )
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

    def destroy(self) -> None:
        """Ends the group; the actors live on. Collectives of it under way are aborted."""
        self._controller.destroy(self.name)

    def __repr__(self) -> str:
        members = ", ".join(member.actor for member in self._membership.members)
        order = f"{self.ordering} order"
        return f"<Group {self.name!r} of {members}; backend {self.backend}, {order}, {self._state()[0]}>"


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
