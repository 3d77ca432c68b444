"""Plans under way for the tests of their tracker."""

from __future__ import annotations

from typing import Any

from raycollect.channel.messages import Abort
from raycollect.core.model import Address, GroupSpec, Key, Member, OpKind, ReduceOp, task_key
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    PlanAbortedError,
)
from raycollect.group.membership import membership_of
from raycollect.planner import Membership, Request, plan
from tests.support.values import replace

SEQ = 7


def key_of(rank: int) -> Key:
    return task_key(bytes([rank + 1] * 24), 1)


def member_of(rank: int) -> Member:
    return Member(
        rank=rank,
        actor_id=f"{rank:032x}",
        actor=f"Worker({rank})",
        address=Address(host="10.0.0.1", port=1000 + rank, secret=bytes(32)),
        machine="m",
        node_id="n",
        pid=rank,
        incarnation="i",
        ordered=True,
    )


def group_of(world: int, name: str = "ring", group_id: str = "0123", first: int = 0) -> Membership:
    """A group of the actors from `first` on."""
    spec = GroupSpec(name=name, group_id=group_id, backend="gloo", world_size=world)
    members = tuple(replace(member_of(first + rank), rank=rank) for rank in range(world))
    return membership_of(spec, members)


def refs_of(count: int) -> dict[Key, Any]:
    return dict.fromkeys(map(key_of, range(count)))


def tracked(world: int = 4, ranks: tuple[int, int] | None = None) -> PlanTracker:
    """An allreduce over all ranks, or a send from the first of `ranks` to the second."""
    membership = group_of(world)
    if ranks is None:
        operands = tuple((rank, rank, None) for rank in range(world))
        request = Request(kind=OpKind.ALLREDUCE, group=membership.spec, operands=operands, op=ReduceOp.SUM)
    else:
        operands = tuple((r, *((r, None) if r == ranks[0] else (None, r))) for r in sorted(ranks))
        request = Request(kind=OpKind.SEND, group=membership.spec, operands=operands, root=ranks[0], peer=ranks[1])
    return flying([request], [membership], refs_of(world))


def flying(requests: list[Request], memberships: list[Membership], refs: dict[Key, Any]) -> PlanTracker:
    planned = plan(requests, memberships)
    return PlanTracker(SEQ, planned, memberships, refs)


def who_aborted(orders: list[tuple[int, Any]]) -> list[int]:
    """The ranks that are told to abort; nothing else is said."""
    for _, message in orders:
        assert type(message) is Abort
        assert message.seq == SEQ
        assert message.reason
    return [rank for rank, _ in orders]


def an_echo() -> PlanAbortedError:
    return PlanAbortedError(detail="rank 1 has left the launch")
