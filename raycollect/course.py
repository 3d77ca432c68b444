"""The plans of a captured step as one, for those who ask who takes part, and what is at which door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raycollect.group import Membership
from raycollect.model import Key, Member
from raycollect.planner import Plan

__all__ = ["Course", "Stage"]


class Stage(NamedTuple):
    """One plan of a captured step.

    Attributes:
        plan: The plan.
        first: The place of its first request among those of all stages.
        offset: Its launches take the numbers from the run's own plus this.
        positions: Its position -> that in the whole step.
    """

    plan: Plan
    first: int
    offset: int
    positions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Course(Plan):
    """The plans of a captured step as one: what is asked of all of them, by the positions of all participants.

    Attributes:
        stages: The plans, in order.
        homes: For each position, the group that errors speak of, and the participant as its member.
        touched: The refs that methods are given, and may write.
    """

    stages: tuple[Stage, ...]
    homes: tuple[tuple[Membership, Member], ...] = field(repr=False)
    touched: frozenset[Key] = field(default=frozenset(), repr=False)

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self.requests[0].kind.value if len(self.requests) == 1 else "captured step"

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        participants: Sequence[str],
        homes: Sequence[tuple[Membership, Member]],
        touched: frozenset[Key] = frozenset(),
    ) -> Course:
        """Puts plans together."""
        plans = [stage.plan for stage in stages]
        return cls(
            requests=tuple(request for plan in plans for request in plan.requests),
            parts=tuple(part for plan in plans for part in plan.parts),
            rosters=tuple(roster for plan in plans for roster in plan.rosters),
            participants=tuple(participants),
            order=(),
            alone=(),
            brought=(),
            rounds=max((plan.rounds for plan in plans), default=0),
            door=None,
            width=max(sum(plan.width for plan in plans), 1),
            stages=tuple(stages),
            homes=tuple(homes),
            touched=touched,
        )

    def stage_of(self, launch: int) -> Stage | None:
        """The stage of a launch, by its number in a run; None where there is no such launch."""
        found = [stage for stage in self.stages if stage.offset <= launch]
        return found[-1] if found and 0 <= launch < self.width else None
