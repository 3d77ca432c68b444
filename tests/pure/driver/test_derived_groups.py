"""Which derived groups are kept."""

from __future__ import annotations

import itertools
import random

import pytest

from raycollect.driver.derived_groups import DerivedGroups
from raycollect.planner import Membership
from tests.pure.driver.tracked_plans import group


def derived(*actors: int) -> Membership:
    return group("derived", actors)


def is_idle(_: Membership) -> bool:
    return True


def test_the_order_of_the_actors_counts() -> None:
    groups = DerivedGroups(4)
    one, other = derived(5, 6), derived(6, 5)
    groups.add(one)
    assert groups.find(one.participants) is one
    assert groups.find(other.participants) is None
    assert one in groups
    assert other not in groups


def test_no_group_goes_as_long_as_its_actors_have_few() -> None:
    """However many groups there are in all."""
    groups = DerivedGroups(2)
    for first in range(0, 400, 2):
        for actors in ((first, first + 1), (first + 1, first)):
            groups.add(newest := derived(*actors))
            assert not groups.full(newest.participants)
            assert groups.take_surplus(newest, is_idle) == []
    assert len(groups.all()) == 400


def test_the_group_that_was_not_used_for_the_longest_time_goes_first() -> None:
    groups = DerivedGroups(2)
    first, second, stranger, third = derived(1, 2), derived(1, 3), derived(4, 5), derived(1, 4)
    for one in (first, second, stranger):
        groups.add(one)
    groups.find(first.participants)
    groups.add(third)
    assert groups.full(third.participants)
    assert groups.take_surplus(third, is_idle) == [second]
    assert groups.all() == (stranger, first, third)


@pytest.mark.parametrize("seed", range(5))
def test_no_actor_has_more_groups_than_are_kept(seed: int) -> None:
    draw, groups = random.Random(seed), DerivedGroups(most := 3)
    for _ in range(300):
        one = derived(*draw.sample(range(7), draw.randint(1, 4)))
        if groups.find(one.participants) is not None:
            continue
        groups.add(one)
        gone = groups.take_surplus(one, is_idle)
        assert not any(other in groups for other in gone)
        assert one in groups
        members = list(itertools.chain.from_iterable(other.participants for other in groups.all()))
        assert all(members.count(actor) <= most for actor in members)


def test_those_that_are_due_go() -> None:
    groups = DerivedGroups(8)
    dead, alive = derived(1, 2), derived(3, 4)
    groups.add(dead)
    groups.add(alive)
    assert groups.take(lambda one: one is dead) == [dead]
    assert groups.all() == (alive,)
    groups.add(dead)
    assert groups.find(dead.participants) is dead
