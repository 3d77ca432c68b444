"""Gathers the arrivals of an agreement of participants without a common group."""

from __future__ import annotations

from collections.abc import Sequence

from raycollect.errors import ProtocolError


class ArrivalGather:
    """Gathers the arrivals of an agreement, one round after the other; keeps those of the current round only."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._round = 0
        self._blobs: dict[int, bytes] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks for which others wait in the current round."""
        return tuple(rank for rank in self._ranks if rank not in self._blobs) if self._blobs else ()

    def arrive(self, number: int, rank: int, blob: bytes) -> tuple[bytes, ...] | None:
        """Adds a rank's arrival in a round; raises ProtocolError for another round, or an unknown or repeated rank.

        Returns:
            All arrivals in rank order if it is the last one of the round, else None.
        """
        if number != self._round:  # a rank continues once all have arrived
            raise ProtocolError(detail=f"rank {rank} came to round {number} of an agreement in round {self._round}")
        if rank not in self._ranks:
            raise ProtocolError(detail=f"rank {rank} has no part in this plan, whose ranks are {self._ranks}")
        if rank in self._blobs:
            raise ProtocolError(detail=f"rank {rank} came to the consistency check twice")
        self._blobs[rank] = blob
        if len(self._blobs) < len(self._ranks):
            return None
        blobs = tuple([self._blobs[rank] for rank in self._ranks])
        self._round, self._blobs = number + 1, {}
        return blobs
