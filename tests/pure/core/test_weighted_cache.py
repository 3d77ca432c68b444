"""The cache that is bounded by the weight of its results."""

from __future__ import annotations

import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from raycollect.core.weighted_cache import WeightedCache

MOST = 100


class Result:
    """A result of a key, which is its weight too."""

    alive: ClassVar[weakref.WeakSet[Result]] = weakref.WeakSet()

    def __init__(self, key: int) -> None:
        if key < 0:
            raise ValueError(key)
        self.weight = key
        self.alive.add(self)


@pytest.fixture
def cache() -> WeightedCache[int, Result]:
    return WeightedCache(Result, lambda key, result: result.weight, MOST)


def weigh() -> int:
    gc.collect()
    return sum(result.weight for result in Result.alive)


def test_a_result_is_made_once_while_it_is_used(cache: WeightedCache[int, Result]) -> None:
    used = cache(30)
    for key in range(1, 40):
        cache(key)
        assert cache(30) is used


def test_results_that_are_not_used_are_dropped(cache: WeightedCache[int, Result]) -> None:
    dropped = weakref.ref(cache(1))
    for key in (40, 50, 60, 70):
        cache(key)
    assert dropped() is None


def test_the_weight_is_bounded_for_any_keys(cache: WeightedCache[int, Result]) -> None:
    for key in random.Random(1).choices(range(2 * MOST), k=500):
        assert cache(key).weight == key
        assert weigh() <= 4 * MOST


def test_of_too_large_results_the_last_one_is_kept_and_drops_no_other(cache: WeightedCache[int, Result]) -> None:
    small, large = cache(MOST), cache(MOST + 1)
    assert cache(MOST + 1) is large
    assert cache(MOST) is small
    cache(MOST + 2)
    assert cache(MOST + 1) is not large
    assert cache(MOST) is small


def test_clear_and_errors_leave_nothing(cache: WeightedCache[int, Result]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            cache(-1)
    cache(3)
    cache.clear()
    assert weigh() == 0


def test_threads_share_it(cache: WeightedCache[int, Result]) -> None:
    def use(seed: int) -> bool:
        return all(cache(key).weight == key for key in random.Random(seed).choices(range(MOST), k=2000))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(8)))
    assert weigh() <= 2 * MOST
