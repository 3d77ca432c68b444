"""A member's place in a group: what the calls that it makes itself run on. Needs no Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from raycollect import backends, vigil
from raycollect.backends import tcp
from raycollect.channel.messages import Deny, Depart, Drop, Gone, Message, Met, Missed, Publish
from raycollect.contracts import CommunicatorFactory
from raycollect.errors import (
    ConnectionLostError,
    FaultError,
    GroupBrokenError,
    ParticipantDiedError,
    ProtocolError,
    RankReport,
    RaycollectError,
)
from raycollect.executor import Outcome
from raycollect.gate import ALL, ranks_of
from raycollect.lane import Attempt, Lane, Standing
from raycollect.model import GroupSpec
from raycollect.vigil import Vigil

__all__ = ["Seat"]

_PAIRS: dict[str, CommunicatorFactory] = {"gloo": tcp.create}
"""Backend -> what its lanes of two ranks use instead, so that several of them can be under way at once."""

PART_LIMIT_S = 5.0
"""How long a member that leaves a declared group waits for the controller to know of it, in seconds."""

Watch = Callable[[Lane, str], AbstractContextManager[Any]]
"""Around a call that blocks a thread: (its lane, its op)."""


class Seat:
    """One member's place in one group. Any thread may call it.

    Attributes:
        spec: The group.
        rank: This member's rank.
        host: The address on which backends listen.
        timeout_s: How long calls wait where they do not say, in seconds.
        declared: Whether the driver declared the group; else its members made it.
        members: What a person calls each rank, in rank order; empty: unknown.
        planned: The group as the planner sees it.

    Args:
        spec: See above.
        rank: See above.
        send: Sends a message to the group's hub; raises ConnectionLostError where that is gone.
        members: See above.
        host: See above.
        timeout_s: See above.
        declared: See above.
        watch: What is told of calls that block.
        flush: Waits until all that the hub has said is on its way, where the hub is in this process.
        leave: Called once by `close`.
    """

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        send: Callable[[Message], None],
        *,
        members: Sequence[str] = (),
        host: str = "",
        timeout_s: float = 30.0,
        declared: bool = False,
        watch: Watch | None = None,
        flush: Callable[[], None] = lambda: None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self.settle(spec, members)
        self.rank = rank
        self.host = host
        self.timeout_s = timeout_s
        self.declared = declared
        self.send = send
        self._watch = watch or (lambda lane, op: nullcontext())
        self.flush = flush
        self._leave = leave
        self._lanes: dict[str, Lane] = {}
        self._gone: dict[int, Gone] = {}
        self._closed: RaycollectError | None = None
        self._parted = threading.Event()
        self._lock = threading.Lock()
        self._vigil = Vigil(self)

    def settle(self, spec: GroupSpec, members: Sequence[str]) -> None:
        """Notes what the members have agreed on."""
        self.spec = spec
        self.members: tuple[str, ...] = tuple(members)
        self.planned: GroupSpec = replace(spec, options=())  # what plans depend on: hashable, for caches

    @property
    def name(self) -> str:
        """What the user calls the group."""
        return self.spec.name

    @property
    def group_name(self) -> str:
        """The same, as `ray.util.collective` calls it."""
        return self.spec.name

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self.spec.world_size

    @property
    def backend(self) -> str:
        """The backend that it uses, never ``"auto"``."""
        return self.spec.backend

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size} in group {self.name!r}; backend {self.backend}>"

    # ------------------------------------------------------------------------------------------ calls

    def run(self, lane: str, op: str, attempt: Attempt, timeout_s: float | None = None) -> Outcome:
        """Runs a call on a lane, in this thread or behind those that were started before.

        Raises:
            RefusedError: All ranks were refused at the door; no tensor was touched.
            GroupBrokenError: A rank of the lane is gone, or this end of the group is.
            FaultError: A rank did not come in time, died or failed.
        """
        there = self.lane(lane)
        with self._watch(there, op):
            return there.run(op, attempt, self._limit(timeout_s))

    def start(self, lane: str, op: str, attempt: Attempt, timeout_s: float | None = None) -> Future[Outcome]:
        """Starts a call on the lane's communication thread."""
        return self.lane(lane).start(op, attempt, self._limit(timeout_s))

    def confer(self, op: str, word: bytes) -> Sequence[bytes]:
        """Gives one's word to all members, and gets everybody's, in rank order.

        Raises:
            RaycollectError: As `run`.
        """
        return self.lane(ALL).confer(op, word, self.timeout_s)

    def form(self, lane: str = ALL) -> None:
        """Forms a lane now rather than at its first call.

        Raises:
            RaycollectError: As `run`.
        """
        self.run(lane, "join", lambda communicator, seq: Outcome())

    def _limit(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    @property
    def lanes(self) -> Sequence[Lane]:
        """The lanes that there are."""
        with self._lock:
            return list(self._lanes.values())

    def lane(self, name: str) -> Lane:
        """The lane of that name, made now or before."""
        with self._lock:
            if name not in self._lanes:
                self._lanes[name] = Lane(self, name)
            return self._lanes[name]

    # ------------------------------------------------------------------------------------------ what lanes need

    def factory(self, lane: str) -> CommunicatorFactory:
        """Makes the communicators of a lane: the backend's, or what stands in for it between two ranks."""
        create = backends.load(self.spec.backend, self.spec.name)
        return create if lane == ALL else _PAIRS.get(self.spec.backend, create)

    def actor(self, rank: int) -> str:
        """What a person calls the actor of a rank; empty: unknown."""
        return self.members[rank] if 0 <= rank < len(self.members) else ""

    def describe(self, rank: int) -> str:
        """What a person calls a rank: ``rank 1 (Worker(3f2a91))``."""
        known = self.actor(rank)
        return f"rank {rank} ({known})" if known else f"rank {rank}"

    def why_not(self, ranks: Sequence[int]) -> RaycollectError | None:
        """Why these ranks can't communicate any more; None where they can."""
        if isinstance(self._closed, FaultError):
            return GroupBrokenError(
                group_name=self.name, detail=f"{self.describe(self._closed.rank)}: {self._closed.detail}"
            )
        if self._closed is not None:
            return self._closed
        for rank in ranks:
            gone = self._gone.get(rank)
            if gone is not None:
                what = "died" if gone.died else "has left"
                detail = f"{self.describe(rank)} {what}: {gone.detail}"
                return GroupBrokenError(group_name=self.name, detail=detail)
        return None

    def begun(self) -> None:
        """A call has begun; it may last."""
        self._vigil.begun()

    def reports(self, lane: Lane, ranks: Sequence[int], mine: Standing) -> tuple[RankReport, ...]:
        """Asks what ranks are doing that have not come in time; see `Vigil.reports`."""
        return self._vigil.reports(lane, ranks, mine)

    # ------------------------------------------------------------------------------------------ hub's thread

    def received(self, message: Message) -> None:
        """A message of the hub; on its thread, so nothing here may wait."""
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise ProtocolError(detail=f"{type(message).__name__} is nothing for the member of a group")
        handle(self, message)

    def lost(self, error: RaycollectError) -> None:
        """The hub is gone, or has ended the group: so has every call, with this error."""
        with self._lock:
            self._closed = self._closed or error
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.stop(error)

    def close(self, detail: str = "it has destroyed the group on its side") -> None:
        """Ends this member's part. May be called twice."""
        self.lost(GroupBrokenError(group_name=self.name, detail=f"this process has left: {detail}"))
        told = GroupBrokenError(group_name=self.name, detail=f"{self.describe(self.rank)} has left: {detail}")
        with self._lock:
            lanes = list(self._lanes.values())
            leave, self._leave = self._leave, None
        for lane in lanes:
            lane.close(told)
        vigil.wake()
        if leave is not None:
            leave()

    def part(self) -> None:
        """Leaves of this process's own accord: when it returns, the controller of a declared group knows."""
        self.close()
        if self.declared:
            with suppress(ConnectionLostError):
                self.send(Depart(group_id=self.spec.group_id))
                self._parted.wait(PART_LIMIT_S)

    def _departed(self, message: Depart) -> None:
        self._parted.set()

    def _left(self, message: Gone) -> None:
        with self._lock:
            self._gone[message.rank] = message
            lanes = [lane for lane in self._lanes.values() if message.rank in lane.ranks]
        for lane in lanes:
            lane.left(self._loss(message), died=message.died)

    def _loss(self, gone: Gone) -> RaycollectError:
        """What a call raises during which a rank goes."""
        if not gone.died:
            return GroupBrokenError(group_name=self.name, detail=f"{self.describe(gone.rank)} has left: {gone.detail}")
        actor = self.members[gone.rank] if gone.rank < len(self.members) else ""
        detail = f"its process, or the connection to it, ended while others worked with it ({gone.detail})"
        return ParticipantDiedError(rank=gone.rank, actor=actor, detail=detail)

    def _answered(self, message: Met | Missed) -> None:
        self.lane(message.lane).answered(message)

    def _dropped(self, message: Drop) -> None:
        self.lane(message.lane).dropped(message)

    def _published(self, message: Publish) -> None:
        if self.rank not in ranks_of(message.lane, self.world_size):
            return
        if not self._vigil.received(message):
            self.lane(message.lane).published(message)

    def _denied(self, message: Deny) -> None:
        self.lane(message.lane).denied(message)


_HANDLERS: dict[type, Callable[[Seat, Any], None]] = {
    Deny: Seat._denied,
    Depart: Seat._departed,
    Drop: Seat._dropped,
    Gone: Seat._left,
    Met: Seat._answered,
    Missed: Seat._answered,
    Publish: Seat._published,
}
