"""What random programs would do one after the other, and whether they did (P2).

A participant notes which of its methods ran, in order, and which plan had ended before each. So the order on every
actor is known afterwards. What is checked:

- On each actor, each thread's calls stand in the thread's own order, and every method that has to run ran once.
- A method whose argument failed never ran. One that was cancelled ran once or not at all.
- A collective fails, and changes nothing, if the method of an operand raised or never ran, and in no other case. If
  that method was cancelled, either is allowed: Ray may call a result cancelled though its method ran to the end.
- All arrays are what numpy makes of the same calls, in the order of the plans' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import raycollect as col
from raycollect.core.model import OpKind
from tests.pure.driver.order_model import Call
from tests.pure.sites import first_values

ACTORS = 3
GROUPS = {"all": (0, 1, 2), "left": (0, 1), "right": (2, 1)}
NEVER = "argument fails"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A call of a method that changes an array."""

    actor: int
    buffer: int
    factor: int
    how: str
    is_cancelled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective; `fresh` is the rank whose operand a method makes, -1 where there is none."""

    group: str
    kind: OpKind | None  # None: an allgather, which makes something
    buffers: tuple[int, ...]
    op: Any
    root: int
    peer: int
    fresh: int
    how: str
    is_cancelled: bool
    is_async: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Waits for all that the thread has sent."""


@dataclass(slots=True, kw_only=True)
class Submitted:
    """A method or plan that a thread submitted; `must`: True has to run, False must not, None may."""

    actors: tuple[int, ...]
    number: int = 0  # of a method
    seq: int = 0  # of a plan
    must: bool | None = True
    action: Any = None
    made: int = 0  # the number of the method that makes its operand
    fresh: Any = None  # its ref
    result: Any = None
    work: Any = None
    is_refused: bool = False


def fresh_value(action: Collective) -> Any:
    """What a method makes for a collective."""
    return np.arange(len(first_values(0)[action.buffers[0]])) * 7 + 1


# ---------------------------------------------------------------------------------------------- judging


World = dict[int, list[Any]]


def judge(submitted: Sequence[Sequence[Submitted]], read: Sequence[Any], world: World | None = None) -> World:
    """Compares what came of a program with the model; AssertionError: they differ.

    Args:
        submitted: What each thread submitted.
        read: What each actor holds, and what it noted.
        world: The arrays before the program; they change.
    """
    world = {number: first_values(number) for number in range(ACTORS)} if world is None else world
    everything = [one for thread in submitted for one in thread]
    places = [{number: (last, 1, at) for at, (last, number) in enumerate(noted)} for _, noted in read]
    for (_, noted), place in zip(read, places, strict=True):
        assert len(place) == len(noted), f"a method ran twice: {noted}"
        assert [last for last, _ in noted] == sorted(last for last, _ in noted)
    for one in everything:
        if one.number and one.must is not None:
            assert (one.number in places[one.actors[0]]) == one.must, f"method {one.number}: {one}"
    for thread in submitted:
        for actor, place in enumerate(places):
            own = [
                place[one.number] if one.number else (one.seq, 0, 0)
                for one in thread
                if actor in one.actors and (one.seq or one.number in place)
            ]
            assert own == sorted(own), f"actor {actor}: a thread's own order: {own}"
    _replay(everything, [noted for _, noted in read], world)
    for number, (values, _) in enumerate(read):
        for at, (found, expected) in enumerate(zip(values, world[number], strict=True)):
            np.testing.assert_array_equal(found, expected, err_msg=f"actor {number}, array {at}")
    return world


def _replay(everything: Sequence[Submitted], noted: Sequence[Sequence[tuple[int, int]]], world: World) -> None:
    methods = {one.number: one for one in everything if one.number}
    left = [list(reversed(one)) for one in noted]

    def run_methods(actor: int, before: float) -> None:
        while left[actor] and left[actor][-1][0] < before:
            action = methods[left[actor].pop()[1]].action
            if action is not None:
                world[actor][action.buffer] *= action.factor
                world[actor][action.buffer] += 1

    plans = [one for one in everything if not one.number]
    assert all(one.seq for one in plans), "each was sent"
    for plan in sorted(plans, key=lambda one: one.seq):
        for actor in plan.actors:
            run_methods(actor, plan.seq)
        _apply(plan, world, methods)
    for actor in world:
        run_methods(actor, float("inf"))


def _apply(plan: Submitted, world: World, methods: dict[int, Submitted]) -> None:
    action, members = plan.action, GROUPS[plan.action.group]
    if plan.made:
        uses = range(len(members)) if action.kind is not OpKind.SEND else (action.root, action.peer)
        is_missing = action.fresh in uses and action.how in ("raises", NEVER)
        may_miss = action.fresh in uses and methods[plan.made].must is None
        assert may_miss or plan.is_refused == is_missing, f"it was refused: {plan.is_refused}: {plan}"
    else:
        assert not plan.is_refused, plan
    if plan.is_refused:
        return
    fresh = fresh_value(action)
    if action.kind is None:
        given = [
            fresh if rank == action.fresh else world[one][buffer]
            for rank, (one, buffer) in enumerate(zip(members, action.buffers, strict=True))
        ]
        for found in col.get(list(plan.result)):
            np.testing.assert_array_equal(found, given)
        return
    _call(action, members, fresh).apply(world)


def _call(action: Collective, members: tuple[int, ...], fresh: Any) -> Call:
    made = tuple(fresh if rank == action.fresh else None for rank in range(len(members)))
    return Call(
        at=members,
        kind=action.kind,  # type: ignore[arg-type]
        buffers=tuple(None if one is not None else buffer for one, buffer in zip(made, action.buffers, strict=True)),
        op=action.op,
        root=action.root,
        peer=action.peer,
        makes=False,
        made=made,
    )
