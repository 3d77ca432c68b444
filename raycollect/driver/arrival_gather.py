"""Gathers the arrivals of an agreement of participants without a common group."""

from __future__ import annotations

from collections.abc import Sequence

from raycollect.errors import ProtocolError


class ArrivalGather:
    """Gathers the arrivals of one round of one plan in one place."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._blobs: dict[int, bytes] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not arrived."""
        return tuple(rank for rank in self._ranks if rank not in self._blobs)

    def arrive(self, rank: int, blob: bytes) -> tuple[bytes, ...] | None:
        """Adds a rank's arrival; raises ProtocolError for an unknown or repeated rank.

        Returns:
            All arrivals in rank order if it is the last one, else None.
        """
        if rank not in self._ranks:
            raise ProtocolError(detail=f"rank {rank} has no part in this plan, whose ranks are {self._ranks}")
        if rank in self._blobs:
            raise ProtocolError(detail=f"rank {rank} came to the consistency check twice")
        self._blobs[rank] = blob
        return None if len(self._blobs) < len(self._ranks) else tuple(self._blobs[rank] for rank in self._ranks)
