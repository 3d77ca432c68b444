"""The declared groups that this process has joined: joining and leaving them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from raycollect.channel.messages import Join, Joined, Leave
from raycollect.core import ray_internals, threads
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Communicator
from raycollect.errors import GroupBrokenError, GroupExistsError, InternalError, ProtocolError, to_wire
from raycollect.group.member_communicator import MemberCommunicator
from raycollect.group.process_group import ProcessGroup
from raycollect.member.reporter import Reporter
from raycollect.observe import Place, Tracer

if TYPE_CHECKING:
    from raycollect.member.runtime import Runtime


CHANGED = "the members of the group have changed: call again, with the current rank and world size"


class JoinedGroups:
    """The groups that one controller has this process join, also those inside a group, until its lease ends.

    Any thread may call it.
    """

    def __init__(self, controller: str, runtime: Runtime, reporter: Reporter) -> None:
        self.by_id: dict[str, ProcessGroup] = {}
        self._controller = controller
        self._runtime = runtime
        self._reporter = reporter

    @property
    def is_ordered(self) -> bool:
        """Whether all groups say that this actor's methods come one by one."""
        return all(one.ordered for one in tuple(self.by_id.values()))

    def communicator(self, group_id: str) -> Communicator:
        """What plans of a group run on; GroupBrokenError if there is none."""
        group = self.by_id.get(group_id)
        communicator = None if group is None else group.plans.communicator
        if communicator is not None:
            return communicator
        if group is not None:
            raise group.plans.why_none()
        raise GroupBrokenError(group_name=group_id, detail="the group was destroyed")

    def join(self, message: Join) -> None:
        """Joins a group, in a thread of its own; ProtocolError: the message makes no sense."""
        spec = _read_spec(message)
        if spec.group_id in self.by_id:  # nothing would ever release what the first one holds
            raise ProtocolError(detail="a group is joined once")
        made, before = self._made(spec, message), self.by_id.get(message.replaces)
        if not spec.parent:  # else only plans use it
            try:
                self._runtime.process_groups.adopt(made, before)
            except GroupExistsError as exc:
                self._reporter.tell(Joined(request=message.request, error=to_wire(exc)))
                return
        self.by_id[spec.group_id] = made
        if before is not None:
            self._end(message.replaces, CHANGED)
        threads.apart(threads.survives, self._connect, made, message)

    def _made(self, spec: GroupSpec, message: Join) -> ProcessGroup:
        reporter, members = self._reporter, message.members

        def watch(communicator: MemberCommunicator, op: str) -> AbstractContextManager[None]:
            name, ranks = communicator.name, communicator.ranks
            return reporter.waiting(spec.group_id, name, op, ranks, seq=0, call=lambda: communicator.call)

        return ProcessGroup(
            spec,
            message.rank,
            reporter.link.send,
            members=[member["actor"] for member in members],
            actor_ids=[str(member.get("actor_id", "")) for member in members],
            ordered=bool(members[message.rank]["ordered"]),
            host=ray_internals.node_address(),
            declared=True,
            watch=watch,
        )

    def _connect(self, group: ProcessGroup, message: Join) -> None:
        try:
            error = group.plans.connect(message.probe)
        except Exception as exc:  # noqa: BLE001 - the library is not ours
            error = threads.failed(f"joining group {group.name!r}", exc)
        failed = None if error is None else to_wire(error)
        self._reporter.tell(Joined(request=message.request, error=failed, links=group.plans.links))

    def fail_join(self, message: Join, error: InternalError) -> None:
        """Gives up a group that could not be joined, and tells why."""
        group = self.by_id.pop(str(message.group.get("group_id")), None)
        if group is not None:
            self.close(group, error.detail)
        self._reporter.tell(Joined(request=message.request, error=to_wire(error)))

    def leave(self, message: Leave) -> None:
        """Forgets a group; plans of it that still come fail."""
        self._end(message.group_id, "the group was destroyed")

    def _end(self, group_id: str, reason: str) -> None:
        group = self.by_id.pop(group_id, None)
        if group is not None:
            ring = Tracer.current().of(self._controller)
            if ring is not None:
                ring.groups[group_id] = Place.of(group.spec, group.rank)
            self.close(group, reason)

    def close(self, group: ProcessGroup, reason: str) -> None:
        """Lets go of all that a group holds here. Never waits; may be called twice."""
        self._runtime.process_groups.remove(group)
        group.close(reason)
        group.plans.close(reason)

    def received(self, message: Any) -> None:
        """A message of the hub of a group."""
        group = self.by_id.get(message.group_id)
        if group is not None:
            group.received(message)

    def places(self) -> dict[str, Place]:
        """The groups, by id, for timelines."""
        return {group_id: Place.of(one.spec, one.rank) for group_id, one in list(self.by_id.items())}

    def take_all(self) -> Sequence[ProcessGroup]:
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
