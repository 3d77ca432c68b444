"""The ranks of a group, and their hosts."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycollect.core.model import BY_RINGS, GroupSpec, Member, Pricing
from raycollect.planner.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Membership:
    """A group as it was formed. Compared by identity: it is part of the keys of caches."""

    spec: GroupSpec
    participants: tuple[str, ...]  # the name of each rank's participant, the same in all groups: its actor's id
    topology: Topology
    # Whether the backend folds every element in rank order (P7), so that no algorithm may do otherwise
    bitwise: bool = True
    chunk_nbytes: int = -1  # the most memory that chunks of its backend take on a rank; -1: not known
    pricing: Pricing = BY_RINGS  # `Capabilities.pricing` of its backend
    chosen: str = ""  # why "auto" has chosen its backend; empty if the user named it
    members: tuple[Member, ...] = ()  # by rank, as its controller knows them; empty where it only plans
    is_derived: bool = False  # whether it was derived from refs, without a name of the user's
    epoch: int = 0  # how often the group was rebuilt
    # The time limit of the driver's calls without one of their own, in seconds
    timeout_s: float = 60.0
    _ranks: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.spec.world_size == len(self.participants) == len(self.topology.hosts):
            raise ValueError(f"a group of {self.spec.world_size} has {len(self.participants)} members")
        object.__setattr__(self, "_ranks", {participant: rank for rank, participant in enumerate(self.participants)})

    @classmethod
    def alone(cls, spec: GroupSpec) -> Membership:
        """A group of which only the size is known: as if on one host, participants named by rank."""
        count = spec.world_size
        return cls(spec=spec, participants=tuple(map(str, range(count))), topology=Topology(hosts=(0,) * count))

    @property
    def has_gpus(self) -> bool:
        """Whether Ray gave each member a GPU."""
        return all("GPU" in dict(member.accelerators) for member in self.members)

    def rank_of(self, participant: str) -> int:
        """The rank of a participant; -1 if it is not a member."""
        return self._ranks.get(participant, -1)
