"""Which plans are kept."""

from __future__ import annotations

import random

import pytest

from raycollect.planner import Membership
from raycollect.planner.plan_cache import PlanCache, forget
from tests.pure.driver.tracked_plans import group


def made(most: int = 100, most_nbytes: int = 1000) -> PlanCache[bytes]:
    return PlanCache(most, most_nbytes, len)


def groups(count: int) -> list[Membership]:
    return [group(f"g{number}", (1, 2)) for number in range(count)]


def test_the_plan_that_was_not_used_for_the_longest_time_goes_first() -> None:
    cache, (one,) = made(most=2), groups(1)
    for key in (1, 2):
        cache.add(key, [one], b"plan %d" % key)
    assert cache.find(1) == b"plan 1"
    cache.add(3, [one], b"plan 3")
    assert [cache.find(key) for key in (1, 2, 3)] == [b"plan 1", None, b"plan 3"]


def test_plans_take_so_many_bytes_but_the_newest_one_is_kept() -> None:
    cache, (one,) = made(most_nbytes=100), groups(1)
    for key in range(10):
        cache.add(key, [one], bytes(40))
    assert len(cache) == 2
    cache.add("large", [one], bytes(5000))
    assert len(cache) == 1
    assert cache.find("large") == bytes(5000)
    cache.add("small", [one], bytes(1))
    assert cache.find("large") is None
    assert cache.find("small") == bytes(1)


def test_the_plans_of_a_group_go_when_it_ends() -> None:
    (ended, other), (first, second) = groups(2), (made(), made())
    for cache in (first, second):
        cache.add("its", [ended], b"1")
        cache.add("of both", [other, ended], b"2")
        cache.add("of the other", [other], b"3")
    forget(ended)
    for cache in (first, second):
        assert [cache.find(key) for key in ("its", "of both", "of the other")] == [None, None, b"3"]


@pytest.mark.parametrize("seed", range(5))
def test_no_more_than_the_limits(seed: int) -> None:
    draw, cache, members = random.Random(seed), made(most=7, most_nbytes=300), groups(3)
    sizes: dict[int, int] = {}
    for _ in range(500):
        key = draw.randrange(20)
        sizes[key] = draw.randrange(1, 120)
        cache.add(key, [draw.choice(members)], bytes(sizes[key]))
        if not draw.randrange(20):
            forget(draw.choice(members))
        kept = [one for one in range(20) if cache.find(one) is not None]
        assert len(kept) == len(cache) <= 7
        assert sum(sizes[one] for one in kept) <= 300
