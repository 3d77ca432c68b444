"""What an update gives: who shows which version, with the digests of what landed."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycollect.weights.protocol import Digests, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReceipt:
    """What one rank has.

    Attributes:
        rank: The rank in its receiver group.
        actor: Its actor, for people.
        digests: Of each of its parts, recomputed from what landed.
        nbytes: The bytes that were read for this version; what had not changed was not.
        seconds: How long reading and checking took.
    """

    rank: int
    actor: str
    digests: Digests = field(repr=False)
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Says that a receiver group shows a version.

    Attributes:
        name: That of the publication.
        version: The version.
        ranks: The ranks that show it. None is here that has not verified all of its atoms.
        lost: The ranks whose processes are gone.
        skipped: How many versions were put between this one and the one that the group had before.
        seconds: How long the update took.
    """

    name: str
    version: Version
    ranks: tuple[RankReceipt, ...]
    lost: tuple[int, ...] = ()
    skipped: int = 0
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """The bytes that were read, by all ranks."""
        return sum(one.nbytes for one in self.ranks)
