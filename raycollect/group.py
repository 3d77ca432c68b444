"""Membership: who is which rank, and which operand belongs to whom."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raycollect import backends, options, ray_internals
from raycollect.costs import Costs
from raycollect.errors import InvalidGroupError, Violation
from raycollect.handle import Handle
from raycollect.model import GroupSpec, Key, Member
from raycollect.planner import Inner, Roster, Topology
from raycollect.rank_table import ENVIRONMENT_VARIABLE, Place, RankTable, assign
from raycollect.staging import memory_of
from raycollect.words import a_type

ALIVE, BROKEN, DESTROYED = "alive", "broken", "destroyed"

PROGRAM, DATA = ORDERINGS = ("program", "data")
"""What orders the collectives of a group: each actor's queue; or their operands, and the collectives before them."""

_WITH_CHIP_MAP = ("torch:sccl",)
"""The backends that take the devices of a rank table as their option ``chip_map``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Membership:
    """A group with its members, as its controller knows it.

    Attributes:
        spec: What backends see.
        members: By rank.
        inner: The groups inside it, which only its plans use: for each host that of its ranks, by the number of the
            host, and last that of each host's lowest rank; or none.
        is_derived: Whether refs have led to it: it has a name that nobody gave.
        epoch: How often the group was rebuilt.
        costs: What moving bytes between the members costs.
        chosen: Why ``"auto"`` has picked its backend; empty where nobody had to pick one.
        roster: What the planner sees; members are named by their actors' ids.
    """

    spec: GroupSpec
    members: tuple[Member, ...]
    inner: tuple[Membership, ...] = ()
    is_derived: bool = False
    epoch: int = 0
    costs: Costs = field(default_factory=Costs, repr=False)
    chosen: str = ""
    roster: Roster = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "roster", self._roster())

    def rank_of(self, actor_id: str) -> int:
        """The rank of an actor; -1 where it is no member."""
        return self.roster.rank_of(actor_id)

    @property
    def has_gpus(self) -> bool:
        """Whether Ray gave each member a GPU."""
        return all("GPU" in dict(member.accelerators) for member in self.members)

    @property
    def tree(self) -> tuple[Membership, ...]:
        """The group and those inside it."""
        return (self, *self.inner)

    def _roster(self) -> Roster:
        ranks = {member.actor_id: member.rank for member in self.members}
        inner = [
            Inner(spec=one.spec, ranks=tuple(ranks[member.actor_id] for member in one.members)) for one in self.inner
        ]
        return Roster(
            spec=self.spec,
            members=tuple(ranks),
            topology=self._topology(),
            hosts=tuple(inner[:-1]),
            leaders=inner[-1] if inner else None,
            bitwise=backends.get(self.spec.backend, self.spec.name).bitwise,
            chosen=self.chosen if self.has_gpus else "",
        )

    def _topology(self) -> Topology:
        places = [member.machine for member in self.members]
        return Topology.of(places, inside=self.costs.inside, between=self.costs.between)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A ref, and what its id tells.

    Attributes:
        ref: The ObjectRef as given; None: the output is made there.
        key: Its POS key.
        actor_id: The participant.
    """

    ref: Any
    key: Key | None
    actor_id: str


def operand(ref: Any, position: int) -> Operand | Violation:
    """Reads a ref.

    The id alone names the participant (P1). A ref that was put, or returned by a task, is looked into: it may hold a
    handle.
    """
    if not isinstance(ref, ray.ObjectRef):
        is_actor = isinstance(ref, ray.actor.ActorHandle)
        return _foreign(position, "an actor handle" if is_actor else a_type(ref), "")
    key, actor_id = ray_internals.read_ref(ref)
    if actor_id:
        return Operand(ref=ref, key=key, actor_id=actor_id)
    value = ray.get(ref)
    if isinstance(value, Handle):
        return Operand(ref=ref, key=value.key, actor_id=value.actor_id)
    origin = "made by ray.put" if ray_internals.is_put(ref) else "returned by a task"
    return _foreign(position, f"{a_type(value)} {origin}", ref.hex())


def _foreign(position: int, found: str, ref: str) -> Violation:
    expected = "an ObjectRef that a method of a participant returned"
    return Violation(kind="foreign", rank=position, field="ref", found=found, expected=expected, ref=ref)


def bind(
    operands: Sequence[Operand], membership: Membership, *, whole: bool = False
) -> dict[int, Operand] | list[Violation]:
    """Gives each operand its rank.

    Args:
        operands: What one parameter of a verb was given.
        membership: The group.
        whole: True where there must be one for every rank.

    Returns:
        rank -> operand; or every reason why that can't be.
    """
    ranked: dict[int, Operand] = {}
    found: list[Violation] = []
    for one in operands:
        rank = membership.rank_of(one.actor_id)
        if rank < 0:
            found.append(_outsider(one, membership))
        elif not membership.members[rank].participant:
            found.append(_no_participant(one, rank, membership.members[rank].actor))
        elif rank in ranked:
            found.append(_second_ref(one, rank, membership.members[rank].actor))
        else:
            ranked[rank] = one
    if whole and not found:
        absent = (member for member in membership.members if member.rank not in ranked)
        found = [_absent(member.rank, member.actor) for member in absent]
    return found or ranked


def repeated(operands: Sequence[Operand]) -> list[Violation]:
    """Operands whose actor has one already, for groups whose ranks are positions."""
    ids = [one.actor_id for one in operands]
    return [_second_ref(one, rank) for rank, one in enumerate(operands) if one.actor_id in ids[:rank]]


def _second_ref(one: Operand, rank: int, actor: str = "") -> Violation:
    found = "a second ref of the same actor"
    return Violation(
        kind="duplicate", rank=rank, field="ref", found=found, expected="one per actor", actor=actor, ref=_hex(one)
    )


def _absent(rank: int, actor: str) -> Violation:
    return Violation(kind="missing", rank=rank, field="operand", found="missing", expected="one ref", actor=actor)


def _outsider(one: Operand, membership: Membership) -> Violation:
    stranger = strangers([one])
    if stranger:
        return replace(stranger[0], rank=-1)  # it has none in a group of others
    actor = ray_internals.describe_actor(ray_internals.actor_handle(one.actor_id))
    expected = f"one of {', '.join(member.actor for member in membership.members)}"
    return Violation(kind="not_member", rank=-1, field="actor", found=actor, expected=expected, ref=_hex(one))


def strangers(operands: Sequence[Operand]) -> list[Violation]:
    """Operands whose actors can't take part in any plan: without the mixin, or unknown to this process."""
    found = []
    for position, one in enumerate(operands):
        handle = ray_internals.actor_handle(one.actor_id)
        if handle is None:
            what = f"{one.actor_id[:6]}, of which this process has no handle (is it of a Ray that was shut down?)"
            found.append(
                Violation(
                    kind="not_member", rank=position, field="actor", found=what, expected="a participant", ref=_hex(one)
                )
            )
        elif not is_participant(handle):
            found.append(_no_participant(one, position, ray_internals.describe_actor(handle)))
    return found


def _no_participant(one: Operand, rank: int, actor: str) -> Violation:
    found = f"{actor}, without the mixin"
    return Violation(
        kind="not_participant", rank=rank, field="actor", found=found, expected="a participant", ref=_hex(one)
    )


def _hex(one: Operand) -> str:
    return one.key.hex() if one.key else ""


def is_participant(handle: Any) -> bool:
    """True where the actor's class has the mixin."""
    return hasattr(handle, "_raycollect_run")


# ---------------------------------------------------------------------------------------------- declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What `declare_collective_group` was asked for, checked.

    Attributes:
        name: The group's name.
        backend: A backend's name in its one spelling, or ``"auto"``.
        actors: The actor handles by rank; as they were given where a rank table says the ranks.
        ordering: One of `ORDERINGS`.
        timeout_s: How long to wait for all members, in seconds.
        call_timeout_s: How long imperative calls of the members wait for each other, in seconds.
        options: `pg_options`, as `GroupSpec.options` has them.
        rank_table: The rank table, if there is one.
        rank_table_from: Where it is from, for a message.
    """

    name: str
    backend: str
    actors: tuple[Any, ...]
    ordering: str = PROGRAM
    timeout_s: float = 60.0
    call_timeout_s: float = 30.0
    options: tuple[tuple[str, Any], ...] = ()
    rank_table: RankTable | None = None
    rank_table_from: str = ""

    @classmethod
    def of(
        cls,
        actors: Any,
        world_size: Any,
        ranks: Any,
        backend: Any,
        group_name: Any,
        *,
        ordering: str = PROGRAM,
        timeout_s: float = 60.0,
        gloo_timeout: float = 30_000,
        pg_options: Any = None,
        rank_table: Any = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Declaration:
        """Checks the arguments of `declare_collective_group`.

        Raises:
            InvalidGroupError: With every reason.
        """
        problems = [*_actor_problems(actors), *_rank_problems(actors, world_size, ranks, backend)]
        for what, value in (("group_name", group_name), ("backend", backend)):
            if not isinstance(value, str) or not value:
                problems.append(f"{what} is {value!r}, not a non-empty string")
        if not isinstance(ordering, str) or ordering not in ORDERINGS:
            problems.append(f"ordering is {ordering!r}, not {' or '.join(map(repr, ORDERINGS))}")
        for what, unit, number in (("timeout_s", "seconds", timeout_s), ("gloo_timeout", "milliseconds", gloo_timeout)):
            if not isinstance(number, (int, float)) or not 0 < number < math.inf:
                problems.append(f"{what} is {number!r}, not a positive, finite number of {unit}")
        given, strange = options.read(pg_options)
        problems += strange
        table, source = _rank_table(actors, ranks, rank_table, environ, problems)
        if problems:
            raise InvalidGroupError(group_name=str(group_name), detail="; ".join(problems))
        order = list(range(len(actors))) if ranks is None else list(ranks)
        return cls(
            name=group_name,
            backend=backends.canonical(backend),
            actors=tuple(actors[order.index(rank)] for rank in range(len(actors))),
            ordering=ordering,
            timeout_s=timeout_s,
            call_timeout_s=gloo_timeout / 1000,
            options=given,
            rank_table=table,
            rank_table_from=source,
        )

    def over(self, actors: Sequence[Any] | None, timeout_s: float) -> Declaration:
        """The same group over other actors, by rank; None: the same ones. A rank table is for its own number of ranks.

        Raises:
            InvalidGroupError: With every reason.
        """
        problems = [] if actors is None else _actor_problems(actors)
        if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
            problems.append(f"timeout_s is {timeout_s!r}, not a positive, finite number of seconds")
        if problems:
            raise InvalidGroupError(group_name=self.name, detail="; ".join(problems))
        found = self.actors if actors is None else tuple(actors)
        table = self.rank_table if len(found) == len(self.actors) else None
        return replace(self, actors=found, timeout_s=timeout_s, rank_table=table)

    def ranked(self, infos: Sequence[dict[str, Any]]) -> tuple[Member, ...]:
        """Makes the members, by rank, of what the actors said of themselves.

        Args:
            infos: What each of `actors` said, in their order: the fields of `Member`, less the rank.

        Raises:
            InvalidGroupError: The actors are not where the rank table wants them.
        """
        ranks: Sequence[int] = range(len(infos))
        if self.rank_table is not None:
            places = [Place.of(one["node_id"], dict(one["accelerators"]), one["actor"]) for one in infos]
            try:
                ranks = assign(self.rank_table, places, group_name=self.name)
            except InvalidGroupError as exc:
                detail = f"{exc.detail}\nThe table is from {self.rank_table_from}"
                raise InvalidGroupError(group_name=self.name, detail=detail) from exc
        members = [Member(rank=rank, **info) for rank, info in zip(ranks, infos, strict=True)]
        return tuple(sorted(members, key=lambda member: member.rank))

    def spec(self, group_id: str, backend: str) -> GroupSpec:
        """The group, once its backend is chosen."""
        given = dict(self.options)
        if self.rank_table is not None and backend in _WITH_CHIP_MAP:
            given.setdefault("chip_map", self.rank_table.chip_map)
        return GroupSpec(
            name=self.name,
            group_id=group_id,
            backend=backend,
            world_size=len(self.actors),
            ordering=self.ordering,
            ops=backends.ops_of(backend),
            memory=memory_of(backend),
            options=tuple(sorted(given.items())),
            timeout_s=self.call_timeout_s,
        )


def _actor_problems(actors: Any) -> list[str]:
    if not isinstance(actors, (list, tuple)):
        return ["actors is not a list"]
    problems = [] if actors else ["the list of actors is empty"]
    strangers = [type(a).__name__ for a in actors if not isinstance(a, ray.actor.ActorHandle)]
    if strangers:
        return [f"not an actor handle: {', '.join(strangers)} (call Class.remote(...) first)"]
    ids = [actor._actor_id.hex() for actor in actors]
    doubled = sorted({ray_internals.describe_actor(a) for a, i in zip(actors, ids, strict=True) if ids.count(i) > 1})
    if doubled:
        problems.append(f"{', '.join(doubled)} more than once")
    return problems


def _rank_problems(actors: Any, world_size: Any, ranks: Any, backend: Any) -> list[str]:
    if not isinstance(actors, (list, tuple)):
        return []
    if isinstance(world_size, str) and ranks is None and not backends.is_known(world_size):
        said = "here, as in ray.util.collective, the world size stands"
        return [f"world_size is {world_size!r}: {said}; a name is given as group_name={world_size!r}"]
    if isinstance(world_size, str):
        name = f", group_name={ranks!r}" if isinstance(ranks, str) else ""
        said = "the second argument of ray.experimental.collective.create_collective_group is the backend"
        here = "here, as in ray.util.collective, it is the world size"
        call = f"create_collective_group(actors, backend={world_size!r}{name})"
        return [f"world_size is {world_size!r}: {said}; {here}. Call {call}"]
    problems = []
    if world_size is not None and (type(world_size) is bool or world_size != len(actors)):
        problems.append(f"world_size is {world_size!r}, but there are {len(actors)} actors")
    if ranks is not None and not _is_permutation(ranks, len(actors)):
        problems.append(f"ranks are {ranks!r}, not a permutation of 0 to {len(actors) - 1}")
    return problems


def _is_permutation(ranks: Any, count: int) -> bool:
    try:
        return not isinstance(ranks, (str, bytes)) and sorted(ranks) == list(range(count))
    except TypeError:
        return False


def _rank_table(
    actors: Any, ranks: Any, rank_table: Any, environ: Mapping[str, str], problems: list[str]
) -> tuple[RankTable | None, str]:
    """The table that says the ranks, and where it is from; where none is given, the environment may name one."""
    source = "the argument rank_table"
    try:
        if rank_table is not None:
            table: RankTable | None = RankTable.coerce(rank_table)
        elif ranks is None:
            table = RankTable.from_environment(environ)
            source = f"{ENVIRONMENT_VARIABLE}={environ.get(ENVIRONMENT_VARIABLE, '')} (pass ranks to go without it)"
        else:
            return None, ""
    except InvalidGroupError as exc:
        problems.append(exc.detail)
        return None, ""
    if table is None:
        return None, ""
    if ranks is not None:
        problems.append("ranks and rank_table both say the ranks: give one of them")
    if isinstance(actors, (list, tuple)) and actors and table.world_size != len(actors):
        problems.append(f"the rank table is of {table}, but there are {len(actors)} actors; it is from {source}")
    return table, source
