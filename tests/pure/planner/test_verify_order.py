"""The order of a plan is proven, and orders that are none are caught."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.core.model import OpKind
from raycollect.errors import InternalError
from raycollect.planner import Link, Made, Membership, Plan, Request, plan
from raycollect.planner.ir import Together
from raycollect.planner.verify_order import verify_order
from tests.pure.batches import random_plan, sums
from tests.pure.memberships import membership, request
from tests.support.values import replace


def _good() -> Plan:
    """Dependent and independent requests over overlapping groups, with alternatives and learned shapes."""
    links = {"inside": Link(latency_s=1e-3, bandwidth=8e9), "between": Link(latency_s=1e-3, bandwidth=1e9)}
    wide = membership("aab", group_id="wide", members=tuple("stu"), backend="gloo", bitwise=False, **links)
    few = membership("aa", group_id="few", members=("t", "s"))
    first, second = (
        Request(
            kind=OpKind.BROADCAST,
            group=wide.spec,
            root=0,
            operands=((0, f"0.{tag}", None), (1, None, f"1.{tag}"), (2, None, f"2.{tag}")),
        )
        for tag in (0, 1)
    )
    learn = Request(kind=OpKind.ALLGATHER, group=few.spec, operands=((0, "1.0", None), (1, "0.0", None)))
    turn = Request(kind=OpKind.ALLTOALL, group=few.spec, operands=tuple((rank, Made(3), None) for rank in range(2)))
    barrier = request(OpKind.BARRIER, few)
    return plan([first, second, first, learn, turn, barrier], [wide, wide, wide, few, few, few])


def _reorder(whole: Plan, *order: Sequence[int]) -> Plan:
    """The same with requests together as said, numbered as the schedule would."""
    found, width = [], 1
    for numbers in order:
        part = whole.parts[numbers[0]]
        found.append(Together(requests=tuple(numbers), base=(width,) * len(part.choices)))
        width += part.width
    return replace(
        whole, order=tuple(found), width=width + sum(part.width for part in whole.parts), alone=_alone(whole, width)
    )


def _alone(whole: Plan, begin: int) -> tuple[int, ...]:
    found = []
    for part in whole.parts:
        found.append(begin)
        begin += part.width
    return tuple(found)


def _rebased(whole: Plan, at: int, base: tuple[int, ...]) -> Plan:
    order = list(whole.order)
    order[at] = replace(order[at], base=base)
    return replace(whole, order=tuple(order))


def _stranger(whole: Plan) -> Membership:
    return membership("aa", group_id="others", members=("s", "nobody"))


GOOD = _good()
BAD: dict[str, tuple[Plan, str]] = {
    "a request is left out": (_reorder(GOOD, (0, 1), (2,), (3,), (4,)), "each is meant once"),
    "a request runs twice": (_reorder(GOOD, (0, 1), (2,), (3,), (4,), (5,), (1,)), "each is meant once"),
    "requests of two groups together": (_reorder(GOOD, (0, 1), (2,), (3, 4), (5,)), "several forms"),
    "not in their order": (_reorder(GOOD, (1, 0), (2,), (3,), (4,), (5,)), "not in their order"),
    "a writer with one before it": (_reorder(GOOD, (0, 1, 2), (3,), (4,), (5,)), "use the same memory"),
    "a writer before a reader of program order": (
        _reorder(GOOD, (2,), (0, 1), (3,), (4,), (5,)),
        "use the same memory",
    ),
    "a reader before the last writer": (_reorder(GOOD, (0, 1), (3,), (2,), (4,), (5,)), "use the same memory"),
    "what is made is used before": (_reorder(GOOD, (0, 1), (2,), (4,), (3,), (5,)), "whose output it uses"),
    "a launch for each of the algorithms but one": (_rebased(GOOD, 0, (0, 1)), "2 places for the algorithms"),
    "the consistency check's launch, after others": (_rebased(GOOD, 1, (0, 99, 99)), "has launch 0"),
    "the consistency check's launch, for an algorithm of several": (_rebased(GOOD, 0, (0, 0, 0)), "has launch 0"),
    "the consistency check's launch, for some of those in the consistency check": (
        _rebased(_reorder(GOOD, (3,), (0, 1), (2,), (4,), (5,)), 0, (0,)),
        "use the same memory",
    ),
    "launches that go back": (_rebased(GOOD, 1, GOOD.order[0].base), "after launch"),
    "a launch of one group that is another's": (_rebased(GOOD, 2, (GOOD.order[2].base[0] - 1,)), "after launch"),
    "launches beyond the last": (replace(GOOD, width=GOOD.alone[0] - 2), "has launch"),
    "alone, beyond the last": (replace(GOOD, width=GOOD.width - 1), "has launch"),
    "alone, two requests in one launch": (
        replace(GOOD, alone=(*GOOD.alone[:-1], GOOD.alone[-2])),
        "is the first one free",
    ),
    "alone, a request in the launches of another": (
        replace(GOOD, alone=(GOOD.alone[0], GOOD.alone[0] + 1, *GOOD.alone[2:])),
        "is the first one free",
    ),
    "alone, in the consistency check's launch": (replace(GOOD, alone=(0, *GOOD.alone[1:])), "is the first one free"),
    "brought before shapes are known": (replace(GOOD, first_rounds=(0,) * 6), "before the shapes"),
    "too few rounds": (replace(GOOD, rounds=2), "rounds of the consistency check"),
    "a participant is missing": (replace(GOOD, participants=GOOD.participants[1:]), "lacks the participants"),
    "a participant is there twice": (
        replace(GOOD, participants=(*GOOD.participants, GOOD.participants[0])),
        "a participant twice",
    ),
    "the consistency check's group lacks participants": (
        replace(GOOD, agreement=_stranger(GOOD)),
        "no members of the consistency check's",
    ),
    "a column is too short": (replace(GOOD, alone=GOOD.alone[1:]), "columns"),
    "it uses what comes later": (
        replace(
            GOOD,
            requests=(
                *GOOD.requests[:4],
                replace(GOOD.requests[4], operands=tuple((rank, Made(5), None) for rank in range(2))),
                GOOD.requests[5],
            ),
        ),
        "use what request 5 makes",
    ),
}


def test_a_good_order_is_proven() -> None:
    verify_order(GOOD)
    assert [together.requests for together in GOOD.order] == [(0, 1), (2,), (3,), (4,), (5,)]
    verify_order(_reorder(GOOD, (0, 1), (2,), (3,), (4,), (5,)))
    verify_order(_reorder(GOOD, (0,), (1,), (2,), (5,), (3,), (4,)))


@pytest.mark.parametrize("name", BAD)
def test_a_broken_order_is_caught(name: str) -> None:
    wrong, why = BAD[name]
    with pytest.raises(InternalError, match=why) as caught:
        verify_order(wrong)
    assert f"a plan of {len(wrong.requests)} requests" in str(caught.value)


def test_all_in_the_checks_launch_alone_only_where_each_has_one() -> None:
    of = membership("aaa")
    good = plan(sums(of, 3), [of] * 3)
    verify_order(good)
    two = membership("aaa", group_id="two")
    wrong = plan([*sums(of, 1), *sums(two, 1)], [of, two])
    with pytest.raises(InternalError):
        verify_order(replace(wrong, alone=(0, 0)))
    with pytest.raises(InternalError):
        verify_order(replace(wrong, alone=(0, 0), width=1, order=tuple(replace(one, base=(0,)) for one in wrong.order)))


@given(st.integers(0, 1 << 32))
def test_taking_two_that_depend_on_each_other_together_is_caught(seed: int) -> None:
    whole = random_plan(seed)
    for at in range(len(whole.order) - 1):
        first, second = whole.order[at : at + 2]
        if whole.parts[first.requests[0]] is not whole.parts[second.requests[0]]:
            continue
        if whole.memberships[first.requests[0]] is not whole.memberships[second.requests[0]]:
            continue
        both = Together(requests=tuple(sorted((*first.requests, *second.requests))), base=first.base)
        with pytest.raises(InternalError):
            verify_order(replace(whole, order=(*whole.order[:at], both, *whole.order[at + 2 :])))
