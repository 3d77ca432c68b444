"""Adds group names, ranks, actors and refs, which only the controller knows, to the errors of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from raycollect.core.model import Key, Member
from raycollect.engine.agreement import OUTPUT
from raycollect.errors import (
    CollectiveTimeoutError,
    FaultError,
    GroupBrokenError,
    RaycollectError,
    RefusedError,
    Violation,
)
from raycollect.planner import Made, Membership, Plan
from raycollect.planner.ir import Operands

RankNames = list[tuple[int, str]]  # (rank, actor)


@dataclass(frozen=True, eq=False)
class ErrorLocator:
    """Maps the positions, group ids and sources of a plan to ranks, group names and refs."""

    plan: Plan
    memberships: Sequence[Membership]
    keys: Sequence[Key]

    def home(self, position: int) -> tuple[Membership, Member]:
        """The group in which errors name a participant, and its member there."""
        number, rank = self.plan.involved[max(position, 0)][0]
        membership = self.memberships[number]
        return membership, membership.members[rank]

    def describe(self, position: int) -> str:
        """A participant in words: its rank; its actor where the plan has several groups."""
        _, member = self.home(position)
        return f"rank {member.rank}" if len(self._groups) == 1 else member.actor

    def positions_of(self, group_id: str) -> dict[int, int]:
        """Rank -> position, for the members of a group that take part."""
        group, positions = self._named_groups.get(group_id), self.plan.positions
        members = () if group is None else group.members
        return {member.rank: positions[member.actor_id] for member in members if member.actor_id in positions}

    def first_use(self, key: Key) -> tuple[int, int]:
        """(call, rank) that first uses a ref; the call is -1 in a plan of one call."""
        source = self.keys.index(key)
        for number, request in enumerate(self.plan.requests):
            for rank, *sources in request.operands:
                if source in sources:
                    return (number if len(self.plan.requests) > 1 else -1), rank
        return -1, -1

    def heard(self, position: int, error: RefusedError) -> Sequence[int]:
        """The positions that know of a reported refusal: all that were in the agreement."""
        return range(len(self.plan.participants))

    def blamed(self, error: GroupBrokenError) -> tuple[Membership, ...]:
        """The group that an error names; all groups if it names none of the plan."""
        group = self._named_groups.get(error.group_name)
        return self._groups if group is None else (group,)

    def locate(
        self, position: int, error: RaycollectError, story: tuple[str, ...], missing_now: RankNames
    ) -> RaycollectError:
        """Completes an error reported by a participant (-1: the controller), in place; a refusal becomes a new one."""
        # `missing_now`: the ranks missing at the latest agreement, for timeouts that name no rank.
        plan, group_names = self.plan, ", ".join(group.spec.name for group in self._groups)
        if isinstance(error, RefusedError):
            found_all = tuple(map(self._named, error.violations))
            return type(error)(op=plan.name, group_name=group_names, violations=found_all)
        if isinstance(error, GroupBrokenError):
            error.group_name = self.blamed(error)[0].spec.name
        if not isinstance(error, FaultError):
            return error
        named = self._named_groups.get(error.group_name)
        group = named or self.home(position)[0]
        error.op = plan.name if len(plan.requests) == 1 else error.op or plan.name
        error.group_name = group.spec.name if position >= 0 or named else group_names
        if error.rank < 0 and position >= 0 and not isinstance(error, CollectiveTimeoutError):  # it names the missing
            error.rank = group.rank_of(plan.participants[position])
        error.actor = error.actor or (group.members[error.rank].actor if 0 <= error.rank < len(group.members) else "")
        error.story = error.story or story
        if isinstance(error, CollectiveTimeoutError):
            missing, within = (_with_actors(ranks, group) for ranks in (error.missing, error.within))
            if not missing and not within:
                missing = missing_now
            error.missing, error.within = (tuple(rank for rank, _ in side) for side in (missing, within))
            if position >= 0 or not error.detail:
                error.detail = error.describe_missing(
                    *([f"rank {r} ({actor})" for r, actor in side] for side in (missing, within))
                )
        return error

    def _named(self, violation: Violation) -> Violation:
        number = max(violation.call, 0)
        if not 0 <= number < len(self.plan.requests):
            return violation
        operands = self.plan.requests[number].operands
        return add_operand(violation, self.memberships[number], operands, self.keys)

    @cached_property
    def _groups(self) -> tuple[Membership, ...]:
        return tuple(dict.fromkeys(self.memberships))

    @cached_property
    def _named_groups(self) -> dict[str, Membership]:
        """Group id, or name -> the group."""
        return {name: group for group in self._groups for name in (group.spec.group_id, group.spec.name)}


def add_operand(
    violation: Violation, membership: Membership, operands: Sequence[Operands], keys: Sequence[Key]
) -> Violation:
    """Adds the rank's actor and its ref, which neither the planner nor a participant knows."""
    members = membership.members
    actor = members[violation.rank].actor if 0 <= violation.rank < len(members) else ""
    src, dst = next(((src, dst) for rank, src, dst in operands if rank == violation.rank), (None, None))
    is_output = OUTPUT in violation.field or violation.field == "output" or src is None
    source: Any = dst if is_output else src
    ref = "" if source is None or isinstance(source, Made) else keys[source].hex()
    return replace(violation, actor=violation.actor or actor, ref=violation.ref or ref)


def _with_actors(ranks: Sequence[int], group: Membership) -> RankNames:
    return [(rank, group.members[rank].actor) for rank in ranks if 0 <= rank < len(group.members)]
