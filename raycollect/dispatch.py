"""Plan -> one message per participant -> flight.

One lock spans all submits of a plan, so every participant's queue sees the plans of this controller in the same order
(P2). A submit that fails in the middle aborts the plan on those that have it.
"""

from __future__ import annotations

from typing import Any

from raycollect.controller import Controller
from raycollect.errors import DispatchError, GroupBrokenError, SelfDrivenError
from raycollect.flight import Flight
from raycollect.group import Membership
from raycollect.planner import Plan, encode_program
from raycollect.ray_internals import current_actor_id


def send_program(controller: Controller, plan: Plan, membership: Membership, refs: dict[int, Any]) -> Flight:
    """Sends each participant its half of a plan, as one actor task each.

    Args:
        controller: This process's controller.
        plan: The plan.
        membership: Its group.
        refs: The operand refs by rank; afterwards `Flight.results` holds the result refs.

    Returns:
        The flight. Where not all could be submitted it has failed with DispatchError, and is aborted on those that were.

    Raises:
        GroupBrokenError: A member is gone; nothing was sent.
        SelfDrivenError: This process is a participant of the plan; nothing was sent.
    """
    members = [membership.members[rank] for rank in plan.ranks]
    me = current_actor_id()
    for member in members:
        if me and member.actor_id == me:
            raise SelfDrivenError(actor=member.actor)
    with controller.dispatching:
        broken = controller.why_broken(membership)
        if broken:
            raise GroupBrokenError(group_name=membership.spec.name, detail=broken)
        peers = [controller.peer(member) for member in members]
        flight = controller.take_off(lambda seq: Flight(seq, plan, membership, dict(refs)))
        for at, (rank, peer) in enumerate(zip(plan.ranks, peers, strict=True)):
            program = plan.program(rank, seq=flight.seq, predecessor=peer.last_seq)
            try:
                made = peer.submit(encode_program(program), plan.outputs(rank))
            except Exception as exc:
                error = DispatchError(rank=rank, actor=members[at].actor, detail=f"{type(exc).__name__}: {exc}")
                error.__cause__ = exc
                controller.send(flight, flight.fail(error, unsent=plan.ranks[at:]))
                return flight
            peer.last_seq = flight.seq
            flight.results[rank] = made[0] if made else refs.get(rank)
    return flight
