"""P2 over Ray, for long: three threads of the driver call collectives of overlapping groups, with methods in between.

The model is numpy, in the order of the plans' numbers. Where a method that changes a tensor stands among them its actor
notes: it knows which plan ended last. ``RAYCOLLECT_TEST_ORDER=20`` does twenty times as much.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.core.model import OpKind
from raycollect.member.participant import this_participant
from tests.pure.driver.order_model import FOLDS, KINDS, MUCH, Call
from tests.pure.sites import BUFFERS, OFTEN, first_values
from tests.support.actor_pool import reusable

WAIT_S = 100.0
GROUPS = {"left": (0, 1, 2), "right": (3, 2, 1), "round": (2, 0, 3)}
"""Four actors; no group has all, and each shares two with each other."""


@reusable
@ray.remote
class Loaded(col.CollectiveParticipant):
    """A participant with some arrays, which notes when its methods ran."""

    def __init__(self, number: int) -> None:
        self.values = first_values(number)
        self.noted: list[tuple[int, int, int]] = []

    def get(self, at):
        return self.values[at]

    def make(self, value):
        return np.array(value)

    def change(self, at, factor, number):
        """Changes a buffer for good; notes the plan that ended last."""
        self.noted.append((this_participant()._lease._sequencer.last, at, factor))
        self.values[at] *= factor
        self.values[at] += 1
        return number

    def dance(self, at):
        """Changes a buffer and takes it back: no plan may see that, and nothing of a plan may be lost."""
        for _ in range(OFTEN):
            before = self.values[at].copy()
            self.values[at] *= 3
            time.sleep(0)  # whoever must not see it gets every chance to
            self.values[at][:] = before

    @col.by_value
    def read(self):
        return self.values, self.noted


@dataclass
class Sent:
    """A plan: its number, its calls in order, and the refs of what each of them makes."""

    work: Any
    calls: list[Call]
    made: list[Any]

    @property
    def seq(self) -> int:
        return self.work._tracker.seq


@dataclass
class Load:
    """What a thread of the driver does, and what it did.

    Attributes:
        workers: The actors.
        refs: Of each actor its buffers.
        calls_methods: Whether methods touch what plans use: not where they may run beside these.
        sent: Its plans, in its order.
    """

    workers: list[Any]
    refs: list[list[Any]]
    calls_methods: bool
    sent: list[Sent] = field(default_factory=list)
    methods: list[Any] = field(default_factory=list)

    def act(self, seed: int, count: int) -> None:
        chance = random.Random(seed)
        for number in range(count):
            if self.calls_methods and chance.random() < 0.35:
                self._call_method(chance, number)
            elif chance.random() < 0.3:
                self._send_batch(chance)
            else:
                call, call_operation = self._draw(chance)
                work = call_operation(async_op=True)
                self.sent.append(Sent(work, [call], [work.refs if call.makes else None]))
            if self.sent and chance.random() < 0.1:
                self.sent[-1].work.wait(WAIT_S)

    def _call_method(self, chance: random.Random, number: int) -> None:
        worker, at = chance.choice(self.workers), chance.randrange(BUFFERS)
        if chance.random() < 0.7:
            self.methods.append(worker.change.remote(at, chance.randint(2, 5), number))
        else:
            self.methods.append(worker.dance.remote(at))

    def _send_batch(self, chance: random.Random) -> None:
        drawn = [self._draw(chance) for _ in range(chance.randint(2, 4))]
        with col.batch(async_op=True) as batch:
            for _, call_operation in drawn:
                call_operation()
        made = [refs if call.makes else None for (call, _), refs in zip(drawn, batch.refs, strict=True)]
        self.sent.append(Sent(batch._work, [call for call, _ in drawn], made))

    def _draw(self, chance: random.Random) -> tuple[Call, Any]:
        """A call, for the model and for raycollect."""
        name = chance.choice(list(GROUPS))
        members, kind = GROUPS[name], chance.choice(KINDS)
        root, peer = chance.sample(range(3), 2)
        is_long = chance.random() < 0.3
        buffers: list[int | None] = [BUFFERS - 1 if is_long else chance.randrange(BUFFERS - 1) for _ in members]
        made: list[Any] = [None] * 3
        if chance.random() < 0.15:
            buffers[root], made[root] = None, np.arange(5 if is_long else 3) * chance.randint(1, 9)
        refs = [
            self.workers[one].make.remote(value) if buffer is None else self.refs[one][buffer]
            for one, buffer, value in zip(members, buffers, made, strict=True)
        ]
        op, makes = chance.choice(list(FOLDS)), kind is OpKind.ALLREDUCE and chance.random() < 0.3
        call = Call(
            at=members, kind=kind, buffers=tuple(buffers), op=op, root=root, peer=peer, makes=makes, made=tuple(made)
        )

        def call_operation(**given: Any) -> Any:
            if kind is OpKind.ALLREDUCE:
                return col.allreduce_refs(refs, name, op=op, inplace=not makes, **given)
            if kind is OpKind.REDUCE:
                return col.reduce_refs(refs, root, name, op=op, **given)
            if kind is OpKind.BROADCAST:
                return col.broadcast_refs(refs, root, name, **given)
            return col.send_ref(refs[root], refs[peer], name, **given)

        return call, call_operation


@pytest.mark.timeout(120 * MUCH)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("threaded", "backend"),
    [
        ((), "shm"),
        pytest.param((), "tcp", marks=pytest.mark.full),
        pytest.param((0, 1, 2, 3), "shm", marks=pytest.mark.full),
        ((1, 2), "tcp"),
    ],
    ids=["plain-shm", "plain-tcp", "threaded-shm", "both-tcp"],
)
def test_calls_of_concurrent_threads_are_serializable(actors, threaded, backend, seed):
    """On actors whose methods run one by one, on threaded ones, and on some of each."""
    options = [{"max_concurrency": 4} if number in threaded else {} for number in range(4)]
    workers = [actors(Loaded, 1, number, **options[number])[0] for number in range(4)]
    for name, members in GROUPS.items():
        col.declare_collective_group([workers[one] for one in members], group_name=name, backend=backend)
    refs = [[worker.get.remote(at) for at in range(BUFFERS)] for worker in workers]
    ray.wait([ref for one in refs for ref in one], num_returns=4 * BUFFERS)
    loads = [Load(workers, refs, not threaded) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        acts = [threads.submit(load.act, 10 * seed + at, 40 * MUCH) for at, load in enumerate(loads)]
        for act in acts:
            act.result(WAIT_S * MUCH)
    for load in loads:
        for one in load.sent:
            one.work.wait(WAIT_S)
        assert [one.seq for one in load.sent] == sorted(one.seq for one in load.sent), "a thread's own order"
    ray.get([ref for load in loads for ref in load.methods])
    read = ray.get([worker.read.remote() for worker in workers])
    sent = sorted((one for load in loads for one in load.sent), key=lambda one: one.seq)
    world = replay(sent, [noted for _, noted in read])
    for number, (values, _) in enumerate(read):
        for found, expected in zip(values, world[number], strict=True):
            np.testing.assert_array_equal(found, expected)
    assert len(sent) > 60 * MUCH
    assert any(noted for _, noted in read) == (not threaded)


def replay(sent: list[Sent], noted: list[list[tuple[int, int, int]]]) -> dict[int, list[Any]]:
    """Does all of it with numpy, one after the other, and compares what is new; returns the arrays at the end."""
    world = {number: first_values(number) for number in range(4)}
    left = [list(reversed(one)) for one in noted]

    def run_methods(number: int, before: float) -> None:
        while left[number] and left[number][-1][0] < before:
            _, at, factor = left[number].pop()
            world[number][at] *= factor
            world[number][at] += 1

    for one in sent:
        for number in {member for call in one.calls for member in call.at}:
            run_methods(number, one.seq)
        for call, refs in zip(one.calls, one.made, strict=True):
            new = call.apply(world)
            for found in [] if new is None else col.get(list(refs)):
                np.testing.assert_array_equal(found, new)
    for number in world:
        run_methods(number, float("inf"))
    return world
