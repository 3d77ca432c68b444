"""How the calls of NCCL's ranks meet on their streams, and what they do then."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ._machine import Machine
from ._memory import Block
from ._queues import Item, Mark, Work

Elements = np.ndarray[Any, np.dtype[Any]]

MISMATCH = 5
"""The status that ranks get whose calls don't match."""

SUM, PROD, MAX, MIN, AVG = range(5)
RULES: dict[int, Callable[..., Elements]] = {SUM: np.add, PROD: np.multiply, MAX: np.fmax, MIN: np.fmin, AVG: np.add}
"""Reduce op -> how two ranks' elements become one; the lesser of a number and NaN is the number, as on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one rank, as it was made.

    Attributes:
        what: Kind, count, datatype, op and root: what has to be the same on all ranks.
        peer: The other rank of a SEND or RECV.
        send: What is read: [n]; None: nothing.
        recv: What is written: [n]; None: nothing.
        blocks: The allocations that it touches.
    """

    seat: Seat
    what: tuple[Any, ...]
    peer: int = -1
    send: Elements | None = None
    recv: Elements | None = None
    blocks: Sequence[Block] = ()

    @property
    def kind(self) -> str:
        return str(self.what[0])

    @property
    def told(self) -> str:
        """It in words: what ranks must agree about."""
        kind, count, datatype, *rest = self.what
        return f"{kind} of {count} elements of datatype {datatype}" + (f" with {rest}" if rest else "")


@dataclass(slots=True, eq=False)
class Op:
    """A call that was enqueued; `key` is the same for those that belong together."""

    call: Call
    key: tuple[Any, ...]
    item: Item
    over: bool = False


@dataclass(slots=True, eq=False)
class Seat:
    """A rank's end of a communicator.

    Attributes:
        ended: It was destroyed or aborted.
        error: What `check_async_error` raises.
        failing: The error that the next call will get: when it runs, or (the flag) when it is made.
        group: What its last calls were made in; `last` and `before`: where these are, and those before them.
        open: What was enqueued and is not over.
    """

    clique: Clique
    rank: int
    device: int
    ended: bool = False
    error: int = 0
    failing: tuple[int, bool] | None = None
    group: object = None
    before: list[Mark] = field(default_factory=list)
    last: list[Mark] = field(default_factory=list)
    open: set[Op] = field(default_factory=set)
    issued: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def next_key(self, call: Call) -> tuple[Any, ...]:
        if call.kind in ("send", "recv"):
            pair = (self.rank, call.peer) if call.kind == "send" else (call.peer, self.rank)
            key: tuple[Any, ...] = (call.kind, *pair)
            self.issued[key] += 1
            return ("pair", *pair, self.issued[key])
        self.issued["all",] += 1
        return ("all", self.issued["all",])


class Launch(Work):
    """The calls of one group on one stream: one item there, in which all of them go on together.

    Args:
        calls: The calls.
        group: The same object for all launches of a group.
    """

    def __init__(self, calls: Sequence[Call], group: object) -> None:
        blocks = [block for call in calls for block in call.blocks]
        super().__init__("nccl." + "+".join(sorted({call.kind for call in calls})), None, blocks)
        self.calls = calls
        self.group = group

    def issue(self, item: Item) -> None:
        item.state = [Op(call, call.seat.next_key(call), item) for call in self.calls]
        for op in item.state:
            seat = op.call.seat
            if seat.ended:
                op.over = True  # the real one would read freed memory
                seat.clique.machine.violate(f"{self.name} on a communicator that has ended")
                continue
            seat.open.add(op)
            if seat.group is not self.group:
                seat.group, seat.before, seat.last = self.group, seat.last, []
            # A communicator's kernels run in the order of its calls, those of one group together.
            item.after += [mark for mark in seat.before if mark.queue is not item.queue]
            seat.last.append(Mark(item.queue, item.number, {}))

    def start(self, machine: Machine, item: Item) -> bool:
        matched = []
        with machine.lock:
            for op in item.state:
                if not op.over and op.call.seat.clique.post(machine, op):
                    matched.append(op)
            if all(op.over for op in item.state):
                return True
            item.state = [*item.state, None]  # from here on, whoever ends the last of them ends the item
        for op in matched:
            op.call.seat.clique.run(machine, op.key)
        return False


def end(machine: Machine, op: Op) -> None:
    """Ends a call, and with the last one its item if that has begun; is called under the lock."""
    if op.over:
        return
    op.over = True
    op.call.seat.open.discard(op)
    state = op.item.state
    if state[-1] is None and all(other.over for other in state[:-1]):
        machine.finish(op.item)


class Clique:
    """The ranks of one communicator.

    Attributes:
        seats: By rank; complete when all have come.
        board: What has begun, by key and by rank and kind.
    """

    def __init__(self, machine: Machine, size: int) -> None:
        self.machine = machine
        self.size = size
        self.seats: dict[int, Seat] = {}
        self.status: int | None = None
        self.board: dict[tuple[Any, ...], dict[tuple[int, str], Op]] = defaultdict(dict)
        self._spoiled: set[tuple[Any, ...]] = set()

    def post(self, machine: Machine, op: Op) -> bool:
        """Notes that a call has begun; True: with it all that belong together have. Is called under the lock."""
        call, seat = op.call, op.call.seat
        if seat.failing is not None and not seat.failing[1]:
            seat.error, seat.failing = seat.failing[0], None
            return False
        if seat.error:
            return False
        there = self.board[op.key]
        for other in there.values():
            if other.call.what[call.peer >= 0 :] != call.what[call.peer >= 0 :]:
                told = [f"rank {one.seat.rank} calls {one.told}" for one in (other.call, call)]
                machine.violate(f"NCCL: {told[0]}, {told[1]}")
                self._spoiled.add(op.key)
                for one in self.seats.values():
                    one.error = one.error or MISMATCH
                break
        there[seat.rank, call.kind] = op
        needed = 2 if op.key[0] == "pair" else self.size
        return len(there) == needed and op.key not in self._spoiled

    def withdraw(self, machine: Machine, seat: Seat) -> None:
        """Ends all that a rank has enqueued; the others go on waiting for it. Is called under the lock."""
        for op in list(seat.open):
            there = self.board.get(op.key, {})
            if there.get((seat.rank, op.call.kind)) is op and op.key not in self._running():
                del there[seat.rank, op.call.kind]
            end(machine, op)

    def _running(self) -> set[tuple[Any, ...]]:
        return {key for key, there in self.board.items() if len(there) == (2 if key[0] == "pair" else self.size)}

    def run(self, machine: Machine, key: tuple[Any, ...]) -> None:
        """Does what calls that have all begun are for."""
        with machine.lock:
            ops = list(self.board[key].values())
        calls = sorted((op.call for op in ops), key=lambda call: (call.seat.rank, call.kind))
        dead = [block for call in calls for block in call.blocks if block.dead]
        if dead:
            machine.violate(f"nccl.{calls[0].kind} touches {dead[0]}, which was freed")
        else:
            try:
                with np.errstate(all="ignore"):
                    _DO[calls[0].kind](calls)
            except Exception as exc:
                machine.violate(f"nccl.{calls[0].kind} raised {exc!r}")
        with machine.lock:
            del self.board[key]
            for op in ops:
                end(machine, op)


# ------------------------------------------------------------------------------------- what the calls do


def ring(op: int, parts: Sequence[Elements]) -> Elements:
    """Reduces as a ring does: each chunk begins at another rank, so the order of terms is not that of ranks."""
    world, rule = len(parts), RULES[op]
    result = np.empty_like(parts[0])
    bounds = [part * result.size // world for part in range(world + 1)]
    for chunk in range(world):
        mine = slice(bounds[chunk], bounds[chunk + 1])
        total = parts[(chunk + 1) % world][mine].copy()
        for step in range(2, world + 1):
            total = rule(total, parts[(chunk + step) % world][mine])
        result[mine] = _averaged(total, world) if op == AVG else total
    return result


def _averaged(total: Elements, world: int) -> Elements:
    if total.dtype.kind in "iu":
        return np.trunc(total / world).astype(total.dtype) if total.dtype.itemsize < 8 else _quotient(total, world)
    result: Elements = (total / total.dtype.type(world)).astype(total.dtype)
    return result


def _quotient(total: Elements, world: int) -> Elements:
    """The division of C, which rounds towards zero."""
    floor = total // world
    result: Elements = floor + ((total < 0) & (floor * world != total)).astype(total.dtype)
    return result


def _given(call: Call) -> Elements:
    assert call.send is not None
    return call.send


def _take(call: Call, values: Elements) -> None:
    if call.recv is not None:
        call.recv[:] = values


def _all_reduce(calls: Sequence[Call]) -> None:
    result = ring(calls[0].what[3], [_given(call) for call in calls])
    for call in calls:
        _take(call, result)


def _reduce(calls: Sequence[Call]) -> None:
    op, root = calls[0].what[3:5]
    _take(calls[root], ring(op, [_given(call) for call in calls]))


def _broadcast(calls: Sequence[Call]) -> None:
    given = _given(calls[calls[0].what[3]]).copy()
    for call in calls:
        _take(call, given)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    count = calls[0].what[1]
    result = ring(calls[0].what[3], [_given(call) for call in calls])
    for rank, call in enumerate(calls):
        _take(call, result[rank * count : (rank + 1) * count])


def _all_gather(calls: Sequence[Call]) -> None:
    result = np.concatenate([_given(call) for call in calls])
    for call in calls:
        _take(call, result)


def _pair(calls: Sequence[Call]) -> None:
    giver, taker = sorted(calls, key=lambda call: call.kind == "recv")
    _take(taker, _given(giver))


_DO: dict[str, Callable[[Sequence[Call]], None]] = {
    "allReduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduceScatter": _reduce_scatter,
    "allGather": _all_gather,
    "send": _pair,
    "recv": _pair,
}
