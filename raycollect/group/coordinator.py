"""The rules by which the members of a group meet for calls of their own. Pure: messages in, messages out.

The coordinator runs in the controller of a declared group, or in rank 0 of a group that its members formed. A
communicator, by its name in messages, is a set of ranks that all take part in each of its launches: ``"all"``, or
``"s>d"`` for the messages from rank s to rank d. On the communicator of the driver's plans, ``"plans"``, values are
relayed, and ranks don't meet. The rules:

1. On each communicator a rank waits at one *place* at a time: to form it, or for the agreement of one launch. When all
   its ranks wait at the same place, each rank gets the values of all ranks.
2. A rank that times out ends the meeting for all ranks at its place, as a collective without one of its ranks can't
   succeed; all ranks get the same list of missing ranks. The next meetings of these ranks match again.
3. A rank that is out of step sends `Drop`, so that the other ranks do not wait for it in a launch.
4. The coordinator tells all ranks when a rank has died or departed, and repeats it to a rank that meets on a
   communicator of that rank.
5. A rank that waits in a call for a rank that waits for it in a plan is denied (`Met` with an error), as both would
   wait forever. A rank that arrives at that call later, and waits for long, is denied as well, as the first rank has
   given up the call. Each rank is denied once, and only until the first rank meets again: the other rank may already
   be in the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raycollect.channel.messages import (
    Answer,
    Ask,
    Drop,
    Gone,
    Meet,
    Message,
    Met,
    Publish,
    Stuck,
    Withdraw,
)
from raycollect.errors import ProtocolError, Violation, refusal, to_wire

ALL = "all"
"""The communicator of collectives."""

PLANS = "plans"
"""The communicator of the driver's plans. Its ranks only publish values for connecting; they meet at the controller."""

DEPARTED = "it has destroyed the group"
"""The reason for the departure of a live member."""

Orders = list[tuple[int, Message]]
"""(rank, message) to send, in order."""


def name_of_ranks(source: int, target: int) -> str:
    """The name of the communicator of one sender and one receiver."""
    return f"{source}>{target}"


def ranks_of(name: str, world_size: int) -> tuple[int, ...]:
    """The ranks of a communicator, ascending; ProtocolError: no communicator has that name."""
    if name in (ALL, PLANS):
        return tuple(range(world_size))
    try:
        source, target = map(int, name.split(">"))
    except ValueError:
        raise ProtocolError(detail=f"no communicator {name[:40]!r}") from None
    if source == target or not (0 <= source < world_size and 0 <= target < world_size):
        raise ProtocolError(detail=f"no communicator {name[:40]!r} in a group of {world_size}")
    return tuple(sorted((source, target)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    place: str
    call: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """A denied call on a communicator."""

    rank: int
    call: int
    error: dict[str, Any]
    expected: set[int]  # the ranks that may still arrive at it


class Coordinator:
    """The meetings of one group. Not thread-safe."""

    def __init__(self, group_id: str, world_size: int, name: str = "") -> None:
        self._group_id = group_id
        self._world_size = world_size
        self._name = name
        self._waiting: dict[str, dict[int, _Waiting]] = {}
        self._gone: dict[int, Gone] = {}
        self._stuck: dict[int, Stuck] = {}
        self._refused: dict[str, _Refused] = {}  # communicator -> its last denied call

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks that have died or departed."""
        return tuple(sorted(self._gone))

    def receive(self, rank: int, message: Message) -> Orders:
        """Handles a member's message. ProtocolError: unexpected message, or the rank is not in the communicator."""
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise ProtocolError(detail=f"{type(message).__name__} is an unexpected message for a coordinator")
        return handle(self, rank, message)

    def lost(self, rank: int, detail: str) -> Orders:
        """Handles the end of a member's connection."""
        return self._leave(rank, died=True, detail=detail)

    # ------------------------------------------------------------------------------------------ meetings

    def _meet(self, rank: int, message: Meet) -> Orders:
        ranks = self._ranks(rank, message.communicator)
        gone = [self._gone[other] for other in ranks if other in self._gone]
        if gone:
            return [(rank, departure) for departure in gone]
        refused = self._refused.get(message.communicator)
        if refused is not None and refused.rank == rank:
            del self._refused[message.communicator]
        waiting = self._waiting.setdefault(message.communicator, {})
        waiting[rank] = _Waiting(place=message.place, call=message.call, blob=message.blob)
        if any(other not in waiting or waiting[other].place != message.place for other in ranks):
            return []
        del self._waiting[message.communicator]
        blobs = [waiting[other].blob for other in ranks]
        return [(other, self._answer(message.communicator, waiting[other].call, blobs=blobs)) for other in ranks]

    def _withdraw(self, rank: int, message: Withdraw) -> Orders:
        ranks = self._ranks(rank, message.communicator)
        waiting = self._waiting.get(message.communicator, {})
        mine = waiting.get(rank)
        if mine is None or mine.call != message.call:
            return []  # the meeting was answered; the answer is in transit
        there = [other for other in ranks if other in waiting and waiting[other].place == mine.place]
        missing = [other for other in ranks if other not in there]
        leaving = there if message.timed_out else [rank]
        name = message.communicator
        return [(other, self._answer(name, waiting.pop(other).call, missing=missing)) for other in leaving]

    def _ask(self, rank: int, message: Ask) -> Orders:
        return [(other, message) for other in self._ranks(rank, message.communicator) if other in message.ranks]

    def _relay(self, rank: int, message: Drop | Publish | Answer) -> Orders:
        return [(other, message) for other in self._ranks(rank, message.communicator) if other != rank]

    # ------------------------------------------------------------------------------------------ departures

    def _depart(self, rank: int, message: Gone) -> Orders:
        return self._leave(rank, died=False, detail=DEPARTED)

    def _leave(self, rank: int, *, died: bool, detail: str) -> Orders:
        if rank in self._gone:
            return []
        message = Gone(group_id=self._group_id, rank=rank, died=died, detail=detail)
        self._gone[rank] = message
        self._stuck.pop(rank, None)
        for name in [name for name, refused in self._refused.items() if refused.rank == rank]:
            del self._refused[name]
        for name in [name for name in self._waiting if rank in ranks_of(name, self._world_size)]:
            del self._waiting[name]
        return [(other, message) for other in range(self._world_size) if other not in self._gone]

    # ------------------------------------------------------------------------------------------ deadlocks

    def _note(self, rank: int, message: Stuck) -> Orders:
        if not message.communicator and not message.seq:
            self._stuck.pop(rank, None)
            return []
        self._stuck[rank] = message
        orders: Orders = []
        for caller, call in self._stuck.items():
            if call.communicator and (planner := self._planner(caller, call)) >= 0:
                error = self._denial(caller, call, planner, self._stuck[planner])
                self._note_refused(caller, call, error)
                orders.append((caller, self._answer(call.communicator, call.call, error=error)))
        return orders + self._late_denials()

    def _note_refused(self, rank: int, call: Stuck, error: dict[str, Any]) -> None:
        name = call.communicator
        refused = self._refused.get(name)
        if refused is None or (refused.rank, refused.call) != (rank, call.call):
            is_first = refused is None or refused.rank == rank
            expected = {*ranks_of(name, self._world_size)} if is_first or refused is None else refused.expected
            self._refused[name] = _Refused(rank=rank, call=call.call, error=error, expected=expected - {rank})

    def _late_denials(self) -> Orders:
        """Denies ranks that wait in a call of which another rank was denied."""
        orders: Orders = []
        for rank, call in self._stuck.items():
            refused = self._refused.get(call.communicator)
            if call.is_long and refused is not None and rank in refused.expected:
                refused.expected.discard(rank)
                orders.append((rank, self._answer(call.communicator, call.call, error=refused.error)))
        return orders

    def _planner(self, caller: int, call: Stuck) -> int:
        """Returns a rank that a call waits for, and that waits in a plan which the caller has not started; -1: none."""
        for rank, other in self._stuck.items():
            if rank in call.ranks and not other.communicator and caller in other.ranks and other.seq > call.begun:
                return rank
        return -1

    def _denial(self, caller: int, call: Stuck, planner: int, plan: Stuck) -> dict[str, Any]:
        violations = (
            Violation(
                kind="mismatch",
                rank=caller,
                field="call",
                found=f"the imperative {call.op} inside a method",
                expected=f"the method's end: rank {planner} waits in the driver's {plan.op}, plan {plan.seq}",
            ),
            Violation(
                kind="mismatch",
                rank=planner,
                field="call",
                found=f"the driver's {plan.op}, plan {plan.seq}",
                expected=f"the imperative {call.op} that rank {caller} is in",
            ),
        )
        return to_wire(refusal(call.op, self._name, violations))

    def _answer(
        self,
        communicator: str,
        call: int,
        *,
        blobs: Sequence[bytes] = (),
        missing: Sequence[int] = (),
        error: dict[str, Any] | None = None,
    ) -> Met:
        return Met(
            group_id=self._group_id,
            communicator=communicator,
            call=call,
            blobs=list(blobs),
            missing=list(missing),
            error=error,
        )

    def _ranks(self, rank: int, name: str) -> tuple[int, ...]:
        ranks = ranks_of(name, self._world_size)
        if rank not in ranks:
            raise ProtocolError(detail=f"rank {rank} has no part in communicator {name!r}")
        return ranks


_HANDLERS: dict[type, Callable[[Coordinator, int, Any], Orders]] = {
    Answer: Coordinator._relay,
    Ask: Coordinator._ask,
    Drop: Coordinator._relay,
    Gone: Coordinator._depart,
    Meet: Coordinator._meet,
    Publish: Coordinator._relay,
    Stuck: Coordinator._note,
    Withdraw: Coordinator._withdraw,
}
