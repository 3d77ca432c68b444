"""Plans under way for the tests of their tracker, and of who talks to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycollect.channel.messages import Abort
from raycollect.core.model import Address, GroupSpec, Key, Member, OpKind, ReduceOp, task_key
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.group.membership import membership_of
from raycollect.planner import Membership, Request, plan
from tests.support.values import replace

SEQ = 40


def key_of(rank: int) -> Key:
    return task_key(bytes([rank + 1] * 24), 1)


def member_of(number: int) -> Member:
    return Member(
        rank=number,
        actor_id=f"{number:032x}",
        actor=f"Worker({number})",
        address=Address(host="10.0.0.1", port=1000 + number, secret=bytes(32)),
        machine="m",
        node_id="n",
        pid=number,
        incarnation="i",
        ordered=True,
    )


def group(name: str, numbers: Sequence[int], *, machines: str = "", backend: str = "tcp") -> Membership:
    """A group of actors by their numbers, each on the machine of its letter."""
    spec = GroupSpec(name=name, group_id=f"id of {name}", backend=backend, world_size=len(numbers))
    places = machines or "m" * len(numbers)
    members = tuple(
        replace(member_of(number), rank=rank, machine=place, node_id=place)
        for rank, (number, place) in enumerate(zip(numbers, places, strict=True))
    )
    return membership_of(spec, members)


def asked(membership: Membership, sources: Sequence[Any], **changes: Any) -> RequestKey:
    """An allreduce."""
    operands = tuple((rank, source, None) for rank, source in enumerate(sources))
    one = RequestKey(membership, OpKind.ALLREDUCE, operands, ReduceOp.SUM, -1, -1, True, 60.0)
    return one._replace(**changes)


def flying(*calls: RequestKey, refs: int = 10) -> PlanTracker:
    """A plan of these calls, of so many refs."""
    groups = [one.group for one in calls]
    return PlanTracker(SEQ, plan([one.request() for one in calls], groups), groups, refs_of(refs))


def refs_of(count: int) -> dict[Key, Any]:
    return dict.fromkeys(map(key_of, range(count)))


def tracked(world: int = 4, ranks: tuple[int, int] | None = None, refs: dict[Key, Any] | None = None) -> PlanTracker:
    """An allreduce over all ranks of the group "ring", or a send from the first of `ranks` to the second."""
    membership = group("ring", range(world), backend="gloo")
    if ranks is None:
        operands = tuple((rank, rank, None) for rank in range(world))
        request = Request(kind=OpKind.ALLREDUCE, group=membership.spec, operands=operands, op=ReduceOp.SUM)
    else:
        operands = tuple((r, *((r, None) if r == ranks[0] else (None, r))) for r in sorted(ranks))
        request = Request(kind=OpKind.SEND, group=membership.spec, operands=operands, root=ranks[0], peer=ranks[1])
    return tracking(request, membership, refs_of(world) if refs is None else refs)


def tracking(request: Request, membership: Membership, refs: dict[Key, Any]) -> PlanTracker:
    return PlanTracker(SEQ, plan([request], [membership]), [membership], refs)


def who_aborted(orders: list[tuple[int, Any]]) -> list[int]:
    """The positions that are told to abort; nothing else is said."""
    for _, message in orders:
        assert type(message) is Abort
        assert message.seq == SEQ
        assert message.reason
    return [position for position, _ in orders]
