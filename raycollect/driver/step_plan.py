"""The plans of a captured step as one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raycollect.core.model import Key, Member
from raycollect.errors import RefusedError
from raycollect.planner import Membership, Plan


class Stage(NamedTuple):
    """One plan of a captured step.

    Attributes:
        first: The place of its first request among those of all stages.
        offset: The number of its first launch, counted from the run's first.
        positions: Its positions -> those in the whole step.
    """

    plan: Plan
    first: int
    offset: int
    positions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan(Plan):
    """All plans of a captured step, by the positions of all participants."""

    stages: tuple[Stage, ...]
    homes: tuple[tuple[Membership, Member], ...] = field(repr=False)
    touched: frozenset[Key] = field(default=frozenset(), repr=False)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.requests[0].name if len(self.requests) == 1 else "captured step"

    @property
    def timeout_s(self) -> float:
        """Runs have a limit of their own."""
        return float("inf")

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        participants: Sequence[str],
        homes: Sequence[tuple[Membership, Member]],
        touched: frozenset[Key] = frozenset(),
    ) -> StepPlan:
        """Combines the plans."""
        plans = [stage.plan for stage in stages]
        return cls(
            requests=tuple(request for plan in plans for request in plan.requests),
            parts=tuple(part for plan in plans for part in plan.parts),
            memberships=tuple(membership for plan in plans for membership in plan.memberships),
            participants=tuple(participants),
            order=(),
            alone=(),
            first_rounds=(),
            rounds=max((plan.rounds for plan in plans), default=0),
            agreement=None,
            width=max(sum(plan.width for plan in plans), 1),
            stages=tuple(stages),
            homes=tuple(homes),
            touched=touched,
        )

    def places_at(self, launch: int) -> Sequence[int]:
        """The positions that take part in a launch: not all have all plans."""
        stage = self._stage_of(launch)
        return () if stage is None else stage.positions

    def rounds_at(self, launch: int, *, in_group: bool) -> int:
        """How many agreements of a launch the controller gathers; 0: there is no such launch."""
        stage = self._stage_of(launch)
        if stage is None:
            return 0
        return stage.plan.rounds if launch == stage.offset else 1

    def heard(self, position: int, error: RefusedError) -> Sequence[int]:
        """The positions that have heard a refusal, which a participant reports: those of its stage."""
        number = max((violation.call for violation in error.violations), default=0)
        stage = next((stage for stage in reversed(self.stages) if stage.first <= max(number, 0)), None)
        return stage.positions if stage is not None and position in stage.positions else ()

    def _stage_of(self, launch: int) -> Stage | None:
        begun = [stage for stage in self.stages if stage.offset <= launch]
        return begun[-1] if begun and 0 <= launch < self.width else None
