"""One member's view of its group: who is in it, who is gone, and how messages reach the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raycollect.channel.messages import Gone, Message
from raycollect.core.model import GroupSpec
from raycollect.errors import FaultError, GroupBrokenError, ParticipantDiedError, RaycollectError
from raycollect.observe import Tracer


class GroupMember:
    """One rank of a group, as its communicators see it. Any thread may read it; `ProcessGroup` changes it.

    Attributes:
        spec: The group.
        rank: This process's rank.
        members: What a person calls each rank, in rank order; empty: unknown.
        send: Sends a message to the coordinator; raises ConnectionLostError if that is gone.
        host: The address on which backends listen.
        flush: Waits a moment until all that the coordinator has said is on its way, if that is in this process.
        tracer: Whether calls are recorded.
    """

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        send: Callable[[Message], None],
        *,
        members: Sequence[str] = (),
        host: str = "",
        flush: Callable[[], None] = lambda: None,
        tracer: Tracer | None = None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.members: tuple[str, ...] = tuple(members)
        self.send = send
        self.host = host
        self.flush = flush
        self.tracer: Tracer = tracer or Tracer()
        self._ended: RaycollectError | None = None
        self._gone: dict[int, Gone] = {}

    def actor(self, rank: int) -> str:
        """What a person calls the actor of a rank; empty: unknown."""
        return self.members[rank] if 0 <= rank < len(self.members) else ""

    def describe(self, rank: int) -> str:
        """What a person calls a rank: ``rank 1 (Worker(3f2a91))``."""
        known = self.actor(rank)
        return f"rank {rank} ({known})" if known else f"rank {rank}"

    def end(self, error: RaycollectError) -> None:
        """The group has ended here; the first error counts."""
        self._ended = self._ended or error

    def lose(self, gone: Gone) -> RaycollectError:
        """Notes that a rank is gone; returns the error of calls that need it."""
        self._gone[gone.rank] = gone
        if not gone.died:
            return GroupBrokenError(
                group_name=self.spec.name, detail=f"{self.describe(gone.rank)} has left: {gone.detail}"
            )
        detail = f"its process, or the connection to it, ended while others worked with it ({gone.detail})"
        return ParticipantDiedError(rank=gone.rank, actor=self.actor(gone.rank), detail=detail)

    def broken(self, ranks: Sequence[int]) -> RaycollectError | None:
        """Why these ranks can't communicate any more; None if they can."""
        ended = self._ended
        if isinstance(ended, FaultError):
            return GroupBrokenError(group_name=self.spec.name, detail=f"{self.describe(ended.rank)}: {ended.detail}")
        if ended is not None:
            return ended
        for rank in ranks:
            gone = self._gone.get(rank)
            if gone is not None:
                what = "died" if gone.died else "has left"
                detail = f"{self.describe(rank)} {what}: {gone.detail}"
                return GroupBrokenError(group_name=self.spec.name, detail=detail)
        return None
