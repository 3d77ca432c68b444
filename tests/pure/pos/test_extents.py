"""Extents against a model: a Python set of the integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.pos.extents import Extents

END = 60
RANGES = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))
CHANGES = st.lists(st.tuples(st.booleans(), RANGES), max_size=25)


def runs(members: set[int]) -> list[tuple[int, int]]:
    """The maximal ranges of a set of integers."""
    starts = sorted(member for member in members if member - 1 not in members)
    stops = sorted(member + 1 for member in members if member + 1 not in members)
    return list(zip(starts, stops, strict=True))


def build(changes: list[tuple[bool, tuple[int, int]]]) -> tuple[Extents, set[int]]:
    """Makes the same changes to extents and to a set."""
    extents, model = Extents(), set[int]()
    for is_added, (lo, hi) in changes:
        (extents.add if is_added else extents.remove)(lo, hi)
        (model.update if is_added else model.difference_update)(range(lo, hi))
        assert list(extents) == runs(model), "disjoint, coalesced, ascending"
        assert extents.total == len(model)
    return extents, model


@given(CHANGES)
def test_holds_what_a_set_holds_after_every_change(changes: list[tuple[bool, tuple[int, int]]]) -> None:
    extents, model = build(changes)
    assert len(extents) == len(runs(model))


@given(CHANGES, RANGES)
def test_what_is_in_a_range_and_what_is_missing_there(
    changes: list[tuple[bool, tuple[int, int]]], span: tuple[int, int]
) -> None:
    extents, model = build(changes)
    every = set(range(*span))
    assert extents.within(*span) == runs(model & every)
    assert extents.gaps(*span) == runs(every - model)
    assert extents.has_some(*span) is bool(model & every)
    assert list(Extents(*reversed(runs(model)), span)) == runs(model | every)


@given(CHANGES, st.integers(1, 20), st.sampled_from([1, 2, 4, 7, 16]))
def test_the_best_fit_is_the_lowest_aligned_start_in_the_smallest_range_that_has_room(
    changes: list[tuple[bool, tuple[int, int]]], nbytes: int, align: int
) -> None:
    extents, model = build(changes)
    fits = [
        (hi - lo, start)
        for lo, hi in runs(model)
        for start in range(lo, hi)
        if start % align == 0 and start + nbytes <= hi
    ]
    assert extents.best_fit(nbytes, align) == (min(fits)[1] if fits else None)


@pytest.mark.parametrize("ranges", [(), ((3, 3),), ((5, 2),)])
def test_an_empty_range_adds_nothing(ranges: tuple[tuple[int, int], ...]) -> None:
    extents = Extents(*ranges)
    assert (list(extents), extents.total, extents.best_fit(1)) == ([], 0, None)
    assert extents.gaps(0, 4) == [(0, 4)]


def test_a_set_shows_its_ranges() -> None:
    assert repr(Extents((6, 9), (0, 2), (2, 4))) == "Extents((0, 4), (6, 9))"
