"""Joining and leaving groups, at a controller's request."""

from __future__ import annotations

from contextlib import AbstractContextManager

from raycollect.channel.messages import Join, Joined, Leave
from raycollect.core import threads
from raycollect.core.model import GroupSpec
from raycollect.errors import GroupExistsError, ProtocolError, ResourceLimitError, to_wire
from raycollect.group.group_member import GroupMember
from raycollect.group.member_communicator import MemberCommunicator
from raycollect.group.process_group import ProcessGroup
from raycollect.group.process_groups import ProcessGroups
from raycollect.member.reporter import Reporter

CHANGED = "the members of the group have changed: call again, with the current rank and world size"


def join(groups: ProcessGroups, host: str, controller: str, reporter: Reporter, message: Join) -> None:
    """Joins a group of a controller, in a helper thread; ProtocolError: the message is invalid.

    Backends listen at `host`.
    """
    spec = message.group
    if not 0 <= message.rank < spec.world_size or len(message.members) != spec.world_size:
        raise ProtocolError(
            detail=f"no rank {message.rank} in a group of {spec.world_size} with {len(message.members)} members"
        )
    if spec.group_id in groups.by_id:  # the resources of the first group would never be released
        raise ProtocolError(detail="a group is joined once")
    process_group, before = (
        _make_process_group(groups, host, spec, controller, reporter, message),
        groups.by_id.get(message.replaces),
    )
    try:
        groups.adopt(process_group, before)
    except GroupExistsError as exc:
        reporter.tell(Joined(request=message.request, error=to_wire(exc)))
        return
    if before is not None:
        groups.end(before, CHANGED)
    try:
        threads.call_in_helper(threads.survives, _connect, process_group, reporter, message)
    except ResourceLimitError as exc:  # no more threads can be started
        groups.end(process_group, exc.detail)
        reporter.tell(Joined(request=message.request, error=to_wire(exc)))


def leave(groups: ProcessGroups, message: Leave) -> None:
    """Leaves a group; its later plans fail."""
    group = groups.by_id.get(message.group_id)
    if group is not None:
        groups.end(group, "the group was destroyed")


def _make_process_group(
    groups: ProcessGroups, host: str, spec: GroupSpec, controller: str, reporter: Reporter, message: Join
) -> ProcessGroup:
    members = message.members

    def watch(communicator: MemberCommunicator, op: str) -> AbstractContextManager[None]:
        name, ranks = communicator.name, communicator.ranks
        return reporter.waiting(spec.group_id, name, op, ranks, seq=0, call=lambda: communicator.client.number)

    actors = [member.actor for member in members]
    mine = GroupMember(spec, message.rank, reporter.link.send, members=actors, host=host, tracer=groups.tracer)
    return ProcessGroup(
        mine,
        ordered=members[message.rank].ordered,
        controller=controller,
        watch=watch,
    )


def _connect(group: ProcessGroup, reporter: Reporter, message: Join) -> None:
    try:
        error = group.plans.connect(group.exchange)
    except Exception as exc:  # noqa: BLE001 - the library is not ours
        error = threads.failed(f"joining group {group.name!r}", exc)
    failed = None if error is None else to_wire(error)
    reporter.tell(Joined(request=message.request, error=failed))
