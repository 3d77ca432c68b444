"""A member's place in a group: what its own calls, and the driver's plans, run on. Needs no Ray."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from msgspec.structs import replace

from raycollect.channel.messages import Answer, Ask, Deny, Depart, Drop, Gone, Message, Met, Missed, Publish
from raycollect.core.model import GroupSpec
from raycollect.engine.execution import Outcome
from raycollect.errors import (
    ConnectionLostError,
    FaultError,
    GroupBrokenError,
    ParticipantDiedError,
    ProtocolError,
    RaycollectError,
    from_wire,
)
from raycollect.group.communicator_init import CLOSE_S
from raycollect.group.coordinator import ALL, PLANS, ranks_of
from raycollect.group.member_communicator import MemberCommunicator
from raycollect.group.plan_communicator import PlanCommunicator
from raycollect.group.watchdog import Watchdog
from raycollect.observe import Tracer

PART_LIMIT_S = 5.0
"""How long a member that leaves a declared group waits for the controller to acknowledge it, in seconds."""

WatchWait = Callable[[MemberCommunicator, str], AbstractContextManager[Any]]
"""Around a call that blocks a thread: (its communicator, its op)."""


class ProcessGroup:
    """One member's place in one group. Any thread may call it.

    Args:
        spec: The group.
        rank: This member's rank.
        send: Sends a message to the group's hub; raises ConnectionLostError if that is gone.
        members: What a person calls each rank, in rank order; empty: unknown.
        actor_ids: The actor of each rank, where the driver declared the group.
        ordered: Whether this actor's methods come one by one, as that driver sees it.
        host: The address on which backends listen.
        controller: What names the controller that declared the group; empty: its members made it.
        watch: What is told of calls that block.
        flush: Waits a moment until all that the hub has said is on its way, if the hub is in this process.
        leave: Called once by `close`.
        tracer: Whether calls are recorded.

    Attributes:
        plans: What the driver's plans run on.
        planned: The group as the planner sees it.
        calls: What calls that were made know for the next ones, by their arguments; see `member.call`.
        timeout_s: How long calls wait that do not say, in seconds.
        is_whole: Whether all ranks can communicate; else `why_not` says why some can't.
    """

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        send: Callable[[Message], None],
        *,
        members: Sequence[str] = (),
        actor_ids: Sequence[str] = (),
        ordered: bool = True,
        host: str = "",
        controller: str = "",
        watch: WatchWait | None = None,
        flush: Callable[[], None] = lambda: None,
        leave: Callable[[], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.settle(spec, members)
        self.rank = rank
        self.actor_ids: tuple[str, ...] = tuple(actor_ids)
        self.ordered = ordered
        self.host = host
        self.timeout_s: float = spec.timeout_s
        self.controller = controller
        self.send = send
        self.flush = flush
        self.plans: PlanCommunicator = PlanCommunicator(weakref.proxy(self))  # not itself: a cycle would keep memory
        self.watchdog: Watchdog = Watchdog(self)
        self.watch: WatchWait = watch or (lambda communicator, op: nullcontext())
        self.tracer: Tracer = tracer or Tracer()
        self._leave = leave
        self._communicators: dict[str, MemberCommunicator] = {}
        self._gone: dict[int, Gone] = {}
        self._closed: RaycollectError | None = None
        self.is_whole: bool = True
        self._is_left = False  # by this process: nothing is kept any more
        self._parted = threading.Event()
        self._lock = threading.Lock()

    def settle(self, spec: GroupSpec, members: Sequence[str]) -> None:
        """Notes the group as the members have agreed on it."""
        self.spec = spec
        self.members: tuple[str, ...] = tuple(members)
        self.calls: dict[Any, Any] = {}
        self.planned: GroupSpec = replace(spec, options=())  # what plans depend on: hashable, for caches

    @property
    def name(self) -> str:
        """What the user calls the group."""
        return self.spec.name

    @property
    def group_name(self) -> str:
        """The name, as `ray.util.collective` calls it."""
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

    def confer(self, op: str, word: bytes) -> Sequence[bytes]:
        """Exchanges a blob with all members, in rank order; raises as `MemberCommunicator.run`."""
        return self.communicator(ALL).confer(op, word, self.timeout_s)

    def form(self) -> None:
        """Forms the communicator of all ranks now rather than at its first call; raises as `confer`."""
        self.communicator(ALL).run("join", lambda communicator, seq: Outcome(), self.timeout_s)

    @property
    def communicators(self) -> Sequence[MemberCommunicator]:
        """The communicators that there are."""
        with self._lock:
            return list(self._communicators.values())

    def communicator(self, name: str) -> MemberCommunicator:
        """The communicator of that name, which is made where there is none."""
        with self._lock:
            there = self._communicators.get(name)
            if there is None:
                there = MemberCommunicator(self, name)
                if self._is_left:  # a call on it says so
                    there.end()
                else:
                    self._communicators[name] = there
            return there

    def actor(self, rank: int) -> str:
        """What a person calls the actor of a rank; empty: unknown."""
        return self.members[rank] if 0 <= rank < len(self.members) else ""

    def describe(self, rank: int) -> str:
        """What a person calls a rank: ``rank 1 (Worker(3f2a91))``."""
        known = self.actor(rank)
        return f"rank {rank} ({known})" if known else f"rank {rank}"

    def why_not(self, ranks: Sequence[int]) -> RaycollectError | None:
        """Why these ranks can't communicate any more; None if they can."""
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

    # ------------------------------------------------------------------------------------------ hub's thread

    def received(self, message: Message) -> None:
        """A message of the hub; on its thread, so nothing here may wait."""
        if isinstance(message, Met | Missed):
            self.communicator(message.communicator).hub.answered(message)
        elif isinstance(message, Drop):
            self.communicator(message.communicator).dropped(message)
        elif isinstance(message, Deny):
            self.communicator(message.communicator).stop(from_wire(message.error), call=message.call)
        elif isinstance(message, Publish) and message.communicator == PLANS:
            self.plans.published(message)
        elif isinstance(message, Publish | Answer | Ask):
            if self.rank not in ranks_of(message.communicator, self.world_size):
                return
            if isinstance(message, Publish):
                self.communicator(message.communicator).hub.published(message)
            else:
                self.watchdog.received(message)
        elif isinstance(message, Gone):
            self._left(message)
        elif isinstance(message, Depart):
            self._parted.set()
        else:
            raise ProtocolError(detail=f"{type(message).__name__} is nothing for the member of a group")

    def orphaned(self, error: RaycollectError) -> None:
        """Rank 0's process has ended, and with it the hub: calls that need no more of it go on."""
        for communicator in self._end(error):
            communicator.died(0, error)

    def lost(self, error: RaycollectError) -> None:
        """The hub has ended the group, or this member has: every call ends with this error."""
        for communicator in self._end(error):
            communicator.stop(error)

    def _end(self, error: RaycollectError) -> Sequence[MemberCommunicator]:
        with self._lock:
            self._closed, self.is_whole = self._closed or error, False
            return list(self._communicators.values())

    def close(self, detail: str = "it has destroyed the group on its side") -> None:
        """Ends this member's part, also for who waits in `part`. Never waits; may be called twice."""
        self._leave_group(detail, wait_s=0.0)
        self._parted.set()  # whoever has the group end does not answer any more

    def _leave_group(self, detail: str = "it has destroyed the group on its side", *, wait_s: float = CLOSE_S) -> None:
        self.lost(GroupBrokenError(group_name=self.name, detail=f"this process has left: {detail}"))
        told = GroupBrokenError(group_name=self.name, detail=f"{self.describe(self.rank)} has left: {detail}")
        with self._lock:
            self._is_left = True
            communicators, self._communicators, self.calls = self._communicators, {}, {}  # which hold this
            leave, self._leave = self._leave, None
        for communicator in communicators.values():
            communicator.close(told, wait_s)
        self.watchdog.stop()
        if leave is not None:
            leave()

    def part(self) -> None:
        """Leaves at this process's own wish: when it returns, the controller of a declared group knows."""
        self._leave_group()
        if self.controller:
            with suppress(ConnectionLostError):
                self.send(Depart(group_id=self.spec.group_id))
                self._parted.wait(PART_LIMIT_S)

    def _left(self, message: Gone) -> None:
        with self._lock:
            self._gone[message.rank], self.is_whole = message, False
            communicators = [one for one in self._communicators.values() if message.rank in one.ranks]
        error = self._loss(message)
        for communicator in communicators:
            if message.died:
                communicator.died(message.rank, error)
            else:
                communicator.departed(error)

    def _loss(self, gone: Gone) -> RaycollectError:
        if not gone.died:
            return GroupBrokenError(group_name=self.name, detail=f"{self.describe(gone.rank)} has left: {gone.detail}")
        detail = f"its process, or the connection to it, ended while others worked with it ({gone.detail})"
        return ParticipantDiedError(rank=gone.rank, actor=self.actor(gone.rank), detail=detail)
