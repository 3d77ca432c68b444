"""The agreements before launches that the controller gathers, where no group has all participants of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raycollect.channel.messages import Arrivals, Arrive
from raycollect.driver.error_location import ErrorLocator, RankNames
from raycollect.engine.agreement import ArrivalGather
from raycollect.errors import ProtocolError
from raycollect.planner import Plan

ANSWER_NBYTES = 1 << 19  # how many bytes go into one message, which has to fit into a frame; each arrival alone did

_AgreementKey = tuple[int, int, str, tuple[int, ...]]  # (launch, round, group id, ranks)


class Gathered(NamedTuple):
    """A complete agreement."""

    message: Arrive
    places: Sequence[int]
    blobs: Sequence[bytes]
    is_last_round: bool

    def answers(self) -> list[Arrivals]:
        """What each of them is told, in parts that fit into frames."""
        parts, filled = list[list[bytes]]([[]]), 0
        for blob in self.blobs:
            if filled and filled + len(blob) > ANSWER_NBYTES:
                parts.append([])
                filled = 0
            parts[-1].append(blob)
            filled += len(blob)
        group_id, seq, number = self.message.group_id, self.message.seq, self.message.round
        return [
            Arrivals(group_id=group_id, seq=seq, round=number, blobs=part, more=part is not parts[-1]) for part in parts
        ]


class PlanArrivals:
    """Who has arrived where, for one plan. Its tracker's lock guards it."""

    def __init__(self, seq: int, plan: Plan, location: ErrorLocator) -> None:
        self._seq = seq
        self._plan = plan
        self._location = location
        self._gathers: dict[_AgreementKey, ArrivalGather] = {}

    def arrive(self, position: int, message: Arrive) -> Gathered | None:
        """A participant arrives; None unless it is the last one."""
        ranks = tuple(message.ranks)
        by_rank = self.positions_of(message.seq, message.group_id)
        places = [by_rank.get(rank, -1) for rank in ranks]
        if min(places, default=-1) < 0 or by_rank.get(message.rank) != position or ranks != tuple(sorted(set(ranks))):
            raise ProtocolError(detail=f"rank {message.rank} has no part in launch {message.seq} of ranks {ranks}")
        rounds = self.rounds_of(message.seq, message.group_id)
        if not 0 <= message.round < rounds:
            raise ProtocolError(detail=f"launch {message.seq} has no round {message.round} in its consistency check")
        key = (message.seq, message.round, message.group_id, ranks)
        blobs = self._gathers.setdefault(key, ArrivalGather(ranks)).arrive(message.rank, message.blob)
        return None if blobs is None else Gathered(message, places, blobs, message.round == rounds - 1)

    def missing(self) -> RankNames:
        """(rank, actor) of those who have not arrived at the latest agreement."""
        if not self._gathers:
            return []
        key = max(self._gathers)
        by_rank = self.positions_of(key[0], key[2])
        homes = (self._location.home(by_rank[at]) for at in self._gathers[key].missing)
        return [(group.rank_of(one.actor_id), one.actor) for group, one in homes]

    def rounds_of(self, launch: int, group_id: str) -> int:
        """How many agreements of a launch are gathered here; 0 where the launch is none of the plan's."""
        if launch != self._seq:
            return int(self._seq < launch < self._seq + self._plan.width)
        # Else a group gathers them, and only the commit is here.
        is_own = bool(group_id) == (self._plan.agreement is not None)
        return self._plan.rounds * is_own + (self._plan.commits and not group_id)

    def positions_of(self, launch: int, group_id: str) -> dict[int, int]:
        """Rank -> position of a group's members that take part; without a group, of all in that launch."""
        if group_id:
            return self._location.positions_of(group_id)
        return {at: at for at in range(len(self._plan.participants))}
