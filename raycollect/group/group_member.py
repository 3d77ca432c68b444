"""One member's view of its group: its members, the dead and departed ones, and the way to the coordinator."""

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
        members: The name of each rank for a person, in rank order; empty: unknown.
        send: Sends a message to the coordinator; raises ConnectionLostError if the coordinator has ended.
        host: The address on which backends listen.
        flush: Waits a moment until the coordinator has sent its messages, if the coordinator is in this process.
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
        """The name of a rank's actor for a person; empty: unknown."""
        return self.members[rank] if 0 <= rank < len(self.members) else ""

    def describe(self, rank: int) -> str:
        """The name of a rank for a person: ``rank 1 (Worker(3f2a91))``."""
        actor = self.actor(rank)
        return f"rank {rank} ({actor})" if actor else f"rank {rank}"

    def end(self, error: RaycollectError) -> None:
        """Notes that this process has left the group; the first error counts."""
        self._ended = self._ended or error

    def lose(self, gone: Gone) -> RaycollectError:
        """Notes that a rank has died or departed; returns the error of calls that need it."""
        self._gone[gone.rank] = gone
        if not gone.died:
            return GroupBrokenError(
                group_name=self.spec.name, detail=f"{self.describe(gone.rank)} has left: {gone.detail}"
            )
        detail = f"its process, or the connection to it, ended while others worked with it ({gone.detail})"
        return ParticipantDiedError(rank=gone.rank, actor=self.actor(gone.rank), detail=detail)

    def broken(self, ranks: Sequence[int]) -> RaycollectError | None:
        """The error if these ranks can't communicate any more, or None."""
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
