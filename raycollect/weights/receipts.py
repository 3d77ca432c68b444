"""The receipts of updates: which ranks show which version, with the digests of the bytes that landed."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycollect.weights.cut import Digests
from raycollect.weights.protocol import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReceipt:
    """The receipt of one rank.

    Attributes:
        rank: The rank in its receiver group.
        actor: The display name of its actor.
        digests: The digest of each of its parts, recomputed from the bytes that landed.
        nbytes: How many bytes the rank read for this version; unchanged parts are not read, others
            perhaps as deltas.
        seconds: How long reading and checking took.
    """

    rank: int
    actor: str
    digests: Digests = field(repr=False)
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The receipt of a receiver group that shows a version.

    Attributes:
        name: The name of the publication.
        version: The version.
        ranks: The receipts of the ranks that show it. Each of them has verified all of its atoms.
        lost: The ranks whose processes have ended.
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
        """The bytes that all ranks have read."""
        return sum(rank.nbytes for rank in self.ranks)
