"""All or nothing: what is planned for ``snapshot=True``, and who decides that there is no way back."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends import arrays, streams
from raycollect.channel.messages import Abort, Arrive
from raycollect.core.model import OpKind
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import InternalError, InvalidArgumentError, KernelError, PlanAbortedError, ProtocolError
from raycollect.planner import Plan, plan
from raycollect.planner.passes import plan_part
from raycollect.planner.verify import verify
from tests.fake_cupy import Fake
from tests.pure.driver.tracked_plans import SEQ, asked, flying, group
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.fleet import WAIT_S, FailAt, HoldAt
from tests.pure.mixed import same
from tests.support.values import replace
from tests.support.waiting import is_in, wait_until


def snapshot(count: int, **changes: Any) -> PlanTracker:
    """An allreduce of that many actors, all or nothing."""
    membership = group("team", tuple(range(count)))
    return flying(asked(membership, range(count), snapshot=True, **changes))


def come(tracker: PlanTracker, at: int) -> list[tuple[int, Any]]:
    """A participant has its result, and waits for the others'."""
    ranks = list(range(len(tracker.plan.participants)))
    return tracker.arrive(at, Arrive(group_id="", seq=SEQ, round=0, ranks=ranks, rank=at, blob=b""))


# ---------------------------------------------------------------------------------------------- what is planned


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"inplace": False}, "snapshot"),
        ({"kind": OpKind.ALLGATHER, "op": None}, "snapshot"),
        ({"kind": OpKind.BROADCAST, "op": None, "root": 0, "operands": ((0, 0, None), (1, None, 1))}, "snapshot"),
    ],
)
def test_where_nothing_that_is_read_is_overwritten_it_is_refused(changes, what):
    membership = group("team", (0, 1))
    one = asked(membership, (0, 1), snapshot=True, **changes)
    with pytest.raises(InvalidArgumentError, match=what):
        plan_part(one.request(), membership)


def test_a_plan_that_overwrites_too_early_does_not_leave_the_planner():
    membership = group("team", (0, 1))
    part = plan_part(asked(membership, (0, 1), snapshot=True).request(), membership)
    (template,) = part.templates
    kernel, commit, copy = template.steps
    for wrong, why in (
        ((kernel, copy, commit), "before it commits"),
        ((kernel, copy), "0 times"),
        ((kernel, commit, commit, copy), "2 times"),
    ):
        with pytest.raises(InternalError, match=why):
            verify(replace(part, templates=(replace(template, steps=wrong),)))


def test_a_plan_with_one_can_be_told_apart():
    membership = group("team", (0, 1))
    plans: list[Plan] = [
        plan([asked(membership, (0, 1), snapshot=given).request()], [membership]) for given in (True, False)
    ]
    assert [one.commits for one in plans] == [True, False]
    assert [one.is_idempotent for one in plans] == [False, False]
    new = plan([asked(membership, (0, 1), inplace=False).request()], [membership])
    assert new.is_idempotent


# ---------------------------------------------------------------------------------------------- who decides


@pytest.mark.parametrize("seed", range(40))
def test_an_abort_and_a_commit_exclude_each_other(seed):
    """In whatever order ranks come, fail or die, and the caller cancels: all are told to go on, or nobody is."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 5])
    tracker = snapshot(count)
    events = [("come", at) for at in range(count)]
    events += rng.choice([[("cancel", -1)], [("fail", 0)], [("die", count - 1)], [("fail", 1), ("die", 0)], []])
    rng.shuffle(events)
    told: dict[int, list[str]] = {at: [] for at in range(count)}
    ended: set[int] = set()
    for what, at in events:
        if at in ended:
            continue
        if what == "come":
            orders = come(tracker, at)
        elif what == "cancel":
            orders = tracker.fail(PlanAbortedError(detail="cancelled by its caller"))
        elif what == "fail":
            ended.add(at)
            orders = tracker.done(at, KernelError(detail="no memory"), [])
        else:
            ended.add(at)
            orders = tracker.lost(at, "end of its connection")
        for to, message in orders:
            told[to].append("report" if message == Abort(seq=SEQ, reason="") else type(message).__name__)
    waiting = [heard for at, heard in told.items() if at not in ended]
    if tracker.is_committed:
        assert all(heard == ["Arrivals", *["report"] * (tracker.error is not None)] for heard in waiting)
    elif tracker.error is not None:
        assert all(heard == ["Abort"] for heard in waiting)
    else:
        raise AssertionError("all came, and nothing was decided")


def test_who_comes_twice_or_to_another_round_is_refused():
    tracker = snapshot(2)
    come(tracker, 0)
    with pytest.raises(ProtocolError):
        come(tracker, 0)
    with pytest.raises(ProtocolError, match="no round 1"):
        tracker.arrive(0, Arrive(group_id="", seq=SEQ, round=1, ranks=[0, 1], rank=0, blob=b""))
    plain = flying(asked(group("team", (0, 1)), (0, 1)))
    with pytest.raises(ProtocolError, match="no round 0"):
        come(plain, 0)


# ---------------------------------------------------------------------------------------------- what a failure leaves


@pytest.mark.parametrize("turn", ["first", "repeated"])
@pytest.mark.parametrize("point", ["before_kernel", "after_kernel", "before_commit", "after_commit"])
def test_an_operand_is_half_written_only_after_the_commit(point: str, turn: str) -> None:
    with convoy_of(2) as convoy:
        values = [np.full(3, rank + 1.0) for rank in range(2)]
        (request,) = allreduces(convoy, [values])
        planned = plan([replace(request, snapshot=True)], convoy.memberships)
        if turn == "repeated":
            assert all(future.result(WAIT_S).error is None for future in convoy.start(planned).values())
        before = [value.copy() for value in values]
        convoy.faults = fault = FailAt(point=point, rank=1)
        outcomes = {one: future.result(WAIT_S) for one, future in convoy.start(planned).items()}
        assert fault.consumed == 1
        assert isinstance(outcomes[1].error, KernelError)
        is_over = point == "after_commit"
        assert convoy.stores[1].is_dirty([arrays.byte_range(values[1])]) == is_over
        for value, was in zip(values, before, strict=True):
            assert is_over or np.array_equal(value, was)


def test_an_abort_after_the_commit_ends_no_copy_to_a_device(fake: Fake) -> None:
    """As after the death of another member: the rank waits for its device, and then has its result."""
    with convoy_of(2) as convoy:
        (team,) = convoy.memberships
        convoy.memberships = [replace(team, spec=replace(team.spec, memory=backends.get("local").memory))]
        with fake.cupy.cuda.Device(0):
            values = [fake.cupy.asarray(np.full(3, 1.0)), np.full(3, 2.0)]
        (request,) = allreduces(convoy, [values])
        convoy.faults = held = HoldAt(point="after_commit", rank=0)
        outcomes = convoy.start(plan([replace(request, snapshot=True)], convoy.memberships))
        assert held.came.wait(WAIT_S)
        fake.drain()
        with fake.cupy.cuda.Device(0):
            stream = fake.cupy.cuda.Stream.null
            fake.hold(stream)
            values[0].fill(5)
        convoy.abort(0)
        held.go.set()
        waits = partial(is_in, streams.pause)
        assert wait_until(lambda: outcomes[0].done() or any(map(waits, list(sys._current_frames()))))
        fake.release(stream)
        assert [outcomes[one].result(WAIT_S).error for one in range(2)] == [None, None]
        same(values, [np.full(3, 3.0)] * 2)
