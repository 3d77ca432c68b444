"""Membership: who is which rank, and which operand belongs to whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from raycollect import ray_internals
from raycollect.errors import InvalidGroupError, Violation
from raycollect.handle import Handle
from raycollect.model import GroupSpec, Key, Member

ALIVE, BROKEN, DESTROYED = "alive", "broken", "destroyed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A group with its members, as its controller knows it.

    Attributes:
        spec: What the planner sees.
        members: By rank.
    """

    spec: GroupSpec
    members: tuple[Member, ...]
    _ranks: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ranks", {member.actor_id: member.rank for member in self.members})

    def rank_of(self, actor_id: str) -> int:
        """The rank of an actor; -1 where it is no member."""
        return self._ranks.get(actor_id, -1)


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
        return _foreign(position, f"a {type(ref).__name__}", "")
    key, actor_id = ray_internals.read_ref(ref)
    if actor_id:
        return Operand(ref=ref, key=key, actor_id=actor_id)
    value = ray.get(ref)
    if isinstance(value, Handle):
        return Operand(ref=ref, key=value.key, actor_id=value.actor_id)
    origin = "made by ray.put" if ray_internals.is_put(ref) else "returned by a task"
    return _foreign(position, f"a {type(value).__name__} {origin}", ref.hex())


def _foreign(position: int, found: str, ref: str) -> Violation:
    expected = "an ObjectRef that a method of a participant returned"
    return Violation(kind="foreign", rank=position, field="ref", found=found, expected=expected, ref=ref)


def bind(operands: Sequence[Operand], membership: Membership) -> list[tuple[int, Operand]] | list[Violation]:
    """Gives each operand its rank.

    Returns:
        (rank, operand), ascending; or every reason why that can't be.
    """
    ranked: dict[int, Operand] = {}
    found: list[Violation] = []
    for one in operands:
        rank = membership.rank_of(one.actor_id)
        if rank < 0:
            found.append(_outsider(one, membership))
        elif rank in ranked:
            found.append(_second_ref(one, rank, membership.members[rank].actor))
        else:
            ranked[rank] = one
    return found or sorted(ranked.items(), key=lambda item: item[0])


def repeated(operands: Sequence[Operand]) -> list[Violation]:
    """Operands whose actor has one already, for groups whose ranks are positions."""
    ids = [one.actor_id for one in operands]
    return [_second_ref(one, rank) for rank, one in enumerate(operands) if one.actor_id in ids[:rank]]


def _second_ref(one: Operand, rank: int, actor: str = "") -> Violation:
    found = "a second ref of the same actor"
    return Violation(
        kind="duplicate", rank=rank, field="ref", found=found, expected="one per actor", actor=actor, ref=_hex(one)
    )


def _outsider(one: Operand, membership: Membership) -> Violation:
    stranger = strangers([one])
    if stranger:
        return stranger[0]
    actor = ray_internals.describe_actor(ray_internals.actor_handle(one.actor_id))
    expected = f"one of {', '.join(member.actor for member in membership.members)}"
    return Violation(kind="not_member", rank=-1, field="actor", found=actor, expected=expected, ref=_hex(one))


def strangers(operands: Sequence[Operand]) -> list[Violation]:
    """Operands whose actors can't take part in any group: without the mixin, or unknown to this process."""
    found = []
    for position, one in enumerate(operands):
        handle = ray_internals.actor_handle(one.actor_id)
        if handle is None:
            kind, what = "not_member", f"actor {one.actor_id[:6]}, of which this process has no handle"
        elif not is_participant(handle):
            kind, what = "not_participant", f"{ray_internals.describe_actor(handle)}, without the mixin"
        else:
            continue
        found.append(
            Violation(kind=kind, rank=position, field="actor", found=what, expected="a participant", ref=_hex(one))
        )
    return found


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
        backend: A backend's name, or ``"auto"``.
        actors: The actor handles by rank.
        ordering: Always ``"program"`` for now.
        timeout_s: How long to wait for all members, in seconds.
    """

    name: str
    backend: str
    actors: tuple[Any, ...]
    ordering: str
    timeout_s: float

    @classmethod
    def of(
        cls,
        actors: Any,
        world_size: int | None,
        ranks: Any,
        backend: str,
        group_name: str,
        *,
        ordering: str = "program",
        timeout_s: float = 60.0,
    ) -> Declaration:
        """Checks the arguments of `declare_collective_group`.

        Raises:
            InvalidGroupError: With every reason.
        """
        given = list(actors) if isinstance(actors, (list, tuple)) else None
        problems = ["actors is not a list"] if given is None else _problems(given, world_size, ranks)
        if not isinstance(group_name, str) or not group_name:
            problems.append(f"group_name is {group_name!r}, not a non-empty string")
        if ordering != "program":
            problems.append(f"ordering is {ordering!r}; 'program' is what there is")
        if not 0 < timeout_s < math.inf:
            problems.append(f"timeout_s is {timeout_s}, not a positive, finite number of seconds")
        if problems or given is None:
            raise InvalidGroupError(group_name=str(group_name), detail="; ".join(problems))
        order = list(ranks) if ranks is not None else list(range(len(given)))
        by_rank = tuple(given[order.index(rank)] for rank in range(len(given)))
        return cls(name=group_name, backend=backend, actors=by_rank, ordering=ordering, timeout_s=timeout_s)


def _problems(actors: list[Any], world_size: int | None, ranks: Any) -> list[str]:
    problems = []
    if not actors:
        problems.append("the list of actors is empty")
    strangers = [type(a).__name__ for a in actors if not isinstance(a, ray.actor.ActorHandle)]
    if strangers:
        problems.append(f"not an actor handle: {', '.join(strangers)} (call Class.remote(...) first)")
        return problems
    ids = [actor._actor_id.hex() for actor in actors]
    doubled = sorted({ray_internals.describe_actor(a) for a, i in zip(actors, ids, strict=True) if ids.count(i) > 1})
    if doubled:
        problems.append(f"{', '.join(doubled)} more than once")
    outside = [ray_internals.describe_actor(actor) for actor in actors if not is_participant(actor)]
    if outside:
        problems.append(f"{', '.join(outside)} without the mixin: let the class inherit CollectiveParticipant")
    if world_size is not None and world_size != len(actors):
        problems.append(f"world_size is {world_size}, but there are {len(actors)} actors")
    if ranks is not None and sorted(ranks) != list(range(len(actors))):
        problems.append(f"ranks are {list(ranks)}, not a permutation of 0 to {len(actors) - 1}")
    return problems
