"""Plan -> one message per participant -> flight.

One lock spans all submits of a plan, so every participant's queue sees the plans of this controller in the same order
(P2). A submit that fails in the middle aborts the plan on those that have it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from raycollect.controller import Controller
from raycollect.errors import DispatchError, GroupBrokenError
from raycollect.flight import Flight
from raycollect.group import Membership
from raycollect.model import Key
from raycollect.planner import Plan, Request, Ticket, encode_order, encode_program, plan


@lru_cache(maxsize=256)
def prepare(request: Request) -> tuple[Plan, tuple[bytes, ...]]:
    """Plans a request and encodes its programs, by rank; remembered, for loops that repeat themselves.

    Raises:
        RefusedError: The request makes no sense.
    """
    planned = plan(request)
    return planned, tuple(encode_program(planned.program(rank)) for rank in planned.ranks)


def send_program(controller: Controller, request: Request, membership: Membership, refs: dict[Key, Any]) -> Flight:
    """Plans a request and sends each participant its half, as one actor task each.

    Args:
        controller: This process's controller.
        request: What to do.
        membership: Its group.
        refs: The operand refs by key.

    Returns:
        The flight; its `results` are the result refs by rank. Where not all could be submitted it has failed with
        DispatchError, and is aborted on those that were.

    Raises:
        RefusedError: The request makes no sense; nothing was sent.
        GroupBrokenError: A member is gone; nothing was sent.
    """
    planned, programs = prepare(request)
    members = [membership.members[rank] for rank in planned.ranks]
    with controller.dispatching:
        broken = controller.why_broken(membership)
        if broken:
            raise GroupBrokenError(group_name=membership.spec.name, detail=broken)
        peers = [controller.peer(member) for member in members]
        flight = controller.take_off(lambda seq: Flight(seq, planned, membership, refs))
        for at, (rank, peer) in enumerate(zip(planned.ranks, peers, strict=True)):
            ticket = Ticket(flight.seq, peer.last_seq)
            try:
                made = peer.submit(encode_order(ticket, programs[at]), planned.outputs(rank))
            except Exception as exc:  # noqa: BLE001 - whatever Ray raises: too many pending calls, a dead actor, its own bugs
                error = DispatchError(rank=rank, actor=members[at].actor, detail=f"{type(exc).__name__}: {exc}")
                error.__cause__ = exc
                controller.send(flight, flight.fail(error, unsent=planned.ranks[at:]))
                return flight
            peer.last_seq = flight.seq
            flight.results[rank] = made[0] if made else _kept(planned, rank, refs)
    return flight


def _kept(planned: Plan, rank: int, refs: dict[Key, Any]) -> Any:
    """The ref of a result that is an operand; None where the rank has no result."""
    template = planned.template(rank)
    if template.result < 0:
        return None
    return refs[planned.keys(rank)[template.result]]
