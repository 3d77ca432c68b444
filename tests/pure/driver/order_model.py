"""A model of collectives on overlapping groups, and a fleet of real controllers and leases to compare it with."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from raycollect.core.model import Key, OpKind, ReduceOp
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import MismatchError, TensorLostError
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.member.runtime import Runtime
from raycollect.planner import Membership
from raycollect.pos import Absence
from tests.pure.driver.leased import declared
from tests.pure.driver.sending import send_plan
from tests.pure.driver.tracked_plans import group
from tests.pure.local_world import LocalCommunicator, LocalWorld
from tests.pure.sites import BUFFERS, WAIT_S, Came, Method, Ref, Site, Turn, change, first_values
from tests.support.waiting import wait_until

MUCH = int(os.environ.get("RAYCOLLECT_TEST_ORDER", "1"))
FOLDS: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BXOR: np.bitwise_xor,
}
ENDS = ("sure", "sure", "sure", "unsure", "")
KINDS = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective as the model sees it.

    Attributes:
        at: The group's members.
        kind: What it does.
        buffers: Of each rank the buffer; None: what a method makes for it, which is in `made`.
        op: How it reduces.
        root: Whence or whither.
        peer: Of a send, whither.
        makes: Whether what it gives is new.
        made: What methods make, by rank.
    """

    at: tuple[int, ...]
    kind: OpKind
    buffers: tuple[int | None, ...]
    op: ReduceOp
    root: int
    peer: int
    makes: bool
    made: tuple[Any, ...]

    def apply(self, world: dict[int, list[Any]]) -> Any:
        """Does it in a world of arrays; returns what is new."""
        values = [
            world[one][buffer] if buffer is not None else made.copy()
            for one, buffer, made in zip(self.at, self.buffers, self.made, strict=True)
        ]
        total = reduce(FOLDS[self.op], values).copy()
        if self.makes:
            return total
        given = total if self.kind in (OpKind.ALLREDUCE, OpKind.REDUCE) else values[self.root].copy()
        takers = {OpKind.REDUCE: [self.root], OpKind.SEND: [self.peer]}.get(self.kind, range(len(values)))
        for rank in takers:
            values[rank][:] = given
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A plan that was sent: its calls in order, and what becomes of it; `turns` are those of its operands' methods."""

    calls: tuple[Call, ...]
    tracker: PlanTracker
    mismatches: bool
    is_missing: bool  # a method raises
    turns: tuple[Turn, ...]

    @property
    def error(self) -> Any:
        """How it fails, if it does; known once all methods have had their turns."""
        if self.mismatches:
            return MismatchError
        return TensorLostError if self.is_missing or any(one.is_cancelled for one in self.turns) else type(None)

    @property
    def is_refused(self) -> bool:
        """Whether it changes nothing."""
        return self.error is not type(None)


@dataclass(slots=True, kw_only=True)
class Made:
    """The operands of a plan that methods make, or that they fail to make."""

    turns: list[Turn] = field(default_factory=list)
    raises: bool = False

    def make(self, site: Site, value: Any, chance: random.Random) -> Ref:
        """Calls such a method."""
        raises = chance.random() < 0.15
        ref, turn = site.make_or_not(None if raises else value.copy(), chance.choice(ENDS))
        self.raises |= raises
        self.turns.append(turn)
        return ref


class Fleet:
    """A controller and its participants.

    Args:
        count: How many participants there are.
        groups: For each group the participants, by rank.
    """

    def __init__(self, count: int, groups: Sequence[Sequence[int]]) -> None:
        self.controller = Controller(object(), Runtime())
        self.sites = [
            Site(number, self._heard, self.controller.messages, self.controller.mailbox) for number in range(count)
        ]
        self.memberships: list[Membership] = []
        self.members: list[tuple[int, ...]] = []
        self.sent: list[Sent] = []
        self._later: SimpleQueue[Turn] = SimpleQueue()  # what is to be cancelled
        for site in self.sites:
            self.controller.participants.add(site.peer)
        for members in groups:
            self._declare(tuple(members))

    def _declare(self, members: tuple[int, ...]) -> None:
        membership = group(f"group {len(self.members)}", members, backend="local")
        world = LocalWorld(len(members), membership.spec.name)
        for rank, one in enumerate(members):
            site = self.sites[one]
            site.peer.group_ids.add(membership.spec.group_id)
            site.lease._groups.by_id[membership.spec.group_id] = cast(
                Any,
                SimpleNamespace(
                    spec=membership.spec,
                    name=membership.spec.name,
                    ordered=True,
                    controller=site.lease.controller,
                    plans=SimpleNamespace(communicator=LocalCommunicator(world, rank)),
                    exchange=ChannelExchange(membership.spec.group_id, rank, site.lease._reporter.tell),
                    close=lambda reason: None,
                ),
            )
        self.controller.groups.add(declared(membership))
        self.memberships.append(membership)
        self.members.append(members)

    def _heard(self, peer: ParticipantLink, message: Any) -> None:
        peer.received(cast(Any, peer.link), message)

    def close(self) -> None:
        for site in self.sites:
            site.close()
        self.controller.close()

    # ------------------------------------------------------------------------------------------ what threads do

    def act(self, chance: random.Random, count: int) -> None:
        """Some calls and methods, one after the other."""
        for _ in range(count):
            if chance.random() < 0.3:
                self._call_method(chance)
            else:
                self._send(chance)

    def _call_method(self, chance: random.Random) -> None:
        site = chance.choice(self.sites)
        takes_back = chance.random() < 0.3
        turn = site.call(
            Method(
                buffer=chance.randrange(BUFFERS), factor=chance.randint(2, 5), summand=chance.randint(-9, 9),
                takes_back=takes_back, end=chance.choice(ENDS),
            )
        )  # fmt: skip
        self._cancel(chance, turn)

    def _cancel(self, chance: random.Random, turn: Turn) -> None:
        """Cancels a method now, later, or never."""
        cancelled = chance.random()
        if cancelled < 0.1:
            turn.cancel()
        elif cancelled < 0.2:
            self._later.put(turn)
        if chance.random() < 0.2 and not self._later.empty():
            with suppress(Empty):
                self._later.get_nowait().cancel()

    def _send(self, chance: random.Random) -> None:
        """One call, or a batch of some; now and then one that is refused."""
        numbers = [chance.randrange(len(self.members)) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
        is_refused = len(numbers) == 1 and len(self.members[numbers[0]]) > 1 and chance.random() < 0.08
        calls, asked, refs, made = [], [], dict[Key, Any](), Made()
        for number in numbers:
            call, operands = self._draw(chance, number, is_refused, refs, made)
            calls.append(call)
            is_reducing = call.kind in (OpKind.ALLREDUCE, OpKind.REDUCE)
            op = call.op if is_reducing else None
            asked.append(
                RequestKey(
                    self.memberships[number], call.kind, operands, op, call.root, call.peer, not call.makes,
                    WAIT_S,
                )
            )  # fmt: skip
        is_awaited = len(self.sent) % 2 > 0  # they end by their letters, too
        tracker = send_plan(self.controller, tuple(asked), refs, is_awaited=is_awaited)
        turns = tuple(made.turns)
        self.sent.append(
            Sent(calls=tuple(calls), tracker=tracker, mismatches=is_refused, is_missing=made.raises, turns=turns)
        )
        for turn in turns:
            self._cancel(chance, turn)
        if chance.random() < 0.1:
            assert tracker.wait(WAIT_S)

    def _draw(
        self, chance: random.Random, number: int, is_refused: bool, refs: dict[Key, Any], by_methods: Made
    ) -> tuple[Call, tuple[Any, ...]]:
        members, kind = self.members[number], chance.choice(KINDS)
        if is_refused or len(members) == 1:
            kind = OpKind.ALLREDUCE
        root, peer = chance.sample(range(len(members)), 2) if len(members) > 1 else (0, -1)
        is_long = chance.random() < 0.3
        buffers: list[int | None] = [BUFFERS - 1 if is_long else chance.randrange(BUFFERS - 1) for _ in members]
        made: list[Any] = [None] * len(members)
        if is_refused:
            buffers[0], buffers[1] = BUFFERS - 1, 0
        used = sorted({root, peer}) if kind is OpKind.SEND else list(range(len(members)))
        if not is_refused and chance.random() < 0.2:
            rank = chance.choice(used)
            buffers[rank], made[rank] = None, np.arange(5 if is_long else 3) * chance.randint(1, 9)
        places = {}
        for rank in used:
            site = self.sites[members[rank]]
            buffer = buffers[rank]
            ref = by_methods.make(site, made[rank], chance) if buffer is None else site.refs[buffer]
            refs.setdefault(ref.key, ref)
            places[rank] = list(refs).index(ref.key)
        is_to_one = kind in (OpKind.BROADCAST, OpKind.SEND)
        operands = tuple(
            (rank, None, place) if is_to_one and rank != root else (rank, place, None) for rank, place in places.items()
        )
        call = Call(
            at=members,
            kind=kind,
            buffers=tuple(buffers),
            op=chance.choice(list(FOLDS)),
            root=-1 if kind is OpKind.ALLREDUCE else root,
            peer=peer if kind is OpKind.SEND else -1,
            makes=kind is OpKind.ALLREDUCE and chance.random() < 0.2,
            made=tuple(made),
        )
        return call, operands

    # ------------------------------------------------------------------------------------------ what comes of it

    def settle(self) -> None:
        """Waits for all, and compares with the model."""
        for one in self.sent:
            assert one.tracker.wait(WAIT_S), f"plan {one.tracker.seq} hangs"
        ends = [threading.Event() for _ in self.sites]
        for site, end in zip(self.sites, ends, strict=True):
            site._enter(Came(), end.set)
        assert all(end.wait(WAIT_S) for end in ends)
        for one in self.sent:
            assert type(one.tracker.error) is one.error, one.tracker.error
        # One that was refused is known to be so before all have said it.
        assert wait_until(lambda: not list(self.controller.plans.trackers()), WAIT_S), "a plan never lands"
        self._compare()

    def _compare(self) -> None:
        world = {site.number: first_values(site.number) for site in self.sites}
        queues = {site.number: iter(list(site.came)) for site in self.sites}
        for one in sorted(self.sent, key=lambda sent: sent.tracker.seq):
            self._run_methods(world, queues, one)
            for number, call in enumerate(() if one.is_refused else one.calls):
                new = call.apply(world)
                if new is not None:
                    self._assert_made(one.tracker, number, call, new)
        for number, queue in queues.items():
            for came in queue:
                assert not came.seq, "a plan came twice, or out of order"
                _apply_method(world[number], came)
        for site in self.sites:
            for found, expected in zip(site.values, world[site.number], strict=True):
                np.testing.assert_array_equal(found, expected)

    def _run_methods(self, world: dict[int, list[Any]], queues: dict[int, Any], sent: Sent) -> None:
        """On each participant the methods that stand before a plan, which must be the next one in its queue."""
        prepared = sent.tracker.plan
        for actor_id in prepared.participants:
            number = int(actor_id, 16)
            came = next(one for one in queues[number] if one.seq or _apply_method(world[number], one))
            assert came.seq == sent.tracker.seq, "plans stand in a queue in another order than that of their numbers"

    def _assert_made(self, tracker: PlanTracker, number: int, call: Call, expected: Any) -> None:
        for rank, one in enumerate(call.at):
            ref = tracker.outputs[(number, tracker.plan.positions[f"{one:032x}"])]
            found = self.sites[one].store.look(ref.key)
            assert not isinstance(found, Absence)
            np.testing.assert_array_equal(found.tensors[0], expected, err_msg=f"rank {rank}")


def _apply_method(values: list[Any], came: Came) -> bool:
    is_cancelled = came.turn is not None and came.turn.is_cancelled
    if came.method is not None and not came.method.takes_back and not is_cancelled:
        change(values[came.method.buffer], came.method)
    return False
