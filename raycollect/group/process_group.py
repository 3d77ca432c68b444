"""One member's end of a group, for its own calls and for the driver's plans. Needs no Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from msgspec.structs import replace

from raycollect.channel.messages import Answer, Ask, Drop, Gone, Message, Met, Publish
from raycollect.core import threads
from raycollect.core.model import GroupSpec
from raycollect.engine.run import Outcome
from raycollect.errors import ConnectionLostError, GroupBrokenError, ProtocolError, RaycollectError
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.group.communicator import GroupCommunicator
from raycollect.group.communicator_init import CLOSE_S
from raycollect.group.coordinator import ALL, DEPARTED, PLANS, ranks_of
from raycollect.group.group_member import GroupMember
from raycollect.group.member_communicator import MemberCommunicator, WatchWait
from raycollect.group.watchdog import Watchdog

PART_LIMIT_S = 5.0
"""How long a member that leaves a declared group waits for the controller to acknowledge it, in seconds."""


class ProcessGroup:
    """One member's end of one group. Any thread may call it.

    Args:
        member: The view that communicators have of the group.
        ordered: Whether this actor's methods run one by one, according to that driver.
        controller: The id of the controller that declared the group; empty: its members formed it.
        watch: Makes the context of calls that block.
        leave: Called once by `close`.

    Attributes:
        plans: The communicator of the driver's plans.
        exchange: The agreement of plans through the controller.
        planned: The spec for the planner.
        calls: Compiled calls, by their arguments; see `member.call`.
        timeout_s: The default timeout of calls, in seconds.
    """

    def __init__(
        self,
        member: GroupMember,
        *,
        ordered: bool = True,
        controller: str = "",
        watch: WatchWait | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self.member = member
        self.settle(member.spec, member.members)
        self.rank: int = member.rank
        self.ordered = ordered
        self.timeout_s: float = member.spec.timeout_s
        self.controller = controller

        def tell(message: Message) -> None:
            with suppress(ConnectionLostError):  # the end of the lease ends all waits
                member.send(message)

        self.exchange: ChannelExchange = ChannelExchange(member.spec.group_id, member.rank, tell)
        self.watchdog: Watchdog = Watchdog(member)
        self._watch: WatchWait = watch or (lambda communicator, op: nullcontext())
        self.plans: GroupCommunicator = GroupCommunicator(member, PLANS)
        self._leave = leave
        self._communicators: dict[str, MemberCommunicator] = {}
        self._is_left = False  # whether this process has left the group
        self._parted = threading.Event()
        self._lock = threading.Lock()

    def settle(self, spec: GroupSpec, members: Sequence[str]) -> None:
        """Sets the spec and the members as agreed."""
        self.spec = self.member.spec = spec
        self.member.members = tuple(members)
        self.calls: dict[Any, Any] = {}
        self.planned: GroupSpec = replace(spec, options=())  # hashable, for the planner's caches

    @property
    def name(self) -> str:
        """The user's name of the group."""
        return self.spec.name

    @property
    def group_name(self) -> str:
        """The name, as `ray.util.collective` calls it."""
        return self.spec.name

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.spec.world_size

    @property
    def backend(self) -> str:
        """The backend of the group, never ``"auto"``."""
        return self.spec.backend

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size} in group {self.name!r}; backend {self.backend}>"

    # ------------------------------------------------------------------------------------------ calls

    def confer(self, word: bytes) -> Sequence[bytes]:
        """Exchanges a blob with all members, in rank order; raises as `MemberCommunicator.run`."""
        return self.communicator(ALL).confer("join", word, self.timeout_s)

    def form(self) -> None:
        """Forms the communicator of all ranks now, not at its first call; raises as `confer`."""
        self.communicator(ALL).run("join", lambda communicator, seq: Outcome(), self.timeout_s)

    def communicator(self, name: str) -> MemberCommunicator:
        """The communicator of that name, made on first use."""
        with self._lock:
            there = self._communicators.get(name)
            if there is None:
                there = MemberCommunicator(self.member, name, self.watchdog, self._watch)
                broken = self.member.broken(there.ranks)
                if broken is not None:  # calls on the communicator raise
                    there.end(broken)
                if not self._is_left:
                    self._communicators[name] = there
                    self.watchdog.clients[name] = there.client
            return there

    def broken(self) -> RaycollectError | None:
        """The error if collectives of all ranks are impossible, or None."""
        return self.member.broken(range(self.world_size))

    # ------------------------------------------------------------------------------------------ coordinator's thread

    def received(self, message: Message) -> None:
        """Handles a message of the coordinator, on its thread, so this must not wait."""
        if isinstance(message, Gone):
            self._left(message)
        elif not isinstance(message, Met | Drop | Publish | Answer | Ask):
            raise ProtocolError(detail=f"{type(message).__name__} is an unexpected message for a member of a group")
        elif isinstance(message, Publish) and message.communicator == PLANS:
            self.plans.received(message)
        elif self.rank not in ranks_of(message.communicator, self.world_size):
            return
        elif isinstance(message, Answer | Ask):
            self.watchdog.received(message)
        else:
            self.communicator(message.communicator).received(message)

    def orphaned(self, error: RaycollectError) -> None:
        """Handles the death of rank 0, the coordinator: calls that need nothing more of rank 0 continue."""
        for communicator in self._end(error):
            communicator.died(0, error)

    def lost(self, error: RaycollectError) -> None:
        """Ends every call with an error: the coordinator or this member has ended the group."""
        for communicator in self._end(error):
            communicator.stop(error)

    def _end(self, error: RaycollectError) -> Sequence[MemberCommunicator]:
        with self._lock:
            self.member.end(error)
            return list(self._communicators.values())

    def close(self, detail: str = DEPARTED) -> None:
        """Leaves the group, ends waits in `part`, and refuses plans. Never waits; may be called twice."""
        self._leave_group(detail, wait_s=0.0)
        self._parted.set()  # the controller does not answer any more
        communicator = self.plans.refuse(detail)
        if communicator is not None:
            threads.bounded(communicator.close)

    def _leave_group(self, detail: str, *, wait_s: float) -> None:
        self.lost(GroupBrokenError(group_name=self.name, detail=f"this process has left: {detail}"))
        who = self.member.describe(self.rank)
        departure = GroupBrokenError(group_name=self.name, detail=f"{who} has left: {detail}")
        with self._lock:
            self._is_left = True
            communicators, self._communicators, self.calls = self._communicators, {}, {}
            leave, self._leave = self._leave, None
        for communicator in communicators.values():
            communicator.close(departure, wait_s)
        self.watchdog.stop()
        if leave is not None:
            leave()

    def part(self) -> None:
        """Leaves the group at the user's request; returns when the controller of a declared group knows."""
        self._leave_group(DEPARTED, wait_s=CLOSE_S)
        if self.controller:
            with suppress(ConnectionLostError):
                self.member.send(Gone(group_id=self.spec.group_id, rank=self.rank, died=False, detail=DEPARTED))
                self._parted.wait(PART_LIMIT_S)

    def _left(self, message: Gone) -> None:
        if message.rank == self.rank:  # the answer to this rank's own message
            self._parted.set()
            return
        with self._lock:
            error = self.member.lose(message)
            communicators = [
                communicator for communicator in self._communicators.values() if message.rank in communicator.ranks
            ]
        for communicator in communicators:
            if message.died:
                communicator.died(message.rank, error)
            else:
                communicator.departed(error)
