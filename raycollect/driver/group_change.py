"""The members of a group after `Group.add`, `Group.remove` and `Group.replace`. Only `living` asks actors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from raycollect.core.model import Member
from raycollect.driver.participants import Participants
from raycollect.errors import InvalidGroupError
from raycollect.errors.text import a_type, listed, shown
from raycollect.group.membership import is_participant
from raycollect.planner import Membership
from raycollect.ray_bridge import ray_actors
from raycollect.ray_bridge.driver_handle import is_handle

ANSWER_S = 2.0
"""How long to wait for an answer of a member that should be dead, in seconds."""


def added(membership: Membership, actors: Sequence[Any], new: Any) -> list[Any]:
    """The actors by rank, with new ones at the end; InvalidGroupError has every reason."""
    newcomers = _several(new)
    _refuse(membership, _newcomer_problems(membership, newcomers))
    return [*actors, *newcomers]


def removed(membership: Membership, actors: Sequence[Any], members: Any) -> list[Any]:
    """The actors by rank without the removed ones; the other ranks close up. Raises as `added`."""
    problems: list[str] = []
    ranks = _ranks(membership, members, problems)
    if not problems and len(set(ranks)) == membership.spec.world_size:
        problems.append("no member would be left: destroy the group instead")
    _refuse(membership, problems)
    return [actor for rank, actor in enumerate(actors) if rank not in ranks]


def replaced(membership: Membership, dead: Any, new: Any) -> dict[int, Any]:
    """The new actor by the rank of the dead member that it replaces; raises as `added`."""
    problems: list[str] = []
    ranks, newcomers = _ranks(membership, dead, problems), _several(new)
    problems += _newcomer_problems(membership, newcomers)
    if not problems and len(ranks) != len(newcomers):
        problems.append(f"{len(ranks)} members to replace, but {len(newcomers)} actors in their place")
    _refuse(membership, problems)
    return dict(zip(ranks, newcomers, strict=True))


def living(members: Sequence[Member], peers: Participants) -> str:
    """Why members can't be replaced, as they are not known to be dead; empty if all are dead."""
    alive = [f"rank {member.rank} ({member.actor})" for member in members if not peers.has_ended(member, ANSWER_S)]
    if not alive:
        return ""
    return (
        f"alive, or not known to be dead: {listed(alive)}. End it with ray.kill(actor), or remove it and add the other"
    )


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _newcomer_problems(membership: Membership, actors: Sequence[Any]) -> list[str]:
    problems = [] if actors else ["no actor is given"]
    everybody = all(member.participant for member in membership.members)
    for actor in actors:
        if not is_handle(actor):
            problems.append(f"not an actor handle: {a_type(actor)} (call Class.remote(...) first)")
            continue
        rank, who = membership.rank_of(ray_actors.id_of(actor)), ray_actors.describe_actor(actor)
        if rank >= 0:
            problems.append(f"{who} is a member already: rank {rank}")
        elif everybody and not is_participant(actor):
            problems.append(
                f"{who} lacks the mixin that all members have: its class has to inherit CollectiveParticipant"
            )
    return problems


def _ranks(membership: Membership, members: Any, problems: list[str]) -> list[int]:
    ranks, size = [], membership.spec.world_size
    for member in _several(members):
        if is_handle(member):
            rank = membership.rank_of(ray_actors.id_of(member))
            if rank < 0:
                problems.append(f"{ray_actors.describe_actor(member)} is not a member")
        else:
            try:
                rank = -1 if isinstance(member, bool) else operator.index(member)
            except TypeError:  # arrays have `__index__`, whatever is in them
                rank = -1
            if not 0 <= rank < size:
                problems.append(f"{shown(member)} is neither a rank from 0 to {size - 1} nor the handle of a member")
                continue
        if rank in ranks:
            problems.append(f"rank {rank} more than once")
        ranks.append(rank)
    if not ranks and not problems:
        problems.append("no member is given")
    return ranks


def _refuse(membership: Membership, problems: Sequence[str]) -> None:
    if problems:
        raise InvalidGroupError(group_name=membership.spec.name, detail=listed(problems, "; "))
