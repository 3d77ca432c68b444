"""Calls -> plan -> one message per participant -> flight.

One lock spans all submits of a plan, so every participant's queue sees the plans of this controller in the same order
(P2). A submit that fails in the middle aborts the plan on those that have it.

The message is an actor task, which takes its place in the actor's queue. In groups whose ordering is ``"data"`` it is
an `Order` by the channel, which does not; but where a plan makes something, its refs are the returns of actor tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import ray

from raycollect.channel.messages import Order
from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.controller import Controller
from raycollect.errors import (
    CollectiveTimeoutError,
    ConnectionLostError,
    DispatchError,
    ParticipantDiedError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    Violation,
    refusal,
)
from raycollect.flight import Flight, described
from raycollect.group import DATA, Membership
from raycollect.model import KEY_NBYTES, Key, OpKind, ReduceOp
from raycollect.peer import Muster, Peer
from raycollect.planner import GpuLists, Plan, Request, Roster, Ticket, encode_order, encode_program, plan, plan_part
from raycollect.planner.ir import Operands

ORDER_NBYTES = MAX_FRAME_NBYTES - 256
"""The longest program, with its keys, that goes by the channel: a frame, less what is around it."""


class Asked(NamedTuple):
    """One call, as far as its plan depends on it: a `Request` that is cheap to make, and to look up.

    Attributes:
        roster: Its group.
        kind: See `Request`.
        operands: See `Request`; a source is the place of a ref among the different refs of all calls, or a `Made`.
        op: See `Request`.
        root: See `Request`.
        peer: See `Request`.
        inplace: See `Request`.
        timeout_s: See `Request`.
        snapshot: See `Request`.
        lists: See `Request`.
    """

    roster: Roster
    kind: OpKind
    operands: tuple[Operands, ...]
    op: ReduceOp | None
    root: int
    peer: int
    inplace: bool
    timeout_s: float
    snapshot: bool = False
    lists: GpuLists | None = None

    def request(self) -> Request:
        """The request."""
        return Request(
            kind=self.kind,
            group=self.roster.spec,
            operands=self.operands,
            op=self.op,
            root=self.root,
            peer=self.peer,
            inplace=self.inplace,
            timeout_s=self.timeout_s,
            snapshot=self.snapshot,
            lists=self.lists,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan with all that dispatching it needs, by position.

    Attributes:
        plan: The plan.
        programs: What each participant gets, encoded.
        sources: The places of the refs whose keys travel with it.
        outputs: The requests that make something there, in the order in which it comes back.
        is_mail: Whether it may go by the channel: it makes nothing, and fits.
    """

    plan: Plan
    programs: tuple[bytes, ...]
    sources: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    is_mail: bool


@lru_cache(maxsize=256)
def prepare(asked: tuple[Asked, ...], staging: int) -> Prepared:
    """Plans calls and encodes the programs; remembered, for loops that repeat themselves, with the same refs or others.

    Raises:
        RefusedError: A call makes no sense; with the reasons of all calls.
    """
    requests = [one.request() for one in asked]
    rosters = [one.roster for one in asked]
    try:
        planned = plan(requests, rosters, staging=staging)
    except RefusedError:
        raise _refusal(requests, rosters) from None
    positions = range(len(planned.participants))
    programs = tuple(encode_program(planned.program(at)) for at in positions)
    sources: Any = tuple(planned.sources(at) for at in positions)  # places, as `Asked` has them
    outputs = tuple(planned.outputs(at) for at in positions)
    nbytes = max(len(one) + len(keys) * KEY_NBYTES for one, keys in zip(programs, sources, strict=True))
    return Prepared(
        plan=planned,
        programs=programs,
        sources=sources,
        outputs=outputs,
        is_mail=nbytes <= ORDER_NBYTES and not any(outputs),
    )


def _refusal(requests: Sequence[Request], rosters: Sequence[Roster]) -> RefusedError:
    """What is wrong with all requests."""
    found: list[Violation] = []
    for number, (request, roster) in enumerate(zip(requests, rosters, strict=True)):
        try:
            plan_part(request, roster)
        except RefusedError as exc:
            if len(requests) == 1:
                return exc
            found += [replace(one, call=number) for one in exc.violations]
    return refusal("batch", "", tuple(found))


def send_plan(
    controller: Controller,
    asked: tuple[Asked, ...],
    memberships: Sequence[Membership],
    refs: dict[Key, Any],
    staging: int,
) -> Flight:
    """Plans calls and sends each participant its half, in one message each.

    Args:
        controller: This process's controller.
        asked: The calls, in program order.
        memberships: The group of each.
        refs: The operand refs by key; their order gives the places that `asked` has.
        staging: See `planner.Program`.

    Returns:
        The flight. Where not all could be sent it has failed with DispatchError, or ParticipantDiedError, and is
        aborted on those that have it.

    Raises:
        RefusedError: A call makes no sense; nothing was sent.
        UnknownGroupError: A group was destroyed meanwhile; nothing was sent.
        GroupBrokenError: A member is gone; nothing was sent.
    """
    try:
        prepared = prepare(asked, staging)
    except RefusedError as exc:
        raise explained(exc, asked, memberships, tuple(refs)) from None
    planned, keys = prepared.plan, tuple(refs)
    with controller.dispatching:
        peers = controller.crew(memberships, planned.participants)
        by_channel = prepared.is_mail and all(one.spec.ordering == DATA for one in memberships)
        together = by_channel and _may_wait(controller, planned.participants, refs.values())
        flight = controller.take_off(lambda seq: Flight(seq, planned, memberships, refs), planned.width)
        if together:
            _muster(controller, flight, peers, memberships)
        for at, peer in enumerate(peers):
            outputs = prepared.outputs[at]
            ticket = Ticket(flight.seq, peer.last_seq)
            order = encode_order(ticket, [keys[place] for place in prepared.sources[at]], prepared.programs[at])
            made: Sequence[Any] = ()
            try:
                if by_channel:
                    peer.order(Order(payload=order, together=together))
                else:
                    made = peer.submit(order, len(outputs))
            except Exception as exc:  # noqa: BLE001 - whatever Ray raises: too many pending calls, a dead actor, its own bugs
                error = _unsent(exc, flight.rank_of(at), peer.info["actor"])
                controller.send(flight, flight.fail(error, unsent=range(at, len(peers))))
                return flight
            except BaseException:  # a signal: this one may have been sent
                interrupted = PlanAbortedError(detail="interrupted while it was sent")
                controller.send(flight, flight.fail(interrupted, unsent=range(at + 1, len(peers))))
                controller.send(flight, flight.done(at, interrupted, ()))
                raise
            peer.last_seq = flight.seq
            if outputs:
                flight.made.update(zip(((number, at) for number in outputs), made, strict=True))
    return flight


def _unsent(exc: Exception, rank: int, actor: str) -> RaycollectError:
    """What became of a plan that could not be sent to a participant."""
    error: RaycollectError
    if isinstance(exc, ConnectionLostError):
        error = ParticipantDiedError(rank=rank, actor=actor, detail=f"it got no order ({exc.detail})")
    else:
        error = DispatchError(rank=rank, actor=actor, detail=f"{type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


def _may_wait(controller: Controller, participants: Iterable[str], refs: Iterable[Any]) -> bool:
    """Whether a participant may have to wait for an operand, or for the end of a plan; called under `dispatching`."""
    under_way = controller.flights()
    if any(flight.is_pending(flight.plan.positions.get(one, -1)) for flight in under_way for one in participants):
        return True
    asked = list(refs)
    return bool(asked and ray.wait(asked, num_returns=len(asked), timeout=0, fetch_local=False)[1])


def _muster(controller: Controller, flight: Flight, peers: Sequence[Peer], memberships: Sequence[Membership]) -> None:
    """Lets the participants of a plan begin together."""

    def late(missing: tuple[int, ...]) -> None:
        actors = [flight.plan.participants[at] for at in missing]
        group = next(one for one in memberships if one.rank_of(actors[0]) >= 0)
        ranks = tuple(sorted(rank for rank in map(group.rank_of, actors) if rank >= 0))
        error = CollectiveTimeoutError(group_name=group.spec.name, missing=ranks, timeout_s=flight.plan.timeout_s)
        controller.send(flight, flight.fail(error))

    muster = Muster(flight.seq, peers, late)
    flight.when_resolved(muster.end)


def explained(
    error: RefusedError, asked: Sequence[Asked], memberships: Sequence[Membership], keys: Sequence[Key]
) -> RefusedError:
    """Adds what the planner does not know: the groups' names, the ranks' actors, and their refs."""
    found = []
    for one in error.violations:
        number = max(one.call, 0)
        found.append(described(one, memberships[number], asked[number].operands, lambda place: keys[place]))
    names = dict.fromkeys(membership.spec.name for membership in memberships)
    return refusal(error.op, ", ".join(names), tuple(found))
