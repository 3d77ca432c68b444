"""The declared groups that this process has joined: joining, leaving, and what each holds here."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from raycollect.channel.messages import Join, Joined, Leave, Message, Publish
from raycollect.core import ray_internals, threads
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Communicator, Probing, Surviving
from raycollect.errors import (
    GroupBrokenError,
    GroupExistsError,
    InternalError,
    ProtocolError,
    RaycollectError,
    kept,
    to_wire,
)
from raycollect.group.communicator_init import make_communicator
from raycollect.group.coordinator import PLANS
from raycollect.group.hub_client import HubRendezvous
from raycollect.group.member_communicator import MemberCommunicator
from raycollect.group.process_group import ProcessGroup
from raycollect.group.process_groups import ProcessGroups
from raycollect.member.exchange import ChannelExchange
from raycollect.member.reporter import Reporter
from raycollect.observe import Place, Tracer

if TYPE_CHECKING:
    from raycollect.member.runtime import Runtime


CHANGED = "the members of the group have changed: call again, with the current rank and world size"


class JoinedGroup:
    """This process's part in one group. Any thread may call it.

    Args:
        spec: The group.
        rank: This process's rank.
        members: What `Join` says of all, in rank order.
        process_groups: The groups of this process.
        before: The group of this name in whose place it comes, if there is one.
        reporter: Tells the controller that declared the group; also of imperative calls that block.

    Attributes:
        ordered: Whether this actor's methods come one by one.
        exchange: The agreement through the controller.
        process_group: What imperative calls run on; None in a group that only plans use.
        links: What `connect` has measured, as in `Joined`.
        communicator: The backend's; None before `connect` has made it.

    Raises:
        GroupExistsError: This process is a member of a group of that name.
    """

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        members: Sequence[Mapping[str, Any]],
        process_groups: ProcessGroups,
        reporter: Reporter,
        before: ProcessGroup | None = None,
    ) -> None:
        def watch(communicator: MemberCommunicator, op: str) -> AbstractContextManager[None]:
            name, ranks = communicator.name, communicator.ranks
            return reporter.waiting(spec.group_id, name, op, ranks, seq=0, call=lambda: communicator.call)

        self.spec = spec
        self.rank = rank
        self.actor_ids: tuple[str, ...] = tuple(str(member.get("actor_id", "")) for member in members)
        self.ordered: bool = bool(members[rank]["ordered"])
        self.exchange: ChannelExchange = ChannelExchange(spec.group_id, rank, reporter.tell)
        self.process_group: ProcessGroup | None = None
        self.links: tuple[tuple[float, ...], ...] = ()
        self._process_groups = process_groups
        self._tell = reporter.tell
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}  # what the members have published
        self._given_up: list[str] = []  # why the group was
        self.communicator: Communicator | None = None
        if not spec.parent:
            self.process_group = ProcessGroup(
                spec,
                rank,
                reporter.link.send,
                members=[member["actor"] for member in members],
                host=ray_internals.node_address(),
                declared=True,
                watch=watch,
            )
            process_groups.adopt(self.process_group, before)

    def connect(self, probe: Sequence[int] = ()) -> RaycollectError | None:
        """Makes the communicator, which waits for the other members. Returns the error if that fails.

        `probe` is as in `Join`: what was found is in `links`.
        """
        # Communicators may keep what is made here, which must not keep this object.
        group_id, tell, given_up = self.spec.group_id, self._tell, self._given_up

        def publish(name: str, value: bytes) -> None:
            tell(Publish(group_id=group_id, lane=PLANS, generation=group_id, name=name, value=value))

        rendezvous = HubRendezvous(self._values, publish, lambda: given_up[0] if given_up else "", self._changed)
        try:
            made = make_communicator(self.spec, self.rank, rendezvous, self.exchange, ray_internals.node_address())
        except RaycollectError as exc:
            return kept(exc)
        if probe and isinstance(made, Probing):
            self.links = tuple(made.probe([(turn, other) for turn, other in enumerate(probe, 1) if other >= 0]))
        self.communicator = made
        if self._given_up:
            made.close()
        return None

    def received(self, message: Message) -> None:
        """A message of the hub, for what the members make here; on the channel's thread."""
        if isinstance(message, Publish) and message.lane == PLANS:
            with self._changed:
                self._values[message.name] = message.value
                self._changed.notify_all()
        elif self.process_group is not None:
            self.process_group.received(message)

    def give_up(self, reason: str) -> None:
        """Ends all waits for what other members publish."""
        with self._changed:
            self._given_up.append(reason)
            self._changed.notify_all()

    def lost(self, actor_id: str) -> bool:
        """An actor's process has ended. Returns False if the caller has to end what is under way (`Surviving`)."""
        communicator: object = self.communicator
        if actor_id in self.actor_ids:
            if not isinstance(communicator, Surviving):
                return False
            communicator.lost(self.actor_ids.index(actor_id))
        return True

    def disconnect(self) -> None:
        """Closes the communicator, so that the group keeps no memory of a member that has died."""
        if self.communicator is not None:
            self.communicator.close()

    def close(self, reason: str) -> None:
        """Lets go of all that the group holds here. Never waits; may be called twice."""
        self.give_up(reason)
        if self.process_group is not None:
            self._process_groups.remove(self.process_group)
            self.process_group.close(reason)
        self.disconnect()


class JoinedGroups:
    """All groups that one controller has this process join. Any thread may call it."""

    def __init__(self, controller: str, runtime: Runtime, reporter: Reporter) -> None:
        self.by_id: dict[str, JoinedGroup] = {}
        self._controller = controller
        self._runtime = runtime
        self._reporter = reporter

    @property
    def is_ordered(self) -> bool:
        """Whether all groups say that this actor's methods come one by one."""
        return all(one.ordered for one in tuple(self.by_id.values()))

    def communicator(self, group_id: str) -> Communicator:
        """The communicator of a group; GroupBrokenError if there is none."""
        joined_group = self.by_id.get(group_id)
        if joined_group is None:
            raise GroupBrokenError(group_name=group_id, detail="the group was destroyed")
        if joined_group.communicator is None:
            raise GroupBrokenError(group_name=group_id, detail="this participant never joined")
        return joined_group.communicator

    def join(self, message: Join) -> None:
        """Joins a group, in a thread of its own; ProtocolError: the message makes no sense."""
        spec = _read_spec(message)
        if spec.group_id in self.by_id:  # nothing would ever release what the first one holds
            raise ProtocolError(detail="a group is joined once")
        before = self.by_id.get(message.replaces)
        process_groups, took = self._runtime.process_groups, None if before is None else before.process_group
        try:
            made = JoinedGroup(spec, message.rank, message.members, process_groups, self._reporter, took)
        except GroupExistsError as exc:
            self._reporter.tell(Joined(request=message.request, error=to_wire(exc)))
            return
        self.by_id[spec.group_id] = made
        if before is not None:
            self._end(message.replaces, CHANGED)
        threads.start("raycollect-join", self._connect, made, message)

    def _connect(self, joined_group: JoinedGroup, message: Join) -> None:
        try:
            error = joined_group.connect(message.probe)
        except Exception as exc:  # noqa: BLE001 - the library is not ours
            error = threads.failed(f"joining group {joined_group.spec.name!r}", exc)
        failed = None if error is None else to_wire(error)
        self._reporter.tell(Joined(request=message.request, error=failed, links=joined_group.links))

    def fail_join(self, message: Join, error: InternalError) -> None:
        """Gives up a group that could not be joined, and tells why."""
        joined_group = self.by_id.pop(str(message.group.get("group_id")), None)
        if joined_group is not None:
            joined_group.close(error.detail)
        self._reporter.tell(Joined(request=message.request, error=to_wire(error)))

    def leave(self, message: Leave) -> None:
        """Forgets a group; plans of it that still come fail."""
        self._end(message.group_id, "the group was destroyed")

    def _end(self, group_id: str, reason: str) -> None:
        joined_group = self.by_id.pop(group_id, None)
        if joined_group is not None:
            ring = Tracer.current().of(self._controller)
            if ring is not None:
                ring.groups[group_id] = Place.of(joined_group.spec, joined_group.rank)
            joined_group.close(reason)

    def received(self, message: Any) -> None:
        """A message of the hub of a group."""
        joined_group = self.by_id.get(message.group_id)
        if joined_group is not None:
            joined_group.received(message)

    def places(self) -> dict[str, Place]:
        """The groups, by id, for timelines."""
        return {group_id: Place.of(one.spec, one.rank) for group_id, one in list(self.by_id.items())}

    def take_all(self) -> Sequence[JoinedGroup]:
        """Forgets all groups and returns them."""
        groups, self.by_id = self.by_id, {}
        return tuple(groups.values())


def _read_spec(message: Join) -> GroupSpec:
    try:
        spec = GroupSpec(**message.group)
    except (TypeError, ValueError) as exc:
        raise ProtocolError(detail=f"malformed group: {exc}") from exc
    named = [isinstance(member.get("actor"), str) and "ordered" in member for member in message.members]
    if not 0 <= message.rank < spec.world_size or len(named) != spec.world_size or not all(named):
        raise ProtocolError(detail=f"no rank {message.rank} in a group of {spec.world_size} with {len(named)} members")
    if not all(-1 <= other < spec.world_size and other != message.rank for other in message.probe):
        raise ProtocolError(detail=f"rank {message.rank} of {spec.world_size} can't measure links to {message.probe}")
    return spec
